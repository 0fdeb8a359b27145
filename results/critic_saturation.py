"""How much of a trained critic is saturated: tanh units of its second layer that are stuck near -1 or 1.

    python results/critic_saturation.py runs/CartPole-v1__ppo_value_first__*

plays, for each run of `ppo_value_first.py` with a checkpoint, 10 greedy episodes, and prints the share of (state, unit)
pairs with |tanh| > 0.99: units that hardly learn, their gradient being a fiftieth or less.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_value_first as ppo


def saturation(checkpoint):
    """Of the run that wrote the file."""
    saved = torch.load(checkpoint, weights_only=True, map_location="cpu")
    args = ppo.Args(**saved["args"])
    env = ppo.make_env(args.env_id)
    agent = ppo.Agent(env.observation_space, env.action_space, args)
    agent.load_state_dict(saved["model"])
    states = []
    for episode in range(10):
        obs, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            states.append(torch.as_tensor(np.asarray(obs, np.float32)))
            obs, _, terminated, truncated, _ = env.step(agent.act(states[-1]).numpy())
            ended = terminated or truncated
    with torch.no_grad():
        second = agent.critic[:4](agent.obs_norm(torch.stack(states)))  # [states, 64]
    return (second.abs() > 0.99).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories; those without a checkpoint are left out")
    for run in parser.parse_args().runs:
        if (run / "checkpoint.pt").exists():
            print(f"{run.name}  {saturation(run / 'checkpoint.pt'):.2f}")


if __name__ == "__main__":
    main()
