"""How near trained policies come to the goal, with the dynamics as they are and with randomised ones.

    python results/hand_success.py runs/*HandReachDense*

plays, for each run of `ppo_lstm_atari.py` or `ppo_mlp_gaussian.py` on a task of Gymnasium-Robotics, 100 greedy episodes
of each kind, the same ones for every policy. The last reward of HandReachDense is minus the distance to the goal, in
metres, over all fingertips together. A success is an episode whose last step is within 0.01 of it.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_lstm_atari
from results.memory_tasks import Forgetful


def play(script, agent, env_id, randomise, num_episodes):
    """-> returns, last rewards and successes [num_episodes]"""
    env, results = ppo_lstm_atari.make_env(env_id, randomise=randomise), []
    for episode in range(num_episodes):
        obs, _ = env.reset(seed=episode)
        begins, episodic_return, ended = True, 0.0, False
        state = agent.initial_state() if script == "ppo_lstm_atari" else None
        while not ended:
            obs = torch.as_tensor(obs, dtype=torch.float32)
            if state is None:
                action = agent.act(obs).numpy()
            else:
                actions, state = agent.act(obs[None], torch.tensor([begins]), state)
                action = actions[0].numpy()
            obs, reward, terminated, truncated, info = env.step(action)
            begins, episodic_return, ended = False, episodic_return + reward, terminated or truncated
        results.append((episodic_return, reward, info["is_success"]))
    return np.array(results, float).T


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run directories; those that have not ended are left out")
    parser.add_argument("--episodes", type=int, default=100)
    args = parser.parse_args()
    print("| run | dynamics | return | last reward | success |\n|-|-|-|-|-|")
    for run in args.runs:
        if not (run / "result.json").exists():
            continue
        script = json.loads((run / "result.json").read_text())["script"]
        module = importlib.import_module(script)
        saved = torch.load(run / "checkpoint.pt", weights_only=True, map_location="cpu")
        flags = module.Args(**saved["args"])
        env = ppo_lstm_atari.make_env(flags.env_id)
        agent_class = Forgetful if flags.exp_name == "forgetful" else module.Agent
        agent = agent_class(env.observation_space, env.action_space, flags)
        agent.load_state_dict(saved["model"])
        for randomise in (False, True):
            returns, last, successes = play(script, agent, flags.env_id, randomise, args.episodes).mean(1)
            kind = "randomised" if randomise else "as they are"
            print(f"| {run.name} | {kind} | {returns:.2f} | {last:.4f} | {successes:.0%} |", flush=True)


if __name__ == "__main__":
    main()
