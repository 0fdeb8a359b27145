"""Draws the densities that a trained comb policy has learned, two-peaked action dimensions first.

    python results/plot_comb.py RUN_DIR densities.png

plays one episode with sampled actions. For each action dimension: left the density along the first 100 steps, right the
density in the state where a second peak stands out most, with its mode (the greedy action) and its mean. Teeth are
learned one by one, so single ones stick out by chance: peaks are looked for in the average over a quarter of the teeth.
A second peak stands out by its height over the deepest valley between it and the highest one, as a share of the highest
one's height; dimensions are in the order of the share of states in which that is over a fifth.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_comb_dist as ppo


def second_peak(density):
    """[..., teeth] -> how far a second peak stands out [...]: 0 (not at all) to 1 (as high, nothing in between)."""
    half = density.shape[-1] // 8
    density = torch.nn.functional.avg_pool1d(density, 2 * half + 1, 1, half, count_include_pad=False)
    left, right = density.cummax(-1).values, density.flip(-1).cummax(-1).values.flip(-1)  # the highest on either side
    return (torch.min(left, right) - density).amax(-1) / density.amax(-1)


def mean(comb):
    """The mean of each dimension's density, [..., act_dim]; a tooth's part of it is a hat, at both ends half of one."""
    masses = comb.log_density.exp()
    masses[..., [0, -1]] /= 2
    masses /= masses.sum(-1, keepdim=True)
    halves = (masses[..., 0] - masses[..., -1]) / 3  # whose centres are a third of a tooth inside
    return comb.at((masses * torch.arange(comb.pieces + 1)).sum(-1) + halves)


def play(agent, env, seed):
    """One episode with sampled actions: observations [steps, obs_dim], undiscounted return."""
    torch.manual_seed(seed)
    observations, episodic_return, done = [], 0.0, False
    obs, _ = env.reset(seed=seed)
    while not done:
        observations.append(torch.as_tensor(obs, dtype=torch.float32))
        action = agent.policy(agent.obs_norm(observations[-1])).sample().numpy()
        obs, reward, terminated, truncated, _ = env.step(action)
        episodic_return, done = episodic_return + float(reward), terminated or truncated
    return torch.stack(observations), episodic_return


@torch.no_grad()
def draw(checkpoint, file, seed=1):
    """Writes the figure; returns each dimension's share of states with two peaks [act_dim], in the actions' order."""
    args = ppo.Args(**checkpoint["args"])
    env = ppo.make_env(args.env_id, eval_episodes=1)  # with a time limit
    agent = ppo.Agent(env.observation_space, env.action_space, args)
    agent.load_state_dict(checkpoint["model"])
    observations, episodic_return = play(agent, env, seed)
    comb = agent.policy(agent.obs_norm(observations))
    density, mode, means = comb.log_density.exp(), comb.mode(), mean(comb)  # [steps, act_dim, teeth], [steps, act_dim]
    peaks = second_peak(density)  # [steps, act_dim]
    shares = (peaks > 0.2).float().mean(0)
    order = sorted(range(len(shares)), key=lambda i: (-shares[i].item(), -peaks[:, i].mean().item()))

    density, shown = density.numpy(), min(len(density), 100)
    size = (10, 1.5 * len(order) + 0.8)
    figure, axes = plt.subplots(len(order), 2, figsize=size, squeeze=False, layout="constrained")
    for (left, right), i in zip(axes, order):
        low, high = agent.low[i].item(), agent.high[i].item()
        teeth = np.linspace(low, high, density.shape[-1])
        image = density[:shown, i].T
        half = (teeth[1] - teeth[0]) / 2
        extent = (-0.5, shown - 0.5, low - half, high + half)
        left.imshow(image, origin="lower", aspect="auto", extent=extent, interpolation="nearest", vmin=0)
        left.set_ylabel(f"action {i}")
        left.set_title(f"two peaks in {shares[i]:.0%} of the states", fontsize="small", loc="left")
        step = peaks[:, i].argmax().item()
        right.fill_between(teeth, density[step, i], color="C0", alpha=0.3)
        right.plot(teeth, density[step, i], ".-", color="C0", linewidth=1)
        right.axvline(mode[step, i].item(), color="C3", linewidth=1, label="mode")
        right.axvline(means[step, i].item(), color="black", linewidth=1, linestyle=":", label="mean")
        right.set_ylim(bottom=0)
        right.set_title(f"density at step {step}", fontsize="small", loc="left")
    figure.legend(*axes[0, 1].get_legend_handles_labels(), loc="outside lower right", ncols=2, fontsize="small")
    axes[-1, 0].set_xlabel("step of the episode")
    axes[-1, 1].set_xlabel("action")
    steps, run = checkpoint["global_step"], f"{args.env_id}, seed {args.seed}"
    figure.suptitle(f"{run}, {steps} steps, --density {args.density}; episode's return {episodic_return:.0f}")
    figure.savefig(file, dpi=80)
    plt.close(figure)
    return shares


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run directory of ppo_comb_dist.py, or its checkpoint.pt")
    parser.add_argument("file", help="the figure")
    parser.add_argument("--seed", type=int, default=1, help="of the episode")
    args = parser.parse_args()
    shares = draw(ppo.read_checkpoint(args.run)[0], args.file, args.seed)
    print("share of states with two peaks:", ", ".join(f"action {i} {share:.2f}" for i, share in enumerate(shares)))


if __name__ == "__main__":
    main()
