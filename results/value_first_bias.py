"""What fitting V to the batch does to the advantages, from the runs of `ppo_value_first.py` with a value phase.

    python results/value_first_bias.py runs

prints for every arm (needs the runs' event files) medians over the iterations, and of those the mean over the seeds:
explained variance of the value targets before and after the value phase, and Var(A(V_new)) / Var(A(V_old)). Below 1 the
advantages shrink as V fits the batch that they are estimated on.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plot_runs

SCALARS = "losses/explained_variance", "losses/explained_variance_after", "losses/advantage_variance_ratio"


def medians(run):
    """Of each of SCALARS, over the run's iterations."""
    events = EventAccumulator(str(run.directory), size_guidance={"scalars": 0})
    events.Reload()
    return [np.nanmedian([point.value for point in events.Scalars(name)]) for name in SCALARS]


def table(runs):
    """Lines of a Markdown table; the runs' variants must have been named."""
    yield "| environment | variant | seeds | explained variance before | after | variance ratio |"
    yield "|-|-|-|-|-|-|"
    for (env_id, variant), group in plot_runs.groups(runs).items():
        cells = [f"{round(value, 2) + 0:.2f}" for value in np.mean([medians(run) for run in group], 0)]  # no -0.00
        yield f"| {env_id} | {variant} | {len(group)} | {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="run directories, or directories above them")
    runs = plot_runs.find_runs(parser.parse_args().runs)
    runs = [run for run in runs if run.args.get("order", "joint") != "joint" and run.status == "finished"]
    if not (runs := [run for run in runs if any(run.directory.glob(plot_runs.EVENTS))]):
        raise SystemExit("no finished run with a value phase and its event files")
    plot_runs.name_variants(runs)
    print(*table(runs), sep="\n")


if __name__ == "__main__":
    main()
