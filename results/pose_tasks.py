"""HumanoidBench for the other scripts: --env-id results.pose_tasks:h1-walk-v0 is its task as it is, and
results.pose_tasks:h1-walk-pose-v0 as the flagship has it: its actions, and its end of episodes that earn nothing (here
also of those of an evaluation, which costs them under 10).
"""

import gymnasium as gym

from ppo_interleaved_gru_beta import EndStalled, PoseActions, import_humanoid_bench

import_humanoid_bench()


def make(task, render_mode=None):
    return EndStalled(PoseActions(gym.make(task, render_mode=render_mode, disable_env_checker=True)), 20)


for task in ("h1-walk", "h1hand-walk"):
    gym.register(f"{task}-pose-v0", make, max_episode_steps=1000, kwargs={"task": f"{task}-v0"})
