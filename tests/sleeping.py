"""An environment of the size of h1hand-walk-v0 that sleeps in `step`, as many of them in one process as if each of a
machine's 16 cores took 2 ms for a step: for the section `cluster` of bench_speed.py."""

import time

import gymnasium as gym
import numpy as np

SECONDS, CORES = 2e-3, 16


class Sleeping(gym.Env):
    observation_space, action_space = gym.spaces.Box(-1, 1, (151,)), gym.spaces.Box(-1, 1, (61,))
    debt = 0.0  # of all environments of this process: many short sleeps would each take too long

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.random(151, np.float32), {}

    def step(self, action):
        Sleeping.debt += SECONDS / CORES
        if Sleeping.debt > SECONDS / 2:
            start = time.perf_counter()
            time.sleep(Sleeping.debt)
            Sleeping.debt -= time.perf_counter() - start
        return self.np_random.random(151, np.float32), 1.0, False, False, {}


gym.register("Sleeping-v0", Sleeping, max_episode_steps=1000)
