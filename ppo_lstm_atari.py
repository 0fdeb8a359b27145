# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "ale-py==0.12.1",
#     "gymnasium==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco>=3.1.6,<4",
#     "numpy==2.4.6",
#     "opencv-python-headless==5.0.0.93",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""Recurrent PPO: an LSTM or a GRU (--rnn) remembers what one observation can't show. For images (Atari) and vectors.

A network encodes the observation, the RNN carries a state through the episode, linear heads give policy and value:

    x_t        = CNN(image_t)   or   MLP(vector_t)
    h_t        = RNN(x_t, h_{t-1}),   h_{t-1} = 0 where an episode begins
    pi(a|s_t)  = softmax(W_pi h_t + b_pi)_a,   or, for continuous actions, Normal(W_pi h_t + b_pi, std)
    V(s_t)     = w_V h_t + b_V

Collect num_envs x num_steps steps with the policy pi_old, estimate each action's advantage A, then take several
epochs of minibatch gradient steps on

    ratio      = pi(a|s) / pi_old(a|s) = exp(log pi(a|s) - log pi_old(a|s))
    L_policy   = -mean( min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) )     no gain from leaving [1 - eps, 1 + eps]
    L_value    = 1/2 mean( max( (V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2 ) ),   R = V_old + A
    L          = L_policy + vf_coef * L_value - ent_coef * entropy
    A_t        = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)     (GAE)

That is PPO (Schulman et al. 2017, arXiv:1707.06347). What it leaves open is chosen here as follows:

    minibatches    hold all steps of some environments, split into sequences where an episode begins. An episode that
                   goes on from the rollout before starts with the state it had then; no gradient flows back there.
    halves         of the environments take turns: while one steps, the policy acts for the other.
    time limits    bootstrap from the value of the last observation, with the recurrent state of that moment.
    log pi_old     and V_old are those of the rollout, which computes them anyway.
    statistics     --norm-obs and --norm-reward are off by default, as in the source. Images are divided by 255.
    games          A life is an episode, with the signs of the rewards; the returns reported are those of whole games.
    evaluation     Discrete actions for images are sampled, as for the published numbers; all others are greedy.
    --randomise    draws each episode's masses, friction, damping, gains and gravity: a memory can find them out.
    all else       is as in ppo_mlp_gaussian.py: episodes go on from batch to batch, advantages are normalised in each
                   minibatch, statistics change after an update only, a resume begins new episodes.

Source:  "Advancements in PPO" (George Ogden), third experiment: LSTM against GRU on Pong, BeamRider and Breakout, in
         the setting of CleanRL's ppo_atari_lstm.py (where time limits are deaths, and action 2 is pressed after FIRE).

Result:  Pong, 3 M steps, mean return of 30 games: GRU 19.4, LSTM 19.1 (one seed each). CartPole-v1 with
         --mask-velocity and the flags of `./benchmark.sh recurrent`, 10 seeds, last 100 training episodes: GRU 479,
         LSTM 481; greedy 481 and 500.

Run:     python ppo_lstm_atari.py --env-id PongNoFrameskip-v4 --rnn gru --total-timesteps 3000000 --eval-episodes 30
         python ppo_lstm_atari.py --env-id Hopper-v5 --mask-velocity --norm-obs --norm-reward
Resume:  python ppo_lstm_atari.py --resume runs/PongNoFrameskip-v4__ppo_lstm_atari__1__1700000000
"""

import atexit
import copy
import io
import json
import multiprocessing
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    # The run
    exp_name: str = Path(__file__).stem  # name of the experiment, a part of the run directory's name
    seed: int = 1  # seed of the networks, the sampling and the environments
    torch_deterministic: bool = True  # deterministic cuDNN algorithms
    cuda: bool = True  # use a GPU where there is one
    track: bool = False  # send the curves to Weights & Biases too (pip install wandb)
    wandb_project_name: str = "ppo"  # the project there
    wandb_entity: str | None = None  # the entity (team) there
    capture_video: bool = False  # record the last evaluation to RUN_DIR/videos (MuJoCo: MUJOCO_GL=egl or osmesa)
    num_workers: int = 0  # processes that step the environments; 0: one for each core
    compile: bool = False  # compile minibatch_gradient, and the policy step where that helps (needs a C++ compiler)
    checkpoint_interval: int = 20  # iterations between checkpoints; 0: only at start and end and when stopped
    resume: str | None = None  # run directory or checkpoint.pt to go on from (--total-timesteps 0: to evaluate)
    run_dir: str | None = None  # directory of the run; None: a new one in runs/, or that of --resume
    eval_episodes: int = 10  # episodes, or whole games, in an evaluation; 0: no evaluation
    eval_interval: int = 0  # iterations between evaluations; 0: only at the end

    # The environment
    env_id: str = "BreakoutNoFrameskip-v4"  # id of a Gymnasium environment, or module:id
    num_envs: int = 8  # environments stepped side by side
    total_timesteps: int = 10_000_000  # environment steps of all environments, also those before a --resume
    mask_velocity: bool = False  # hide the velocities, in the environments of VELOCITIES
    randomise: bool = False  # MuJoCo: other dynamics in each episode: gravity, and those of RANDOMISED

    # PPO (Schulman et al. 2017)
    num_steps: int = 128  # steps of each environment in an iteration
    update_epochs: int = 4  # passes over the batch in an iteration
    num_minibatches: int = 4  # minibatches an epoch
    learning_rate: float = 2.5e-4  # Adam's learning rate
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    clip_coef: float = 0.1  # epsilon of the clipped surrogate objective
    ent_coef: float = 0.01  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss

    # The 37 details (Huang et al. 2022)
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over --total-timesteps
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_vloss: bool = True  # clip the value's change too, by the same epsilon
    max_grad_norm: float = 0.5  # largest norm of the gradient, over all parameters; 0: no limit
    target_kl: float | None = None  # stop the update after an epoch whose mean KL exceeds this
    norm_obs: bool = False  # normalise observations by running statistics and clip them at 10
    norm_reward: bool = False  # divide rewards by the running std of the discounted return and clip them at 10

    # "Advancements in PPO" (Ogden)
    rnn: str = "lstm"  # the recurrent cell, lstm or gru


class AtariGame(gym.Wrapper):
    """Episodes are lives and rewards are signs (Mnih et al. 2015); FIRE comes first, for which some games wait. Whole
    games that have ended are listed in `ended_games` as (return, length), until `worker` takes them out."""

    def __init__(self, env):
        super().__init__(env)
        self.over, self.ended_games = True, []

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.score, self.length = self.score + float(reward), self.length + 1
        self.over = terminated or truncated
        if self.over:
            self.ended_games.append((self.score, self.length))
        lost = 0 < info["lives"] < self.lives  # at 0 the game ends by itself, sometimes some frames later
        self.lives = info["lives"]
        return obs, np.sign(reward), terminated or lost, truncated, info

    def next_life(self, **kwargs):
        """Goes on with the game by a no-op; begins another one where it is over or the no-op ends it."""
        if not self.over:
            obs, _, _, _, info = self.step(0)
        if self.over:
            obs, info = self.env.reset(**kwargs)
            self.score, self.length, self.lives, self.over = 0.0, 0, info["lives"], False
        return obs, info

    def reset(self, **kwargs):
        obs, info = self.next_life(**kwargs)
        if "FIRE" in self.env.unwrapped.get_action_meanings():  # it is action 1 then
            obs, _, terminated, truncated, info = self.step(1)
            if terminated or truncated:
                obs, info = self.next_life()
        return obs, info


# Where the velocities are in the observation
VELOCITIES = {"CartPole-v1": [1, 3], "MountainCar-v0": [1], "Acrobot-v1": [4, 5], "Pendulum-v1": [2]}
VELOCITIES |= {"Ant-v5": range(13, 27), "HalfCheetah-v5": range(8, 17), "Hopper-v5": range(5, 11)}
VELOCITIES |= {"Walker2d-v5": range(8, 17)}

# Smallest and largest factor on fields of MuJoCo's model. Each body, geom, pair of geoms, degree of freedom and
# actuator draws its own. A servo's force is gainprm * action + biasprm * position, so both get one factor.
RANDOMISED = {("body_mass", "body_inertia"): (0.5, 1.5), ("geom_friction",): (0.7, 1.3), ("pair_friction",): (0.7, 1.3)}
RANDOMISED |= {("dof_damping",): (0.3, 3.0), ("actuator_gainprm", "actuator_biasprm"): (0.75, 1.5)}


class RandomisedDynamics(gym.Wrapper):
    """Another robot in each episode: factors drawn log-uniformly, gravity moved by up to 0.7 m/s^2 in each coordinate.
    The ranges of the factors are those of OpenAI's hand (arXiv:1808.00177, table 1). There masses and friction are
    drawn uniformly, gravity from a normal distribution, and sizes vary too."""

    def __init__(self, env):
        super().__init__(env)
        model, self.generator = getattr(env.unwrapped, "model", None), np.random.default_rng()
        if not hasattr(model, "body_mass") or 2 in model.actuator_gaintype:  # mjGAIN_MUSCLE, whose gain is a curve
            needs = "needs a MuJoCo model as env.unwrapped.model, without muscles"
            raise SystemExit(f"--randomise: {needs}, which {env.spec.id} has not")
        self.nominal = {name: getattr(model, name).copy() for names in RANDOMISED for name in names}
        self.gravity = model.opt.gravity.copy()

    def reset(self, *, seed=None, options=None):
        import mujoco

        if seed is not None:  # not the environment's own generator: its starts and goals stay those of the nominal one
            self.generator = np.random.default_rng([seed, 1])
        model = self.unwrapped.model
        for names, bounds in RANDOMISED.items():
            factors = np.exp(self.generator.uniform(*np.log(bounds), len(self.nominal[names[0]])))
            for name in names:
                getattr(model, name)[:] = (factors * self.nominal[name].T).T
        model.opt.gravity[:] = self.gravity + self.generator.uniform(-0.7, 0.7, 3)
        mujoco.mj_setConst(model, mujoco.MjData(model))  # total masses, inverse weights: what MuJoCo derives from these
        return self.env.reset(seed=seed, options=options)


def make_env(env_id, eval_episodes=0, video_folder=None, mask_velocity=False, randomise=False):
    """One environment; one line if this script can't drive it. In Atari games up to 30 no-ops come first, and a step is
    4 frames, the maximum of the last two as 84 x 84 grey pixels (Mnih et al. 2015, without their stack of frames)."""
    name = env_id.removeprefix("ale_py:")
    if ":" not in name and name not in gym.registry:
        try:
            import ale_py  # registers its games
            import cv2  # noqa: F401, for AtariPreprocessing

            ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # no banner from every process
        except ImportError as error:
            reason = "none of Gymnasium's own; Atari games need pip install ale-py opencv-python-headless"
            raise SystemExit(f"--env-id {env_id}: {reason} ({error})") from None
    if name in gym.registry and gym.registry[name].entry_point == "ale_py.env:AtariEnv":
        options = {"frameskip": 1, "obs_type": "grayscale", "max_episode_steps": 108_000}  # half an hour
        if "Backgammon" in name or "VideoCheckers" in name:  # among their own actions is no NOOP
            options["full_action_space"] = True
        env = gym_make(env_id, eval_episodes, video_folder, images=True, **options)
        env = AtariGame(gym.wrappers.AtariPreprocessing(env))
    else:
        env = gym_make(env_id, eval_episodes, video_folder, images=True)
        if env.spec.entry_point == "ale_py.env:AtariEnv":
            raise SystemExit(f"--env-id {env_id}: a game's id needs its version, as in ALE/Pong-v5")
    if randomise:
        env = RandomisedDynamics(env)
    if mask_velocity:
        if env_id not in VELOCITIES:
            raise SystemExit(f"--mask-velocity: knows the velocities of {', '.join(VELOCITIES)}, not of {env_id}")
        mask = ~np.isin(np.arange(env.observation_space.shape[0]), VELOCITIES[env_id])
        env = gym.wrappers.TransformObservation(env, lambda obs: obs * mask, env.observation_space)
    space = env.action_space  # does a distribution fit it? Below: can the networks read the observations?
    box = isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f"
    choices = isinstance(space, gym.spaces.MultiDiscrete) and len(space.shape) == 1
    if not (box or choices or isinstance(space, gym.spaces.Discrete)):
        needs = "it must be Discrete, MultiDiscrete or a flat Box of floats"
        raise SystemExit(f"--env-id {env_id}: its action space is {space}; {needs}")
    shape = env.observation_space.shape
    if len(shape) > 3 or (len(shape) == 3 and shape[1] < min(shape[0], shape[2])):  # channels in the middle
        needs = "an image is [height, width], with channels first, last or not at all"
        raise SystemExit(f"--env-id {env_id}: its observation space is {env.observation_space}; {needs}")
    return env


class Gaussian:
    """Independent normal distributions, not bounded: mean [..., act_dim], log_std [act_dim]."""

    def __init__(self, mean, log_std):
        self.mean, self.log_std = mean, log_std

    def sample(self):
        """-> [..., act_dim]"""
        return self.mean + self.log_std.exp() * torch.randn_like(self.mean)

    def log_prob(self, actions):
        """[..., act_dim] -> log-density [...], the sum over the action dimensions."""
        z = (actions - self.mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self):
        """In nats, of all dimensions together; the same in every state."""
        return (self.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum(-1)

    def mode(self):
        """-> [..., act_dim]"""
        return self.mean


class Categorical:
    """A choice between n actions, int64 [...], by logits [..., n]."""

    def __init__(self, logits):
        self.log_probs = logits.log_softmax(-1)

    def sample(self, generator=None):
        """Gumbel-max: -log of an exponential variate is Gumbel's."""
        noise = torch.empty_like(self.log_probs).exponential_(generator=generator)
        return (self.log_probs - noise.log()).argmax(-1)

    def log_prob(self, actions):
        return self.log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self):
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def mode(self):
        return self.log_probs.argmax(-1)


class Categoricals:
    """Independent choices, int64 [..., k], of sizes n_1 ... n_k, by logits [..., n_1 + ... + n_k]."""

    def __init__(self, logits, sizes):
        self.parts = [Categorical(x) for x in logits.split(sizes, -1)]

    def sample(self, generator=None):
        return torch.stack([part.sample(generator) for part in self.parts], -1)

    def log_prob(self, actions):
        return sum(part.log_prob(x) for part, x in zip(self.parts, actions.unbind(-1)))

    def entropy(self):
        return sum(part.entropy() for part in self.parts)

    def mode(self):
        return torch.stack([part.mode() for part in self.parts], -1)


class RunningNorm(nn.Module):
    """Mean and variance of everything that `update` has seen, by Chan et al.'s parallel formula; 0 and 1 at first."""

    def __init__(self, shape):
        super().__init__()
        self.register_buffer("mean", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("var", torch.ones(shape, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update(self, batch):
        """Adds a batch [..., *shape]."""
        batch = batch.reshape(-1, *self.mean.shape).double()
        total = self.count + len(batch)
        delta = batch.mean(0) - self.mean
        m2 = self.var * self.count + batch.var(0, correction=0) * len(batch)
        self.var.copy_((m2 + delta.square() * self.count * len(batch) / total) / total)
        self.mean += delta * len(batch) / total
        self.count.copy_(total)

    def forward(self, x):
        """Normalised and clipped at 10: [..., *shape] -> float32 [..., *shape]."""
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(input_dim, output_dim, output_std):
    hidden = layer_init(nn.Linear(input_dim, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
    return nn.Sequential(*hidden, layer_init(nn.Linear(64, output_dim), output_std))


def nature_cnn(channels, height, width, output_dim):
    """The CNN of Mnih et al. 2015: [N, channels, height, width] -> [N, output_dim]"""
    layers = []
    for outputs, kernel, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
        layers += [layer_init(nn.Conv2d(channels, outputs, kernel, stride)), nn.ReLU()]
        channels, height, width = outputs, (height - kernel) // stride + 1, (width - kernel) // stride + 1
    return nn.Sequential(*layers, nn.Flatten(), layer_init(nn.Linear(channels * height * width, output_dim)), nn.ReLU())


class Agent(nn.Module):
    """An encoder (a CNN for images, an MLP for vectors), an LSTM or GRU, and heads for policy and value.

    Observations are as the environment gives them; `encode` scales images and normalises vectors. The RNN's state is a
    row for each environment, [num_envs, state_dim]: an LSTM's h and c side by side, a GRU's h.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.shape = observation_space.shape
        self.pixels = len(self.shape) > 1
        if self.pixels and args.norm_obs:
            raise SystemExit("--norm-obs: only for vector observations; images are divided by 255")
        self.obs_norm = RunningNorm(self.shape) if args.norm_obs else nn.Identity()
        num_features = 512 if self.pixels else 64
        if self.pixels:
            self.encoder = nature_cnn(*self.images(torch.empty(self.shape)).shape, num_features)
        else:
            self.encoder = mlp(*self.shape, num_features, 2**0.5)
        self.rnn = (nn.LSTM if args.rnn == "lstm" else nn.GRU)(num_features, 128)
        for name, parameter in self.rnn.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        self.box = isinstance(action_space, gym.spaces.Box)
        if self.box:
            self.log_std = nn.Parameter(torch.zeros(action_space.shape))
            self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32))
            self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32))
        else:
            discrete = isinstance(action_space, gym.spaces.Discrete)
            self.sizes = [int(action_space.n)] if discrete else action_space.nvec.tolist()
            self.register_buffer("start", torch.as_tensor(np.int64(action_space.start)), persistent=False)  # not saved
        self.actor = layer_init(nn.Linear(128, action_space.shape[0] if self.box else sum(self.sizes)), 0.01)
        self.critic = layer_init(nn.Linear(128, 1), 1.0)

    def initial_state(self, num_envs=1):
        """Zeros [num_envs, state_dim]."""
        return self.critic.weight.new_zeros(num_envs, 256 if isinstance(self.rnn, nn.LSTM) else 128)

    def images(self, obs):
        """[..., H, W], [..., H, W, channels] or [..., channels, H, W] -> [..., channels, H, W]"""
        if len(self.shape) == 2:
            return obs.unsqueeze(-3)
        return obs.movedim(-1, -3) if self.shape[-1] < self.shape[0] else obs  # the shorter one is channels

    def encode(self, obs):
        """[..., *the shape of an observation] -> [..., num_features]"""
        if not self.pixels:
            return self.encoder(self.obs_norm(obs.float()))
        images = self.images(obs)
        return self.encoder(images.flatten(0, -4) / 255).unflatten(0, images.shape[:-3])

    def recur(self, features, state):
        """[num_steps, num_envs, num_features] -> the RNN's outputs [num_steps, num_envs, 128], the state after them"""
        lstm, state = isinstance(self.rnn, nn.LSTM), state[None]  # of one layer: [1, num_envs, state_dim]
        outputs, state = self.rnn(features, tuple(x.contiguous() for x in state.chunk(2, -1)) if lstm else state)
        return outputs, (torch.cat(state, -1) if lstm else state)[0]

    def unroll(self, features, first, state):
        """As `recur`, but of [num_envs, num_steps, ...] with new episodes at `first`, in one call -> the outputs.

        Each sequence is a row of a table, filled up with zeros. These come after its last step, and so change nothing.
        Four steps of environments a and b, whose episodes begin at a2 and b0:

            first   a  0 0 1 0      table   a0 a1 .  .      used    1 1 0 0      starts   0 2 4
                    b  1 0 0 0              a2 a3 .  .              1 1 0 0      lengths  2 2 4
                                            b0 b1 b2 b3             1 1 1 1
        """
        begins = first.clone()
        begins[:, 0] = True  # also where an episode goes on from the rollout before
        starts = begins.flatten().nonzero().squeeze(-1)  # [num_sequences]; steps are counted row by row
        lengths = starts.diff(append=starts.new_tensor([first.numel()]))
        used = torch.arange(int(lengths.max()), device=first.device) < lengths[:, None]  # [num_sequences, longest]
        states = state[starts // first.shape[1]].masked_fill(first.flatten()[starts, None], 0)
        table = features.new_zeros(*used.shape, features.shape[-1])
        table[used] = features.flatten(0, 1)  # both are in the order of the steps
        outputs, _ = self.recur(table.transpose(0, 1).contiguous(), states)
        return outputs.transpose(0, 1)[used].unflatten(0, first.shape)

    def policy(self, outputs):
        """The RNN's outputs [..., 128] -> the distribution of the actions"""
        outputs = self.actor(outputs)
        if self.box:
            return Gaussian(outputs, self.log_std)
        return Categoricals(outputs, self.sizes) if self.start.ndim else Categorical(outputs)

    def to_env(self, actions):
        """What the environment gets: the actions counted from the space's start, or clipped to its bounds."""
        return actions.clamp(self.low, self.high) if self.box else actions + self.start

    def value(self, outputs):
        """[..., 128] -> [...]"""
        return self.critic(outputs).squeeze(-1)

    def step(self, obs, first, state):
        """One step of each environment, from zeros if it is an episode's `first`: -> policy, values, the state after"""
        outputs, state = self.recur(self.encode(obs)[None], state.masked_fill(first[:, None], 0))
        return self.policy(outputs[0]), self.value(outputs[0]), state

    @torch.no_grad()
    def act(self, obs, first, state, generator=None):
        """Actions for the environments, and the state to pass with the next `obs`. Discrete ones for images are drawn,
        all others greedy. `first` [num_envs] says which environments have just been reset; the first state is
        `initial_state(num_envs)`."""
        policy, _, state = self.step(obs, first, state)
        return self.to_env(policy.sample(generator) if self.pixels and not self.box else policy.mode()), state


def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438), all [num_steps, num_envs].

    next_values[t] is V of the state that really followed step t. A terminal state is worth 0. A time limit is no
    terminal state: it bootstraps, but no advantage flows across it.
    """
    deltas = rewards + gamma * (1 - terminated) * next_values - values
    decay = gamma * gae_lambda * (1 - done)
    advantages, advantage = torch.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = deltas[t] + decay[t] * advantage
    return advantages


def discounted_returns(rewards, done, running, gamma):
    """Each episode's discounted return so far, [num_steps, num_envs]; `running` [num_envs] goes on in place."""
    returns = torch.zeros_like(rewards)
    for t in range(len(rewards)):
        returns[t] = running.mul_(gamma).add_(rewards[t])
        running.mul_(1 - done[t])
    return returns


def minibatch_gradient(agent, args, state, obs, first, actions, log_probs, values, advantages, returns):
    """Sets the gradient of one minibatch's loss, its norm clipped. -> log_ratio, and the losses by name. A minibatch is
    of whole environments [envs, num_steps, ...]; `state` [envs, state_dim] is that before their first step."""
    outputs = agent.unroll(agent.encode(obs), first, state)
    policy = agent.policy(outputs)
    log_ratio = policy.log_prob(actions) - log_probs
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    new_values = agent.value(outputs)
    errors = (new_values - returns).square()
    if args.clip_vloss:
        clipped_values = values + (new_values - values).clamp(-args.clip_coef, args.clip_coef)
        errors = torch.max(errors, (clipped_values - returns).square())
    value_loss = 0.5 * errors.mean()
    entropy = policy.entropy().mean()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    losses = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
    return log_ratio.detach(), {name: value.detach() for name, value in losses.items()}


def update(agent, optimizer, gradient, args, batch):
    """`update_epochs` passes over the batch, cut along its tensors' first dimension. -> metrics by name, their means"""
    log_ratios, losses = [], []  # of each minibatch
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch[0]), device=batch[0].device)
        for minibatch in zip(*(x[order].chunk(args.num_minibatches) for x in batch)):
            optimizer.zero_grad()
            log_ratio, loss = gradient(agent, args, *minibatch)
            optimizer.step()
            log_ratios.append(log_ratio)
            losses.append(loss)
        log_ratio = torch.cat(log_ratios[-args.num_minibatches :])  # of this epoch
        if args.target_kl is not None and (log_ratio.exp() - 1 - log_ratio).mean() > args.target_kl:
            break
    log_ratio = torch.cat(log_ratios)
    metrics = {name: torch.stack([loss[name] for loss in losses]).mean() for name in losses[0]}
    metrics["losses/old_approx_kl"] = -log_ratio.mean()
    # k3 of Schulman, "Approximating KL Divergence": the same KL(pi_old || pi) with less variance.
    metrics["losses/approx_kl"] = (log_ratio.exp() - 1 - log_ratio).mean()
    metrics["losses/clipfrac"] = ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean()
    return metrics


def annealing(args, global_step):
    """Factor on the learning rate: with --anneal-lr it falls linearly from 1 to 0 at --total-timesteps."""
    return max(0.0, 1 - global_step / args.total_timesteps) if args.anneal_lr else 1.0


def evaluate(run, agent, make, video_folder=None, name="eval"):
    """Plays and logs `eval_episodes` episodes, or whole games, on fresh environments. -> their returns and lengths

    Those that begin first count: those that end first would be the short ones. With --randomise the environment as it
    is comes first, logged as "eval_nominal", then the randomised one, whose returns are those of the run.
    """
    args, num_episodes = run.args, run.args.eval_episodes
    if num_episodes == 0:
        return [], []
    if args.randomise and name == "eval":
        evaluate(run, agent, partial(make, randomise=False), name="eval_nominal")
    label = {"eval": "evaluation", "eval_nominal": "evaluation of the nominal dynamics"}[name]
    num_envs = 1 if video_folder else min(args.num_envs, num_episodes)
    make = partial(make, eval_episodes=num_episodes, video_folder=video_folder)
    with SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, 2**31], run.spaces) as envs:  # no iteration's seed
        obs, first, state = envs.reset(), np.ones(num_envs, bool), agent.initial_state(num_envs)
        generator = torch.Generator(run.device).manual_seed(args.seed)  # of its own: training goes on with the other
        playing, begun, ended = np.arange(num_envs), num_envs, {}  # episodes are numbered as they begin
        while playing.min() < num_episodes:
            inputs = [torch.as_tensor(x, device=run.device) for x in (obs, first)]
            actions, state = agent.act(*inputs, state, generator)
            obs, _, terminated, truncated = envs.step(actions.cpu().numpy(), playing < num_episodes)
            first = terminated | truncated  # also where a life ends
            for env, episodic_return, length in envs.episodes:
                ended[playing[env]] = episodic_return, length
                playing[env], begun = begun, begun + 1
                run.show(f"{label} {len(ended)}/{num_episodes}", passing=True)
    returns, lengths = map(list, zip(*(ended[i] for i in range(num_episodes))))
    mean, std = np.mean(returns), np.std(returns)
    where = f", recorded in {video_folder}" if video_folder else ""
    run.show(f"{label}: mean return {mean:.1f}, standard deviation {std:.1f}, {num_episodes} episodes{where}")
    run.log({f"{name}/episodic_return": mean, f"{name}/episodic_length": np.mean(lengths)})
    return returns, lengths


def train(args: Args) -> dict:
    """Trains, or with --total-timesteps 0 only evaluates. -> what the run's result.json, or eval.json, holds"""
    check_args(args)
    if args.rnn not in ("lstm", "gru"):
        raise SystemExit(f"--rnn {args.rnn}: must be lstm or gru")
    if args.num_envs % args.num_minibatches:
        raise SystemExit(f"--num-minibatches {args.num_minibatches}: must divide --num-envs {args.num_envs}")
    make = partial(make_env, args.env_id, mask_velocity=args.mask_velocity, randomise=args.randomise)
    num_envs = args.num_envs if args.total_timesteps else 1
    with Run(args) as run, SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, run.iteration]) as envs:
        device = run.device
        torch.backends.cudnn.allow_tf32 = False  # as for matrix products: rollout and update shall round alike
        torch.manual_seed(args.seed)
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        agent.to(memory_format=torch.channels_last)  # the CNN's update takes a quarter less time on a CPU
        update_threads = run.threads if agent.pixels else 1  # the layers for vectors are too small to share
        torch.set_num_threads(1)  # in the rollout: more would take the workers' cores
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr: set in each iteration
        return_norm = RunningNorm(()).to(device)
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm)

        def draw(obs, first, state):
            policy, values, state = agent.step(obs, first, state)
            actions = policy.sample()
            return actions, policy.log_prob(actions), values, state

        gradient = minibatch_gradient
        if args.compile:
            # The RNN stays eager, as the number of sequences and their length vary.
            agent.recur, agent.unroll = torch.compiler.disable(agent.recur), torch.compiler.disable(agent.unroll)
            gradient = compile_function(gradient, device)
            if device.type == "cuda":
                draw = compile_function(draw, device)

        # Of all steps, [num_steps, num_envs, ...]; `states` has one more: [t] is before step t, [t + 1] after it.
        obs_dtype = torch.uint8 if agent.pixels else torch.float32
        action_dtype = torch.float32 if agent.box else torch.int64
        obs, followed = torch.zeros((2, args.num_steps, *envs.obs.shape), dtype=obs_dtype, device=device)
        actions = torch.zeros((args.num_steps, *envs.actions.shape), dtype=action_dtype, device=device)
        first = torch.zeros((args.num_steps, args.num_envs), dtype=torch.bool, device=device)
        log_probs, values = torch.zeros((2, *first.shape), device=device)
        states = agent.initial_state(args.num_envs).repeat(args.num_steps + 1, 1, 1)  # [..., state_dim]
        running_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)  # discounted
        next_first = np.ones(args.num_envs, bool)  # which environments begin an episode
        envs.reset()
        # While one half of the environments steps, the policy acts for the other, as in Sample Factory (Petrenko et al.
        # 2020). On 2 cores whole training is 1.13 times as fast on Breakout.
        halves = [slice(0, None, 2), slice(1, None, 2)][: args.num_envs]

        while run.global_step < run.budget:
            optimizer.param_groups[0]["lr"] = args.learning_rate * annealing(args, run.global_step)

            # Collect. The policy and the observation statistics stay as they are in the meantime.
            rollout_start = time.perf_counter()
            states[0] = states[-1]
            rewards, terminated, done = np.zeros((3, args.num_steps, args.num_envs), np.float32)
            for step, rows in product(range(args.num_steps + 1), halves):
                now, before, after = ((t, rows) for t in (step, step - 1, step + 1))
                if step > 0:  # what followed the half's last actions; the other half still steps
                    next_obs, rewards[before], terminated[before], truncated = envs.receive(rows)
                    next_first[rows] = done[before] = np.logical_or(terminated[before], truncated)
                    # Where an episode ended, its last observation followed; .T, so that done fits images and vectors.
                    next_obs = np.where(done[before], envs.final_obs[rows].T, next_obs.T).T
                    followed[before] = torch.as_tensor(next_obs, device=device)
                    run.count(len(next_obs), envs.episodes)
                if step < args.num_steps:
                    obs[now] = torch.as_tensor(envs.obs[rows], device=device)
                    first[now] = torch.as_tensor(next_first[rows], device=device)
                    with torch.no_grad():
                        drawn = draw(obs[now], first[now], states[now])
                        actions[now], log_probs[now], values[now], states[after] = drawn
                    envs.send(agent.to_env(actions[now]).cpu().numpy(), rows=rows)

            # Advantages. V of what followed is the next step's; at episode ends and the last step it is computed here.
            update_start = time.perf_counter()
            torch.set_num_threads(update_threads)
            rewards, terminated, done = (torch.as_tensor(x, device=device) for x in (rewards, terminated, done))
            scaled = (rewards / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10) if args.norm_reward else rewards
            with torch.no_grad():
                next_values, ends = values.roll(-1, 0), done.bool()  # [num_steps, num_envs]
                ends[-1] = True
                outputs, _ = agent.recur(agent.encode(followed[ends])[None], states[1:][ends])
                next_values[ends] = agent.value(outputs[0])
                advantages = compute_gae(scaled, values, next_values, terminated, done, args.gamma, args.gae_lambda)
                returns = advantages + values

            # Update, by minibatches of whole environments; then let the statistics see the rollout.
            batch = [x.transpose(0, 1) for x in (obs, first, actions, log_probs, values, advantages, returns)]
            metrics = update(agent, optimizer, gradient, args, [states[0], *batch])  # [num_envs, ...]
            if args.norm_obs:
                agent.obs_norm.update(obs)
            if args.norm_reward:
                return_norm.update(discounted_returns(rewards.double(), done, running_return, args.gamma))
            torch.set_num_threads(1)

            # Log, save, evaluate.
            metrics["losses/explained_variance"] = 1 - (returns - values).var() / returns.var()
            if agent.box:
                metrics["losses/action_std"] = agent.log_std.exp().mean()
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            run.end_iteration(metrics, rollout_start, update_start)
            if args.eval_interval and run.iteration % args.eval_interval == 0 and run.global_step < run.budget:
                evaluate(run, agent, make)

        return run.finish(*evaluate(run, agent, make, run.video_folder))


# Plumbing: what carries the algorithm; the same text in every script that has it
#   gym_make                       one environment, or one line that says why not
#   worker, SubprocVecEnv          many environments, stepped by processes over shared memory
#   check_args, compile_function   one line where the sizes make no sense; --compile
#   read_checkpoint, parse_args    the command line; with --resume on top of the saved run's flags
#   Run                            one run: its directory, curves, checkpoints of whole iterations, and how it ends

SIGNALS = signal.SIGINT, signal.SIGTERM
RESET, STEP = b"r", b"s"  # commands to workers


def one_line(error):
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def gym_make(env_id, eval_episodes=0, video_folder=None, images=False, **kwargs):
    """gymnasium.make with vectors, or `images`, as observations, recorded in `video_folder`; or one line on why not."""
    sys.path += [] if "" in sys.path else [""]  # module:id is found in the working directory too
    kwargs |= {"render_mode": "rgb_array"} if video_folder else {}
    in_worker = multiprocessing.parent_process() is not None
    try:
        env = gym.make(env_id, disable_env_checker=True, **kwargs)
        if eval_episodes and env.spec.max_episode_steps is None:
            env = gym.wrappers.TimeLimit(env, 27000)  # so that every episode ends
        if video_folder:
            env.reset()
            env.render()  # if it can't, it says so here
            with warnings.catch_warnings(action="ignore"):  # that the folder exists
                env = gym.wrappers.RecordVideo(env, video_folder, lambda i: i < eval_episodes, disable_logger=True)
        space = env.observation_space
        if space.dtype == np.uint8 and sorted((0, 0, *space.shape))[-2] >= 36:  # two sides are long: an image
            if not images:
                raise gym.error.Error(f"{space} are images, which ppo_lstm_atari.py takes")
        elif not (isinstance(space, gym.spaces.Box) and len(space.shape) == 1):
            with suppress(NotImplementedError):  # said below
                env = gym.wrappers.FlattenObservation(env)
        if 0 in (env.observation_space.shape or [0]):
            raise gym.error.Error(f"{space} can't be made a vector; a wrapper of your own may help")
        if env.observation_space is not space and not in_worker:
            print(f"{env_id}: observations {space} are flattened to {env.observation_space.shape}")
    except Exception as error:
        hint = "; put what a notebook registers into a module, for its processes: module:id" if in_worker else ""
        if video_folder or any(x in str(error) for x in ("GL", "glGet", "eglQuery", "OSMesa")):
            hint = "; frames need render_mode rgb_array, MuJoCo's MUJOCO_GL=egl (libegl1) or osmesa (libosmesa6)"
        elif not isinstance(error, (gym.error.Error, ImportError, OSError, NotImplementedError)):
            traceback.print_exc()  # its constructor's own fault
        raise SystemExit(f"--env-id {env_id}: {one_line(error)}{hint}") from None
    return env


def put(array, i, value, name):
    """array[i] = value, which an environment returned; one line if its shape or kind is wrong. -> value"""
    value = np.asarray(value)
    if value.dtype.kind in "biuf" and (value.shape == array.shape[1:] or (array.ndim == 1 and value.size == 1)):
        array[i] = value.reshape(array.shape[1:])
        if array.dtype.kind == "f" or (array[i] == value).all():
            return value
    raise SystemExit(f"returned {name} that is no {array.dtype} of shape {array[i].shape}: {str(value.tolist())[:200]}")


def worker(connection, make_env, seeds, first, memory):
    """Steps environments `first`, `first` + 1, ... at each command. Answers: the episodes that ended, or a fault."""
    for signum in SIGNALS:  # ignored, as the parent ends a run; not by SIG_IGN, which child processes would inherit
        signal.signal(signum, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    # End with the parent, even in the midst of a step: its sentinel is ready as soon as it is gone, however it went.
    threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()
    rows, generators = np.frombuffer(*memory)[first:], [np.random.default_rng(seed) for seed in seeds]
    view, returns, steps = SimpleNamespace(**{name: rows[name] for name in rows.dtype.names}), {}, {}
    env_seeds, envs = [int(generator.integers(2**31)) for generator in generators], []
    try:
        for i, generator in enumerate(generators):
            random.seed(env_seeds[i])  # for constructors that draw from the global generators
            np.random.seed(env_seeds[i])
            envs.append(make_env())
            envs[i].action_space.seed(int(generator.integers(2**31)))
        games = {i: x.get_wrapper_attr("ended_games") for i, x in enumerate(envs) if x.has_wrapper_attr("ended_games")}
        while command := os.read(connection.fileno(), 1):
            episodes = []
            for i, env in enumerate(envs):
                begin = command == RESET
                if command in (STEP, b"%d" % ((first + i) % 2)) and view.active[i]:
                    obs, reward, terminated, truncated, _ = env.step(view.actions[i].copy())
                    view.terminated[i], view.truncated[i], begin = terminated, truncated, terminated or truncated
                    returns[i], steps[i] = returns[i] + put(view.rewards, i, reward, "a reward").item(), steps[i] + 1
                    put(view.final_obs if begin else view.obs, i, obs, "an observation")
                    episodes += [(first + i, returns[i], steps[i])] if begin and i not in games else []
                if begin:
                    draw = int(generators[i].integers(2**32))
                    random.seed(draw)  # for its resets likewise
                    np.random.seed(draw)
                    put(view.obs, i, env.reset(seed=env_seeds[i])[0], "an observation")
                    env_seeds[i], returns[i], steps[i] = None, 0.0, 0
                episodes += [(first + i, *games[i].pop(0)) for _ in games.get(i, [])[:] if command != RESET]
            connection.send(episodes)
    except BaseException as error:
        message = f"environment {first + i} {error if isinstance(error, SystemExit) else 'raised ' + one_line(error)}"
        with suppress(OSError):  # of a parent that is gone
            connection.send(message if isinstance(error, SystemExit) else traceback.format_exc() + message)
    for env in envs:
        with suppress(Exception):
            env.close()


class SubprocVecEnv(AbstractContextManager):
    """`num_envs` environments in `num_workers` processes (0: one a core). reset() -> obs, step(actions) -> obs,
    rewards, terminated, truncated: views of memory that the next step overwrites. obs [num_envs, ...] has the space's
    dtype or float32. When an episode ends, the next begins in that step: `obs` is its first observation, `final_obs`
    the ended one's last; `episodes` lists (environment, return, length). One that is not `active` rests. `seed`, an int
    or several, fixes all but what `step` draws from a global generator, whatever `num_workers`. `make_env` is
    picklable. SystemExit says what failed. `step` is `send` and `receive`; rows [0::2] and [1::2] may take turns."""

    def __init__(self, make_env, num_envs, num_workers, seed, spaces=None):
        if spaces is None:
            env = make_env()
            spaces = env.observation_space, env.action_space
            with suppress(Exception):
                env.close()
        self.num_envs, self.episodes, self.workers = num_envs, [], []  # of each: its environments, connection, process
        self.single_observation_space, self.single_action_space = space, action_space = spaces
        obs_type = np.float32 if space.dtype.kind == "f" else space.dtype, space.shape
        fields = [("obs", *obs_type), ("final_obs", *obs_type), ("actions", action_space.dtype, action_space.shape)]
        fields += [("rewards", np.float32), ("active", bool), ("terminated", bool), ("truncated", bool)]
        row = np.dtype(fields, align=True)  # of one environment
        context = multiprocessing.get_context("forkserver")  # forks workers from a process with imports, but no threads
        context.set_forkserver_preload(["gymnasium", "tyro", "torch.utils.tensorboard", *{"mujoco"} & {*sys.modules}])
        memory = context.RawArray("b", num_envs * row.itemsize), row
        vars(self).update({name: np.frombuffer(*memory)[name] for name in row.names})  # self.obs, ..., self.truncated
        resource_tracker.ensure_running()  # else forkserver starts it, which unblocks the signals blocked next
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a Ctrl-C shall not end fork server and workers
        forkserver.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        atexit.register(self.close)  # else multiprocessing waits for the workers at exit, for ever
        seeds = np.array(np.random.SeedSequence(seed).spawn(num_envs))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        with suppress(OSError, ValueError):  # the cgroup's quota; there may be no cgroup, or "max", no quota
            quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
            cores = max(1, min(cores, quota // period))
        for part in np.array_split(np.arange(num_envs), min(num_envs, num_workers or cores)):
            connection, worker_end = context.Pipe()
            process = context.Process(target=worker, args=(worker_end, make_env, seeds[part], int(part[0]), memory))
            process.start()
            worker_end.close()
            self.workers.append((part, connection, process))

    def reset(self):
        """Starts a new episode everywhere; the random streams go on, the episodes cut short are not reported."""
        self.send(self.actions, command=RESET)
        return self.receive()[0]

    def step(self, actions, active=True):
        self.send(actions, active)
        return self.receive()

    def send(self, actions, active=True, rows=slice(None), command=STEP):
        self.actions[rows], self.active[rows], space = actions, active, self.single_action_space
        if isinstance(space, gym.spaces.Box):  # in its own dtype: 0.1 is more in float32 than in float64
            np.clip(self.actions[rows], space.low, space.high, out=self.actions[rows])
        self.rewards[rows] = self.terminated[rows] = self.truncated[rows] = 0  # of those that rest
        for _, connection, _ in self.workers:
            with suppress(OSError):  # of a worker that died: noticed when it shall answer
                os.write(connection.fileno(), command if rows.start is None else b"%d" % rows.start)  # a half

    def receive(self, rows=slice(None)):
        self.episodes, ids = [], np.arange(self.num_envs)[rows]
        for part, connection, process in self.workers:
            try:
                answer = connection.recv()  # waits without end
            except (EOFError, OSError):
                process.join(1)
                answer = f"the process of environments {part[0]} to {part[-1]} died with exit code {process.exitcode}"
            if isinstance(answer, str):
                raise SystemExit(answer)
            self.episodes += answer
        for name, array in ("an observation", self.obs), ("an observation", self.final_obs), ("a reward", self.rewards):
            if array.dtype.kind == "f" and (wrong := np.argwhere(~np.isfinite(array[rows]))).size:
                raise SystemExit(f"environment {ids[wrong[0, 0]]} returned {name} that is not finite in {array.dtype}")
        return self.obs[rows], self.rewards[rows], self.terminated[rows], self.truncated[rows]

    def close(self, *_):
        """The workers close their environments and end; those that still live after two seconds are killed."""
        for _, connection, _ in self.workers:
            connection.close()  # a worker that waits reads the end
        end = time.monotonic() + 2
        for _, _, process in self.workers:
            process.join(max(0, end - time.monotonic()))
            process.kill()
            process.join(1)
        atexit.unregister(self.close)

    __exit__ = close


def check_args(args):
    """Ends with one line where a value makes no sense. Ints, rates, coefficients, norms, KLs, gammas, lambdas: >= 0."""
    for name, value in vars(args).items():
        low = 1 if name in ("num_envs", "num_steps", "num_minibatches", "update_epochs") else 0
        high = 2**64 - 1 if name == "seed" else 1 if name.endswith(("gamma", "lambda")) else np.inf
        limited = isinstance(value, int) or name.endswith(("_rate", "_coef", "_norm", "_kl", "gamma", "lambda"))
        if limited and value is not None and not low <= value <= high:
            raise SystemExit(f"--{name.replace('_', '-')} {value}: must be from {low} to {high}")
    size = args.num_envs * args.num_steps
    batch = f"a batch of {size} steps (--num-envs {args.num_envs} x --num-steps {args.num_steps})"
    if size % args.num_minibatches or size // args.num_minibatches < 2:
        raise SystemExit(f"--num-minibatches {args.num_minibatches}: must cut {batch} into equal parts of 2 or more")
    if args.total_timesteps < size and (args.total_timesteps or args.resume is None):
        raise SystemExit(f"--total-timesteps {args.total_timesteps}: less than {batch}; 0 needs --resume")
    if args.eval_episodes == 0 and (args.capture_video or args.total_timesteps == 0):
        raise SystemExit("--eval-episodes 0: --capture-video and --total-timesteps 0 need an evaluation")
    if args.compile and args.total_timesteps and shutil.which(os.environ.get("CXX", "g++")) is None:
        raise SystemExit("--compile needs a C++ compiler: Debian's g++, or what the variable CXX names")


def compile_function(function, device):
    """torch.compile; on a GPU with CUDA graphs, whose outputs are cloned, as the next call overwrites them."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helper processes would outlive the run
    torch._dynamo.config.trace_autograd_ops = device.type == "cpu"  # loss, backward() and clipping in one graph
    compiled = torch.compile(function, mode=None if device.type == "cpu" else "reduce-overhead")

    def call(*inputs):
        torch.compiler.cudagraph_mark_step_begin()
        return torch.utils._pytree.tree_map(torch.clone, compiled(*inputs))

    return compiled if device.type == "cpu" else call


def read_checkpoint(path):
    """(checkpoint, its directory) of a run's directory or its checkpoint.pt."""
    file = Path(path, "checkpoint.pt") if os.path.isdir(path) else Path(path)
    try:
        checkpoint = torch.load(file, weights_only=True, map_location="cpu")
        return checkpoint | {"args": checkpoint["args"], "model": checkpoint["model"]}, file.parent  # or KeyError
    except Exception:
        raise SystemExit(f"--resume {file}: {'broken' if os.path.exists(file) else 'missing; start anew'}") from None


def parse_args(default):
    """The command line as Args. A flag that is not given is the saved run's with --resume PATH, else the default's."""
    args = tyro.cli(type(default), default=default, args=[x for x in sys.argv[1:] if x not in ("-h", "--help")])
    if args.resume is not None:
        saved = {k: v for k, v in read_checkpoint(args.resume)[0]["args"].items() if hasattr(args, k)}
        default = replace(default, **saved | {"run_dir": None})
    return tyro.cli(type(default), default=default)


class Run(AbstractContextManager):
    """One run and its directory. Unless killed (SIGKILL, a closed terminal), its last whole iteration is saved."""

    progress = {"iteration": 0, "global_step": 0, "starts": [], "recent_returns": [], "training_seconds": 0.0}
    progress |= {"wall_seconds": 0.0, "wandb_id": None}  # first values of what checkpoints keep; each is an attribute

    def __init__(self, args):
        self.args, self.writer, self.snapshot, self.signum, self.signal_time = args, None, None, None, 0.0
        self.checkpoint, saved_in = read_checkpoint(args.resume) if args.resume is not None else ({}, None)
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time():.6f}".replace("/", "-").replace(":", "-")
        self.directory = Path(args.run_dir or saved_in or f"runs/{name}")
        if os.path.exists(self.directory / "checkpoint.pt") and not (saved_in and self.directory.samefile(saved_in)):
            raise SystemExit(f"--run-dir {self.directory} holds a run: name another, or go on with it by --resume")
        vars(self).update({name: self.checkpoint.get(name, value) for name, value in self.progress.items()})
        self.started = time.time() - self.wall_seconds
        was = self.old_args = vars(type(args)()) | self.checkpoint.get("args", vars(args))  # copies may have new flags
        changed = {k: [was[k], v] for k, v in vars(args).items() if was[k] != v and k not in ("resume", "run_dir")}
        self.changed = "; ".join(f"--{k.replace('_', '-')} was {x}, is {y}" for k, (x, y) in changed.items())
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--verify", "--quiet", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        self.starts = [*self.starts, {"global_step": self.global_step, "changed": changed, "commit": commit or None}]
        size = args.num_envs * args.num_steps or 1  # of a batch; num_steps 0 (adaptive KL): whole episodes
        self.budget = self.global_step + max(0, args.total_timesteps - self.global_step) // size * size
        self.device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.deterministic = args.torch_deterministic
        threading.excepthook = lambda x: "AsyncWriter" in str(x.thread) or threading.__excepthook__(x)  # flush raises
        self.threads, main = torch.get_num_threads(), threading.current_thread() is threading.main_thread()
        self.handlers = {signum: signal.signal(signum, self._on_signal) for signum in SIGNALS if main}

    def _on_signal(self, signum, frame):
        if time.monotonic() > self.signal_time + 0.5:  # timeout(1) signals twice, process and group
            self.signum, self.signal_time = signum, time.monotonic()
            if any("_dynamo" in x.f_code.co_filename for x, _ in traceback.walk_stack(frame)):
                with suppress(SystemExit):  # in its C++ code an exception may abort the process
                    self.__exit__(None, SystemExit(), None)
                os._exit(128 + signum)
            raise SystemExit(128 + signum)

    def begin(self, envs, **parts):
        """Opens the run's directory. With --resume loads the checkpoint into `parts`: name=module or optimizer."""
        args, saved, self.parts = self.args, self.checkpoint, parts
        self.spaces = envs.single_observation_space, envs.single_action_space
        self.generators = [torch.default_generator, *torch.cuda.default_generators[:1]]
        if saved:
            try:
                for name in parts if args.total_timesteps else ["model"]:
                    bounds = {k: v for k, v in parts[name].state_dict().items() if k in ("low", "high")}  # of this env
                    parts[name].load_state_dict(saved[name] | bounds)
                if args.total_timesteps and args.seed == self.old_args["seed"]:  # another seed draws anew
                    for generator, state in zip(self.generators, saved["rng"]):
                        generator.set_state(state)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise SystemExit(f"--resume {args.resume} does not fit; {self.changed} ({one_line(error)})") from None
        self.video_folder = str(self.directory / "videos") if args.capture_video else None
        if args.capture_video:  # better now than after the training
            make_env(args.env_id, 1, self.video_folder).close()
        self.directory.mkdir(parents=True, exist_ok=True)
        if args.total_timesteps == 0:
            return
        if args.track:
            import wandb  # pip install wandb

            run = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": self.directory.name}
            run |= {"id": None if args.run_dir else self.wandb_id, "config": vars(args)}
            self.wandb_id = wandb.init(**run, resume="allow", reinit="finish_previous", sync_tensorboard=True).id
        self._take_snapshot()
        self._write("checkpoint.pt", self.snapshot)
        (self.directory / "result.json").unlink(missing_ok=True)  # no longer the end of the run
        self._write("args.json", vars(args))
        self.writer = SummaryWriter(self.directory, purge_step=self.global_step + 1)  # drops what no checkpoint holds
        if self.changed:
            rates = [x.learning_rate * annealing(x, self.global_step) for x in (SimpleNamespace(**self.old_args), args)]
            print(self.changed, "the annealed --learning-rate was {:.3g}, is {:.3g}".format(*rates), sep="; ")
        print(f"{self.directory}: up to step {self.budget} of {args.total_timesteps}, on {self.device}", flush=True)

    def _write(self, name, state):
        buffer, file = io.BytesIO(), self.directory / name
        buffer.write(json.dumps(state, indent=2).encode()) if name.endswith(".json") else torch.save(state, buffer)
        file.with_suffix(".tmp").write_bytes(buffer.getbuffer())
        os.replace(file.with_suffix(".tmp"), file)  # a kill in the midst of writing leaves the old file whole

    def _take_snapshot(self):
        """Copies the state at the end of an iteration: what is saved, even when the next one is cut short."""
        self.wall_seconds = time.time() - self.started
        snapshot = {name: copy.deepcopy(part.state_dict()) for name, part in self.parts.items()}
        snapshot |= {name: getattr(self, name) for name in self.progress}
        snapshot |= {"shapes": [[*space.shape, int(getattr(space, "n", 0))] for space in self.spaces]}
        self.snapshot = snapshot | {"args": vars(self.args), "rng": [x.get_state() for x in self.generators]}

    def log(self, scalars):
        for name, value in scalars.items() if self.writer else ():
            self.writer.add_scalar(name, value, self.global_step)

    def show(self, text, passing=False):
        """A line on the console. A passing one is for a terminal alone, until the next one takes its place."""
        terminal = sys.stdout.isatty()
        if terminal or not passing:
            print(f"\r\033[K{text}" if terminal else text, end="" if passing else "\n", flush=True)

    def count(self, num_steps, episodes):
        """Counts environment steps, and logs the episodes that ended in them."""
        if self.signum is not None:  # raised in a destructor, where Python drops exceptions
            raise SystemExit(128 + self.signum)
        self.global_step += num_steps
        for _, episodic_return, length in episodes:
            self.log({"charts/episodic_return": episodic_return, "charts/episodic_length": length})
            self.recent_returns = [*self.recent_returns[-99:], episodic_return]

    def end_iteration(self, metrics, rollout_start, update_start):
        """Logs, ends a run that diverged (parameters or a *_loss not finite), copies the state, saves it where due."""
        self.log(metrics)  # on a GPU this waits for the end of the update
        rollout, update = update_start - rollout_start, time.perf_counter() - update_start
        args, speed = self.args, (self.global_step - self.snapshot["global_step"]) / (rollout + update)
        self.log({"charts/SPS": speed, "time/rollout": rollout, "time/update": update})
        state = [x for part in self.parts.values() if isinstance(part, nn.Module) for x in part.parameters()]
        state += [torch.as_tensor(value) for name, value in metrics.items() if name.endswith("_loss")]
        if not all(tensor.isfinite().all() for tensor in state):
            self.finish([], [], "diverged")
            raise SystemExit(f"diverged at step {self.global_step}: not finite any more; try a lower --learning-rate")
        self.writer.flush()  # before a checkpoint, or a resume finds a gap; raises what its thread met: a full disk
        self.iteration, self.training_seconds = self.iteration + 1, self.training_seconds + rollout + update
        self._take_snapshot()
        last = self.global_step >= self.budget
        if last or (args.checkpoint_interval and self.iteration % args.checkpoint_interval == 0):
            self._write("checkpoint.pt", self.snapshot)
        left = max(0, self.budget - self.global_step) * self.training_seconds / self.global_step
        mean = f"{np.mean(self.recent_returns):.1f}" if self.recent_returns else "-"
        bar = f"[{'#' * (8 * self.global_step // self.budget):.<8.8}] " if sys.stdout.isatty() else ""
        line = f"{bar}step {self.global_step}/{args.total_timesteps}  {speed:.0f} steps/s  return {mean}"
        self.show(f"{line}  {timedelta(seconds=int(left))} left", passing=sys.stdout.isatty() and not last)

    def finish(self, returns, lengths, status="finished"):
        """Writes and returns what it all came to: result.json, or, of an evaluation alone, eval.json."""
        args, name, mean = self.args, "eval.json", lambda values: float(np.mean(values)) if values else None
        result = {"returns": returns, "lengths": lengths, "mean": mean(returns), "global_step": self.global_step}
        if args.total_timesteps:
            self.writer.close()
            name, modules = "result.json", ("torch", "numpy", "gymnasium", "mujoco", "ale_py", "cv2")
            versions = {x: sys.modules[x].__version__ for x in modules if x in sys.modules}
            device = torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu"
            result = {"status": status, "env_id": args.env_id, "script": Path(__file__).stem, "seed": args.seed}
            result |= {"args": vars(args), "run_dir": str(self.directory), "starts": self.starts, "device": device}
            result |= {"global_step": self.global_step, "iterations": self.iteration, "eval_returns": returns}
            result |= {"mean_return_last_100": mean(self.recent_returns), "wall_seconds": time.time() - self.started}
            result |= {"steps_per_second": self.snapshot["global_step"] / max(self.training_seconds, 1e-9)}
            result |= {"versions": versions | {"python": sys.version.split()[0]}}
        self._write(name, result)
        self.show(f"{status}: {self.directory / name}")
        return result

    def __exit__(self, _, error, __):
        for signum in self.handlers:
            signal.signal(signum, signal.SIG_IGN)  # what was reached is saved now; a signal must not cut that short
        where = ""
        if self.snapshot is not None:
            try:
                self._write("checkpoint.pt", self.snapshot)
            except OSError as full:
                error = error or full
            if os.path.exists(self.directory / "checkpoint.pt"):
                where = f"; go on with: {shlex.join(['python', sys.argv[0], '--resume', str(self.directory)])}"
        torch.set_num_threads(self.threads)
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)
        if error is not None and self.signum is not None:
            print(f"\nstopped by {signal.Signals(self.signum).name}{where}", file=sys.stderr)
            raise SystemExit(128 + self.signum) from None
        if isinstance(error, (ImportError, OSError)) or (where and isinstance(error, SystemExit)):
            raise SystemExit(f"{error if isinstance(error, SystemExit) else one_line(error)}{where}") from None


if __name__ == "__main__":
    train(parse_args(Args()))
