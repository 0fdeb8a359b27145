"""HumanoidBench without hands, as two Markdown tables: our returns beside published ones, and beside other settings'.

python results/h1_table.py results/runs/{h1,interleaved-settings}   the runs of these suites, full or kept
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
SETTINGS = (0.997, 0.95), (0.99, 0.95), (0.99, 0.9)  # gamma and lambda; the first are the defaults
PUBLISHED = ("PPO", 2), ("PPO", 4), ("TD-MPC2", 2), ("FlashSAC", 1)  # after so many million steps


def ours(runs, task, setting):
    """The greedy returns of all seeds, and those in training."""
    seeds = [run for run in runs if run.env_id == f"h1-{task}-v0"]
    seeds = [run for run in seeds if (run.args["gamma"], run.args["gae_lambda"]) == setting]
    if len(variants := {run.variant for run in seeds}) > 1:
        raise SystemExit(f"h1-{task}-v0, gamma, lambda {setting}: {len(variants)} variants; name the suites' folders")
    return [", ".join(f"{getattr(run, kind):.0f}" for run in seeds) or "-" for kind in ("evaluation", "training")]


def tables(paths):
    references = json.loads((Path(__file__).parent / "references.json").read_text())
    runs = [run for run in plot_runs.find_runs(paths) if run.status == "finished" and run.env_id.startswith("h1-")]
    plot_runs.name_variants(runs)  # and sorts them by seed
    names = [f"{method}, {millions} M" for method, millions in PUBLISHED]
    yield row("task", "ours, greedy", "in training", *names, "first pose held")
    yield "|-|-|-|-|-|-|-|-|"
    for task, pose in POSE.items():
        found = {reference["label"]: reference for reference in references[f"h1-{task}-v0"]}
        published = []
        for (method, millions), name in zip(PUBLISHED, names):
            curve = found.get(method, {}).get("curve") or [[millions * 1e6, found[name]["return"]]]
            published += [min(curve, key=lambda point: abs(point[0] - millions * 1e6))[1]]
        yield row(task, *ours(runs, task, SETTINGS[0]), *(f"{value:.0f}" for value in [*published, pose]))
    yield ""
    names = "ours", "discount 0.99", "0.99 and lambda 0.9"
    yield row("task", *(f"{name}, {kind}" for kind in ("greedy", "in training") for name in names))
    yield "|-|-|-|-|-|-|-|"
    for task in POSE:
        greedy, training = zip(*(ours(runs, task, setting) for setting in SETTINGS))
        yield row(task, *greedy, *training)


if __name__ == "__main__":
    print(*tables(sys.argv[1:]), sep="\n")
