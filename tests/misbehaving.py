"""Small environments, healthy ones and ones that misbehave on purpose, each in one way.

Importing this registers them: `--env-id misbehaving:Healthy-v0`, with this folder on PYTHONPATH. A fault happens in
the second environment of each process that steps any, in the middle of its third iteration of 16 steps. Where
MISBEHAVING_LOG names a file, each environment writes a line with its process id there when it is made and when its
fault happens.
"""

import os
import random
import signal
import time

import gymnasium as gym
import numpy as np

FAULT_STEP = 40


class Misbehaving(gym.Env):
    """A point that a random force and the two actions push around; the episode ends where it goes too far."""

    metadata = {"render_modes": []}
    made = 0

    def __init__(self, fault=None, bound=1.0, render_mode=None):
        self.faulty = Misbehaving.made % 2 == 1
        Misbehaving.made += 1
        self.fault, self.render_mode, self.steps = fault, render_mode, 0
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gym.spaces.Box(-bound, bound, (2,), np.float32)
        if fault == "dict observation":
            self.observation_space = gym.spaces.Dict({"point": self.observation_space})
        if fault == "discrete action":
            self.action_space = gym.spaces.Discrete(3)
        self.log("made")
        if fault == "slow constructor":
            time.sleep(4)

    def log(self, word):
        if "MISBEHAVING_LOG" in os.environ:
            with open(os.environ["MISBEHAVING_LOG"], "a") as file:
                file.write(f"{word} {os.getpid()} {time.time()}\n")

    def happens(self, fault):
        """Whether this fault is due; `steps` counts over episodes."""
        due = self.fault == fault and self.faulty and self.steps >= FAULT_STEP
        if due:
            self.log("fault")
        return due

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.happens("raise in reset"):
            raise RuntimeError("no way back")
        # All three sources of randomness that an environment may use.
        self.point = np.array([self.np_random.normal(), np.random.normal(), random.gauss(0, 1)])
        return self.point.copy(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"not a valid action: {action}"
        self.steps += 1
        if self.happens("raise in step"):
            raise RuntimeError("the leg is broken")
        if self.happens("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.happens("exits"):
            os._exit(3)
        if self.fault == "slow step":
            time.sleep(1)
        self.point += 0.1 * self.np_random.normal(size=3)
        self.point[:2] += 0.3 * np.asarray(action).clip(-1, 1)
        obs, reward = self.point.copy(), -float(np.square(self.point).sum())
        terminated = bool(np.abs(self.point).max() > 3)
        if self.happens("observation not finite"):
            obs[1] = np.nan
        if self.happens("final observation not finite"):
            obs[2], terminated = np.inf, True
        if self.happens("reward not finite"):
            reward = np.nan
        if self.fault == "enormous reward" and self.steps >= FAULT_STEP:
            reward *= 1e30
        if self.fault == "enormous reward at once":
            reward *= 1e30
        return obs, reward, terminated, False, {}


def register(name, time_limit=20, **arguments):
    gym.register(f"{name}-v0", "misbehaving:Misbehaving", max_episode_steps=time_limit, kwargs=arguments)


register("Healthy")
register("Endless", time_limit=None, bound=0.1)
register("RaiseInStep", fault="raise in step")
register("RaiseInReset", fault="raise in reset")
register("Killed", fault="killed")
register("Exits", fault="exits")
register("ObservationNotFinite", fault="observation not finite")
register("FinalObservationNotFinite", fault="final observation not finite")
register("RewardNotFinite", fault="reward not finite")
register("EnormousReward", fault="enormous reward")
register("EnormousRewardAtOnce", fault="enormous reward at once")
register("DictObservation", fault="dict observation")
register("DiscreteAction", fault="discrete action")
register("InfiniteBounds", bound=np.inf)
register("SlowStep", fault="slow step")
register("SlowConstructor", fault="slow constructor")
