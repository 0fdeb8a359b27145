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
"""PPO on interleaved states and actions: a GRU over the last 8 steps, a Beta policy, and a state-prediction loss.

The policy and the value function see one sequence of tokens, s_{t-7} a_{t-7} s_{t-6} ... a_{t-1} s_t, cut at the start
of the episode. Encoders (MLPs) embed states and actions; a two-layer GRU reads the tokens; from its output after s_t an
MLP gives the policy and another the value; from its output after each a_j a decoder predicts s_{j+1}:

    h_1, ..., h_15 = GRU(e_s(s_{t-7}), e_a(a_{t-7}), ..., e_a(a_{t-1}), e_s(s_t))
    m              = sigmoid(head(h_15))                                          the mode; a learned c apart
    x              ~ Beta(1 + c m, 1 + c (1 - m)),  action = low + x * (high - low)
    V(s_t)         = value(h_15)
    L_state        = mean_j (decoder(h after a_j) - s_{j+1})^2, on normalised states
    L              = L_clip + 0.3 * mean (V - return)^2 - ent_coef * entropy + 0.1 * L_state

Source: Luo and Miao, "Improving the Representation Learning Ability of PPO Algorithm by Interleaving States and
Actions" (HumanoidBench). --preset paper has its settings: alpha, beta = 1 + softplus(head(h_15)), much noise at the
start, rounds of 32000 steps and 10 passes over each. The defaults differ: a longer horizon; little noise, as strong in
every joint, around the pose that the robot starts in (`PoseActions`); rounds of 2048 steps with two passes of large
steps, nearly as in Sample Factory's settings for MuJoCo; and no steps spent on a robot that lies there (`EndStalled`).

The Beta's mode as an output matters where the noise is small. Of a Beta(60, 60) a unit more of the logits of alpha and
less of beta moves the mean by 0.2 standard deviations; a unit more of the mode's by 5. The concentration c is the same
in every state, as the Gaussian's standard deviation usually is.

Else it differs from the base by one network for policy and value, and the value's whole squared error, unclipped.

Result:  h1hand-walk-v0, 10 M steps: greedy 917, 927 and 934 (FastTD3, greedy: 928; DreamerV3, in training: 736).

Run:     python ppo_interleaved_gru_beta.py --env-id h1hand-walk-v0      (or --env-id Humanoid-v5 --vf-coef 5)
Resume:  python ppo_interleaved_gru_beta.py --resume runs/h1hand-walk-v0__ppo_interleaved_gru_beta__1__1700000000
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
    """use a GPU where there is one"""
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

    env_id: str = "Humanoid-v5"
    """id of a Gymnasium environment, or module:id"""
    total_timesteps: int = 10_000_000
    """environment steps in all, summed over environments"""
    learning_rate: float = 1e-3
    """Adam's learning rate"""
    num_envs: int = 32
    """environments stepped side by side"""
    num_steps: int = 64
    """steps of each environment in an iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over --total-timesteps"""
    gamma: float = 0.995
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 2
    """minibatches an epoch"""
    update_epochs: int = 2
    """passes over the batch in an iteration"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective"""
    clip_vloss: bool = False
    """clip the value's change too, by the same epsilon (37 details, 9)"""
    ent_coef: float = 0.001
    """weight of the entropy bonus"""
    vf_coef: float = 0.3
    """weight of the value loss"""
    max_grad_norm: float = 3.5
    """largest norm of the gradient, over all parameters; 0: no limit"""
    target_kl: float | None = None
    """stop the update after an epoch whose mean KL exceeds this"""
    norm_obs: bool = True
    """normalise observations by running statistics and clip them at 10"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return and clip them at 10"""

    preset: str = "default"
    """default or paper: whose values the flags have that are not given"""
    window: int = 8
    """states that the policy sees: the current one and those just before it, with the actions between them"""
    interleave: bool = True
    """put the actions between the states; without, the window holds states only (ablation)"""
    state_coef: float = 0.1
    """weight of the state-prediction loss; 0: no prediction (ablation)"""
    reward_scale: float = 1.0
    """factor on the rewards, to keep value targets under 20 (paper, 3.1); --norm-reward undoes it"""
    separate_critic: bool = False
    """a network of its own for the value, of the current state alone (ablation)"""
    hidden_size: int = 64
    """width of every layer (64 leaves a CPU's time to the environments)"""
    beta_head: str = "mode"
    """what the network gives of each action's Beta: its mode, or alpha and beta, as in the paper"""
    init_std: float = 0.15
    """noise of the first actions, whose bounds are -1 and 1"""
    entropy_mean: bool = False
    """mean of the entropy over the action dimensions instead of their sum"""
    pose_actions: bool = True
    """HumanoidBench: actions in radians, at most 1, from the robot's first pose, not fractions of each joint's range"""
    stall_steps: int = 20
    """HumanoidBench: end a training episode after so many steps without reward, once there was one; 0: don't"""

    # What --preset on the command line puts in place of the defaults above. The paper leaves open the learning rate,
    # the width, and the entropy's sum or mean; these are its authors' code's, whose learning rate ends at 1e-5.
    presets = {
        "default": {},
        "paper": {
            "preset": "paper",
            "learning_rate": 4e-5,
            "num_envs": 32,
            "num_steps": 1000,
            "gamma": 0.99,
            "num_minibatches": 64,
            "update_epochs": 10,
            "ent_coef": 0.05,
            "max_grad_norm": 0.5,
            "norm_reward": False,
            "reward_scale": 0.25,
            "hidden_size": 512,
            "beta_head": "alpha",
            "init_std": 0.48,
            "entropy_mean": True,
            "pose_actions": False,
            "stall_steps": 0,
        },
    }


class PoseActions(gym.ActionWrapper):
    """HumanoidBench's actions as radians from the robot's first pose: 0 holds it, 1 is a radian beyond, and the most.

    HumanoidBench's own are targets for the joints, as fractions of their ranges: 0 is the middle of them all, a pose
    that falls, and the same noise turns a hip by four times the angle of an ankle.
    """

    def __init__(self, env):
        super().__init__(env)
        robot = env.unwrapped
        robot.set_state(robot.model.key_qpos[robot.keyframe], robot.init_qvel)
        self.pose, self.low, self.high = robot.data.actuator_length.copy(), robot.action_low, robot.action_high

    def action(self, action):
        return np.clip(2 * (self.pose + action - self.low) / (self.high - self.low) - 1, -1, 1)


class EndStalled(gym.Wrapper):
    """Truncates an episode that pays no more: after `stall_steps` rewards in a row below 0.01 (in absolute value).

    A robot of HumanoidBench that has fallen on its hands may lie there to the time limit, for nothing, and most of the
    rollouts are then of that. As after any time limit the state is worth what V says, so the task stays the same.
    """

    def __init__(self, env, stall_steps):
        super().__init__(env)
        self.stall_steps = stall_steps

    def reset(self, **kwargs):
        self.stalled = -np.inf  # until the first reward: a robot that hangs on a bar earns its first late
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.stalled = self.stalled + 1 if abs(reward) < 0.01 else 0
        return obs, reward, terminated, truncated or self.stalled >= self.stall_steps, info


def make_env(env_id, eval_episodes=0, video_folder=None, pose_actions=True, stall_steps=0):
    """One environment; exits with one line if this script can't drive it."""

    def wrap(env):
        control = env.spec.kwargs.get("control")  # pos, torque for HumanoidBench's g1, None elsewhere
        if pose_actions and control == "pos":
            env = PoseActions(env)
        return EndStalled(env, stall_steps) if stall_steps and control else env

    env = gym_make(env_id, eval_episodes, video_folder, wrap)
    for name, space, kinds in (("observation", env.observation_space, "biuf"), ("action", env.action_space, "f")):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.dtype.kind not in kinds:
            needed = "this script needs flat Boxes, of floats for actions"
            raise SystemExit(f"--env-id {env_id}: its {name} space is {space}; {needed}")
    size = env.action_space.high - env.action_space.low
    if not ((0 < size) & (size < np.inf)).all():
        raise SystemExit(f"--env-id {env_id}: its action space is {env.action_space}; a Beta needs finite low < high")
    return env


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


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(*sizes, output_std=None):
    """Linear and tanh layers; with an output_std the last one is linear and starts with that scale."""
    layers = []
    for size, next_size in zip(sizes, sizes[1:]):
        layers += [layer_init(nn.Linear(size, next_size)), nn.Tanh()]
    if output_std is not None:
        layers[-2:] = [layer_init(layers[-2], output_std)]
    return nn.Sequential(*layers)


class Trajectory:
    """The last `num_steps` steps of every environment, and the `window - 1` before them, each stored once.

    Windows are gathered from it by index. `states` are as the environment gave them, `actions` in [0, 1] as drawn;
    `age` counts the earlier steps of the same episode that a window holds, 0 to window - 1.
    """

    def __init__(self, num_steps, num_envs, obs_dim, act_dim, window, device):
        self.window, self.row = window, window - 1 + num_steps - 1
        self.states = torch.zeros((window - 1 + num_steps, num_envs, obs_dim), device=device)
        self.actions = torch.zeros((window - 1 + num_steps, num_envs, act_dim), device=device)
        self.age = torch.zeros((window - 1 + num_steps, num_envs), dtype=torch.long, device=device)
        self.envs = torch.arange(num_envs, device=device)

    def append(self, states, first):
        """The environments' next states [num_envs, obs_dim]; `first` [num_envs] says which begin an episode."""
        if self.row == len(self.states) - 1:  # full: only what later windows still reach stays, at the front
            for tensor in (self.states, self.actions, self.age):
                tensor[: self.window - 1] = tensor[len(tensor) - self.window + 1 :].clone()
            self.row = self.window - 2
        age = (self.age[self.row] + 1).clamp(max=self.window - 1)
        self.row += 1
        self.states[self.row] = states
        self.age[self.row] = age.masked_fill(first, 0)

    def windows(self, states, rows, envs, next_states=None):
        """The windows that end at states[rows, envs] [B], or at `next_states` [B, obs_dim] that followed them.

        -> states [B, window, obs_dim], actions [B, window - 1, act_dim], age [B]. A window starts at index 0 with its
        first step, and its current state is at index age; what lies behind it is padding.
        """
        after = next_states is not None
        age = (self.age[rows, envs] + after).clamp(max=self.window - 1)
        steps = (rows + after - age)[:, None] + torch.arange(self.window, device=age.device)
        steps = torch.minimum(steps, rows[:, None])  # [B, window]
        states, actions = states[steps, envs[:, None]], self.actions[steps[:, :-1], envs[:, None]]
        if after:
            states[torch.arange(len(age), device=age.device), age] = next_states
        return states, actions, age


class Agent(nn.Module):
    """The sequential policy and value network, with the observation statistics it was trained with.

    States are normalised by `obs_norm` before they reach the networks: `act` does it, the others expect it done.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        obs_dim, act_dim, size = observation_space.shape[0], action_space.shape[0], args.hidden_size
        self.window, self.interleave, self.beta_head = args.window, args.interleave, args.beta_head
        self.separate_critic = args.separate_critic
        self.obs_norm = RunningNorm(obs_dim) if args.norm_obs else nn.Identity()
        self.state_encoder = mlp(obs_dim, size, size)
        self.action_encoder = mlp(act_dim, size, size)
        self.gru = nn.GRU(size, size, num_layers=2, batch_first=True)
        for name, parameter in self.gru.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        # On [-1, 1] a Beta(1 + c / 2, 1 + c / 2), of concentration c, has standard deviation 1 / sqrt(c + 3).
        concentration = 1 / args.init_std**2 - 3
        if self.beta_head == "mode":
            self.actor = mlp(size, size, act_dim, output_std=0.01)
            self.log_concentration = nn.Parameter(torch.full((act_dim,), float(np.log(concentration))))
        else:
            self.actor = mlp(size, size, 2 * act_dim, output_std=0.01)
            nn.init.constant_(self.actor[-1].bias, concentration / 2 + np.log(-np.expm1(-concentration / 2)))
        self.critic = mlp(*((obs_dim, size) if args.separate_critic else (size,)), size, 1, output_std=1.0)
        self.decoder = mlp(size, size, obs_dim, output_std=1.0)
        self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32))

    def forward(self, states, actions, age):
        """Windows -> alpha, beta [B, act_dim], values [B], the GRU's outputs [B, tokens, hidden_size]."""
        tokens = self.state_encoder(states)  # [B, window, hidden_size]
        last = age
        if self.interleave and self.window > 1:
            pairs = torch.stack([tokens[:, :-1], self.action_encoder(2 * actions - 1)], 2)  # s, a
            tokens = torch.cat([pairs.flatten(1, 2), tokens[:, -1:]], 1)  # [B, 2 * window - 1, hidden_size]
            last = 2 * age
        outputs, _ = self.gru(tokens)  # causal: the padding behind the last token changes nothing before it
        batch = torch.arange(len(age), device=age.device)
        output = outputs[batch, last]  # after the current state, [B, hidden_size]
        if self.beta_head == "mode":
            mode, concentration = self.actor(output).sigmoid(), self.log_concentration.exp()
            alpha, beta = 1 + concentration * mode, 1 + concentration * (1 - mode)
        else:
            alpha, beta = (nn.functional.softplus(self.actor(output)) + 1).chunk(2, -1)
        values = self.critic(states[batch, age] if self.separate_critic else output).squeeze(-1)
        return alpha, beta, values, outputs

    def predict(self, outputs):
        """The GRU's outputs -> predictions of the window's states[:, 1:], [B, window - 1, obs_dim]."""
        return self.decoder(outputs[:, 1::2] if self.interleave else outputs[:, :-1])

    def log_prob(self, alpha, beta, x):
        """[..., act_dim] three times -> [...], the log-density of the actions low + x * (high - low)."""
        # float64: lgamma(60) in float32 is off by 1e-5, in each of h1hand's 61 dimensions
        alpha, beta, x = alpha.double(), beta.double(), x.double()
        log_prob = (alpha - 1) * x.log() + (beta - 1) * (-x).log1p() - log_beta(alpha, beta)
        return (log_prob - (self.high - self.low).log()).sum(-1).float()

    def entropy(self, alpha, beta):
        """[..., act_dim] twice -> [..., act_dim], of the actions low + x * (high - low)."""
        alpha, beta = alpha.double(), beta.double()
        entropy = log_beta(alpha, beta) - (alpha - 1) * alpha.digamma() - (beta - 1) * beta.digamma()
        entropy += (alpha + beta - 2) * (alpha + beta).digamma()
        return (entropy + (self.high - self.low).log()).float()

    def to_env(self, x):
        """[0, 1] -> the action bounds."""
        return self.low + x * (self.high - self.low)

    def memory(self, num_envs=1):
        """What `act` remembers of the episodes of `num_envs` environments."""
        return Trajectory(1, num_envs, self.state_encoder[0].in_features, len(self.low), self.window, self.low.device)

    @torch.no_grad()
    def act(self, obs, first, memory):
        """Greedy actions, the Beta's means, for the environments' observations [num_envs, obs_dim] as they are.

        `first` [num_envs] says which environments have just been reset; `memory` comes from `memory(num_envs)`.
        """
        memory.append(obs, first)
        rows = torch.full_like(memory.envs, memory.row)
        states, actions, age = memory.windows(memory.states, rows, memory.envs)
        alpha, beta, _, _ = self(self.obs_norm(states), actions, age)
        memory.actions[memory.row] = inside(alpha / (alpha + beta))
        return self.to_env(memory.actions[memory.row])


def log_beta(alpha, beta):
    """Logarithm of the Beta function."""
    return alpha.lgamma() + beta.lgamma() - (alpha + beta).lgamma()


def inside(x):
    """Clamps into the open interval (0, 1), at whose ends the log-density may be infinite."""
    return x.clamp(1e-6, 1 - 1e-6)


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


def clipped_value_loss(new_values, values, returns, clip_coef):
    """Squared errors; with a clip_coef the larger of the error and that of V_old plus the clipped change."""
    errors = (new_values - returns).square()
    if clip_coef is None:
        return errors
    clipped = values + (new_values - values).clamp(-clip_coef, clip_coef)
    return torch.max(errors, (clipped - returns).square())


def state_prediction_loss(predictions, states, age):
    """Mean squared error of the predictions of states[:, 1:] that lie in the window, [B, window - 1, obs_dim]."""
    mask = torch.arange(predictions.shape[1], device=age.device) < age[:, None]  # [B, window - 1]
    errors = (predictions - states[:, 1:]).square().mean(-1)
    return (errors * mask).sum() / mask.sum().clamp(min=1)


def minibatch_gradient(agent, args, states, actions, age, taken, log_probs, values, advantages, returns):
    """Sets the clipped gradient of one minibatch's loss; returns what is logged: log_ratio [minibatch], losses [4]."""
    alpha, beta, new_values, outputs = agent(states, actions, age)
    log_ratio = agent.log_prob(alpha, beta, taken) - log_probs
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = clipped_policy_loss(log_ratio.exp(), advantages, args.clip_coef).mean()
    clip_coef = args.clip_coef if args.clip_vloss else None
    value_loss = clipped_value_loss(new_values, values, returns, clip_coef).mean()
    entropy = agent.entropy(alpha, beta)
    entropy = entropy.mean() if args.entropy_mean else entropy.sum(-1).mean()
    state_loss = state_prediction_loss(agent.predict(outputs), states, age)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.state_coef * state_loss
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return log_ratio.detach(), torch.stack([policy_loss, value_loss, entropy, state_loss]).detach()


def approximate_kl(log_ratio):
    """KL(pi_old || pi) from samples of pi_old: mean of (ratio - 1) - log ratio (Schulman, "Approximating KL", k3)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def update(agent, optimizer, minibatch_gradient, args, trajectory, states, batch):
    """`update_epochs` passes over the batch, a tuple of [batch_size]; returns scalars, means over the update."""
    batch_size = len(batch[0])
    taken = trajectory.actions[trajectory.window - 1 :].flatten(0, 1)  # [batch_size, act_dim]
    log_ratios, losses = [], []
    for _ in range(args.update_epochs):
        for index in torch.randperm(batch_size, device=taken.device).split(batch_size // args.num_minibatches):
            check_signals()
            rows, envs = trajectory.window - 1 + index // args.num_envs, index % args.num_envs
            windows = trajectory.windows(states, rows, envs)
            optimizer.zero_grad()
            log_ratio, loss = minibatch_gradient(agent, args, *windows, taken[index], *(x[index] for x in batch))
            optimizer.step()
            log_ratios.append(log_ratio)
            losses.append(loss)
        if args.target_kl is not None:
            if approximate_kl(torch.cat(log_ratios[-args.num_minibatches :])) > args.target_kl:
                break
    log_ratio = torch.cat(log_ratios)
    clipfrac = ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean()
    metrics = [*torch.stack(losses).mean(0), -log_ratio.mean(), approximate_kl(log_ratio), clipfrac]
    names = ("policy_loss", "value_loss", "entropy", "state_loss", "old_approx_kl", "approx_kl", "clipfrac")
    return {f"losses/{name}": value for name, value in zip(names, torch.stack(metrics).tolist())}


def evaluate(agent, args, device, video_folder=None):
    """Plays `eval_episodes` greedy episodes on fresh environments. -> returns and lengths, in the order they began.

    The first so many started count, not the first finished, which would favour short ones.
    """
    if args.eval_episodes == 0:
        return [], []
    num_envs = 1 if video_folder else min(args.num_envs, args.eval_episodes)
    make = partial(make_env, args.env_id, args.eval_episodes, video_folder, args.pose_actions)
    with SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, 2**31]) as envs:
        obs = envs.reset()
        memory, first = agent.memory(num_envs), np.ones(num_envs, bool)
        playing, started, finished = np.arange(num_envs), num_envs, {}
        while len(finished) < args.eval_episodes:
            check_signals()
            actions = agent.act(*(torch.as_tensor(x, device=device) for x in (obs, first)), memory)
            obs, _, terminated, truncated = envs.step(actions.cpu().numpy(), playing < args.eval_episodes)
            first = terminated | truncated
            for env, episode in zip(np.flatnonzero(first), envs.episodes):
                finished[playing[env]] = episode
                playing[env], started = started, started + 1
    return [list(column) for column in zip(*(finished[i] for i in range(args.eval_episodes)))]


def train(args: Args) -> dict:
    """Trains (or, with a budget of 0, only evaluates) and returns what the run's result.json (eval.json) holds."""
    check_args(args)
    for name, least in (("window", 1), ("hidden_size", 1), ("stall_steps", 0)):
        if getattr(args, name) < least:
            raise SystemExit(f"{flag(name)} {getattr(args, name)}: must be at least {least}")
    if not 0 < args.init_std < 0.57:
        raise SystemExit(f"--init-std {args.init_std}: must be above 0 and below 0.57, that of uniform actions")
    for name, choices in (("preset", args.presets), ("beta_head", ("mode", "alpha"))):
        if getattr(args, name) not in choices:
            raise SystemExit(f"{flag(name)} {getattr(args, name)}: must be one of {', '.join(choices)}")
    num_envs = args.num_envs if args.total_timesteps else 1
    make = partial(make_env, args.env_id, pose_actions=args.pose_actions, stall_steps=args.stall_steps)
    with Run(args) as run, SubprocVecEnv(make, num_envs, args.num_workers, run.env_seed) as envs:
        device = run.device
        # The update uses every core. In the rollout a second thread would spin on a worker's core.
        update_threads = torch.get_num_threads()
        torch.set_num_threads(1)
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)
        return_norm = RunningNorm(()).to(device)
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm)
        if args.total_timesteps == 0:
            return run.evaluated(*evaluate(agent, args, device, run.video_folder))
        policy, gradient = agent, minibatch_gradient
        if args.compile:  # the GRU stays as it is: the compiler leaves RNNs alone
            gradient = compile_function(gradient, device)
            if device.type == "cuda":
                policy = compile_function(policy, device)

        obs_dim, act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        trajectory = Trajectory(args.num_steps, args.num_envs, obs_dim, act_dim, args.window, device)
        log_probs, values = torch.zeros((2, args.num_steps, args.num_envs), device=device)
        rewards, terminated, done = np.zeros((3, args.num_steps, args.num_envs), np.float32)
        ends = np.zeros((args.num_steps, args.num_envs), bool)  # where the next row holds no next state
        running_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)  # discounted
        next_obs, first = envs.reset(), np.ones(args.num_envs, bool)

        for iteration in range(run.iteration + 1, run.num_iterations + 1):
            if run.evaluation_due():
                run.log_evaluation(*evaluate(agent, args, device))
            left = 1 - (iteration - 1) / run.num_iterations if args.anneal_lr else 1
            optimizer.param_groups[0]["lr"] = args.learning_rate * left

            # Collect. The policy and the observation statistics stay as they are until the update.
            rollout_start = time.perf_counter()
            last_obs = []  # what followed each step of `ends`, in its order
            for step in range(args.num_steps):
                check_signals()
                trajectory.append(*(torch.as_tensor(x, device=device) for x in (next_obs, first)))
                with torch.no_grad():
                    rows = torch.full_like(trajectory.envs, trajectory.row)
                    states, actions, age = trajectory.windows(trajectory.states, rows, trajectory.envs)
                    alpha, beta, values[step], _ = policy(agent.obs_norm(states), actions, age)
                    x = inside(torch.distributions.Beta(alpha, beta, validate_args=False).sample())
                    trajectory.actions[trajectory.row] = x
                    log_probs[step] = agent.log_prob(alpha, beta, x)
                    env_actions = agent.to_env(x).cpu().numpy()
                next_obs, rewards[step], terminated[step], truncated = envs.step(env_actions)
                first = done[step] = envs.terminated | truncated
                ends[step] = first | (step == args.num_steps - 1)
                if ends[step].any():
                    last_obs.append(np.where(first[:, None], envs.final_obs, next_obs)[ends[step]])
                run.step(envs.episodes)

            # Advantages.
            update_start = time.perf_counter()
            torch.set_num_threads(update_threads)
            with torch.no_grad():
                rewards_t, terminated_t, done_t = (torch.tensor(x, device=device) for x in (rewards, terminated, done))
                next_values = torch.cat([values[1:], values[-1:]])
                steps, indices = torch.as_tensor(ends, device=device).nonzero(as_tuple=True)
                last_obs = torch.as_tensor(np.concatenate(last_obs), dtype=torch.float32, device=device)
                states = agent.obs_norm(trajectory.states)
                windows = trajectory.windows(states, args.window - 1 + steps, indices, agent.obs_norm(last_obs))
                next_values[steps, indices] = agent(*windows)[2]
                rewards_t *= args.reward_scale
                scaled_rewards = rewards_t
                if args.norm_reward:
                    scaled_rewards = (rewards_t / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10)
                advantages = compute_gae(
                    scaled_rewards, values, next_values, terminated_t, done_t, args.gamma, args.gae_lambda
                )
                returns = advantages + values
                explained_variance = 1 - (returns - values).var() / returns.var()

            # Update, then let the statistics see the rollout.
            batch = tuple(x.flatten(0, 1) for x in (log_probs, values, advantages, returns))
            scalars = update(agent, optimizer, gradient, args, trajectory, states, batch)
            if args.norm_obs:
                agent.obs_norm.update(trajectory.states[args.window - 1 :])
            if args.norm_reward:
                return_norm.update(discounted_returns(rewards_t.double(), done_t, running_return, args.gamma))
            torch.set_num_threads(1)
            end = time.perf_counter()

            # Log and save.
            scalars["losses/explained_variance"] = explained_variance.item()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            run.end_iteration(iteration, scalars, update_start - rollout_start, end - update_start)

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
