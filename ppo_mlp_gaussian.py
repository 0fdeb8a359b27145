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
"""PPO with a diagonal Gaussian policy: the base that every other script here adds one idea to.

Collect num_envs x num_steps steps with the policy pi_old, estimate each action's advantage A, then take several
epochs of minibatch gradient steps on

    ratio      = pi(a|s) / pi_old(a|s) = exp(log pi(a|s) - log pi_old(a|s))
    L_policy   = -mean( min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) )     no gain from leaving [1 - eps, 1 + eps]
    L_value    = 1/2 mean( (V(s) - (V_old(s) + A))^2 )         (--clip-vloss: or, if larger, with V's change clipped)
    L          = L_policy + vf_coef * L_value - ent_coef * entropy
    A_t        = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)     (GAE)

In L_policy, not in L_value, A is normalised in each minibatch (--norm-adv).

Sources: Schulman et al. 2017 (arXiv:1707.06347); "The 37 Implementation Details of PPO" (Huang et al. 2022); and the
course report "Proximal Policy Optimization" (Vincent, Violante, Sert, Masquil; MVA 2022), whose own knobs are
--critic-learning-rate, --fixed-std, --final-tanh and --scale-actions.

Result:  HalfCheetah-v5, 1 M steps: mean return of the last 100 episodes 2226, standard deviation 884 over 3 seeds; with
         --gamma 0.98 --gae-lambda 0.92 --fixed-std 0.15 --no-clip-vloss 5117, standard deviation 1117.

Run:     python ppo_mlp_gaussian.py --env-id HalfCheetah-v5
Resume:  python ppo_mlp_gaussian.py --resume runs/HalfCheetah-v5__ppo_mlp_gaussian__1__1700000000
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
    total_timesteps: int = 1_000_000
    """environment steps in all, summed over environments"""
    learning_rate: float = 3e-4
    """Adam's learning rate"""
    num_envs: int = 8
    """environments stepped side by side"""
    num_steps: int = 256
    """steps of each environment in an iteration"""
    anneal_lr: bool = True
    """lower the learning rate linearly to 0 over --total-timesteps"""
    gamma: float = 0.99
    """discount factor"""
    gae_lambda: float = 0.95
    """lambda of generalized advantage estimation"""
    num_minibatches: int = 32
    """minibatches an epoch"""
    update_epochs: int = 10
    """passes over the batch in an iteration"""
    norm_adv: bool = True
    """normalise the advantages of each minibatch"""
    clip_coef: float = 0.2
    """epsilon of the clipped surrogate objective"""
    clip_vloss: bool = True
    """clip the value's change too, by the same epsilon (37 details, 9)"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """largest norm of the gradient, over all parameters; 0: no limit"""
    target_kl: float | None = None
    """stop the update after an epoch whose mean KL exceeds this"""
    norm_obs: bool = True
    """normalise observations by running statistics and clip them at 10"""
    norm_reward: bool = True
    """divide rewards by the running standard deviation of the discounted return and clip them at 10"""

    critic_learning_rate: float | None = None
    """the critic's own learning rate (course report, 3.2); the actor's if not given"""
    fixed_std: float | None = None
    """fixed standard deviation as a fraction of the action range (course report, 4.1: 0.05); learned if not given"""
    final_tanh: bool = False
    """tanh on the mean (course report, 3.2)"""
    scale_actions: bool = False
    """the policy acts in [-1, 1], scaled to the action bounds on the way out (course report, 3.2)"""


def make_env(env_id, eval_episodes=0, video_folder=None):
    """One environment; exits with one line if this script can't drive it."""
    env = gym_make(env_id, eval_episodes, video_folder)
    for name, space, kinds in (("observation", env.observation_space, "biuf"), ("action", env.action_space, "f")):
        if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.dtype.kind not in kinds:
            needed = "this script needs flat Boxes, of floats for actions"
            raise SystemExit(f"--env-id {env_id}: its {name} space is {space}; {needed}")
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


def mlp(input_dim, output_dim, output_std):
    return nn.Sequential(
        layer_init(nn.Linear(input_dim, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, 64)),
        nn.Tanh(),
        layer_init(nn.Linear(64, output_dim), output_std),
    )


class Agent(nn.Module):
    """A Gaussian policy and a value function, with the observation statistics they were trained with.

    Observations are normalised by `obs_norm` before they reach the networks: `act` does it, the others expect it done.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        obs_dim, act_dim = observation_space.shape[0], action_space.shape[0]
        self.final_tanh, self.scale_actions = args.final_tanh, args.scale_actions
        self.obs_norm = RunningNorm(obs_dim) if args.norm_obs else nn.Identity()
        self.actor = mlp(obs_dim, act_dim, 0.01)  # the small last layer starts every state with almost the same action
        self.critic = mlp(obs_dim, 1, 1.0)
        low, high = (torch.as_tensor(bound, dtype=torch.float32) for bound in (action_space.low, action_space.high))
        if args.fixed_std is not None and args.fixed_std <= 0:
            raise SystemExit(f"--fixed-std {args.fixed_std}: must be above 0")
        if not torch.isfinite(high - low).all() and (args.scale_actions or args.fixed_std is not None):
            raise SystemExit(f"--scale-actions and --fixed-std need finite action bounds, not {action_space}")
        self.register_buffer("low", low)
        self.register_buffer("high", high)
        if args.fixed_std is None:
            self.log_std = nn.Parameter(torch.zeros(act_dim))
        else:
            self.register_buffer(
                "log_std", (args.fixed_std * (2 if args.scale_actions else high - low) + low * 0).log()
            )

    def get_value(self, obs):
        """[..., obs_dim] -> [...]"""
        return self.critic(obs).squeeze(-1)

    def get_mean(self, obs):
        """[..., obs_dim] -> [..., act_dim]"""
        mean = self.actor(obs)
        return mean.tanh() if self.final_tanh else mean

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
        """What the environment gets: the actions clipped to the Box (and scaled to it from [-1, 1])."""
        if self.scale_actions:
            actions = self.low + (actions.clamp(-1, 1) + 1) / 2 * (self.high - self.low)
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


def clipped_value_loss(new_values, values, returns, clip_coef):
    """Squared errors; with a clip_coef the larger of the error and that of V_old plus the clipped change."""
    errors = (new_values - returns).square()
    if clip_coef is None:
        return errors
    clipped = values + (new_values - values).clamp(-clip_coef, clip_coef)
    return torch.max(errors, (clipped - returns).square())


def minibatch_gradient(agent, args, obs, actions, log_probs, values, advantages, returns):
    """Sets the clipped gradient of one minibatch's loss; returns what is logged: log_ratio [minibatch], losses [3]."""
    log_ratio = agent.log_prob(agent.get_mean(obs), actions) - log_probs
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = clipped_policy_loss(log_ratio.exp(), advantages, args.clip_coef).mean()
    clip_coef = args.clip_coef if args.clip_vloss else None
    value_loss = 0.5 * clipped_value_loss(agent.get_value(obs), values, returns, clip_coef).mean()
    entropy = agent.entropy()
    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    loss.backward()
    if args.max_grad_norm:
        nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return log_ratio.detach(), torch.stack([policy_loss, value_loss, entropy]).detach()


def approximate_kl(log_ratio):
    """KL(pi_old || pi) from samples of pi_old: mean of (ratio - 1) - log ratio (Schulman, "Approximating KL", k3)."""
    return (log_ratio.exp() - 1 - log_ratio).mean()


def update(agent, optimizer, minibatch_gradient, args, batch):
    """`update_epochs` passes over the batch, a tuple of [batch_size, ...]; returns scalars, means over the update."""
    batch_size = len(batch[0])
    log_ratios, losses = [], []
    for _ in range(args.update_epochs):
        order = torch.randperm(batch_size, device=batch[0].device)
        shuffled = [x[order].split(batch_size // args.num_minibatches) for x in batch]  # gathered once an epoch
        for minibatch in zip(*shuffled):
            check_signals()
            optimizer.zero_grad()
            log_ratio, loss = minibatch_gradient(agent, args, *minibatch)
            optimizer.step()
            log_ratios.append(log_ratio)
            losses.append(loss)
        if args.target_kl is not None:
            if approximate_kl(torch.cat(log_ratios[-args.num_minibatches :])) > args.target_kl:
                break
    log_ratio = torch.cat(log_ratios)
    clipfrac = ((log_ratio.exp() - 1).abs() > args.clip_coef).float().mean()
    metrics = [*torch.stack(losses).mean(0), -log_ratio.mean(), approximate_kl(log_ratio), clipfrac]
    names = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")
    return {f"losses/{name}": value for name, value in zip(names, torch.stack(metrics).tolist())}


def evaluate(agent, args, device, video_folder=None):
    """Plays `eval_episodes` greedy episodes on fresh environments. -> returns and lengths, in the order they began.

    The first so many started count, not the first finished, which would favour short ones.
    """
    if args.eval_episodes == 0:
        return [], []
    num_envs = 1 if video_folder else min(args.num_envs, args.eval_episodes)
    make = partial(make_env, args.env_id, args.eval_episodes, video_folder)
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
    check_args(args)
    num_envs = args.num_envs if args.total_timesteps else 1
    with (
        Run(args) as run,
        SubprocVecEnv(partial(make_env, args.env_id), num_envs, args.num_workers, run.env_seed) as envs,
    ):
        device = run.device
        if device.type == "cpu":
            torch.set_num_threads(1)  # layers of 64 units are too small to share: a second thread slows them down
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        learning_rates, groups = [args.learning_rate], [{"params": agent.parameters()}]
        if args.critic_learning_rate is not None:  # only then: each group costs a tenth of the update's time
            learning_rates.append(args.critic_learning_rate)
            actor_parameters = [p for name, p in agent.named_parameters() if not name.startswith("critic")]
            groups = [{"params": actor_parameters}, {"params": agent.critic.parameters()}]
        optimizer = torch.optim.Adam(groups, eps=1e-5, fused=True)
        return_norm = RunningNorm(()).to(device)
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm)
        if args.total_timesteps == 0:
            return run.evaluated(*evaluate(agent, args, device, run.video_folder))
        sample, gradient = agent.sample, minibatch_gradient
        if args.compile:
            gradient = compile_function(gradient, device)
            if device.type == "cuda":  # on a CPU a network this small samples faster as it is
                sample = compile_function(sample, device)

        obs_dim, act_dim = envs.single_observation_space.shape[0], envs.single_action_space.shape[0]
        obs = torch.zeros((args.num_steps, args.num_envs, obs_dim), device=device)
        actions = torch.zeros((args.num_steps, args.num_envs, act_dim), device=device)
        rewards, terminated, done = np.zeros((3, args.num_steps, args.num_envs), np.float32)
        ends = np.zeros((args.num_steps, args.num_envs), bool)  # where the next row holds no next state
        running_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)  # discounted
        next_obs = envs.reset()  # [num_envs, obs_dim]

        for iteration in range(run.iteration + 1, run.num_iterations + 1):
            if run.evaluation_due():
                run.log_evaluation(*evaluate(agent, args, device))
            left = 1 - (iteration - 1) / run.num_iterations if args.anneal_lr else 1
            for group, learning_rate in zip(optimizer.param_groups, learning_rates):
                group["lr"] = learning_rate * left

            # Collect. The policy and the observation statistics stay as they are until the update.
            rollout_start = time.perf_counter()
            last_obs = []  # what followed each step of `ends`, in its order
            for step in range(args.num_steps):
                check_signals()
                obs[step] = torch.as_tensor(next_obs, device=device)
                with torch.no_grad():
                    actions[step] = sample(agent.obs_norm(obs[step]))
                    env_actions = agent.to_env(actions[step]).cpu().numpy()
                next_obs, rewards[step], terminated[step], truncated = envs.step(env_actions)
                ended = done[step] = envs.terminated | truncated
                ends[step] = ended | (step == args.num_steps - 1)
                if ends[step].any():
                    last_obs.append(np.where(ended[:, None], envs.final_obs, next_obs)[ends[step]])
                run.step(envs.episodes)

            # Advantages. One pass gives the log-probabilities and values of the whole rollout.
            update_start = time.perf_counter()
            with torch.no_grad():
                normed_obs = agent.obs_norm(obs)
                log_probs = agent.log_prob(agent.get_mean(normed_obs), actions)  # [num_steps, num_envs], as below
                values = agent.get_value(normed_obs)
                next_values = torch.cat([values[1:], values[-1:]])
                last_obs = torch.as_tensor(np.concatenate(last_obs), dtype=torch.float32, device=device)
                next_values[torch.as_tensor(ends, device=device)] = agent.get_value(agent.obs_norm(last_obs))
                rewards_t, terminated_t, done_t = (torch.tensor(x, device=device) for x in (rewards, terminated, done))
                scaled_rewards = rewards_t
                if args.norm_reward:
                    scaled_rewards = (rewards_t / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10)
                advantages = compute_gae(
                    scaled_rewards, values, next_values, terminated_t, done_t, args.gamma, args.gae_lambda
                )
                returns = advantages + values
                explained_variance = 1 - (returns - values).var() / returns.var()

            # Update, then let the statistics see the rollout.
            batch = tuple(x.flatten(0, 1) for x in (normed_obs, actions, log_probs, values, advantages, returns))
            scalars = update(agent, optimizer, gradient, args, batch)
            if args.norm_obs:
                agent.obs_norm.update(obs)
            if args.norm_reward:
                return_norm.update(discounted_returns(rewards_t.double(), done_t, running_return, args.gamma))
            end = time.perf_counter()

            # Log and save.
            scalars["losses/explained_variance"] = explained_variance.item()
            scalars["losses/action_mean"] = actions.mean().item()
            scalars["losses/action_std"] = agent.log_std.exp().mean().item()
            scalars["charts/learning_rate"] = optimizer.param_groups[0]["lr"]
            scalars["charts/critic_learning_rate"] = optimizer.param_groups[-1]["lr"]
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
