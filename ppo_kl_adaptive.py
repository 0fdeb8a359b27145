# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "gymnasium==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco==3.1.6",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""PPO with a KL penalty that adapts itself and stops early, and the other surrogate objectives of the PPO paper.

Nothing clips the ratio. The loss holds the new policy near the old one, by a coefficient beta that follows the KL that
each update ends with, so that an iteration moves the policy by about kl_targ:

    KL   = mean KL(pi_old(.|s) || pi(.|s))                                        closed form: both are Gaussians
    L    = -mean(ratio * A) + beta * KL + eta * max(0, KL - 2 * kl_targ)^2
    at most 20 steps on the whole batch, none after KL > 4 * kl_targ; then
    KL > 2 * kl_targ:  beta *= 1.5 (up to 35);      where that is over 30, learning rate /= 1.5 (while over a tenth)
    KL < kl_targ / 2:  beta /= 1.5 (down to 1/35);  where that is under 1/30, learning rate *= 1.5 (while below tenfold)

Source: "AI Gym Workout" (Coady 2017), with the settings of its author's code (the post prints the hinge with KL and
kl_targ exchanged). --preset post, the default, is that post, and differs from the base by more than the idea: batches
of whole episodes, networks sized from the task, a variance that learns faster, the time as an observation, a whole-run
scaler, rewards times 1 - gamma, and a value function fitted after the policy to Monte-Carlo returns. A time limit is an
end, as in the post (--bootstrap-time-limit: not); unlike there, environments and control costs get clipped actions.

--objective clip | none | kl-fixed | kl-adaptive takes another surrogate. With --preset paper each row of Table 1 of
Schulman et al. 2017 (arXiv:1707.06347) is one command: the base, but with a constant learning rate and no limit on the
gradient's norm or the value's change. There beta adapts by the paper's own rule, without hinge and early stop:

    KL > 1.5 * kl_targ:  beta *= 2        KL < kl_targ / 1.5:  beta /= 2

Result:  episodes until the mean return of 5 reaches the post's threshold, three seeds (the post): Reacher-v5 10317,
         10523, 10762 (14100), Hopper-v5 1299, 1618, 2778 (2250), HalfCheetah-v5 2476, 2101, not in 3000 (1966),
         Swimmer-v5 163, 1642, 1298 (137).

Run:     python ppo_kl_adaptive.py --env-id HalfCheetah-v5
         python ppo_kl_adaptive.py --env-id HalfCheetah-v5 --preset paper --objective kl-fixed --beta 3
Resume:  python ppo_kl_adaptive.py --resume runs/HalfCheetah-v5__ppo_kl_adaptive__1__1700000000
"""

import argparse
import copy
import fcntl
import io
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import platform
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import deque
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    exp_name: str = Path(__file__).stem
    """name of the experiment, a part of the run directory's name"""
    seed: int = 1
    """seed of the networks, the sampling and the environments"""
    torch_deterministic: bool = True
    """deterministic cuDNN algorithms"""
    cuda: bool = True
    """use a GPU where there is one (networks as small as these may be faster with --no-cuda)"""
    track: bool = False
    """send the curves to Weights & Biases too (pip install wandb)"""
    wandb_project_name: str = "ppo"
    """the project there"""
    wandb_entity: str | None = None
    """the entity (team) there"""
    capture_video: bool = False
    """record the last evaluation's episodes to RUN_DIR/videos (for MuJoCo set MUJOCO_GL=egl or osmesa)"""
    num_workers: int = 0
    """processes that step the environments; 0: one for each core"""
    compile: bool = False
    """compile the update, and the policy step where that helps (needs a C++ compiler; a minute at the start)"""
    checkpoint_interval: int = 20
    """iterations between checkpoints; 0: only at the end and when stopped"""
    resume: str | None = None
    """a run directory, checkpoint.pt or policy.pt to go on from; with --total-timesteps 0 it is only evaluated"""
    run_dir: str | None = None
    """directory of the run; runs/{env_id}__{exp_name}__{seed}__{unix_time} if not given"""
    eval_episodes: int = 10
    """greedy episodes in an evaluation; 0: no evaluation"""
    eval_interval: int = 0
    """iterations between evaluations; 0: only at the end"""

    env_id: str = "HalfCheetah-v5"
    """id of a Gymnasium environment, or module:id"""
    total_timesteps: int = 3_000_000
    """environment steps in all, summed over environments"""
    learning_rate: float = 9e-4
    """Adam's learning rate; the post divides it by the square root of the width of the network's second layer"""
    num_envs: int = 20
    """environments stepped side by side"""
    num_steps: int = 0
    """steps of each environment in an iteration; 0: whole episodes instead"""
    anneal_lr: bool = False
    """lower the learning rate linearly to 0 over --total-timesteps"""
    gamma: float = 0.995
    """discount factor"""
    gae_lambda: float = 0.98
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 1
    """minibatches an epoch"""
    update_epochs: int = 20
    """passes over the batch in an iteration"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss (paper; the post fits the value function by itself)"""
    max_grad_norm: float = 0.0
    """largest norm of the gradient, over all parameters; 0: no limit, as in the post and the paper"""
    norm_obs: bool = True
    """normalise observations by running statistics; paper: and clip them at 10"""
    norm_reward: bool = False
    """divide rewards by the running standard deviation of the discounted return and clip them at 10"""

    preset: str = "post"
    """post or paper: whose method it is, and whose values the flags have that are not given"""
    objective: str = "kl-adaptive"
    """surrogate objective of the policy: clip, none (the plain ratio), kl-fixed or kl-adaptive"""
    beta: float = 1.0
    """weight of the KL penalty, with kl-adaptive at the start"""
    kl_targ: float = 0.003
    """the KL that an iteration shall move the policy by, in nats (paper: 0.003, 0.01, 0.03)"""
    eta: float = 50.0
    """weight of the squared hinge on KL - 2 kl_targ, where there is a penalty (post)"""
    kl_stop: float | None = 4.0
    """end the update at a minibatch whose KL exceeds this many kl_targ, whatever the objective (post); None: never"""
    value_learning_rate: float | None = 1e-2
    """the value function's learning rate, divided in the same way; None: the policy's"""
    episodes_per_batch: int | None = None
    """with --num-steps 0: whole episodes in an iteration. None: 50 for Reacher, 5 for HalfCheetah, Swimmer and
    HumanoidStandup, else 20 (post)"""
    bootstrap_time_limit: bool = False
    """an episode that a time limit cuts goes on at the value of its last observation; the post takes it for an end"""

    # What --preset puts in place of the defaults above.
    presets = {
        "post": {},
        "paper": {
            "preset": "paper",
            "total_timesteps": 1_000_000,
            "learning_rate": 3e-4,
            "num_envs": 8,
            "num_steps": 256,
            "gamma": 0.99,
            "gae_lambda": 0.95,
            "num_minibatches": 32,
            "update_epochs": 10,
            "norm_reward": True,
            "kl_targ": 0.01,
            "eta": 0.0,
            "kl_stop": None,
            "value_learning_rate": None,
            "bootstrap_time_limit": True,
        },
    }


OBJECTIVES = ("clip", "none", "kl-fixed", "kl-adaptive")
EPISODES_PER_BATCH = {"Reacher": 50, "HalfCheetah": 5, "Swimmer": 5, "HumanoidStandup": 5}  # else 20


class TimeFeature(gym.ObservationWrapper):
    """Appends the time to a flat observation: 0 at first, 0.001 more after each step (post)."""

    def __init__(self, env):
        super().__init__(env)
        low, high = env.observation_space.low, env.observation_space.high
        self.observation_space = gym.spaces.Box(np.append(low, 0), np.append(high, np.inf), dtype=np.float64)

    def reset(self, **kwargs):
        self.steps = -1
        return super().reset(**kwargs)

    def observation(self, observation):
        self.steps += 1
        return np.append(observation, 0.001 * self.steps)


def make_env(env_id, eval_episodes=0, video_folder=None, time_feature=False):
    """One environment; exits with one line if this script can't drive it."""
    env = gym_make(env_id, eval_episodes, video_folder)
    for name, space, kinds in (("observation", env.observation_space, "biuf"), ("action", env.action_space, "f")):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.dtype.kind not in kinds:
            needed = "this script needs flat Boxes, of floats for actions"
            raise SystemExit(f"--env-id {env_id}: its {name} space is {space}; {needed}")
    return TimeFeature(env) if time_feature else env


class RunningNorm(nn.Module):
    """Mean and variance of everything seen, one set for all environments; normalises with them and clips at 10.

    Only `update` changes them: by Chan et al.'s parallel formula, the same as one pass over all batches.
    """

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
        """[..., *shape] -> float32 [..., *shape] within [-10, 10]."""
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-10, 10).float()


class WholeRunScaler(RunningNorm):
    """The post's scaling, (x - mean) / (standard deviation + 0.1) / 3 without a limit; the time stays as it is."""

    def forward(self, x):
        scaled = ((x - self.mean) / (self.var.sqrt() + 0.1) / 3).float()
        return torch.cat([scaled[..., :-1], x[..., -1:]], -1)


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(input_dim, output_dim, output_std):
    return nn.Sequential(
        layer_init(nn.Linear(input_dim, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, output_dim), output_std),
    )


def sized_mlp(input_dim, last_size, output_dim):
    """The post's network: 10 x input_dim, the geometric mean, last_size tanh units; weights from N(0, 1 / inputs)."""
    sizes = [input_dim, 10 * input_dim, int((10 * input_dim * last_size) ** 0.5), last_size, output_dim]
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
        nn.init.normal_(layers[-2].weight, std=inputs**-0.5)
        nn.init.zeros_(layers[-2].bias)
    return nn.Sequential(*layers[:-1])


class Agent(nn.Module):
    """A Gaussian policy and a value function, with the observation statistics they were trained with.

    Observations are normalised by `obs_norm` before they reach the networks: `act` does it, the others expect it done.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        if args.preset == "post":
            last_size = 10 * act_dim
            self.obs_norm = WholeRunScaler(obs_dim) if args.norm_obs else nn.Identity()
            self.actor = sized_mlp(obs_dim, last_size, act_dim)
            self.critic = sized_mlp(obs_dim, 5, 1)
            # The larger a network, the more a step of every weight moves its output (post).
            self.lr_scales = [network[2].out_features ** -0.5 for network in (self.actor, self.critic)]
            # The logarithm of the variance starts at -1, and is that plus the sum of so many copies: Adam moves each of
            # them by a whole step, so together they learn as many times faster (post).
            copies, self.log_std_start, self.log_std_scale = 10 * last_size // 48, -0.5, 0.5
        else:
            self.obs_norm = RunningNorm(obs_dim) if args.norm_obs else nn.Identity()
            self.actor = mlp(obs_dim, act_dim, 0.01)
            self.critic = mlp(obs_dim, 1, 1.0)
            self.lr_scales = [1.0, 1.0]
            copies, self.log_std_start, self.log_std_scale = 1, 0.0, 1.0
        self.log_std_copies = nn.Parameter(torch.zeros(copies, act_dim))
        self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32))

    @property
    def log_std(self):
        """[act_dim]"""
        return self.log_std_start + self.log_std_scale * self.log_std_copies.sum(0)

    def get_value(self, obs):
        """[..., obs_dim] -> [...]"""
        return self.critic(obs).squeeze(-1)

    def get_mean(self, obs):
        """[..., obs_dim] -> [..., act_dim]"""
        return self.actor(obs)

    def sample(self, obs):
        mean = self.get_mean(obs)
        return mean + self.log_std.exp() * torch.randn_like(mean)

    def log_prob(self, mean, actions):
        """[..., act_dim] twice -> [...], the log-density of the actions as they were drawn, before any clipping."""
        z = (actions - mean) * (-self.log_std).exp()
        return (-0.5 * z.square() - self.log_std - 0.5 * np.log(2 * np.pi)).sum(-1)

    def entropy(self):
        return (self.log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()

    def to_env(self, actions):
        """What the environment gets: the actions clipped to the Box."""
        return actions.clamp(self.low, self.high)

    @torch.no_grad()
    def act(self, obs):
        """Greedy actions for the environment, from observations as it gives them: [..., obs_dim] -> [..., act_dim]."""
        return self.to_env(self.get_mean(self.obs_norm(obs)))


def compute_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """Generalized advantage estimation (Schulman et al. 2015, arXiv:1506.02438), all [num_steps, num_envs].

    next_values[t] is V of the state that really followed step t: the episode's last observation where it ended.
    A terminal state is worth 0. A time limit is no terminal state: it bootstraps, but no advantage flows across it.
    """
    advantages = rewards + gamma * (1 - terminated) * next_values - values  # the deltas, at first
    decay = (gamma * gae_lambda * (1 - done)).unbind()
    rows = advantages.unbind()
    for t in reversed(range(len(rows) - 1)):
        rows[t].addcmul_(decay[t], rows[t + 1])
    return advantages


def discounted_returns(rewards, done, running, gamma):
    """Each environment's discounted return so far, [num_steps, num_envs]; `running` [num_envs] goes on in place."""
    returns = rewards.clone()
    returns[0] += gamma * running
    decay = (gamma * (1 - done.type_as(rewards))).unbind()
    rows = returns.unbind()
    for t in range(1, len(rows)):
        rows[t].addcmul_(decay[t - 1], rows[t - 1])
    running.copy_(rows[-1] * (1 - done[-1]))
    return returns


def clipped_policy_loss(ratio, advantages, clip_coef):
    """-min(ratio A, clip(ratio) A): zero gradient where the ratio is out of range on the side that A pushes it to."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip_coef, 1 + clip_coef) * advantages)


def gaussian_kl(old_mean, old_log_std, mean, log_std):
    """KL(old || new) of diagonal Gaussians, means [..., act_dim] and log_stds [act_dim] -> [...]."""
    variance_ratio = (2 * (old_log_std - log_std)).exp()
    z = (mean - old_mean) * (-log_std).exp()
    return (log_std - old_log_std + 0.5 * (variance_ratio + z.square() - 1)).sum(-1)


def surrogate_loss(args, ratio, advantages, kl, beta):
    """The surrogate objective of --objective, to be minimised: ratio and advantages [minibatch], kl [] -> []."""
    if args.objective == "clip":
        return clipped_policy_loss(ratio, advantages, args.clip_coef).mean()
    loss = -(ratio * advantages).mean()
    if args.objective != "none":
        loss = loss + beta * kl + args.eta * (kl - 2 * args.kl_targ).clamp(min=0).square()
    return loss


def minibatch_gradient(agent, args, beta, old_log_std, obs, actions, log_probs, old_mean, advantages, returns):
    """Sets the gradient of one minibatch's loss; returns its KL, and to be logged log_ratio [minibatch], losses [3]."""
    mean = agent.get_mean(obs)
    log_ratio = agent.log_prob(mean, actions) - log_probs
    kl = gaussian_kl(old_mean, old_log_std, mean, agent.log_std).mean()
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = surrogate_loss(args, log_ratio.exp(), advantages, kl, beta)
    entropy = agent.entropy()
    loss = policy_loss - args.ent_coef * entropy
    value_loss = torch.zeros_like(policy_loss)
    if args.preset == "paper":  # the post fits the value function afterwards
        value_loss = 0.5 * (agent.get_value(obs) - returns).square().mean()
        loss = loss + args.vf_coef * value_loss
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return kl.detach(), log_ratio.detach(), torch.stack([policy_loss, value_loss, entropy]).detach()


def approximate_kl(log_ratio):
    """KL(pi_old || pi) from samples of pi_old: mean of (ratio - 1) - log ratio (Schulman, "Approximating KL", k3)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def update(agent, optimizer, minibatch_gradient, args, beta, batch):
    """Passes over the batch, a tuple of [batch_size, ...]: `update_epochs`, or until the KL is too large.

    Returns scalars, means over the update but for losses/kl, the KL after it.
    """
    obs, old_mean, old_log_std = batch[0], batch[3], agent.log_std.detach()
    num_minibatches = min(args.num_minibatches, len(obs) // 2)  # episodes may be short
    log_ratios, losses = [], []
    for _ in range(args.update_epochs):
        order = torch.randperm(len(obs), device=obs.device)
        shuffled = [x[order].tensor_split(num_minibatches) for x in batch]  # gathered once an epoch
        for minibatch in zip(*shuffled):
            check_signals()
            optimizer.zero_grad()
            kl, log_ratio, loss = minibatch_gradient(agent, args, beta, old_log_std, *minibatch)
            # With one minibatch an epoch this is the KL after the epoch before, and no second forward pass is needed.
            stop = args.kl_stop is not None and kl > args.kl_stop * args.kl_targ
            if stop:
                break
            optimizer.step()
            log_ratios.append(log_ratio)
            losses.append(loss)
        if stop:
            break
    with torch.no_grad():
        kl = gaussian_kl(old_mean, old_log_std, agent.get_mean(obs), agent.log_std).mean()
    log_ratio = torch.cat(log_ratios)
    clipfrac = ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean()
    metrics = [*torch.stack(losses).mean(0), -log_ratio.mean(), approximate_kl(log_ratio), clipfrac, kl]
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "kl")
    scalars = {f"losses/{name}": value for name, value in zip(names, torch.stack(metrics).tolist())}
    return scalars | {"losses/epochs": len(losses) / num_minibatches}


class Carried:
    """What an iteration hands to the next besides the networks; saved with them, as the optimizer is.

    beta, lr_multiplier: what adapts. obs [n, obs_dim], returns [n]: the last batch, on which the value is fitted again.
    """

    def __init__(self, beta, obs_dim):
        self.beta, self.lr_multiplier = beta, 1.0
        self.obs, self.returns = torch.zeros(0, obs_dim), torch.zeros(0)

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


def adapt(carried, kl, args):
    """After an update that has moved the policy by `kl`: the next one's beta and learning rate."""
    if args.preset == "paper":
        if kl > 1.5 * args.kl_targ:
            carried.beta *= 2
        elif kl < args.kl_targ / 1.5:
            carried.beta /= 2
    elif kl > 2 * args.kl_targ:
        carried.beta = min(35, 1.5 * carried.beta)
        if carried.beta > 30 and carried.lr_multiplier > 0.1:
            carried.lr_multiplier /= 1.5
    elif kl < args.kl_targ / 2:
        carried.beta = max(1 / 35, carried.beta / 1.5)
        if carried.beta < 1 / 30 and carried.lr_multiplier < 10:
            carried.lr_multiplier *= 1.5


def value_gradient(agent, args, obs, returns):
    """Sets the gradient of one minibatch's value loss, and returns the loss."""
    loss = 0.5 * (agent.get_value(obs) - returns).square().mean()
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return loss.detach()


def fit_value(agent, optimizer, value_gradient, args, carried, obs, returns):
    """The post's: 10 epochs in minibatches of 256 or more, after the policy's update; returns the mean loss.

    An epoch takes as many samples as the batch has, at random from this batch and the one before it.
    """
    both = torch.cat([obs, carried.obs.to(obs.device)]), torch.cat([returns, carried.returns.to(obs.device)])
    num_minibatches = max(len(obs) // 256, 1)
    size = len(obs) // num_minibatches
    losses = []
    for _ in range(10):
        order = torch.randperm(len(both[0]), device=obs.device)[: num_minibatches * size]
        for minibatch in zip(*(x[order].split(size) for x in both)):
            check_signals()
            optimizer.zero_grad()
            losses.append(value_gradient(agent, args, *minibatch))
            optimizer.step()  # of the value function alone: nothing else has a gradient
    carried.obs, carried.returns = obs, returns
    return torch.stack(losses).mean()


def collect(agent, sample, envs, device, num_steps=None, num_episodes=np.inf, run=None):
    """Plays `num_steps` steps of every environment, or the next `num_episodes` whole episodes, all of them new.

    -> obs, actions, rewards, terminated, done, next_obs, taken: [steps, num_envs, ...], next_obs being what really
    followed. An episode is numbered when it starts, and the first so many are taken: the first to finish would be the
    short ones. An environment that has none left rests: that is not `taken`. `run`, if given, logs them in this order.
    """
    if num_episodes < np.inf:
        envs.reset()
    playing = np.arange(len(envs.obs))  # the number of each environment's episode
    rows, finished = [], {}
    while len(rows) != num_steps and (playing < num_episodes).any():
        check_signals()
        taken = playing < num_episodes
        obs = torch.tensor(envs.obs, dtype=torch.float32, device=device)
        with torch.no_grad():
            actions = sample(agent.obs_norm(obs))
            env_actions = agent.to_env(actions).cpu().numpy()
        next_obs, rewards, terminated, truncated = envs.step(env_actions, taken)
        done = terminated | truncated
        next_obs = np.where(done[:, None], envs.final_obs, next_obs).astype(np.float32, copy=False)
        rows.append((obs, actions, rewards.copy(), np.float32(terminated), np.float32(done), next_obs, taken))
        finished.update(zip(playing[done], envs.episodes))
        playing[done] = playing.max() + 1 + np.arange(done.sum())
    if run is not None:
        run.step([finished[i] for i in sorted(finished)], sum(int(row[-1].sum()) for row in rows))
    obs, actions, *others = zip(*rows)
    return torch.stack(obs), torch.stack(actions), *(torch.as_tensor(np.stack(x), device=device) for x in others)


def evaluate(agent, args, device, video_folder=None):
    """Plays `eval_episodes` greedy episodes on fresh environments. -> returns and lengths, in the order they began.

    The first so many started count, not the first finished, which would favour short ones.
    """
    if args.eval_episodes == 0:
        return [], []
    num_envs = 1 if video_folder else min(args.num_envs, args.eval_episodes)
    make = partial(make_env, args.env_id, args.eval_episodes, video_folder, args.preset == "post")
    with SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, 2**31]) as envs:
        obs = envs.reset()
        playing, started, finished = np.arange(num_envs), num_envs, {}
        while len(finished) < args.eval_episodes:
            check_signals()
            actions = agent.act(torch.as_tensor(obs, dtype=torch.float32, device=device))
            obs, _, terminated, truncated = envs.step(actions.cpu().numpy(), playing < args.eval_episodes)
            for env, episode in zip(np.flatnonzero(terminated | truncated), envs.episodes):
                finished[playing[env]] = episode
                playing[env], started = started, started + 1
    return [list(column) for column in zip(*(finished[i] for i in range(args.eval_episodes)))]


def train(args: Args) -> dict:
    """Trains (or, with a budget of 0, only evaluates) and returns what the run's result.json (eval.json) holds."""
    post, num_episodes = args.preset == "post", np.inf
    for name, choices in (("preset", args.presets), ("objective", OBJECTIVES)):
        if getattr(args, name) not in choices:
            raise SystemExit(f"{flag(name)} {getattr(args, name)}: must be one of {', '.join(choices)}")
    check_args(args, whole_episodes=True)
    if args.kl_targ <= 0 or (args.kl_stop is not None and args.kl_stop <= 0):
        raise SystemExit(f"--kl-targ {args.kl_targ}, --kl-stop {args.kl_stop}: must be above 0 (--kl-stop None: never)")
    if args.num_steps == 0:
        num_episodes = args.episodes_per_batch
        if num_episodes is None:
            num_episodes = EPISODES_PER_BATCH.get(args.env_id.split("-")[0], 20)
        if num_episodes < 2:
            raise SystemExit(f"--episodes-per-batch {num_episodes}: must be at least 2")
    num_envs = min(args.num_envs, num_episodes) if args.total_timesteps else 1
    # A whole episode without a time limit gets that of evaluations, so that it ends.
    make = partial(make_env, args.env_id, int(args.num_steps == 0), time_feature=post)
    with Run(args) as run, SubprocVecEnv(make, num_envs, args.num_workers, run.env_seed) as envs:
        device = run.device
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        # Whole batches are updated by every core. In the rollout a second thread would spin on a worker's core.
        update_threads = torch.get_num_threads() if post else 1
        torch.set_num_threads(1)
        actor_parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
        groups = [{"params": actor_parameters}, {"params": agent.critic.parameters()}]
        value_learning_rate = args.learning_rate if args.value_learning_rate is None else args.value_learning_rate
        learning_rates = [args.learning_rate * agent.lr_scales[0], value_learning_rate * agent.lr_scales[1]]
        optimizer = torch.optim.Adam(groups, eps=1e-8 if post else 1e-5, fused=True)
        carried = Carried(args.beta, agent.critic[0].in_features)
        return_norm = RunningNorm(()).to(device)
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm, carried=carried)
        if args.total_timesteps == 0:
            return run.evaluated(*evaluate(agent, args, device, run.video_folder))
        sample, gradient, gradient_of_value = agent.sample, minibatch_gradient, value_gradient
        if args.compile:
            gradient, gradient_of_value = (compile_function(f, device) for f in (gradient, gradient_of_value))
            if device.type == "cuda":  # on a CPU a network this small samples faster as it is
                sample = compile_function(sample, device)
                # Whole episodes make batches of any size: not a CUDA graph for each.
                torch._inductor.config.triton.cudagraph_skip_dynamic_graphs = True

        if post and args.norm_obs and run.iteration == 0:  # the scaler starts from 5 episodes that are not trained on
            obs, *_, taken = collect(agent, sample, envs, device, num_episodes=5)
            agent.obs_norm.update(obs[taken])
        running_return = torch.zeros(num_envs, dtype=torch.float64, device=device)  # discounted
        envs.reset()

        while run.global_step < run.budget:
            iteration = run.iteration + 1
            if run.evaluation_due():
                run.log_evaluation(*evaluate(agent, args, device))
            left = 1 - run.global_step / run.budget if args.anneal_lr else 1
            multipliers = (carried.lr_multiplier, 1.0)
            for group, learning_rate, multiplier in zip(optimizer.param_groups, learning_rates, multipliers):
                group["lr"] = learning_rate * multiplier * left

            # Collect. The policy and the observation statistics stay as they are until the update.
            rollout_start = time.perf_counter()
            obs, actions, rewards, terminated, done, next_obs, taken = collect(
                agent, sample, envs, device, args.num_steps or None, num_episodes, run
            )

            # Advantages. One pass gives the means, log-probabilities and values of all steps that were taken.
            policy_start = time.perf_counter()
            torch.set_num_threads(update_threads)
            with torch.no_grad():
                normed_obs, actions = agent.obs_norm(obs[taken]), actions[taken]  # [batch_size, ...]
                means = agent.get_mean(normed_obs)
                log_probs = agent.log_prob(means, actions)
                values, next_values = torch.zeros((2, *taken.shape), device=device)  # [steps, num_envs], as below
                values[taken] = agent.get_value(normed_obs)
                next_values[taken] = agent.get_value(agent.obs_norm(next_obs[taken]))
                ends = terminated if args.bootstrap_time_limit else done
                scaled_rewards = rewards * (1 - args.gamma) if post and args.gamma < 0.999 else rewards
                if args.norm_reward:
                    scaled_rewards = (rewards / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10)
                gae_inputs = scaled_rewards, values, next_values, ends, done, args.gamma
                advantages = compute_gae(*gae_inputs, args.gae_lambda)
                # With lambda 1 an advantage plus its value is the Monte-Carlo return.
                returns = (compute_gae(*gae_inputs, 1.0) if post else advantages) + values
                explained_variance = 1 - (returns - values)[taken].var() / returns[taken].var()

            # Update the policy, then the value function, then let the statistics see the rollout.
            batch = normed_obs, actions, log_probs, means, advantages[taken], returns[taken]
            beta = torch.tensor(carried.beta, device=device)
            scalars = update(agent, optimizer, gradient, args, beta, batch)
            if args.objective == "kl-adaptive":
                adapt(carried, scalars["losses/kl"], args)
            value_start = time.perf_counter()
            if post:
                loss = fit_value(agent, optimizer, gradient_of_value, args, carried, batch[0], batch[-1])
                scalars["losses/value_loss"] = loss.item()
            value_end = time.perf_counter()
            if args.norm_obs:
                agent.obs_norm.update(obs[taken])
            if args.norm_reward:
                if args.num_steps == 0:
                    running_return.zero_()  # every environment has begun anew
                discounted = discounted_returns(rewards.double(), done, running_return, args.gamma)
                return_norm.update(discounted[taken])
            torch.set_num_threads(1)
            end = time.perf_counter()

            # Log and save.
            scalars["losses/explained_variance"] = explained_variance.item()
            scalars["losses/beta"] = beta.item()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars["time/policy"], scalars["time/value"] = value_start - policy_start, value_end - value_start
            run.end_iteration(iteration, scalars, policy_start - rollout_start, end - policy_start)

        return run.finish(*evaluate(agent, args, device, run.video_folder))


# Plumbing: the same text in every script


class EnvError(RuntimeError):
    """An environment or the process that steps it failed; says which one, with the environment's own traceback."""


def gym_make(env_id, eval_episodes=0, video_folder=None, preprocess=None, **kwargs):
    """gymnasium.make for HumanoidBench's ids too, in silence, with one line where it fails; reports raw full episodes.

    For an evaluation of `eval_episodes` an environment without a time limit of its own gets one of 27000 steps; that
    many episodes are recorded in `video_folder`. `preprocess` wraps what is made with `kwargs` before all this.
    """
    # MuJoCo 3.1.6 never closes the mesh files it reads: 72 for each of HumanoidBench's h1hand environments.
    hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
    hint = ""
    with redirect_stdout(io.StringIO()):
        if ":" not in env_id and env_id not in gym.registry:
            try:
                import humanoid_bench.tasks  # noqa: F401, importing it registers its ids
            except ImportError as error:
                if env_id.startswith(("h1", "g1")):
                    hint = f" HumanoidBench can't be imported ({error}): the README says how to install it."
        try:
            # render_mode=None matters: HumanoidBench's default opens a GL context for each environment.
            render_mode = "rgb_array" if video_folder else None
            env = gym.make(env_id, render_mode=render_mode, disable_env_checker=True, **kwargs)
            if video_folder and hasattr(env.unwrapped, "mujoco_renderer"):
                render = env.unwrapped.mujoco_renderer.render  # HumanoidBench passes two arguments too many for it
                env.unwrapped.mujoco_renderer.render = lambda mode, *_: render(mode)
            if preprocess is not None:
                env = preprocess(env)
        except Exception as error:
            if not isinstance(error, (gym.error.Error, ImportError, OSError)):
                traceback.print_exc()  # its constructor's own fault
            message = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise SystemExit(f"--env-id {env_id}: {message}{hint}") from None
    if eval_episodes and env.spec.max_episode_steps is None:
        env = gym.wrappers.TimeLimit(env, 27000)
    env = gym.wrappers.RecordEpisodeStatistics(env)
    if video_folder:
        with warnings.catch_warnings(action="ignore"):  # that the folder exists
            env = gym.wrappers.RecordVideo(env, video_folder, lambda i: i < eval_episodes, disable_logger=True)
    return env


def check_video(env_id):
    """Exits with one line where frames can't be rendered or encoded: better now than after the training."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            env = make_env(env_id, 1, folder)
            env.reset()
            env.close()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise SystemExit(
            f"--capture-video: {reason}. For MuJoCo set MUJOCO_GL=egl (Debian's libegl1 or a GPU's driver) or "
            "MUJOCO_GL=osmesa (Debian's libosmesa6) before starting; moviepy encodes the frames"
        ) from None


RESET, STEP, DONE, FAULT = b"r", b"s", b"d", b"f"  # what goes through the pipes


def _views(shared):
    return {name: np.frombuffer(memory, dtype).reshape(shape) for name, (memory, dtype, shape) in shared.items()}


def _worker(connection, make_env, seeds, first, shared, core):
    """Steps the environments `first`, `first + 1`, ... at each byte; answers with one, after a fault with a message."""
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)  # the parent decides when a run ends
    # End with the parent, even in the middle of a step: its sentinel is ready as soon as it is gone, however it went.
    sentinel = multiprocessing.parent_process().sentinel
    threading.Thread(target=lambda: (multiprocessing.connection.wait([sentinel]), os._exit(1)), daemon=True).start()
    if core is not None:
        os.sched_setaffinity(0, [core])
    torch.set_num_threads(1)
    view = argparse.Namespace(**_views(shared))
    envs, generators, first_seeds = [], [], {}
    ended_in_reset = {}  # episodes that ended inside a reset, as a game may in a wrapper's: the next step reports them

    def reset(i):
        draw = int(generators[i].integers(2**32))  # for environments that draw from the global generators
        random.seed(draw)
        np.random.seed(draw)
        view.obs[first + i], info = envs[i].reset(seed=first_seeds.pop(i, None))
        if "episode" in info:
            ended_in_reset[i] = info["episode"]

    def step(i):
        nonlocal doing
        at = first + i
        obs, view.rewards[at], terminated, truncated, info = envs[i].step(view.actions[at].copy())
        view.terminated[at], view.truncated[at], view.episode_lengths[at] = terminated, truncated, 0
        episode = info.get("episode") or ended_in_reset.pop(i, None)
        if episode is not None:
            view.episode_returns[at], view.episode_lengths[at] = episode["r"], episode["l"]
        if terminated or truncated:
            view.final_obs[at] = obs
            doing = "reset"
            reset(i)
        else:
            view.obs[at] = obs

    i, doing, pipe = 0, "its constructor", connection.fileno()
    try:
        for i, seed in enumerate(seeds):
            generators.append(np.random.default_rng(seed))
            first_seeds[i] = int(generators[i].integers(2**31))
            envs.append(make_env())
            envs[i].action_space.seed(int(generators[i].integers(2**31)))
        # Raw bytes, and up to 0.2 ms of asking for the next before sleeping: to wake a process takes 0.05 ms.
        poll = select.poll()
        poll.register(pipe, select.POLLIN)
        while True:
            os.write(pipe, DONE)
            for _ in range(200):
                if poll.poll(0):
                    break
                os.sched_yield()
            command = os.read(pipe, 1)
            if not command:
                break  # the parent is done with these environments
            for i in range(len(envs)):
                doing = "reset" if command == RESET else "step"
                if command == RESET:
                    reset(i)
                elif view.active[first + i]:
                    step(i)
                else:
                    for array in (view.rewards, view.terminated, view.truncated, view.episode_lengths):
                        array[first + i] = 0
    except BaseException as error:
        message = f"{traceback.format_exc()}\nenvironment {first + i} raised {type(error).__name__} in {doing}: {error}"
        with suppress(OSError):  # the pipe is broken if the parent is done with these environments
            os.write(pipe, FAULT)
            connection.send_bytes(message.encode())
    with suppress(Exception):
        for env in envs:
            env.close()


class SubprocVecEnv:
    """`num_envs` environments in `num_workers` processes (0: one for each core), each with its own slice of them.

    reset() -> obs; step(actions) -> (obs, rewards, terminated, truncated). These are views of shared memory that the
    next step overwrites: obs [num_envs, ...] in the space's dtype (float64 as float32), rewards float32 [num_envs],
    flags bool [num_envs]. An environment that ends starts anew in the same step: `obs` then holds the new episode's
    first observation, and `final_obs` [num_envs, ...] the old one's last. `episodes` lists the (return, length) of the
    episodes that ended in this step, in the order of the environments. Both are valid until the next step.
    step(actions, active) lets environments rest where `active` [num_envs] is false: no reward, no end, `obs` stays.
    `make_env` takes no argument and can be pickled. `seed`, an int or a list of ints, fixes everything that happens,
    whatever the number of workers. Raises EnvError where an environment or a worker fails.
    """

    def __init__(self, make_env, num_envs, num_workers, seed):
        env = make_env()
        self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        env.close()
        # forkserver: workers start from a process that has the imports and no threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "gymnasium", "mujoco", "tyro", "torch.utils.tensorboard"])
        space, action_space = self.single_observation_space, self.single_action_space
        obs_dtype = np.float32 if space.dtype == np.float64 else space.dtype
        arrays = {"obs": (obs_dtype, space.shape), "final_obs": (obs_dtype, space.shape)}
        arrays |= {"actions": (action_space.dtype, action_space.shape), "rewards": (np.float32, ())}
        arrays |= {"active": (bool, ()), "terminated": (bool, ()), "truncated": (bool, ())}
        arrays |= {"episode_returns": (np.float64, ()), "episode_lengths": (np.int64, ())}
        shared = {}
        for name, (dtype, shape) in arrays.items():
            size = num_envs * int(np.prod(shape)) * np.dtype(dtype).itemsize
            shared[name] = context.RawArray("b", size), np.dtype(dtype), (num_envs, *shape)
        vars(self).update(_views(shared))
        self.episodes = []
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [None] * os.cpu_count()
        self.slices = np.array_split(np.arange(num_envs), min(num_envs, num_workers or len(cores)))
        if len(self.slices) != len(cores):
            cores = [None] * len(self.slices)
        seeds = np.random.SeedSequence(seed).spawn(num_envs)
        self.connections, self.processes = [], []
        # At exit too, if never called: before multiprocessing waits for daemons that its SIGTERM does not end.
        self.close = multiprocessing.util.Finalize(self, _close, (self.connections, self.processes), exitpriority=0)
        threads = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"  # for the workers only, which inherit it
        try:
            # A Ctrl-C reaches every process, but only the parent decides when a run ends: the fork server starts with
            # the signals blocked, and so do its children. (Starting the tracker would unblock them here.)
            multiprocessing.resource_tracker.ensure_running()
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            try:
                multiprocessing.forkserver.ensure_running()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            # One worker for each core: each stays on its own, as two that wake up on one would share it for a while.
            for part, core in zip(self.slices, cores):
                connection, worker_end = context.Pipe()
                arguments = (worker_end, make_env, seeds[part[0] : part[-1] + 1], int(part[0]), shared, core)
                process = context.Process(target=_worker, args=arguments, daemon=True)
                process.start()
                worker_end.close()
                self.connections.append(connection)
                self.processes.append(process)
            self._receive()
        except BaseException:
            self.close()
            raise
        finally:
            os.environ.pop("OMP_NUM_THREADS") if threads is None else os.environ.update(OMP_NUM_THREADS=threads)

    def reset(self):
        """Starts a new episode everywhere; the random streams go on, the episodes cut short are not reported."""
        self._command(RESET)
        self.episodes = []
        self._check_finite("an observation", self.obs)
        return self.obs

    def step(self, actions, active=True):
        self.actions[:], self.active[:] = actions, active
        self._command(STEP)
        ended = self.episode_lengths > 0
        self.episodes = list(zip(self.episode_returns[ended].tolist(), self.episode_lengths[ended].tolist()))
        self._check_finite("a reward", self.rewards)
        self._check_finite("an observation", self.obs)
        if (self.terminated | self.truncated).any():
            self._check_finite("a final observation", self.final_obs)
        return self.obs, self.rewards, self.terminated, self.truncated

    def _command(self, command):
        for connection in self.connections:
            with suppress(ConnectionError):  # of a worker that died: noticed below
                os.write(connection.fileno(), command)
        self._receive()

    def _receive(self):
        # The last one first: it starts last, on the core that this process leaves by waiting for it. Were the first one
        # waited for first, its answer would wake this process in the midst of the last one's work.
        for part, connection, process in [*zip(self.slices, self.connections, self.processes)][::-1]:
            try:
                with _leaving_at_once():  # a step may hang
                    answer = os.read(connection.fileno(), 1)
                if answer == FAULT:
                    raise EnvError(connection.recv_bytes().decode())
            except (EOFError, ConnectionError):
                answer = b""
            if not answer:
                process.join(1)
                code = process.exitcode
                cause = f"was killed by signal {-code}" if code and code < 0 else f"exited with code {code}"
                raise EnvError(f"the process of environments {part[0]} to {part[-1]} {cause}")

    def _check_finite(self, what, array):
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            env = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(1))[0]
            raise EnvError(f"environment {env} returned {what} that is not finite")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def _close(connections, processes):
    for connection in connections:
        connection.close()  # a worker that waits sees the end of its pipe
    end = time.monotonic() + 2  # for all of them together
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.kill()


_signal_received = _signal_time = None
_leave_at_once = False


def _on_signal(signum, _):
    global _signal_received, _signal_time
    if _signal_received is None:
        _signal_received, _signal_time = signum, time.monotonic()
        if _leave_at_once:
            check_signals()
    elif time.monotonic() - _signal_time > 0.5:  # timeout(1) sends its signal twice, to the process and to its group
        os._exit(128 + signum)  # a second Ctrl-C leaves at once


def check_signals():
    """Raises SystemExit after a SIGINT or SIGTERM: called where leaving is safe, at least once a step and minibatch."""
    if _signal_received is not None:
        raise SystemExit(128 + _signal_received)


@contextmanager
def _leaving_at_once():
    """Lets a signal end what is done inside, however long that takes."""
    global _leave_at_once
    _leave_at_once = True
    try:
        check_signals()  # after one that came just before, none may come any more
        yield
    finally:
        _leave_at_once = False


def flag(name):
    return "--" + name.replace("_", "-")


def check_args(args, whole_episodes=False):
    """Exits with one line where the sizes make no sense; with `whole_episodes`, --num-steps 0 is a batch of those."""
    limits = dict.fromkeys(("num_envs", "num_steps", "num_minibatches", "update_epochs"), (1, np.inf))
    limits |= {"num_steps": (0, np.inf)} if whole_episodes else {}
    names = "num_workers checkpoint_interval eval_episodes eval_interval total_timesteps".split()
    names += ["clip_coef", "max_grad_norm"]
    names += [name for name, value in vars(args).items() if name.endswith("learning_rate") and value is not None]
    limits |= dict.fromkeys(names, (0, np.inf)) | {"seed": (0, 2**64 - 1), "gamma": (0, 1), "gae_lambda": (0, 1)}
    for name, (low, high) in limits.items():
        if not low <= getattr(args, name) <= high:
            bounds = f"at least {low}" if high == np.inf else f"from {low} to {high}"
            raise SystemExit(f"{flag(name)} {getattr(args, name)}: must be {bounds}")
    batch_size = args.num_envs * args.num_steps
    batch = f"a batch of {batch_size} steps (--num-envs {args.num_envs} x --num-steps {args.num_steps})"
    if batch_size and (batch_size % args.num_minibatches or batch_size // args.num_minibatches < 2):
        raise SystemExit(f"--num-minibatches {args.num_minibatches}: must cut {batch} into equal parts of 2 or more")
    if args.total_timesteps == 0 and (args.resume is None or args.eval_episodes == 0):
        raise SystemExit("--total-timesteps 0 only evaluates: it needs --resume PATH and --eval-episodes of 1 or more")
    if (args.eval_interval or args.capture_video) and args.eval_episodes == 0:
        name = "--eval-interval" if args.eval_interval else "--capture-video"
        raise SystemExit(f"{name} needs --eval-episodes of 1 or more")
    if 0 < args.total_timesteps < batch_size:
        raise SystemExit(f"--total-timesteps {args.total_timesteps}: less than {batch}")


def compile_function(function, device):
    """torch.compile, on a GPU with CUDA graphs: the outputs are cloned, as the next call overwrites them."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise SystemExit(f"--compile needs a C++ compiler: {compiler} is not installed (Debian's g++; or set CXX)")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helper processes would outlive the run
    cuda = device.type == "cuda"
    with _leaving_at_once():  # importing the compiler takes a while
        if not cuda:
            torch._dynamo.config.trace_autograd_ops = True  # loss, backward() and clipping in one graph
        compiled = torch.compile(function, mode="reduce-overhead" if cuda else None)

    def call(*inputs):
        with _leaving_at_once():  # the first call compiles, for up to a minute
            if not cuda:
                return compiled(*inputs)
            torch.compiler.cudagraph_mark_step_begin()
            return torch.utils._pytree.tree_map(torch.clone, compiled(*inputs))

    return call


def read_checkpoint(path):
    """(checkpoint, its file) of a run directory, checkpoint.pt or policy.pt; one line if it is not this script's."""
    file = Path(path)
    if file.is_dir():
        file = file / ("checkpoint.pt" if (file / "checkpoint.pt").exists() else "policy.pt")
    if not file.is_file():
        raise SystemExit(f"--resume {path}: there is no {file}")
    try:
        checkpoint = torch.load(file, weights_only=True, map_location="cpu")
        script, _, _ = checkpoint["script"], checkpoint["args"], checkpoint["model"]
    except Exception as error:
        raise SystemExit(f"--resume {path}: {file} is damaged or no checkpoint ({type(error).__name__})") from None
    if script != Path(__file__).stem:
        raise SystemExit(f"--resume {path}: a checkpoint of {script}.py, not of {Path(__file__).name}")
    return checkpoint, file


def parse_args(Args):
    """The command line; with --resume PATH the defaults are the saved run's, else --preset's where Args has presets."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--resume")
    parser.add_argument("--preset")
    given = parser.parse_known_args()[0]
    resume = given.resume
    default = Args(**getattr(Args, "presets", {}).get(given.preset, {}))
    if resume is not None:
        saved = read_checkpoint(resume)[0]["args"]
        unknown = saved.keys() ^ vars(default).keys()
        if unknown:
            raise SystemExit(
                f"--resume {resume}: of another version of this script, whose flags differ: {sorted(unknown)}"
            )
        default = replace(Args(**saved), run_dir=None)
    return tyro.cli(Args, default=default)


MAY_CHANGE = "total_timesteps num_workers cuda compile eval_episodes eval_interval capture_video track".split()
MAY_CHANGE += "wandb_project_name wandb_entity checkpoint_interval run_dir resume".split()  # when a run is resumed


class Run:
    """One run: its directory, curves, checkpoints and signals; as a context, what was reached is saved however it ends.

    `begin` opens it, `step` counts a step of all environments, `end_iteration` logs, checks and saves, `finish` ends
    it. `iteration` and `global_step` say where it stands, `env_seed` what its environments are seeded with.
    """

    def __init__(self, args):
        self.args = args
        self.batch_size = args.num_envs * args.num_steps or 1  # of whole episodes: any number of steps
        self.num_iterations = args.total_timesteps // self.batch_size
        self.budget = self.num_iterations * self.batch_size
        self.iteration = self.global_step = 0
        self.recent_returns = deque(maxlen=100)
        self.seconds = self.training_seconds = 0.0  # since the run's first start; in rollouts and updates alone
        self.started = time.perf_counter()
        self.checkpoint = self.writer = self.snapshot = self.directory = self.lock = None
        self.env_seed, self.saved_iteration, self.last_evaluation = args.seed, 0, 0
        if args.resume is not None:
            self.checkpoint, file = read_checkpoint(args.resume)
            self.directory = file.parent
            if args.run_dir is not None and Path(args.run_dir).resolve() != self.directory.resolve():
                raise SystemExit(f"--run-dir {args.run_dir}: a run goes on in its own directory, {self.directory}")
            for key, value in self.checkpoint["args"].items():
                if key not in MAY_CHANGE and getattr(args, key) != value:
                    raise SystemExit(f"{flag(key)} {getattr(args, key)}: can't change, the run of --resume has {value}")
            for name in ("iteration", "global_step", "seconds", "training_seconds"):
                setattr(self, name, self.checkpoint[name])
            self.recent_returns.extend(self.checkpoint["recent_returns"])
            self.saved_iteration, self.env_seed = self.iteration, [args.seed, self.iteration]
            self.last_evaluation = self.checkpoint.get("last_evaluation", self.iteration)  # not in older ones
            if 0 < args.total_timesteps < min(self.global_step, self.checkpoint["args"]["total_timesteps"]):
                raise SystemExit(f"--total-timesteps {args.total_timesteps}: the run has {self.global_step} already")
        elif args.run_dir is not None:
            self.directory = Path(args.run_dir)
            if any((self.directory / name).exists() for name in ("checkpoint.pt", "policy.pt")):
                raise SystemExit(
                    f"--run-dir {self.directory} holds a run: go on with --resume {self.directory}, or name another"
                )
        if args.capture_video:
            check_video(args.env_id)
        self.device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
        torch.backends.cudnn.deterministic = args.torch_deterministic
        torch.backends.cudnn.allow_tf32 = False  # as for matrix products: rollout and update shall round alike
        torch.manual_seed(args.seed)

    def __enter__(self):
        global _signal_received, _leave_at_once
        _signal_received, _leave_at_once = None, False
        self.threads, self.handlers = torch.get_num_threads(), {}
        if threading.current_thread() is threading.main_thread():
            self.handlers = {s: signal.signal(s, _on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def begin(self, envs, **parts):
        """Opens the directory, or loads the checkpoint of --resume, into `parts`: name=module or optimizer."""
        self.parts = parts
        spaces = (envs.single_observation_space, envs.single_action_space)
        self.shapes = [[*space.shape, int(getattr(space, "n", 0))] for space in spaces]
        if self.checkpoint is not None:
            self._load(self.checkpoint)
        if self.args.total_timesteps == 0:
            return
        self._open_directory()
        self._write(vars(self.args), self.directory / "args.json")
        if self.args.track:
            try:
                import wandb
            except ImportError:
                raise SystemExit("--track needs Weights & Biases: pip install wandb") from None
            wandb.init(
                project=self.args.wandb_project_name,
                entity=self.args.wandb_entity,
                name=self.directory.name,
                config=vars(self.args),
                sync_tensorboard=True,
            )
        size = f"{self.num_iterations} iterations of {self.batch_size}" if self.args.num_steps else f"{self.budget}"
        plan = f"{self.directory}: {size} steps on {self.device}"
        left = self.args.total_timesteps % self.batch_size
        print(
            plan + (f"; the last {left} of {self.args.total_timesteps} steps are left out" if left else ""), flush=True
        )
        # What an earlier start logged after the checkpoint, or without ever saving one, is dropped.
        self.writer = SummaryWriter(self.directory, purge_step=self.global_step + 1 if self.checkpoint else 0)
        table = "\n".join(f"|{key}|{value}|" for key, value in vars(self.args).items())
        self.writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{table}")
        self._take_snapshot()

    def _open_directory(self):
        """Makes the directory, or takes the given one, and keeps other processes out of it."""
        args = self.args
        try:
            while self.directory is None:
                name = f"{args.env_id}__{args.exp_name}__{args.seed}__{int(time.time())}"
                directory = Path("runs", name.replace("/", "-").replace(":", "-"))
                try:
                    directory.mkdir(parents=True)
                    self.directory = directory
                except FileExistsError:  # of a run that began in the same second
                    time.sleep(1)
            self.directory.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.directory, os.O_RDONLY)
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(f"{self.directory}: another process works at this run") from None
            except OSError:
                pass  # some network file systems have no such locks
            (self.directory / "result.json").unlink(missing_ok=True)  # an end that this start goes on from
        except OSError as error:
            raise SystemExit(f"--run-dir {self.directory}: {error}") from None

    @property
    def video_folder(self):
        return str(self.directory / "videos") if self.args.capture_video else None

    def _load(self, checkpoint):
        if checkpoint["shapes"] != self.shapes:
            shapes = f"{checkpoint['shapes']}, not {self.shapes}"
            raise SystemExit(f"--resume {self.args.resume}: trained with observations and actions of shapes {shapes}")
        if "rng" not in checkpoint and self.args.total_timesteps > 0:
            raise SystemExit(
                f"--resume {self.args.resume}: a policy without optimizer and random states can only be evaluated "
                "(--total-timesteps 0); training goes on from checkpoint.pt"
            )
        try:
            for name in self.parts.keys() & checkpoint.keys():
                self.parts[name].load_state_dict(checkpoint[name])
        except (KeyError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise SystemExit(f"--resume {self.args.resume}: of another version of this script ({reason})") from None
        if "rng" in checkpoint:
            torch.set_rng_state(checkpoint["rng"]["torch"])
            if self.device.type == "cuda" and checkpoint["rng"]["cuda"] is not None:
                torch.cuda.set_rng_state(checkpoint["rng"]["cuda"])

    def _take_snapshot(self):
        """Copies the state after a whole iteration: what is saved, even when the next one is cut short."""
        cuda = torch.cuda.get_rng_state() if self.device.type == "cuda" else None
        state = {"script": Path(__file__).stem, "args": vars(self.args), "shapes": self.shapes}
        state |= {name: copy.deepcopy(part.state_dict()) for name, part in self.parts.items()}
        state["rng"] = {"torch": torch.get_rng_state(), "cuda": cuda}
        state |= {"global_step": self.global_step, "iteration": self.iteration}
        state |= {"last_evaluation": self.last_evaluation}
        state |= {"seconds": self.seconds + time.perf_counter() - self.started}
        state |= {"training_seconds": self.training_seconds, "recent_returns": list(self.recent_returns)}
        self.snapshot = state

    def _save(self):
        self.writer.flush()
        self._write(self.snapshot, self.directory / "checkpoint.pt")
        self.saved_iteration = self.snapshot["iteration"]

    def _write(self, state, file):
        buffer, temporary = io.BytesIO(), file.with_suffix(".tmp")
        if file.suffix == ".json":
            buffer.write((json.dumps(state, indent=2) + "\n").encode())
        else:
            torch.save(state, buffer)
        try:
            with open(temporary, "wb") as stream:
                stream.write(buffer.getbuffer())
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, file)  # a kill in the middle of writing leaves the old file whole
        except OSError as error:
            raise SystemExit(f"{file} can't be written: {error}") from None

    def step(self, episodes, steps=None):
        """Counts a step of all environments, or `steps`; logs the episodes, [(return, length)], that ended in it."""
        self.global_step += self.args.num_envs if steps is None else steps
        for episodic_return, length in episodes:
            self.log({"charts/episodic_return": episodic_return, "charts/episodic_length": length})
            self.recent_returns.append(episodic_return)

    def log(self, scalars):
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, self.global_step)

    def evaluation_due(self):
        """Whether --eval-interval asks for an evaluation of the state that the last iteration left: once each."""
        interval = self.args.eval_interval
        return interval > 0 and self.iteration % interval == 0 and self.iteration > self.last_evaluation

    def log_evaluation(self, returns, lengths):
        self.log({"eval/episodic_return": np.mean(returns), "eval/episodic_length": np.mean(lengths)})
        self.last_evaluation = self.snapshot["last_evaluation"] = self.iteration
        if self.saved_iteration == self.iteration:
            self._save()

    def end_iteration(self, iteration, scalars, rollout_seconds, update_seconds):
        """Logs, stops if the training has diverged, takes a snapshot, and saves it when it is due."""
        seconds = rollout_seconds + update_seconds
        speed = (self.global_step - self.snapshot["global_step"]) / seconds
        self.log(scalars | {"time/rollout": rollout_seconds, "time/update": update_seconds, "charts/SPS": speed})
        tensors = [p.detach() for part in self.parts.values() if isinstance(part, nn.Module) for p in part.parameters()]
        tensors.append(torch.tensor([value for name, value in scalars.items() if name.endswith("_loss")]))
        if not all(tensor.isfinite().all() for tensor in tensors):
            self._write_result("diverged", [])
            where = f"the last good state is in {self.directory / 'checkpoint.pt'}; " if self.iteration else ""
            raise SystemExit(
                f"diverged at step {self.global_step}: a loss or parameter is not finite; {where}"
                "a lower --learning-rate may help"
            )
        self.iteration = iteration
        self.training_seconds += seconds
        self._take_snapshot()
        last, interval = self.global_step >= self.budget, self.args.checkpoint_interval
        if last or (interval and iteration % interval == 0):
            self._save()
        mean = f"{np.mean(self.recent_returns):.1f}" if self.recent_returns else "-"
        left = max(0, int((self.budget - self.global_step) / speed))
        line = f"step {self.global_step}/{self.args.total_timesteps}  {speed:.0f} steps/s  return {mean}  "
        line += f"{left // 3600}h{left // 60 % 60:02d}m{left % 60:02d}s left"
        if sys.stdout.isatty():
            filled = min(20, 20 * self.global_step // self.budget)
            line = f"\r\033[K[{'#' * filled}{'.' * (20 - filled)}] {line}"
        print(line, end="" if sys.stdout.isatty() and not last else "\n", flush=True)

    def _write_result(self, status, eval_returns):
        git = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--verify", "--quiet", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
        packages = [name for name in ("torch", "numpy", "gymnasium", "mujoco", "ale_py", "cv2") if name in sys.modules]
        result = {
            "status": status,
            "env_id": self.args.env_id,
            "script": Path(__file__).stem,
            "seed": self.args.seed,
            "args": vars(self.args),
            "global_step": self.global_step,
            "iterations": self.iteration,
            "mean_return_last_100": float(np.mean(self.recent_returns)) if self.recent_returns else None,
            "eval_returns": eval_returns,
            "wall_seconds": self.seconds + time.perf_counter() - self.started,
            "steps_per_second": self.snapshot["global_step"] / max(self.training_seconds, 1e-9),
            "versions": {"python": platform.python_version(), **{x: sys.modules[x].__version__ for x in packages}},
            "commit": commit or None,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else "cpu",
        }
        self._write(result, self.directory / "result.json")
        return result

    def finish(self, returns, lengths):
        """Writes policy.pt and result.json after the last iteration and its evaluation; returns the result."""
        if returns:
            if self.iteration > self.last_evaluation:
                self.log_evaluation(returns, lengths)
            print(f"evaluation: mean return {np.mean(returns):.1f} of {len(returns)} episodes")
        left_out = {name for name, part in self.parts.items() if not isinstance(part, nn.Module)} | {"rng"}
        policy = {name: value for name, value in self.snapshot.items() if name not in left_out}
        policy = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, policy)  # to load it anywhere
        self._write(policy, self.directory / "policy.pt")
        print(f"finished: {self.directory}")
        return self._write_result("finished", returns)

    def evaluated(self, returns, lengths):
        """Writes eval.json beside the checkpoint that --total-timesteps 0 has evaluated; returns what it holds."""
        mean = float(np.mean(returns))
        result = {"returns": returns, "lengths": lengths, "mean": mean, "global_step": self.global_step}
        print(f"evaluation: mean return {mean:.1f} of {len(returns)} episodes")
        self._write(result, self.directory / "eval.json")
        return result

    def __exit__(self, _, error, __):
        if self.writer is not None:
            if self.snapshot["iteration"] > self.saved_iteration:
                self._save()
            self.writer.close()
        if self.lock is not None:
            os.close(self.lock)
        torch.set_num_threads(self.threads)
        for signum, handler in self.handlers.items():  # only now: a signal must not cut the saving short
            signal.signal(signum, handler)
        where = f"go on with --resume {self.directory}" if self.saved_iteration else "no iteration was finished"
        if error is not None and _signal_received is not None:
            print(f"\nstopped by {signal.Signals(_signal_received).name}; {where}", file=sys.stderr)
            raise SystemExit(128 + _signal_received) from None
        if isinstance(error, EnvError):
            raise SystemExit(f"{error}; {where}") from None


if __name__ == "__main__":
    train(parse_args(Args))
