"""Tasks with hidden velocities, for scripts that have no memory, and a memory that forgets.

--env-id results.memory_tasks:Hopper-NoVel-v5 is what `ppo_lstm_atari.py --env-id Hopper-v5 --mask-velocity` trains on.
Run as a script this is `ppo_lstm_atari.py`, but that every step is the first of an episode:

    python results/memory_tasks.py --env-id Pendulum-v1 --mask-velocity
"""

import sys
from pathlib import Path

import gymnasium as gym
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import ppo_lstm_atari as ppo


def make(env_id, render_mode=None):
    return ppo.make_env(env_id, mask_velocity=True)


for env_id in ppo.VELOCITIES:
    name, version = env_id.split("-")
    gym.register(f"{name}-NoVel-{version}", make, kwargs={"env_id": env_id})


class Forgetful(ppo.Agent):
    def recur(self, features, state):
        steps = features.flatten(0, 1)
        outputs, _ = super().recur(steps[None], self.initial_state(len(steps)))
        return outputs[0].unflatten(0, features.shape[:2]), torch.zeros_like(state)


if __name__ == "__main__":
    ppo.Agent = Forgetful
    ppo.train(ppo.parse_args(ppo.Args(exp_name="forgetful")))
