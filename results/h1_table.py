"""HumanoidBench without hands: our returns beside published ones, as a Markdown table.

python results/h1_table.py results/runs/{h1,interleaved-lambda}   the runs of these suites, full or kept
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plot_runs
from plot_runs import row

# What the network earns before its first update, greedy: it holds the robot's first pose
POSE = dict(walk=10, stand=56, run=10, sit_simple=538, sit_hard=5, crawl=292, reach=1155, hurdle=21, pole=493, stair=12)
POSE |= dict(balance_simple=51, balance_hard=40, maze=126, slide=12)
LAMBDAS = {0.95: "ours", 0.9: "lambda 0.9"}
PUBLISHED = ("PPO", 2), ("PPO", 4), ("TD-MPC2", 2), ("FlashSAC", 1)  # after so many million steps


def table(paths):
    references = json.loads((Path(__file__).parent / "references.json").read_text())
    runs = [run for run in plot_runs.find_runs(paths) if run.status == "finished" and run.env_id.startswith("h1-")]
    plot_runs.name_variants(runs)  # and sorts them by seed
    names = [f"{method}, {millions} M" for method, millions in PUBLISHED]
    kinds = [f"{name}, {kind}" for name in LAMBDAS.values() for kind in ("greedy", "in training")]
    yield row("task", *kinds, *names, "first pose held")
    yield "|-|-|-|-|-|-|-|-|-|-|"
    for task, pose in POSE.items():
        ours = []
        for value in LAMBDAS:
            seeds = [run for run in runs if (run.env_id, run.args["gae_lambda"]) == (f"h1-{task}-v0", value)]
            if len(variants := {run.variant for run in seeds}) > 1:
                raise SystemExit(f"h1-{task}-v0, lambda {value}: {len(variants)} variants; name the suites' folders")
            for returns in "evaluation", "training":
                ours += [", ".join(f"{getattr(run, returns):.0f}" for run in seeds) or "-"]
        if set(ours) == {"-"}:
            continue
        found = {reference["label"]: reference for reference in references[f"h1-{task}-v0"]}
        published = []
        for (method, millions), name in zip(PUBLISHED, names):
            curve = found.get(method, {}).get("curve") or [[millions * 1e6, found[name]["return"]]]
            published += [min(curve, key=lambda point: abs(point[0] - millions * 1e6))[1]]
        yield row(task, *ours, *(f"{value:.0f}" for value in [*published, pose]))


if __name__ == "__main__":
    print(*table(sys.argv[1:]), sep="\n")
