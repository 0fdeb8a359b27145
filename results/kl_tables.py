"""The two published tables that `ppo_kl_adaptive.py` is measured against, each beside ours.

    python results/kl_tables.py thresholds runs                         "AI Gym Workout", tables 1 and 2
    python results/kl_tables.py objectives results/runs/kl-objectives   the PPO paper, table 1; --out draws it

thresholds needs the full runs of `./benchmark.sh kl-post`, whose event files have every episode: after how many
episodes the mean return of 5 in a row first reaches the post's threshold, and the largest such mean; seed by seed.

objectives takes the runs of `./benchmark.sh kl-objectives`, full or kept. As the paper does, it shifts and scales the
mean return of the last 100 episodes in each environment, so that uniformly random actions score 0 and the best row 1,
and averages over the environments. A run that diverged counts with the mean it had reached. A row's score is that of
its mean returns over seeds; beside it stands each seed's own.
"""

import argparse
import sys
from pathlib import Path

import gymnasium as gym
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy import stats

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import plot_runs
from plot_runs import number, row

# "AI Gym Workout": (threshold, episodes until it is crossed, largest mean of 5 episodes), on v1 environments, one run
POST = {
    "Ant": (3500, 29740, 3660), "HalfCheetah": (4700, 1966, 5363), "Hopper": (2000, 2250, 3897),
    "Humanoid": (2500, None, 1248), "Reacher": (-7, 14100, -4.0), "Swimmer": (90, 137, 372),
    "Walker2d": (3000, 5700, 7280),
}  # fmt: skip
# Schulman et al. 2017 (arXiv:1707.06347), table 1: (objective, the flag that tells it, its value, average score)
PAPER = [
    ("none", None, None, -0.39),
    ("clip", "clip_coef", 0.1, 0.76), ("clip", "clip_coef", 0.2, 0.82), ("clip", "clip_coef", 0.3, 0.70),
    ("kl-adaptive", "kl_targ", 0.003, 0.68), ("kl-adaptive", "kl_targ", 0.01, 0.74),
    ("kl-adaptive", "kl_targ", 0.03, 0.71),
    ("kl-fixed", "beta", 0.3, 0.62), ("kl-fixed", "beta", 1.0, 0.71), ("kl-fixed", "beta", 3.0, 0.72),
    ("kl-fixed", "beta", 10.0, 0.69),
]  # fmt: skip
RANDOM_EPISODES = 100


def five_episode_means(returns):
    """[episodes] -> means of each 5 in a row [episodes - 4]"""
    return np.convolve(returns, np.full(5, 0.2), "valid")


def crossing(returns, threshold):
    """How many episodes there were when the mean of 5 in a row first reached the threshold; None if it never did."""
    reached = np.flatnonzero(five_episode_means(returns) >= threshold)
    return int(reached[0]) + 5 if len(reached) else None


def thresholds(runs):
    """Lines of Markdown: ours and the post's episodes to each threshold, and best means."""
    yield row(
        "environment", "variant", "threshold", "the post", "ours, each seed", "best 5 of the post", "ours, each seed"
    )
    yield row(*"-------")
    for (env_id, variant), group in plot_runs.groups(runs).items():
        threshold, episodes, best = POST.get(env_id.rsplit("-", 1)[0], (None, None, None))
        ours, bests = [], []
        for run in sorted(group, key=lambda run: run.seed):
            returns = run.points[:, 2]
            reached = crossing(returns, threshold) if threshold is not None else None
            ours.append(reached or (f"not in {len(returns)}" if threshold is not None else "-"))
            bests.append(number(five_episode_means(returns).max()))
        cells = [env_id, variant, *("-" if x is None else x for x in (threshold, episodes))]
        yield row(*cells, ", ".join(map(str, ours)), "-" if best is None else best, ", ".join(bests))


def random_score(env_id):
    """Mean return of uniformly random actions."""
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id), RANDOM_EPISODES)
    env.action_space.seed(0)
    for episode in range(RANDOM_EPISODES):
        env.reset(seed=episode)
        ended = False
        while not ended:
            _, _, terminated, truncated, _ = env.step(env.action_space.sample())
            ended = terminated or truncated
    return np.mean(env.return_queue)


def score(runs, random_score=random_score):
    """Rows of (name, the paper's score, ours, each seed's, {environment: mean return}), and random actions' returns."""
    environments = sorted({run.env_id for run in runs})
    returns = {}  # of each row: {environment: {seed: mean return of the last 100 episodes}}
    for objective, flag, value, published in PAPER:
        name = f"{objective}, {flag} {value:g}" if flag else objective
        found = {env_id: {} for env_id in environments}
        for run in runs:
            if run.args["objective"] == objective and (not flag or run.args[flag] == value):
                if run.seed in found[run.env_id]:
                    raise SystemExit(f"{run.directory}: a second run of {name}; name the folder of one suite's runs")
                found[run.env_id][run.seed] = run.training
        if all(found.values()):
            returns[name, published] = found
        else:
            print(f"{name} is left out: not every environment has a run", file=sys.stderr)
    if not returns:
        raise SystemExit("no row has a run in every environment")
    means = {row: {e: np.mean(list(x.values())) for e, x in found.items()} for row, found in returns.items()}
    low = {env_id: random_score(env_id) for env_id in environments}
    high = {env_id: max(mean[env_id] for mean in means.values()) for env_id in environments}

    def normalised(returns):
        return np.mean([(returns[e] - low[e]) / (high[e] - low[e]) for e in environments])

    rows = []
    for (name, published), mean in means.items():
        found = returns[name, published]
        seeds = sorted(set.intersection(*map(set, found.values())))  # those that every environment has
        of_seeds = [normalised({env_id: x[seed] for env_id, x in found.items()}) for seed in seeds]
        rows.append((name, published, normalised(mean), of_seeds, mean))
    return rows, low


def objectives(rows, low):
    """Lines of Markdown: each row's normalised score beside the paper's, and its mean return in every environment."""
    yield row("objective", "the paper", "ours", "each seed", *low)
    yield row(*"----", *("-" for _ in low))
    for name, published, ours, of_seeds, means in rows:
        each = ", ".join(f"{x:.2f}" for x in of_seeds)
        yield row(name, f"{published:.2f}", f"{ours:.2f}", each, *(number(mean) for mean in means.values()))
    yield row("random actions", 0, 0, "", *map(number, low.values()))
    if len(rows) > 2:
        _, theirs, ours, *_ = zip(*rows)
        yield f"\nSpearman's rank correlation of both columns: {stats.spearmanr(ours, theirs).statistic:.2f}"


def draw(rows, out):
    """The scores, one line a row: the paper's, ours, and each seed's where there are several."""
    figure, axes = plt.subplots(figsize=(8, 0.35 * len(rows) + 1.2), layout="constrained")
    for y, (_, published, ours, of_seeds, _) in enumerate(rows):
        axes.plot([published, ours], [y, y], color="0.8", linewidth=1, zorder=0)
        if len(of_seeds) > 1:
            axes.plot(of_seeds, [y] * len(of_seeds), "|", color="C0", markersize=12, label="each of its seeds")
        axes.plot(published, y, "o", color="0.35", markerfacecolor="white", label="the paper, mean of 3 seeds")
        axes.plot(ours, y, "o", color="C0", label="ours")
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("score: 0 random actions, 1 the best row of each environment")
    axes.grid(axis="x", alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    legend = dict(zip(labels, handles))
    axes.legend(legend.values(), legend.keys(), fontsize=8, loc="lower left")
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=["thresholds", "objectives"])
    parser.add_argument("paths", nargs="+", help="run directories, or directories above them")
    parser.add_argument("--out", help="objectives: the figure to write (.png, .pdf or .svg)")
    args = parser.parse_args()
    if args.out and args.table == "thresholds":
        parser.error("--out draws the scores of objectives; the curves of the post's settings are plot_runs.py's")
    preset = {"thresholds": "post", "objectives": "paper"}[args.table]
    runs = [run for run in plot_runs.find_runs(args.paths) if run.args.get("preset") == preset]
    runs = [run for run in runs if run.status != "unfinished" and len(run.points) >= 5]
    if args.table == "thresholds":
        runs = [run for run in runs if list(run.directory.glob(plot_runs.EVENTS))]
    if not runs:
        raise SystemExit(f"no ended runs of --preset {preset} in {' '.join(args.paths)}")
    plot_runs.name_variants(runs)
    if args.table == "thresholds":
        print(*thresholds(runs), sep="\n")
        return
    rows, low = score(runs)
    print(*objectives(rows, low), sep="\n")
    if args.out:
        draw(rows, args.out)


if __name__ == "__main__":
    main()
