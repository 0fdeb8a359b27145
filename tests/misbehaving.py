"""Small environments, healthy ones and ones that misbehave on purpose, each in one way.

Importing this registers them, each also with three discrete actions: `--env-id misbehaving:Healthy-v0` and
`misbehaving:DiscreteHealthy-v0`, with this folder on PYTHONPATH. Most faults happen in the second environment of each
process, after 45 of its steps: with 16 steps an iteration, in the third one. Where MISBEHAVING_LOG names a file, every
environment writes a line "what pid time" there when it is made and when its fault happens.
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

    metadata = {"render_modes": ["rgb_array"]}
    made = 0
    space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)

    def __init__(self, fault=None, bound=1.0, discrete=False, space=None, actions=None, render_mode=None):
        self.faulty = Misbehaving.made % 2 == 1
        Misbehaving.made += 1
        self.fault, self.render_mode, self.steps = fault, render_mode, 0
        self.observation_space = self.space if space is None else space
        self.action_space = gym.spaces.Box(-bound, bound, (2,), np.float32) if actions is None else actions
        if discrete:
            self.action_space = gym.spaces.Discrete(3)
        self.log("made")
        if fault == "hang in constructor" and multiprocessing.parent_process() is not None:
            time.sleep(120)
        if fault == "raise in constructor":
            raise RuntimeError("no such robot")
        if fault == "child process" and multiprocessing.parent_process() is not None:
            self.child = multiprocessing.Process(target=time.sleep, args=(600,))
            self.child.start()

    def close(self):
        if self.fault == "raise in close":
            raise RuntimeError("can't let go")
        if self.fault == "hang in close" and multiprocessing.parent_process() is not None:
            time.sleep(120)
        if hasattr(self, "child"):
            self.child.terminate()
            self.child.join()

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
        if isinstance(self.action_space, gym.spaces.Box | gym.spaces.Discrete):
            self.point[2] += 0.1 * np.ravel(self.action_space.sample())[0]
        return self.observation(), {}

    def observation(self):
        space, point = self.observation_space, self.point
        if isinstance(space, gym.spaces.Dict):
            return {"point": point.copy(), "where": (int(point[0] > 0), np.full((2, 2), point[1], np.float32))}
        if isinstance(space, gym.spaces.Discrete):
            return int(point[0] > 0)
        if space.dtype == np.uint8:
            point = (128 + 40 * point).clip(0, 255)
        return np.resize(point, space.shape).astype(space.dtype)

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


class Bare(Misbehaving):
    """Without a parameter render_mode."""

    def __init__(self, discrete=False):
        super().__init__(discrete=discrete)


class Drawn(Misbehaving):
    def render(self):
        return np.full((64, 64, 3), self.steps % 256, np.uint8)


class Counting(Misbehaving):
    """Every episode earns 1 in each of its seven steps, whatever its `info` claims."""

    def __init__(self, info=None, **kwargs):
        super().__init__(**kwargs)
        self.info, self.kept = info, {}

    def reset(self, **kwargs):
        self.length = 0
        return super().reset(**kwargs)[0], self.kept

    def step(self, action):
        self.length += 1
        obs, *_ = super().step(action)
        info = {"same": self.kept, "own": {"episode": {"r": 999.0, "l": 999, "t": 0.0}}, None: {}}[self.info]
        return obs, 1.0, self.length == 7, False, info


class Constant(gym.Env):
    """Episodes of three steps which all give one reward, and from `when` on ("reset", "step", "end") one
    observation; before that one that the space holds. For SubprocVecEnv alone: it ends where another step is asked for.
    """

    action_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, space, obs, when="reset", reward=1.0):
        self.observation_space, self.obs, self.when, self.reward = space, obs, when, reward

    def observation(self, now):
        order = ["reset", "step", "end"]
        held = np.zeros(self.observation_space.shape, self.observation_space.dtype)
        return self.obs if order.index(now) >= order.index(self.when) else held

    def reset(self, **kwargs):
        self.steps = 0
        return self.observation("reset"), {}

    def step(self, action):
        self.steps += 1
        done = self.steps == 3
        return self.observation("end" if done else "step"), self.reward, done, False, {}


class OwnSpace(gym.Space):
    """A space that Gymnasium can't flatten, as MiniGrid's mission."""

    def sample(self, mask=None):
        return "go"


def counted_twice(**kwargs):
    return gym.wrappers.RecordEpisodeStatistics(Counting(**kwargs))


def register(name, fault=None, entry_point=Misbehaving, limit=20, **kwargs):
    kwargs |= {"fault": fault} if fault else {}
    for prefix, more in (("", {}), ("Discrete", {"discrete": True})):
        gym.register(f"{prefix}{name}-v0", entry_point, max_episode_steps=limit, kwargs=kwargs | more)


register("Healthy")
register("Action")  # DiscreteAction is Healthy with other actions
register("InfiniteBounds", bound=np.inf)
register("EqualBounds", bound=0.0)
register("WideBounds", bound=3.0)
register("BinaryActions", actions=gym.spaces.MultiBinary(2))
register("WholeNumberActions", actions=gym.spaces.Box(-1, 1, (2,), np.int64))
# Bounds that are no float32: the nearest ones lie outside.
register("DoubleActions", actions=gym.spaces.Box(np.array([-0.1, -np.pi]), np.array([0.1, np.pi]), dtype=np.float64))
register("ByteObservation", space=gym.spaces.Box(0, 255, (3,), np.uint8))
register("LongDoubleObservation", space=gym.spaces.Box(-np.inf, np.inf, (3,), np.longdouble))
register("EmptyObservation", space=gym.spaces.Box(-1, 1, (0,)))
register("MatrixObservation", space=gym.spaces.Box(-np.inf, np.inf, (2, 3)))
register("DiscreteObservation", space=gym.spaces.Discrete(2))
register("ImageObservation", space=gym.spaces.Box(0, 255, (36, 40, 3), np.uint8))
register("TinyImageObservation", space=gym.spaces.Box(0, 255, (7, 7, 3), np.uint8))
register("ListObservation", space=gym.spaces.Sequence(gym.spaces.Discrete(2)))
where = gym.spaces.Tuple([gym.spaces.Discrete(2), gym.spaces.Box(-np.inf, np.inf, (2, 2))])
register("OwnSpaceObservation", space=gym.spaces.Dict({"point": Misbehaving.space, "mine": OwnSpace()}))
register("DictObservation", space=gym.spaces.Dict({"point": Misbehaving.space, "where": where}))
register("RaiseInConstructor", "raise in constructor")
register("RaiseInStep", "raise in step")
register("RaiseInReset", "raise in reset")
register("RaiseInClose", "raise in close")
register("KilledInStep", "killed in step")
register("ChildProcess", "child process")
register("ExitInStep", "exit in step")
register("SlowStep", "slow step")
register("HangInStep", "hang in step")
register("HangInClose", "hang in close")
register("HangInConstructor", "hang in constructor")
register("ObservationNotFinite", "observation not finite")
register("FinalObservationNotFinite", "final observation not finite")
register("RewardNotFinite", "reward not finite")
register("EnormousRewards", "enormous rewards")
register("EnormousRewardsAtOnce", "enormous rewards at once")
register("LargestRewards", "largest rewards")
register("Bare", entry_point=Bare)
register("Drawn", entry_point=Drawn)
register("NoLimit", limit=None)
register("Counting", entry_point=Counting)
register("OneInfo", entry_point=Counting, info="same")
register("OwnEpisodes", entry_point=Counting, info="own")
register("CountedTwice", entry_point=counted_twice)
