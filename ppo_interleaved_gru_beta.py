# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = [
#     "gymnasium==1.4.0",
#     "moviepy==2.2.1",
#     "mujoco>=3.1.6,<4",
#     "numpy==2.4.6",
#     "tensorboard==2.21.0",
#     "torch==2.13.0",
#     "tyro==1.0.17",
# ]
# ///
"""PPO on interleaved states and actions: a GRU over the last 8 states, a Beta policy, and a state-prediction loss.

Policy and value see one sequence of tokens, s_{t-7} a_{t-7} s_{t-6} ... a_{t-1} s_t, fewer if the episode is younger.
MLPs embed states and actions, and a GRU of two layers reads them, from a state of zero in each window. From its output
after s_t one MLP gives the policy and another the value; from its output after each a_j a decoder predicts s_{j+1}:

    h_1, ..., h_15 = GRU(e_s(s_{t-7}), e_a(a_{t-7}), ..., e_a(a_{t-1}), e_s(s_t))
    m              = sigmoid(actor(h_15))                                     the mode; c is a parameter of its own
    action         = low + x * (high - low),   x ~ Beta(1 + c m, 1 + c (1 - m))
    V(s_t)         = critic(h_15)
    L_state        = mean_j (decoder(h after a_j) - s_{j+1})^2                normalised, mean over dimensions too
    ratio          = pi(a|s) / pi_old(a|s)
    L              = -mean min(ratio A, clip(ratio, 1 - eps, 1 + eps) A) + vf_coef * mean (V - (V_old + A))^2
                     - ent_coef * entropy + state_coef * L_state

Source: Luo and Miao, "Improving the Representation Learning Ability of PPO Algorithm by Interleaving States and
Actions" (HumanoidBench), whose settings are --preset paper. Here it is done as follows:

    the mode       is an output, where the paper has alpha and beta. At the first noise, Beta(22, 22), a unit of output
                   moves the mean by 3 standard deviations; a unit of alpha, or of beta, by 0.15.
    the noise      is small from the start, and its c does not depend on the state.
    the discount   rises over the run's first half: a short horizon seemed to walk sooner, a long one to fall less.
    HumanoidBench  Actions are radians around the robot's first pose. The benchmark's own are fractions of the joints'
                   ranges: 0 is a pose that falls, and the same noise pitches a hip four times as far as an ankle.
                   In training a robot that has lain for 20 steps ends its episode, as a time limit does.
    halves         of the environments take turns: while one steps, the policy acts for the other.
    log pi_old     and V_old are stored in the rollout: another pass over the windows is dear.
    all else       is as in ppo_mlp_gaussian.py: time limits bootstrap, statistics change after an update only (the
                   first iteration has mean 0, variance 1), advantages are normalised in each minibatch, episodes go
                   on from batch to batch, a resume begins new ones.

Result:  h1hand-walk-v0, greedy after 10 M steps with its first settings, 3 seeds: 917, 927, 934 (FastTD3: 928).

Run:     python ppo_interleaved_gru_beta.py --env-id h1hand-walk-v0      (or --env-id Humanoid-v5)
Resume:  python ppo_interleaved_gru_beta.py --resume runs/h1hand-walk-v0__ppo_interleaved_gru_beta__1__1700000000
"""

import atexit
import copy
import importlib
import io
import json
import multiprocessing
import os
import random
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache, partial
from itertools import product
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType, SimpleNamespace

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
    eval_episodes: int = 10  # greedy episodes in an evaluation; 0: no evaluation
    eval_interval: int = 0  # iterations between evaluations; 0: only at the end

    # The environment
    env_id: str = "Humanoid-v5"  # id of a Gymnasium environment, or module:id
    num_envs: int = 32  # environments stepped side by side
    ray: str | None = None  # step them on every machine of a Ray cluster: auto, local, or host:port
    total_timesteps: int = 10_000_000  # environment steps of all environments, also those before a --resume

    # PPO (Schulman et al. 2017)
    num_steps: int = 64  # steps of each environment in an iteration
    update_epochs: int = 4  # passes over the batch in an iteration
    num_minibatches: int = 8  # minibatches an epoch
    learning_rate: float = 3e-4  # Adam's learning rate
    gamma: float = 0.997  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    clip_coef: float = 0.2  # epsilon of the clipped surrogate objective
    ent_coef: float = 0.001  # weight of the entropy bonus
    vf_coef: float = 2.0  # weight of the value loss

    # The 37 details (Huang et al. 2022)
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over --total-timesteps
    norm_adv: bool = True  # normalise the advantages of each minibatch
    max_grad_norm: float = 3.5  # largest norm of the gradient, over all parameters; 0: no limit
    target_kl: float | None = None  # stop the update after an epoch whose mean KL exceeds this
    norm_obs: bool = True  # normalise observations by running statistics and clip them at 10
    norm_reward: bool = True  # divide rewards by the running std of the discounted return and clip them at 10

    # Luo and Miao
    preset: str = "default"  # default or paper: the defaults of all flags; in Python Args(**PRESETS["paper"])
    window: int = 8  # states that policy and value see, with the actions between them
    interleave: bool = True  # put the actions between the states; without, the window holds states only (ablation)
    state_coef: float = 0.1  # weight of the state-prediction loss; 0: not trained on (ablation)
    reward_scale: float = 1.0  # factor on the rewards; --norm-reward undoes it
    entropy_mean: bool = False  # mean of the entropy over the action dimensions instead of their sum

    # Chosen here
    init_gamma: float = 0.97  # discount factor at first; it goes linearly to --gamma at half of --total-timesteps
    hidden_size: int = 64  # width of every layer (64 leaves a CPU's time to the environments)
    separate_critic: bool = False  # a network of its own for the value, of the current state alone (ablation)
    beta_head: str = "mode"  # what the network gives: the Beta's mode, or, as in the paper, alpha and beta
    init_std: float = 0.15  # noise of the first actions, as if their bounds were -1 and 1
    pose_actions: bool = True  # HumanoidBench: actions in radians from the robot's first pose, at most 1
    lying_steps: int = 20  # HumanoidBench: cut a training episode after so many steps of lying; 0: don't


PRESETS = {  # what --preset puts in place of the defaults above
    "default": {},
    "paper": {"preset": "paper", "num_steps": 1000, "update_epochs": 10, "num_minibatches": 64, "gamma": 0.99}
    | {"ent_coef": 0.05, "max_grad_norm": 0.5, "norm_reward": False, "reward_scale": 0.25, "beta_head": "alpha"}
    | {"init_std": 0.48, "pose_actions": False, "lying_steps": 0, "vf_coef": 0.3, "init_gamma": 0.99}
    | {"learning_rate": 4e-5, "hidden_size": 512, "entropy_mean": True},  # from its authors' code, not the paper
}


def preset_args():
    """The defaults of the command line: Args with what its --preset puts in their place."""
    args = tyro.cli(Args, args=[x for x in sys.argv[1:] if x not in ("-h", "--help")])
    return Args(**PRESETS.get(args.preset, {}))


def check_settings(args):
    """Ends with one line where a flag that the base lacks makes no sense; the others are for check_args."""
    for name, right, rule in (
        ("preset", args.preset in PRESETS, f"one of {', '.join(PRESETS)}"),
        ("beta_head", args.beta_head in ("mode", "alpha"), "one of mode, alpha"),
        ("init_std", 1e-6 <= args.init_std < 0.57, "from 1e-6 on and below 0.57, that of uniform actions"),
        ("window", args.window > 0, "1 or more"),
        ("hidden_size", args.hidden_size > 0, "1 or more"),
        ("reward_scale", 0 < args.reward_scale < np.inf, "above 0 and finite"),
    ):
        if not right:
            raise SystemExit(f"--{name.replace('_', '-')} {getattr(args, name)}: must be {rule}")
    check_args(args)


@cache
def import_humanoid_bench():
    """Imports HumanoidBench, which registers its ids, and mends what keeps it from running here; once in a process."""
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    for name in "env", "envs.cabinet":  # some of its tasks print
        importlib.import_module(f"humanoid_bench.{name}").print = lambda *_: None
    for spec in gym.registry.values():
        if str(spec.entry_point).startswith("humanoid_bench"):
            spec.kwargs["render_mode"] = None  # its own default opens a GL context for each environment
    render = MujocoRenderer.render
    MujocoRenderer.render = lambda self, mode, *_: render(self, mode)  # its tasks pass two arguments too many
    # MuJoCo 3.1.6 never closes the mesh files it reads, 72 for each h1hand. macOS refuses a limit of infinity.
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (10240 if limit == resource.RLIM_INFINITY else limit, limit))


class PoseActions(gym.ActionWrapper):
    """HumanoidBench's actions as radians from the robot's first pose, from -1 to 1: 0 holds the pose."""

    def __init__(self, env):
        super().__init__(env)
        task = env.unwrapped
        task.set_state(task.model.key_qpos[task.keyframe], task.init_qvel)
        self.pose, self.low, self.high = task.data.actuator_length.copy(), task.action_low, task.action_high

    def action(self, action):
        return np.clip(2 * (self.pose + action - self.low) / (self.high - self.low) - 1, -1, 1)


class EndLying(gym.Wrapper):
    """Truncates an episode after `lying_steps` steps of lying in a row: the head within 0.3 m of a foot's height, or
    within 0.7 m, as on a slope, where that pays no more than 0.01."""

    def __init__(self, env, lying_steps):
        super().__init__(env)
        self.lying_steps = lying_steps

    def reset(self, **kwargs):
        self.lying = 0
        return self.env.reset(**kwargs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        robot = self.unwrapped.robot
        feet = robot.left_foot_height(), robot.right_foot_height()  # it may lie on stairs, or hang head down
        height = min(abs(robot.head_height() - foot) for foot in feet)
        self.lying = self.lying + 1 if height < (0.3 if reward > 0.01 else 0.7) else 0
        return obs, reward, terminated, truncated or self.lying >= self.lying_steps, info


def make_env(env_id, eval_episodes=0, video_folder=None, pose_actions=True, lying_steps=0):
    """One environment, or SystemExit with one line on why this script can't drive it."""
    module = env_id.rpartition(":")[0]
    if "humanoid_bench" in (module, *sys.modules) or not (module or env_id in gym.registry):
        try:
            import_humanoid_bench()
        except Exception as error:  # MuJoCo's own, too, where MUJOCO_GL names an OpenGL that is not there
            if module == "humanoid_bench" or env_id.startswith(("h1", "g1")):
                how = "pip install jax dm_control==1.0.20 mujoco==3.1.6, then --no-deps -e a clone of"
                how += " carlosferrazza/humanoid-bench; MUJOCO_GL, if set, needs libegl1 (egl) or libosmesa6 (osmesa)"
                raise SystemExit(f"--env-id {env_id} needs HumanoidBench ({one_line(error)}): {how}") from None
    env = gym_make(env_id, eval_episodes, video_folder)
    space = env.action_space
    flat = isinstance(space, gym.spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f"
    if not flat or not ((space.low < space.high) & np.isfinite(space.high - space.low)).all():
        needs = "this script needs a flat Box of floats, finite low < high; ppo_value_first.py takes more"
        raise SystemExit(f"--env-id {env_id}: its action space is {space}; {needs}")
    if type(env.unwrapped).__module__.startswith("humanoid_bench"):
        if pose_actions and env.unwrapped.spec.kwargs.get("control") == "pos":  # g1's actions are torques
            env = PoseActions(env)
        if lying_steps and not eval_episodes:  # evaluations play every episode whole
            env = EndLying(env, lying_steps)
    return env


class Beta:
    """Independent Beta distributions between the bounds low and high [act_dim]: alpha, beta [..., act_dim]."""

    def __init__(self, alpha, beta, low, high):
        # float64: in float32 the log-probability of h1hand's 61 dimensions is off by up to 2e-4
        self.beta = torch.distributions.Beta(alpha.double(), beta.double(), validate_args=False)
        self.low, self.size = low, high - low

    def sample(self):
        """-> [..., act_dim]"""
        return self.low + self.size * self.beta.sample().float()

    def log_prob(self, actions):
        """[..., act_dim] -> log-density [...], the sum over the action dimensions."""
        x = ((actions.double() - self.low) / self.size).clamp(1e-6, 1 - 1e-6)  # at 0 and 1 it may be infinite
        return (self.beta.log_prob(x) - self.size.log()).sum(-1).float()

    def entropy(self):
        """In nats, of all dimensions together: [...]"""
        return (self.beta.entropy() + self.size.log()).sum(-1).float()

    def mode(self):
        """-> [..., act_dim]"""
        return self.low + self.size * self.beta.mode.float()


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


def mlp(*sizes, output_std=None):
    """Linear and tanh layers; with an output_std the last one is linear and starts with that scale."""
    layers = []
    for size, next_size in zip(sizes, sizes[1:]):
        layers += [layer_init(nn.Linear(size, next_size)), nn.Tanh()]
    if output_std is not None:
        layers[-2:] = [layer_init(layers[-2], output_std)]
    return nn.Sequential(*layers)


def slide(states, past, num_before, next_states, first):
    """Appends the next states [B, obs_dim] to windows; where `first`, [B] or one for all, they begin new ones.

    A window holds an episode's last states [B, window, obs_dim], the actions after them (past [B, window, act_dim]),
    and the number of states before the current one, num_before [B]. With a window of 4, where r0 begins an episode:

        states        s0 -  -  -     s0 s1 -  -     s0 s1 s2 -     s0 s1 s2 s3    s1 s2 s3 s4    r0 -  -  -
        past          -  -  -  -     a0 -  -  -     a0 a1 -  -     a0 a1 a2 -     a1 a2 a3 -     -  -  -  -
        num_before    0              1              2              3              3              0

    - is padding: what stood there, which nobody reads. Whoever acts writes a_t at num_before.
    """
    most, device = states.shape[1] - 1, states.device
    full = (num_before == most)[:, None, None]
    states, past = (torch.where(full, x.roll(-1, 1), x) for x in (states, past))
    num_before = torch.where(torch.as_tensor(first, device=device), 0, (num_before + 1).clamp(max=most))
    states[torch.arange(len(states), device=device), num_before] = next_states
    return states, past, num_before


class Agent(nn.Module):
    """Encoders, GRU, and what reads its output. `read` takes normalised states, `act` takes the environments'."""

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        self.args, size = args, args.hidden_size
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.obs_norm = RunningNorm(obs_dim) if args.norm_obs else nn.Identity()
        self.state_encoder, self.action_encoder = mlp(obs_dim, size, size), mlp(act_dim, size, size)
        self.gru = nn.GRU(size, size, num_layers=2, batch_first=True)
        for name, parameter in self.gru.named_parameters():
            nn.init.zeros_(parameter) if "bias" in name else nn.init.orthogonal_(parameter)
        # On [-1, 1] a Beta(1 + c / 2, 1 + c / 2) has the standard deviation 1 / sqrt(c + 3).
        concentration = 1 / args.init_std**2 - 3
        if args.beta_head == "mode":
            self.actor = mlp(size, size, act_dim, output_std=0.01)
            self.log_concentration = nn.Parameter(torch.full((act_dim,), float(np.log(concentration))))
        else:
            self.actor = mlp(size, size, 2 * act_dim, output_std=0.01)
            nn.init.constant_(self.actor[-1].bias, concentration / 2 + np.log(-np.expm1(-concentration / 2)))
        self.critic = mlp(*((obs_dim, size) if args.separate_critic else (size,)), size, 1, output_std=1.0)
        self.decoder = mlp(size, size, obs_dim, output_std=1.0)
        self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32))

    def read(self, states, past, num_before):
        """Windows -> the GRU's output after the current state [B, hidden_size], its outputs after all tokens
        [B, tokens, hidden_size], and the current state [B, obs_dim]."""
        tokens, last = self.state_encoder(states), num_before  # [B, window, hidden_size]; the current state's index
        if self.args.interleave:
            actions = self.action_encoder(2 * (past[:, :-1] - self.low) / (self.high - self.low) - 1)
            pairs = torch.stack([tokens[:, :-1], actions], 2).flatten(1, 2)  # s a s a ...
            tokens, last = torch.cat([pairs, tokens[:, -1:]], 1), 2 * num_before  # [B, 2 * window - 1, hidden_size]
        outputs, _ = self.gru(tokens)  # causal: the padding behind the last token changes nothing before it
        batch = torch.arange(len(last), device=last.device)
        return outputs[batch, last], outputs, states[batch, num_before]

    def policy(self, output):
        """[B, hidden_size] -> the distribution of the actions [B, act_dim]"""
        if self.args.beta_head == "mode":
            mode, concentration = self.actor(output).sigmoid(), self.log_concentration.exp()
            alpha, beta = 1 + concentration * mode, 1 + concentration * (1 - mode)
        else:
            alpha, beta = (1 + nn.functional.softplus(self.actor(output))).chunk(2, -1)
        return Beta(alpha, beta, self.low, self.high)

    def value(self, output, state):
        """[B, hidden_size], or with --separate-critic the current state [B, obs_dim] -> [B]"""
        return self.critic(state if self.args.separate_critic else output).squeeze(-1)

    def prediction_loss(self, outputs, states, num_before):
        """Mean squared error of decoder(the output before a state) against that state, without the padding."""
        predictions = self.decoder(outputs[:, 1::2] if self.args.interleave else outputs[:, :-1])
        errors = (predictions - states[:, 1:]).square().mean(-1)  # [B, window - 1]
        mask = torch.arange(errors.shape[1], device=errors.device) < num_before[:, None]
        return (errors * mask).sum() / mask.sum().clamp(min=1)

    def empty_windows(self, num_envs):
        """Windows that hold nothing yet, for the first call of `act`."""
        obs_dim, act_dim = self.state_encoder[0].in_features, len(self.low)
        states, past = (self.low.new_zeros(num_envs, self.args.window, dim) for dim in (obs_dim, act_dim))
        return states, past, self.low.new_zeros(num_envs, dtype=torch.long)

    @torch.no_grad()
    def act(self, obs, first, windows):
        """Greedy actions [num_envs, act_dim] for the environments' observations, and the windows to pass with the next.

        `first`, [num_envs] or one for all: where an episode begins. The first windows are `empty_windows(num_envs)`.
        """
        states, past, num_before = windows = slide(*windows, obs, first)
        output, _, _ = self.read(self.obs_norm(states), past, num_before)
        actions = past[torch.arange(len(past)), num_before] = self.policy(output).mode()
        return actions, windows


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


def minibatch_gradient(agent, args, states, past, num_before, actions, log_probs, advantages, returns):
    """Sets the gradient of one minibatch's loss, its norm clipped. -> log_ratio [minibatch], and the losses by name"""
    output, outputs, current = agent.read(states, past, num_before)
    policy = agent.policy(output)
    log_ratio = policy.log_prob(actions) - log_probs
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    value_loss = (agent.value(output, current) - returns).square().mean()
    entropy = policy.entropy().mean() / (actions.shape[-1] if args.entropy_mean else 1)
    state_loss = agent.prediction_loss(outputs, states, num_before)
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy + args.state_coef * state_loss
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "state_loss": state_loss}
    return log_ratio.detach(), {f"losses/{name}": value.detach() for name, value in losses.items()}


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


def evaluate(run, agent, make, video_folder=None):
    """Plays and logs `eval_episodes` greedy episodes on fresh environments. -> their returns and lengths

    The first that begin count, as the first that end would be the short ones.
    """
    args, num_episodes = run.args, run.args.eval_episodes
    if num_episodes == 0:
        return [], []
    num_envs = 1 if video_folder else min(args.num_envs, num_episodes)
    make = partial(make, eval_episodes=num_episodes, video_folder=video_folder)
    with SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, 2**31], run.spaces) as envs:  # no iteration's seed
        obs, first, windows = envs.reset(), np.ones(num_envs, bool), agent.empty_windows(num_envs)
        playing, begun, ended = np.arange(num_envs), num_envs, {}  # episodes are numbered as they begin
        while len(ended) < num_episodes:
            obs = torch.as_tensor(obs, dtype=torch.float32, device=run.device)
            actions, windows = agent.act(obs, first, windows)
            obs, _, terminated, truncated = envs.step(actions.cpu().numpy(), playing < num_episodes)
            first = terminated | truncated
            for env, episodic_return, length in envs.episodes:
                ended[playing[env]] = episodic_return, length
                playing[env], begun = begun, begun + 1
                run.show(f"evaluation {len(ended)}/{num_episodes}", passing=True)
    returns, lengths = map(list, zip(*(ended[i] for i in range(num_episodes))))
    mean, std = np.mean(returns), np.std(returns)
    where = f", recorded in {video_folder}" if video_folder else ""
    run.show(f"evaluation: mean return {mean:.1f}, standard deviation {std:.1f}, {num_episodes} episodes{where}")
    run.log({"eval/episodic_return": mean, "eval/episodic_length": np.mean(lengths)})
    return returns, lengths


def train(args: Args) -> dict:
    """Trains, or with --total-timesteps 0 only evaluates. -> what the run's result.json, or eval.json, holds"""
    check_settings(args)
    make = partial(make_env, args.env_id, pose_actions=args.pose_actions, lying_steps=args.lying_steps)
    num_envs = args.num_envs if args.total_timesteps else 1
    vec_env = partial(RayVecEnv, args.ray) if args.ray and args.total_timesteps else SubprocVecEnv
    with Run(args) as run, vec_env(make, num_envs, args.num_workers, [args.seed, run.iteration]) as envs:
        device = run.device
        torch.backends.cudnn.allow_tf32 = False  # as for matrix products: rollout and update shall round alike
        torch.set_num_threads(1)  # but for the update: in the rollout a second thread is in the way of a worker
        torch.manual_seed(args.seed)
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr: set in each iteration
        return_norm = RunningNorm(()).to(device)
        if run.old_args["preset"] != args.preset:
            raise SystemExit(f"--preset {args.preset}: a resume keeps the run's flags; give those that shall change")
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm)
        discount = partial(np.interp, xp=[0, args.total_timesteps / 2], fp=[args.init_gamma, args.gamma])
        if run.changed and args.total_timesteps:
            run.show(f"the discount is {discount(run.global_step):.4g}")

        # torch.compile leaves the GRU as it is: on a CPU `read` gains nothing.
        gradient = compile_function(minibatch_gradient, device) if args.compile else minibatch_gradient
        read = compile_function(agent.read, device) if args.compile and device.type == "cuda" else agent.read

        # All steps' windows, [num_steps, num_envs, ...], normalised; the current `states` stay raw for new statistics.
        windows = states, _, _ = agent.empty_windows(args.num_envs)
        normed, past, num_before = (torch.stack([x] * args.num_steps) for x in windows)
        actions = torch.zeros_like(past[:, :, 0])  # [num_steps, num_envs, act_dim]
        obs, followed = torch.zeros((2, args.num_steps, *envs.obs.shape), device=device)  # [num_steps, num_envs, ...]
        log_probs, values = torch.zeros((2, *num_before.shape), device=device)  # [num_steps, num_envs]
        running_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)  # discounted
        first = np.ones(args.num_envs, bool)  # which environments begin an episode
        envs.reset()
        # While one half of the environments steps, the policy acts for the other, as in Sample Factory (Petrenko et al.
        # 2020). With 2 epochs of 2 minibatches, on 2 cores, h1hand-walk-v0 trains 1.08 times as fast, Humanoid-v5 1.04.
        halves = [slice(0, None, 2), slice(1, None, 2)][: args.num_envs]

        while run.global_step < run.budget:
            optimizer.param_groups[0]["lr"] = args.learning_rate * annealing(args, run.global_step)
            gamma = float(discount(run.global_step))

            # Collect. The policy and the observation statistics stay as they are in the meantime.
            rollout_start = time.perf_counter()
            rewards, terminated, done = np.zeros((3, args.num_steps, args.num_envs), np.float32)
            for step, rows in product(range(args.num_steps + 1), halves):
                now, before = (step, rows), (step - 1, rows)  # step 0 only acts, the last only receives
                if step > 0:  # what followed the half's last actions; the other half still steps
                    next_obs, rewards[before], terminated[before], truncated = envs.receive(rows)
                    first[rows] = done[before] = np.logical_or(terminated[before], truncated)
                    next_obs = np.where(first[rows, None], envs.final_obs[rows], next_obs)
                    followed[before] = torch.as_tensor(next_obs, device=device)
                    run.count(len(next_obs), envs.episodes)
                if step < args.num_steps:
                    obs[now] = torch.as_tensor(envs.obs[rows], device=device)
                    windows = states[rows], past[before], num_before[before]  # before step 0: the last rollout's
                    states[rows], past[now], num_before[now] = slide(*windows, obs[now], first[rows])
                    with torch.no_grad():
                        normed[now] = agent.obs_norm(states[rows])
                        output, _, current = read(normed[now], past[now], num_before[now])
                        policy, values[now] = agent.policy(output), agent.value(output, current)
                        actions[now] = policy.sample()
                        log_probs[now] = policy.log_prob(actions[now])
                    past[now][torch.arange(len(output)), num_before[now]] = actions[now]
                    envs.send(actions[now].cpu().numpy(), rows=rows)

            # Advantages. V of what followed is the next step's; at episode ends and the last step it is computed here.
            update_start = time.perf_counter()
            torch.set_num_threads(run.threads)
            rewards, terminated, done = (torch.as_tensor(x, device=device) for x in (rewards, terminated, done))
            rewards = args.reward_scale * rewards
            scaled = (rewards / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10) if args.norm_reward else rewards
            with torch.no_grad():
                next_values, ends = values.roll(-1, 0), done.bool()  # [num_steps, num_envs]
                ends[-1] = True
                ending = (x[ends] for x in (normed, past, num_before))  # windows [B, ...]; `past` has a_t already
                output, _, current = agent.read(*slide(*ending, agent.obs_norm(followed[ends]), first=False))
                next_values[ends] = agent.value(output, current)
                advantages = compute_gae(scaled, values, next_values, terminated, done, gamma, args.gae_lambda)
                returns = advantages + values

            # Update, then let the statistics see the rollout.
            batch = normed, past, num_before, actions, log_probs, advantages, returns  # [num_steps, num_envs, ...]
            metrics = update(agent, optimizer, gradient, args, [x.flatten(0, 1) for x in batch])
            if args.norm_obs:
                agent.obs_norm.update(obs)
            if args.norm_reward:
                return_norm.update(discounted_returns(rewards.double(), done, running_return, gamma))
            torch.set_num_threads(1)

            # Log, save, evaluate.
            metrics["losses/explained_variance"] = 1 - (returns - values).var() / returns.var()
            metrics["losses/gamma"] = gamma
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            run.end_iteration(metrics, rollout_start, update_start)
            if args.eval_interval and run.iteration % args.eval_interval == 0 and run.global_step < run.budget:
                evaluate(run, agent, make)

        return run.finish(*evaluate(run, agent, make, run.video_folder))


# A cluster: environments on other machines


class Machine:
    """One machine of a Ray cluster: a SubprocVecEnv, from a copy of this file that is sent along."""

    def __init__(self, text, name, factory, *inputs):
        directory = tempfile.mkdtemp()
        Path(directory, f"{name}.py").write_text(text)
        sys.path.insert(0, directory)
        sys.modules["__main__"] = ModuleType("__main__")  # in place of Ray's, which the processes would import too
        self.name, self.factory, self.inputs, self.envs = name, factory, inputs, None

    def step(self, actions, rows, **command):
        """-> (episodes that ended, these rows of SubprocVecEnv's arrays), or (what failed, None)"""
        try:
            if self.envs is None:  # not made by __init__, where an exception would end the actor
                script, (name, inputs, flags) = importlib.import_module(self.name), self.factory
                self.envs = script.SubprocVecEnv(partial(getattr(script, name), *inputs, **flags), *self.inputs)
            self.envs.send(actions, rows=rows, **command)
            outcome = self.envs.receive(rows)
        except (Exception, SystemExit) as error:
            return str(error), None
        return self.envs.episodes, [*outcome, self.envs.final_obs[rows]]


class RayVecEnv(AbstractContextManager):
    """SubprocVecEnv's reset, send and receive over all machines of a Ray cluster, by one call to each. Each has
    environments in proportion to its cores. Environment i is what it is without Ray, and so the run is the same."""

    def __init__(self, address, make_env, num_envs, num_workers, seed):
        handler, env = signal.getsignal(signal.SIGTERM), make_env()  # first: an id that fails leaves no cluster
        try:
            import ray

            if ":" in address:  # Ray itself would try for eight minutes
                socket.create_connection(address.rsplit(":", 1), timeout=10).close()
            ray.init(address, log_to_driver=False, logging_level="error")
        except Exception as error:
            raise SystemExit(f"--ray {address}: {one_line(error)}; see docs/clusters.md") from None
        if signal.getsignal(signal.SIGTERM) is not handler:  # Ray has put one of its own in place
            signal.signal(signal.SIGTERM, handler)
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the machines don't have this file
        self.ray, self.machines, self.calls = ray, [], []
        spaces = self.single_observation_space, self.single_action_space = env.observation_space, env.action_space
        with suppress(Exception):
            env.close()
        self.obs, self.final_obs = np.zeros((2, num_envs, *spaces[0].shape), np.float32)
        self.actions = np.zeros((num_envs, *spaces[1].shape), spaces[1].dtype)
        self.rewards, (self.terminated, self.truncated) = np.zeros(num_envs, np.float32), np.zeros((2, num_envs), bool)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
        if not nodes:
            ray.shutdown()
            raise SystemExit(f"--ray {address}: no machine has a core; see docs/clusters.md")
        cores = [int(node["Resources"]["CPU"]) for node in nodes]
        # Even, so that a half, every second environment, is every second one of each machine too.
        ends = [2 * round(num_envs / 2 * share) for share in np.cumsum(cores)[:-1] / sum(cores)]
        script, factory = Path(__file__), (make_env.func.__name__, make_env.args, make_env.keywords)
        for node, cpus, first, end in zip(nodes, cores, [0, *ends], [*ends, num_envs]):
            if first < end:
                place = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                inputs = end - first, num_workers or cpus, seed, spaces, first
                actor_class = ray.remote(num_cpus=0, scheduling_strategy=place)(Machine)
                machine = actor_class.remote(script.read_text(), script.stem.replace(".", "_"), factory, *inputs)
                self.machines.append((slice(first, end), node["NodeManagerHostname"], machine))

    def reset(self):
        self.send(self.actions, command=RESET)
        return self.receive()[0]

    def send(self, actions, rows=slice(None), **command):
        self.actions[rows] = actions
        calls = [machine.step.remote(self.actions[part][rows], rows, **command) for part, _, machine in self.machines]
        self.calls.append(calls)

    def receive(self, rows=slice(None)):
        self.episodes, outcome = [], (self.obs, self.rewards, self.terminated, self.truncated)
        for (part, host, _), call in zip(self.machines, self.calls.pop(0)):
            try:
                episodes, values = self.ray.get(call)
            except self.ray.exceptions.RayError as error:
                lost = f"environments {part.start} to {part.stop - 1}, on {host}, are lost"
                raise SystemExit(f"{lost}: {one_line(error)}") from None
            if values is None:
                raise SystemExit(f"{episodes} (on {host}, counted from environment {part.start})")
            self.episodes += [(part.start + i, *episode) for i, *episode in episodes]
            for array, value in zip((*outcome, self.final_obs), values):
                array[part][rows] = value
        return [array[rows] for array in outcome]

    def __exit__(self, *_):
        self.ray.shutdown()


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
        while command := os.read(connection.fileno(), 1):
            episodes = []
            for i, env in enumerate(envs):
                begin = command == RESET
                if command in (STEP, b"%d" % ((first + i) % 2)) and view.active[i]:
                    obs, reward, terminated, truncated, _ = env.step(view.actions[i].copy())
                    view.terminated[i], view.truncated[i], begin = terminated, truncated, terminated or truncated
                    returns[i], steps[i] = returns[i] + put(view.rewards, i, reward, "a reward").item(), steps[i] + 1
                    put(view.final_obs if begin else view.obs, i, obs, "an observation")
                    episodes += [(first + i, returns[i], steps[i])] if begin else []
                if begin:
                    draw = int(generators[i].integers(2**32))
                    random.seed(draw)  # for its resets likewise
                    np.random.seed(draw)
                    put(view.obs, i, env.reset(seed=env_seeds[i])[0], "an observation")
                    env_seeds[i], returns[i], steps[i] = None, 0.0, 0
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

    def __init__(self, make_env, num_envs, num_workers, seed, spaces=None, first=0):
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
        seeds = np.array(np.random.SeedSequence(seed, n_children_spawned=first).spawn(num_envs))
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
    train(parse_args(preset_args()))
