"""HumanoidBench for the other scripts: --env-id results.pose_tasks:h1-walk-v0 is its task as it is, and
results.pose_tasks:h1-walk-pose-v0 has the flagship's actions.
"""

import gymnasium as gym

from ppo_interleaved_gru_beta import PoseActions, import_humanoid_bench

import_humanoid_bench()


def make(task, render_mode=None):
    return PoseActions(gym.make(task, render_mode=render_mode, disable_env_checker=True))


for task in ("h1-walk", "h1hand-walk"):
    gym.register(f"{task}-pose-v0", make, max_episode_steps=1000, kwargs={"task": f"{task}-v0"})
