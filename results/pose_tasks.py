"""HumanoidBench as the flagship has it, for the other scripts: --env-id results.pose_tasks:h1-walk-pose-v0

Its actions, and its end of episodes that earn nothing; here of those of an evaluation too, which costs them under 10.
"""

import gymnasium as gym

from ppo_interleaved_gru_beta import EndStalled, PoseActions


def make(task, render_mode=None):
    env = gym.make(f"humanoid_bench.tasks:{task}", render_mode=render_mode, disable_env_checker=True)
    return EndStalled(PoseActions(env), 20)


for task in ("h1-walk", "h1hand-walk"):
    gym.register(f"{task}-pose-v0", make, max_episode_steps=1000, kwargs={"task": f"{task}-v0"})
