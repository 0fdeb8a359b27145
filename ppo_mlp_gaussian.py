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
"""PPO with a diagonal Gaussian policy: the base that every other script here adds one idea to.

Collect num_envs x num_steps steps with the policy pi_old, estimate each action's advantage A, then take several
epochs of minibatch gradient steps on

    ratio      = pi(a|s) / pi_old(a|s) = exp(log pi(a|s) - log pi_old(a|s))
    L_policy   = -mean( min(ratio * A, clip(ratio, 1 - eps, 1 + eps) * A) )     no gain from leaving [1 - eps, 1 + eps]
    L_value    = 1/2 mean( max( (V - R)^2, (V_old + clip(V - V_old, -eps, eps) - R)^2 ) ),   R = V_old + A
    L          = L_policy + vf_coef * L_value - ent_coef * entropy
    A_t        = delta_t + gamma * lambda * A_{t+1},   delta_t = r_t + gamma * V(s_{t+1}) - V(s_t)     (GAE)

That is PPO (Schulman et al. 2017, arXiv:1707.06347). What it leaves open is chosen here as follows:

    time limits    An episode cut by one is worth V(its last observation) from there on, a terminal state 0.
    episodes       go on from batch to batch. Those of one fixed length all end in the same step; random first lengths
                   made no difference on HalfCheetah.
    statistics     Observations are normalised by their running mean and deviation, rewards divided by the discounted
                   return's deviation. They change after an update only; the first iteration has mean 0, deviation 1.
    advantages     are normalised in each minibatch, in L_policy, not in L_value (--norm-adv).
    actions        are drawn and scored without bounds; the environment gets them clipped.
    log pi_old     is computed in one pass after the rollout: the networks are still those that drew the actions.
    a resume       goes on from the last whole iteration, in new episodes; flags given anew replace the saved ones.

Sources: "The 37 Implementation Details of PPO" (Huang et al. 2022); the course report "Proximal Policy Optimization"
         (Vincent, Violante, Sert, Masquil; MVA 2022).
Result:  HalfCheetah-v5, 1 M steps, mean return of the last 100 episodes, 10 seeds: 2300 (seven run on their backs,
         near 1700); with --gamma 0.98 --gae-lambda 0.92 --fixed-std 0.15 --no-clip-vloss 5227 (each above 3900).

Run:     python ppo_mlp_gaussian.py --env-id HalfCheetah-v5
Resume:  python ppo_mlp_gaussian.py --resume runs/HalfCheetah-v5__ppo_mlp_gaussian__1__1700000000
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
    cuda: bool = True  # use a GPU where there is one (networks as small as these may be faster with --no-cuda)
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
    env_id: str = "HalfCheetah-v5"  # id of a Gymnasium environment, or module:id
    num_envs: int = 8  # environments stepped side by side
    total_timesteps: int = 1_000_000  # environment steps of all environments, also those before a --resume

    # PPO (Schulman et al. 2017)
    num_steps: int = 256  # steps of each environment in an iteration
    update_epochs: int = 10  # passes over the batch in an iteration
    num_minibatches: int = 32  # minibatches an epoch
    learning_rate: float = 3e-4  # Adam's learning rate
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalized advantage estimation
    clip_coef: float = 0.2  # epsilon of the clipped surrogate objective
    ent_coef: float = 0.0  # weight of the entropy bonus
    vf_coef: float = 0.5  # weight of the value loss

    # The 37 details (Huang et al. 2022)
    anneal_lr: bool = True  # lower the learning rate linearly to 0 over --total-timesteps
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_vloss: bool = True  # clip the value's change too, by the same epsilon
    max_grad_norm: float = 0.5  # largest norm of the gradient, over all parameters; 0: no limit
    target_kl: float | None = None  # stop the update after an epoch whose mean KL exceeds this
    norm_obs: bool = True  # normalise observations by running statistics and clip them at 10
    norm_reward: bool = True  # divide rewards by the running std of the discounted return and clip them at 10

    # The course report (3.2, 4.1)
    fixed_std: float | None = None  # fixed standard deviation, a fraction of the action range; None: learned
    scale_actions: bool = False  # actions are drawn for [-1, 1], which is scaled to the action bounds


def make_env(env_id, eval_episodes=0, video_folder=None):
    """One environment; one line if this script can't drive it."""
    env = gym_make(env_id, eval_episodes, video_folder)
    space = env.action_space
    if not isinstance(space, gym.spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        needs = "this script needs a flat Box of floats; ppo_value_first.py takes Discrete too"
        raise SystemExit(f"--env-id {env_id}: its action space is {space}; {needs}")
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


class Agent(nn.Module):
    """Policy and value networks, and the statistics of the observations of all rollouts so far.

    `policy` and `value` take observations that `obs_norm` has normalised, `act` takes them from the environment.
    """

    def __init__(self, observation_space, action_space, args):
        super().__init__()
        obs_dim, act_dim, self.scale_actions = observation_space.shape[0], action_space.shape[0], args.scale_actions
        self.obs_norm = RunningNorm(obs_dim) if args.norm_obs else nn.Identity()
        self.actor = mlp(obs_dim, act_dim, 0.01)  # the small last layer starts every state with almost the same action
        self.critic = mlp(obs_dim, 1, 1.0)
        self.register_buffer("low", torch.as_tensor(action_space.low, dtype=torch.float32))
        self.register_buffer("high", torch.as_tensor(action_space.high, dtype=torch.float32))
        size = torch.full((act_dim,), 2.0) if args.scale_actions else self.high - self.low
        log_std = torch.zeros(act_dim) if args.fixed_std is None else (args.fixed_std * size).log()
        self.log_std = nn.Parameter(log_std, requires_grad=args.fixed_std is None)
        if (args.scale_actions and not (self.high - self.low).isfinite().all()) or not log_std.isfinite().all():
            needs = "--scale-actions and --fixed-std need finite action bounds, --fixed-std a number above 0"
            raise SystemExit(f"{needs}: got {args.fixed_std} and {action_space}")

    def policy(self, obs):
        """[..., obs_dim] -> the distribution of the actions [..., act_dim]"""
        return Gaussian(self.actor(obs), self.log_std)

    def value(self, obs):
        """[..., obs_dim] -> [...]"""
        return self.critic(obs).squeeze(-1)

    def to_env(self, actions):
        """What the environment gets: the actions, with --scale-actions scaled from [-1, 1], clipped to its bounds."""
        if self.scale_actions:
            actions = self.low + (actions + 1) / 2 * (self.high - self.low)
        return actions.clamp(self.low, self.high)

    @torch.no_grad()
    def act(self, obs):
        """Greedy actions for the environment, from its observations: [..., obs_dim] -> [..., act_dim]"""
        return self.to_env(self.policy(self.obs_norm(obs)).mode())


def really_followed(next_obs, final_obs, done):
    """The observations [num_envs, obs_dim] that really followed a step: an episode's last one where it ended.

    An episode s0 s1 s2 s3 ends in step 2, and the next one, r0 r1 ..., begins at once:

        step            0    1    2    3
        obs             s0   s1   s2   r0
        next_obs        s1   s2   r0   r1
        final_obs       -    -    s3   -
        followed        s1   s2   s3   r1
    """
    return np.where(done[:, None], final_obs, next_obs)


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


def minibatch_gradient(agent, args, normed_obs, actions, log_probs, values, advantages, returns):
    """Sets the gradient of one minibatch's loss, its norm clipped. -> log_ratio [minibatch], and the losses by name"""
    policy = agent.policy(normed_obs)
    log_ratio = policy.log_prob(actions) - log_probs
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    new_values = agent.value(normed_obs)
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
        obs = envs.reset()
        playing, begun, ended = np.arange(num_envs), num_envs, {}  # episodes are numbered as they begin
        while len(ended) < num_episodes:
            actions = agent.act(torch.as_tensor(obs, dtype=torch.float32, device=run.device))
            obs, _, _, _ = envs.step(actions.cpu().numpy(), playing < num_episodes)
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
    check_args(args)
    make, num_envs = partial(make_env, args.env_id), args.num_envs if args.total_timesteps else 1
    with Run(args) as run, SubprocVecEnv(make, num_envs, args.num_workers, [args.seed, run.iteration]) as envs:
        device = run.device
        torch.set_num_threads(1)  # layers of 64 units are too small to share: a second thread slows them down
        torch.manual_seed(args.seed)
        agent = Agent(envs.single_observation_space, envs.single_action_space, args).to(device)
        optimizer = torch.optim.Adam(agent.parameters(), eps=1e-5, fused=True)  # lr: set in each iteration
        return_norm = RunningNorm(()).to(device)
        fixed_log_std = agent.log_std.data.clone()
        run.begin(envs, model=agent, optimizer=optimizer, return_norm=return_norm)
        if args.fixed_std is not None:  # a resume may give it anew
            agent.log_std.data.copy_(fixed_log_std)

        def draw(obs):
            return agent.policy(agent.obs_norm(obs)).sample()

        gradient = compile_function(minibatch_gradient, device) if args.compile else minibatch_gradient
        if args.compile and device.type == "cuda":  # on a CPU a network this small draws faster as it is
            draw = compile_function(draw, device)

        obs, followed = torch.zeros((2, args.num_steps, *envs.obs.shape), device=device)  # [num_steps, num_envs, ...]
        actions = torch.zeros((args.num_steps, *envs.actions.shape), device=device)  # [num_steps, num_envs, act_dim]
        running_return = torch.zeros(args.num_envs, dtype=torch.float64, device=device)  # discounted
        next_obs = envs.reset()  # [num_envs, obs_dim]

        while run.global_step < run.budget:
            optimizer.param_groups[0]["lr"] = args.learning_rate * annealing(args, run.global_step)

            # Collect. The policy and the observation statistics stay as they are in the meantime.
            rollout_start = time.perf_counter()
            rewards, terminated, done = np.zeros((3, args.num_steps, args.num_envs), np.float32)
            for step in range(args.num_steps):
                obs[step] = torch.as_tensor(next_obs, device=device)
                with torch.no_grad():
                    actions[step] = draw(obs[step])
                    env_actions = agent.to_env(actions[step]).cpu().numpy()
                next_obs, rewards[step], terminated[step], truncated = envs.step(env_actions)
                done[step] = np.logical_or(terminated[step], truncated)
                followed[step] = torch.as_tensor(really_followed(next_obs, envs.final_obs, done[step]), device=device)
                run.count(args.num_envs, envs.episodes)

            # Advantages. The policy has not changed: one pass gives the log-probabilities of the whole rollout.
            update_start = time.perf_counter()
            rewards, terminated, done = (torch.as_tensor(x, device=device) for x in (rewards, terminated, done))
            scaled = (rewards / (return_norm.var + 1e-8).sqrt().float()).clamp(-10, 10) if args.norm_reward else rewards
            with torch.no_grad():
                normed_obs = agent.obs_norm(obs)
                log_probs = agent.policy(normed_obs).log_prob(actions)  # [num_steps, num_envs], as all below
                values, next_values = agent.value(normed_obs), agent.value(agent.obs_norm(followed))
                advantages = compute_gae(scaled, values, next_values, terminated, done, args.gamma, args.gae_lambda)
                returns = advantages + values

            # Update, then let the statistics see the rollout.
            batch = [x.flatten(0, 1) for x in (normed_obs, actions, log_probs, values, advantages, returns)]
            metrics = update(agent, optimizer, gradient, args, batch)
            if args.norm_obs:
                agent.obs_norm.update(obs)
            if args.norm_reward:
                return_norm.update(discounted_returns(rewards.double(), done, running_return, args.gamma))

            # Log, save, evaluate.
            metrics["losses/explained_variance"] = 1 - (returns - values).var() / returns.var()
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
        while command := os.read(connection.fileno(), 1):
            episodes = []
            for i, env in enumerate(envs):
                begin = command == RESET
                if command == STEP and view.active[i]:
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
    picklable. SystemExit says what failed."""

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
        self._command(RESET)
        return self.obs

    def step(self, actions, active=True):
        self.actions[:], self.active[:], space = actions, active, self.single_action_space
        if isinstance(space, gym.spaces.Box):  # in its own dtype: 0.1 is more in float32 than in float64
            np.clip(self.actions, space.low, space.high, out=self.actions)
        self.rewards[:] = self.terminated[:] = self.truncated[:] = 0  # of those that rest
        self._command(STEP)
        return self.obs, self.rewards, self.terminated, self.truncated

    def _command(self, command):
        self.episodes = []
        for _, connection, _ in self.workers:
            with suppress(OSError):  # of a worker that died: noticed below
                os.write(connection.fileno(), command)
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
            if array.dtype.kind == "f" and (wrong := np.argwhere(~np.isfinite(array))).size:
                raise SystemExit(f"environment {wrong[0, 0]} returned {name} that is not finite in {array.dtype}")

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
