"""Small environments, healthy ones and ones that misbehave on purpose, each in one way.

Importing this registers them: `--env-id misbehaving:Healthy-v0`, with this folder on PYTHONPATH. Most faults happen in
the second environment of each process, after 45 of its steps: with 16 steps an iteration, in the third one. Where
MISBEHAVING_LOG names a file, every environment writes a line "what pid time" there when it is made and when its fault
happens.
"""

import multiprocessing
import os
import random
import signal
import time

import gymnasium as gym
import numpy as np

FAULT_STEP = 45


class Misbehaving(gym.Env):
    """A point that chance and two actions (or one of three) push around; an episode ends where it is too far out."""

    made = 0

    def __init__(self, fault=None, bound=1.0, discrete=False, render_mode=None):
        self.faulty = Misbehaving.made % 2 == 1
        Misbehaving.made += 1
        self.fault, self.render_mode, self.steps = fault, render_mode, 0
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        self.action_space = gym.spaces.Box(-bound, bound, (2,), np.float32)
        if fault == "byte observation":
            self.observation_space = gym.spaces.Box(0, 255, (3,), np.uint8)
        if fault == "dict observation":
            self.observation_space = gym.spaces.Dict({"point": self.observation_space})
        if discrete:
            self.action_space = gym.spaces.Discrete(3)
        if fault == "whole number actions":
            self.action_space = gym.spaces.Box(-1, 1, (2,), np.int64)
        if fault == "binary actions":
            self.action_space = gym.spaces.MultiBinary(2)
        self.log("made")
        if fault == "hang in constructor" and multiprocessing.parent_process() is not None:
            time.sleep(120)
        if fault == "raise in constructor":
            raise RuntimeError("no such robot")

    def log(self, what):
        if "MISBEHAVING_LOG" in os.environ:
            with open(os.environ["MISBEHAVING_LOG"], "a") as file:
                file.write(f"{what} {os.getpid()} {time.time()}\n")

    def due(self, fault):
        due = self.fault == fault and self.faulty and self.steps >= FAULT_STEP
        if due:
            self.log("fault")
        return due

    def reset(self, *, seed=None, options=None):
        assert seed is None or type(seed) is int, f"a seed that is no Python int: {seed!r}"
        super().reset(seed=seed)
        if self.due("raise in reset"):
            raise RuntimeError("can't get up")
        # Every source of randomness that an environment may use.
        self.point = np.array([self.np_random.normal(), np.random.normal(), random.gauss(0, 1)])
        self.point[2] += 0.1 * np.ravel(self.action_space.sample())[0]
        return self.observation(), {}

    def observation(self):
        if self.fault == "byte observation":
            return (128 + 40 * self.point).clip(0, 255).astype(np.uint8)
        return self.point.copy()

    def step(self, action):
        assert self.action_space.contains(action), f"not a valid action: {action}"
        self.steps += 1
        if self.due("raise in step"):
            raise RuntimeError("the leg is broken")
        if self.due("killed in step"):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.due("exit in step"):
            os._exit(3)
        if self.fault == "slow step":
            time.sleep(0.5)
        if self.due("hang in step"):
            time.sleep(120)
        self.point += 0.1 * self.np_random.normal(size=3)
        self.point[:2] += 0.3 * (action - 1 if np.ndim(action) == 0 else action.clip(-1, 1))
        obs, reward = self.observation(), -float(np.square(self.point).sum())
        terminated = bool(np.abs(self.point).max() > 2.5)
        if self.due("observation not finite"):
            obs[1] = np.nan
        if self.due("final observation not finite"):
            obs[2], terminated = np.inf, True
        if self.due("reward not finite"):
            reward = np.nan
        if self.fault == "enormous rewards" and self.steps >= FAULT_STEP or self.fault == "enormous rewards at once":
            reward *= 1e30
        if self.fault == "largest rewards":
            reward = 3e38
        return obs, reward, terminated, False, {}


def register(name, fault=None, **kwargs):
    gym.register(f"{name}-v0", "misbehaving:Misbehaving", max_episode_steps=20, kwargs={"fault": fault} | kwargs)


register("Healthy")
register("InfiniteBounds", bound=np.inf)
register("EqualBounds", bound=0.0)
register("DictObservation", "dict observation")
register("ByteObservation", "byte observation")
register("DiscreteByteObservation", "byte observation", discrete=True)
register("DiscreteAction", discrete=True)
register("BinaryActions", "binary actions")
register("WholeNumberActions", "whole number actions")
register("RaiseInConstructor", "raise in constructor")
register("RaiseInStep", "raise in step")
register("DiscreteRaiseInStep", "raise in step", discrete=True)
register("RaiseInReset", "raise in reset")
register("KilledInStep", "killed in step")
register("ExitInStep", "exit in step")
register("SlowStep", "slow step")
register("HangInStep", "hang in step")
register("HangInConstructor", "hang in constructor")
register("ObservationNotFinite", "observation not finite")
register("FinalObservationNotFinite", "final observation not finite")
register("RewardNotFinite", "reward not finite")
register("EnormousRewards", "enormous rewards")
register("EnormousRewardsAtOnce", "enormous rewards at once")
register("LargestRewards", "largest rewards")
