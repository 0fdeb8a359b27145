"""Learning curves and a table of results, from the runs of these scripts and of CleanRL's.

    python plot_runs.py runs --out figure.png                    every run below runs/, one panel an environment
    python plot_runs.py results/runs/base --x minutes --out figure.png
    python plot_runs.py runs/Hopper-v5__* --keep results/runs/hopper     small copies, fit to be committed

One colour is one variant: the runs of one script whose flags agree but for the seed. It is named by its --exp-name and,
where that is not enough, by the flags that tell it from most of the others of its environment (so one name may stand
for other flags in another environment). From 5 seeds on a curve is the interquartile mean (IQM) with its 95% bootstrap
interval; with fewer, or as long as one seed is behind, every seed is drawn thin, and their mean. Published results from
results/references.json are dashed; those far outside of what the runs reach are only named. The table on standard
output has, over the seeds, each run's mean return of its last 100 training episodes, and that of its evaluation. Of
several runs of one seed one counts: the last by name that has ended.
"""

import argparse
import csv
import json
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import EngFormatter, MaxNLocator
from scipy import stats
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import SessionLog

# Flags that do not change what is learned: two runs of one variant may differ in them, and in the seed.
NOT_THE_VARIANT = {
    "exp_name", "run_dir", "resume", "torch_deterministic", "cuda", "num_workers", "compile", "ray", "track",
    "wandb_project_name", "wandb_entity", "checkpoint_interval", "capture_video", "eval_episodes", "eval_interval",
}  # fmt: skip
EVENTS = "events.out.tfevents.*"
MANY_SEEDS = 5  # from here on a mean and an interval say more than every seed
MARKS = {
    "†": "a run was resumed with other flags (`changed` in its result.json)",
    "‡": "the runs differ in the versions of packages (`versions` in their result.json)",
}


@dataclass
class Run:
    """One run; `points` is [episodes or bins, 3]: global step, minutes of running, episodic return."""

    directory: Path
    env_id: str
    seed: int
    args: dict
    points: np.ndarray
    status: str
    training: float
    evaluation: float
    variant: str = ""
    result: dict = field(default_factory=dict)


def read_events(directory):
    """Every episode that a run's event files hold, [episodes, 3], and the text of its hyperparameters.

    A resumed run has several files. Each begins by saying which steps of the earlier ones it takes back; its minutes
    go on where those ended, so that the time between a stop and a resume does not count.
    """
    points, text, offset = [], "", 0.0
    for file in sorted(directory.glob(EVENTS)):
        start = None
        for event in LegacyEventFileLoader(str(file)).Load():
            start = event.wall_time if start is None else start
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[0] < event.step]
                offset = points[-1][1] if points else 0.0
            for value in event.summary.value:
                if value.tag == "charts/episodic_return":
                    points.append((event.step, offset + (event.wall_time - start) / 60, value.simple_value))
                elif value.tag.startswith("hyperparameters"):
                    text = value.tensor.string_val[0].decode()
        offset = points[-1][1] if points else 0.0
    return np.array(points, np.float64).reshape(-1, 3), text


def read_json(file):
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except json.JSONDecodeError as error:
        raise SystemExit(f"{file}: {error}") from None


def read_run(directory):
    """The run that a directory holds, in full (event files) or kept (curve.csv); None if its flags are not known."""
    if (directory / "curve.csv").exists():
        points, text = np.loadtxt(directory / "curve.csv", delimiter=",", skiprows=1, ndmin=2).reshape(-1, 3), ""
    else:
        points, text = read_events(directory)
    args, result = (read_json(directory / name) for name in ("args.json", "result.json"))
    status = result.get("status", "unfinished")
    if args and "script" in result:
        args["script"] = result["script"]  # two scripts may be given one --exp-name
    if not args:  # CleanRL's: the flags are a table in the event file, and nothing says that the run ended
        args, status = dict(re.findall(r"^\|(\w+)\|(.*)\|$", text, re.MULTILINE)), "finished"
    if "env_id" not in args:
        return None
    training = result.get("mean_return_last_100")
    if training is None:
        training = points[-100:, 2].mean() if len(points) else math.nan
    evaluation = np.mean(result["eval_returns"]) if result.get("eval_returns") else math.nan
    seed = int(args["seed"])
    return Run(directory, args["env_id"], seed, args, points, status, training, evaluation, result=result)


def find_runs(paths):
    """Every run at or below the paths."""
    paths = [path for path in map(Path, paths) if path.suffix != ".log"]  # benchmark.sh's logs lie beside its runs
    for path in paths:
        if not path.is_dir():
            raise SystemExit(f"{path}: no such directory")
    marks = [mark for path in paths for name in (EVENTS, "curve.csv") for mark in path.rglob(name)]
    return list(filter(None, map(read_run, sorted({mark.parent for mark in marks}))))


def name_variants(runs):
    """Sets each run's `variant`: its --exp-name, and the flags that tell it from others of that name and environment.

    A flag that only some of the runs know tells only those apart: a script that gained one is still the same variant.
    Left out are a flag's value that more than half of the variants share (in a table of ablations only what was changed
    is named) and the flags that follow from --preset. The runs are sorted by environment, variant and seed; of several
    runs of one seed, which would count the same chance twice, the last that has ended is left.
    """
    for env_id in {run.env_id for run in runs}:
        for exp_name in {run.args["exp_name"] for run in runs if run.env_id == env_id}:
            group = [run for run in runs if (run.env_id, run.args["exp_name"]) == (env_id, exp_name)]
            known = dict.fromkeys(flag for run in group for flag in run.args if flag not in {"seed", *NOT_THE_VARIANT})
            values = {flag: [str(run.args[flag]) if flag in run.args else None for run in group] for flag in known}
            telling = [flag for flag in known if len(set(values[flag]) - {None}) > 1]
            if "preset" in telling:
                presets = values["preset"]
                free = [flag for flag in telling if len(set(zip(presets, values[flag]))) > len(set(presets))]
                telling = ["preset", *free]
            variants = set(zip(*(values[flag] for flag in telling)))
            usual = [Counter(column).most_common(1)[0] for column in zip(*variants)]
            usual = {flag: value for flag, (value, times) in zip(telling, usual) if 2 * times > len(variants)}
            for i, run in enumerate(group):
                own = {flag: values[flag][i] for flag in telling}
                named = [f"{flag}={value}" for flag, value in own.items() if value not in (None, usual.get(flag))]
                run.variant = " ".join([exp_name, *named])
    runs.sort(key=lambda run: (run.env_id, run.variant, run.seed, run.status != "unfinished"))
    used = {(run.env_id, run.variant, run.seed): run for run in runs}
    for run in runs:
        if run is not (other := used[run.env_id, run.variant, run.seed]):
            print(f"left out, as {other.directory} has the same flags and seed: {run.directory}", file=sys.stderr)
    runs[:] = used.values()


def binned(points, edges, column):
    """Means of the returns between the edges [bins + 1] of a column, nan where there are none: [bins]"""
    sums, _ = np.histogram(points[:, column], edges, weights=points[:, 2])
    counts, _ = np.histogram(points[:, column], edges)
    return np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)


def iqm(values, axis=0):
    """Interquartile mean, as rliable has it: of what is left without the lowest and the highest quarter."""
    return stats.trim_mean(values, 0.25, axis)


def interval(values):
    """95% percentile bootstrap interval of the interquartile mean, of [seeds] or [seeds, bins]."""
    result = stats.bootstrap((values,), iqm, axis=0, n_resamples=2000, method="percentile", rng=0)
    return result.confidence_interval


def groups(runs):
    """{(env_id, variant): its runs}, in the order of their first appearance."""
    found = {}
    for run in runs:
        found.setdefault((run.env_id, run.variant), []).append(run)
    return found


def number(value):
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}" if math.isfinite(value) else "-"


def row(*cells):
    return f"| {' | '.join(map(str, cells))} |"


def table(runs):
    """The results as lines of a Markdown table; below it its marks, and what is not finished or has no episode."""
    found = ""  # of MARKS
    yield "| environment | variant | seeds | mean | IQM | its 95% interval, or each seed | evaluation |"
    yield "|-|-|-|-|-|-|-|"
    for (env_id, variant), group in groups([run for run in runs if math.isfinite(run.training)]).items():
        values = np.array([run.training for run in sorted(group, key=lambda run: run.seed)])
        evaluations = np.array([run.evaluation for run in group if math.isfinite(run.evaluation)])
        middle, spread = "-", ", ".join(map(number, values))
        if len(values) >= MANY_SEEDS:
            middle, spread = number(iqm(values)), "{} to {}".format(*map(number, interval(values)))
        evaluation = number(evaluations.mean()) if len(evaluations) else "-"
        if len(evaluations) > 1:
            evaluation += f" ± {number(evaluations.std(ddof=1))}"
        if 0 < len(evaluations) < len(group):
            evaluation += f" ({len(evaluations)} of {len(group)})"
        starts = (start for run in group for start in run.result.get("starts", []))
        changed = any(start["changed"].keys() - NOT_THE_VARIANT for start in starts)
        versions = [run.result["versions"] for run in group if "versions" in run.result]
        marks = "†" * changed + "‡" * any(version != versions[0] for version in versions)
        found += marks
        name = f"{variant} {marks}".strip()
        yield row(env_id, name, len(values), number(values.mean()), middle, spread, evaluation)
    notes = [f"- {mark}: {meaning}" for mark, meaning in MARKS.items() if mark in found]
    notes += [f"- {run.status}: {run.directory}" for run in runs if run.status != "finished"]
    notes += [f"- no finished episode: {run.directory}" for run in runs if not math.isfinite(run.training)]
    if notes:
        yield "\n" + "\n".join(notes)


def published(references, env_id, runs):
    """The published results for an environment; those with a `where` only beside a run that has these arguments."""
    arguments = [run.args.items() for run in runs if run.env_id == env_id]
    return [r for r in references.get(env_id, []) if any(r.get("where", {}).items() <= items for items in arguments)]


def draw(runs, references, axis, out):
    """One panel an environment, one colour a variant; dashed is what is published (over steps also curves)."""
    runs = [run for run in runs if np.isfinite(run.points[:, 2]).any()]
    if not runs:
        raise SystemExit("no run has a finished episode: nothing to draw")
    environments, variants = (list(dict.fromkeys(getattr(run, name) for run in runs)) for name in ("env_id", "variant"))
    column, columns = ("steps", "minutes").index(axis), 2 if len(environments) == 4 else min(3, len(environments))
    rows = math.ceil(len(environments) / columns)
    figure, panels = plt.subplots(rows, columns, figsize=(3.7 * columns, 2.8 * rows + 0.4), squeeze=False)
    palette = plt.get_cmap("tab10" if len(variants) <= 10 else "tab20")
    if len(variants) > palette.N:
        palette = plt.get_cmap("turbo", len(variants))
    colours = {variant: palette(i) for i, variant in enumerate(variants)}
    lines = {}
    for env_id, panel in zip(environments, panels.flat):
        longest = max(run.points[-1, column] for run in runs if run.env_id == env_id)
        edges = np.linspace(0, longest, 101)
        centres = (edges[1:] + edges[:-1]) / 2
        for (_, variant), group in groups([run for run in runs if run.env_id == env_id]).items():
            curves = []
            for run in group:
                means = binned(run.points, edges, column)
                seen = np.isfinite(means)  # bins without an episode are bridged, not those before the first or last
                curves.append(np.interp(centres, centres[seen], means[seen], left=np.nan, right=np.nan))
            curves, colour = np.array(curves), colours[variant]
            whole = np.isfinite(curves).all(0)
            ends = [run.points[-1, column] for run in group]  # at the last episodes, a little before the budget's end
            if len(curves) < MANY_SEEDS or min(ends) < 0.8 * max(ends):
                for curve in curves:
                    marker = "." if np.isfinite(curve).sum() == 1 else None  # a line of one point is not seen
                    panel.plot(centres, curve, color=colour, linewidth=0.7, alpha=0.4, marker=marker)
                (lines[variant],) = panel.plot(centres[whole], curves[:, whole].mean(0), color=colour, linewidth=1.5)
            else:
                (lines[variant],) = panel.plot(centres[whole], iqm(curves[:, whole]), color=colour, linewidth=1.5)
                low, high = interval(curves[:, whole])
                panel.fill_between(centres[whole], low, high, color=colour, alpha=0.2, linewidth=0)
        here = [r for r in published(references, env_id, runs) if axis == "steps" or "curve" not in r]
        lowest, highest = panel.get_ylim()  # of the runs; what is published far outside shall not flatten them
        bounds = 2 * lowest - highest, 2 * highest - lowest
        for reference, style in zip(here, cycle([(6, 3), (2, 2), (6, 2, 1, 2), (1, 3), (9, 2, 1, 2, 1, 2)])):
            look = {"color": "0.35", "linewidth": 1, "linestyle": (0, style), "label": reference["label"]}
            if "curve" in reference:  # [[step, return], ...], as far as the runs reach: their last episodes end before
                steps, returns = np.transpose(reference["curve"])
                reached = steps <= 1.02 * longest
                panel.plot(steps[reached], returns[reached], **look)
            elif bounds[0] <= reference["return"] <= bounds[1]:
                panel.axhline(reference["return"], **look)
            else:
                panel.plot([], [], " ", label=f"{reference['label']}: {reference['return']:g}")
        panel.set_ylim(max(panel.get_ylim()[0], bounds[0]), min(panel.get_ylim()[1], bounds[1]))
        if here:
            panel.legend(fontsize=8, loc="best", framealpha=0.6)
        panel.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
        panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
        panel.set(title=env_id.split(":")[-1], ylabel="episodic return")
        panel.set(xlabel="environment steps" if axis == "steps" else "minutes")
        panel.grid(alpha=0.25)
    for panel in list(panels.flat)[len(environments) :]:
        panel.set_visible(False)
    fitting = int(3.7 * columns / (0.068 * max(map(len, lines)) + 0.6))  # inches a letter of 9 points
    ncols = min(max(fitting, 1), 3, len(lines))
    figure.legend(lines.values(), lines.keys(), loc="outside upper center", ncols=ncols, fontsize=9)
    figure.set_layout_engine("constrained")
    try:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=130)
    except (OSError, ValueError) as error:
        raise SystemExit(f"--out {out}: {error}") from None


def keep(runs, destination):
    """Small copies of finished runs: args.json, result.json and curve.csv, at most 200 means over equal step ranges."""
    names = set()
    for run in runs:
        unfit = "" if run.result else "unfinished or not of these scripts"
        if unfit or run.directory.name in names:
            print(f"not kept, {unfit or 'as another run has its name'}: {run.directory}", file=sys.stderr)
            continue
        names.add(run.directory.name)
        directory = Path(destination) / run.directory.name
        directory.mkdir(parents=True, exist_ok=True)
        for name in ("args.json", "result.json"):
            saved = json.loads((run.directory / name).read_text())
            # Wherever it was, and however often it was resumed: no machine's paths.
            saved["run_dir"] = saved.get("args", saved)["run_dir"] = f"runs/{run.directory.name}"
            saved.get("args", saved)["resume"] = None
            (directory / name).write_text(json.dumps(saved, indent=2) + "\n")
        bins = np.minimum(run.points[:, 0] * 200 // run.result["global_step"], 199)
        with open(directory / "curve.csv", "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["global_step", "minutes", "episodic_return"])
            for i in np.unique(bins):
                step, minutes, episodic_return = run.points[bins == i].mean(0)
                writer.writerow([int(step), round(minutes, 3), round(episodic_return, 3)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", help="run directories, or directories above them")
    parser.add_argument("--out", help="the figure to write (.png, .pdf or .svg)")
    parser.add_argument("--x", choices=["steps", "minutes"], default="steps", help="x-axis of the curves")
    parser.add_argument("--keep", metavar="DIR", help="keep small copies of the runs there; nothing else is done")
    args = parser.parse_args()
    runs = find_runs(args.paths)
    if not runs:
        raise SystemExit(f"no runs in {' '.join(args.paths)}")
    if args.keep:
        return keep(runs, args.keep)
    name_variants(runs)
    print(*table(runs), sep="\n")
    if args.out:
        file = Path(__file__).parent / "results" / "references.json"
        draw(runs, json.loads(file.read_text()) if file.exists() else {}, args.x, args.out)


if __name__ == "__main__":
    main()
