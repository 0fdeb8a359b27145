"""The training loop, watched from outside, in all six scripts.

What the environments gave and got, what was drawn, what compute_gae got and what minibatches trained on is recorded,
and then computed again, step by step, with statistics and memories of this file's own.
"""

import copy
import inspect
from importlib import import_module
from types import SimpleNamespace

import gpu_check
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import SCRIPTS, recurrent, scripts

BASE, FLAGSHIP, VALUE_FIRST = "ppo_mlp_gaussian", "ppo_interleaved_gru_beta", "ppo_value_first"
ADAPTIVE, RECURRENT, COMB = "ppo_kl_adaptive", "ppo_lstm_atari", "ppo_comb_dist"
VARIANTS = [
    (BASE, {}),
    (BASE, {"scale_actions": True, "norm_obs": False, "fixed_std": 0.1}),
    (FLAGSHIP, {}),
    (FLAGSHIP, {"reward_scale": 0.25, "norm_reward": False, "beta_head": "alpha"}),
    (FLAGSHIP, {"reward_scale": 0.25, "separate_critic": True, "window": 3}),
    (FLAGSHIP, {"interleave": False}),
    (FLAGSHIP, {"window": 1}),
    (VALUE_FIRST, {"norm_obs": True, "norm_reward": True}),
    (VALUE_FIRST, {"norm_obs": True, "discrete": True}),
    (VALUE_FIRST, {"norm_obs": True, "discrete": True, "order": "joint", "shared_update": True}),
    (VALUE_FIRST, {"norm_obs": True, "norm_reward": True, "order": "phases", "critic": "support"}),
    (ADAPTIVE, {"preset": "post"}),
    (ADAPTIVE, {"preset": "post", "bootstrap_time_limit": True, "norm_reward": True}),
    (ADAPTIVE, {"preset": "post", "gamma": 0.9995, "norm_obs": False}),
    (ADAPTIVE, {"preset": "paper"}),
    (RECURRENT, {"rnn": "lstm", "norm_obs": True, "norm_reward": True}),
    (RECURRENT, {"rnn": "gru"}),
    (RECURRENT, {"rnn": "lstm", "discrete": True}),
    (RECURRENT, {"rnn": "gru", "norm_obs": True, "discrete": True}),
    (RECURRENT, {"rnn": "lstm", "images": True}),
    (COMB, {}),
    (COMB, {"density": "as-coded"}),
]
ENVS, STEPS, LIMIT = 4, 20, 10


class Lopsided(gym.Env):
    """A point that chance and actions push around; from the third episode on it may be too far out.

    The first two fill a rollout, so a time limit falls on its last step. Nothing is centred or scaled.
    """

    episodes = 0

    def __init__(self, start=None, images=False, render_mode=None):
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
        if images:
            self.observation_space = gym.spaces.Box(0, 255, (36, 40, 3), np.uint8)
        self.action_space = gym.spaces.Box(np.float32([-0.5, -2]), np.float32([1.5, 0.5]))
        if start is not None:
            self.action_space = gym.spaces.Discrete(3, start=start)

    def observation(self):
        if len(self.observation_space.shape) > 1:
            return np.tile(np.uint8(np.clip(50 * self.point + 128, 0, 255)), (36, 40, 1))
        return self.point * [1.0, 5.0, 0.2] + [2.0, -10.0, 0.0]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.point, self.episodes = self.np_random.normal(size=3), self.episodes + 1
        return self.observation(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"not a valid action: {action}"
        self.point += 0.5 * self.np_random.normal(size=3)
        self.point[:2] += 0.2 * np.asarray(action)
        terminated = bool(self.episodes > 2 and np.abs(self.point).max() > 2.5)
        return self.observation(), -float(np.square(self.point).sum()), terminated, False, {}


for suffix, kwargs in {"": {}, "From-1": {"start": -1}, "Images": {"images": True}}.items():
    gym.register(f"Lopsided{suffix}-v0", "test_loop:Lopsided", max_episode_steps=LIMIT, kwargs=kwargs)


def watch(patch, owner, name, after):
    """Has after(outcome, *inputs) called after each call."""
    function = getattr(owner, name)

    def spy(*inputs, **named):
        outcome = function(*inputs, **named)
        after(outcome, *inputs, **named)
        return outcome

    patch.setattr(owner, name, spy)


# The adapter: all that depends on the inside of a script, down to the recording.


def make_args(name, script, flags, iterations=3, **more):
    flags = dict(num_steps=STEPS, num_minibatches=2) | flags
    size = ENVS * STEPS
    kind = "From-1" * flags.pop("discrete", False) + "Images" * flags.pop("images", False)
    if flags.get("preset") == "post":  # batches of eight whole episodes
        flags, size = flags | dict(num_steps=0, num_minibatches=1, episodes_per_batch=8), 8 * LIMIT
    if name == FLAGSHIP:
        flags |= dict(hidden_size=16, init_std=0.3)
    flags |= dict(env_id=f"test_loop:Lopsided{kind}-v0", num_envs=ENVS, total_timesteps=iterations * size)
    flags |= dict(update_epochs=2, learning_rate=3e-3, num_workers=1, eval_episodes=0, cuda=False)
    return script.Args(**getattr(script, "PRESETS", {}).get(flags.get("preset"), {}) | flags | more)


def is_post(args):
    return getattr(args, "preset", None) == "post"


def parameters(policy):
    """Of a distribution, whatever its class."""
    if hasattr(policy, "beta"):
        return [policy.beta.concentration1, policy.beta.concentration0]
    return [getattr(policy, name) for name in ("mean", "log_std", "log_density", "log_probs") if hasattr(policy, name)]


def watch_draws(patch, script, record):
    """Has record(parameters, actions, log_probs) called at each draw: of the distribution drawn from, on the spot."""
    for name in ("Gaussian", "Comb", "Beta", "Categorical"):
        if hasattr(script, name):
            after = lambda actions, self, *_: record(parameters(self), actions, self.log_prob(actions))  # noqa: E731
            watch(patch, getattr(script, name), "sample", after)


class Memory:
    """What policies remember of each environment's episode: its past, or a state; and what they make of it."""

    def __init__(self):
        self.past, self.state = [[] for _ in range(ENVS)], None

    def forget(self, first):
        self.past = [[] if begins else past for past, begins in zip(self.past, first)]
        if self.state is not None:
            goes_on = torch.tensor(~first)[:, None]
            self.state = torch.utils._pytree.tree_map(lambda x: torch.where(goes_on, x, 0.0), self.state)

    def look(self, agent, normalise, obs):
        """-> the policy's parameters and the values at obs [num_envs, obs_dim]"""
        if hasattr(agent, "rnn"):
            outputs, self.next_state = agent.rnn(agent.encoder(normalise(obs))[None], self.state)
            return parameters(agent.policy(outputs[0])), agent.value(outputs[0])
        if not hasattr(agent, "read"):
            return parameters(agent.policy(normalise(obs))), agent.value(normalise(obs))
        window = agent.args.window
        states, actions = torch.zeros(ENVS, window, 3), torch.zeros(ENVS, window, 2)
        pasts = [past[max(0, len(past) - window + 1) :] for past in self.past]
        for i, past in enumerate(pasts):
            states[i, : len(past) + 1] = normalise(np.stack([state for state, _ in past] + [obs[i]]))
            for j, (_, action) in enumerate(past):
                actions[i, j] = action
        output, _, current = agent.read(states, actions, torch.tensor([len(past) for past in pasts]))
        return parameters(agent.policy(output)), agent.value(output, current)

    def remember(self, agent, normalise, obs, actions):
        for past, *step in zip(self.past, obs, actions):
            past.append(step)
        self.look(agent, normalise, obs)
        self.state = getattr(self, "next_state", None)


def normalised(args, obs, mean, var):
    """[..., obs_dim] by these statistics -> float32"""
    if args.norm_obs and is_post(args):
        obs = np.append(((obs - mean) / (np.sqrt(var) + 0.1) / 3)[..., :-1], obs[..., -1:], -1)  # the last is the time
    elif args.norm_obs:
        obs = np.clip((obs - mean) / np.sqrt(var + 1e-8), -10, 10)
    elif obs.ndim > 3:  # images
        obs = np.moveaxis(obs, -1, 1) / 255
    return torch.tensor(obs, dtype=torch.float32)


def for_environment(args, space, actions):
    """What the environment shall get for the actions that were drawn."""
    if isinstance(space, gym.spaces.Discrete):
        return actions + space.start
    if getattr(args, "scale_actions", False):
        return space.low + (actions.clip(-1, 1) + 1) / 2 * (space.high - space.low)
    return actions.clip(space.low, space.high)


def trained_on(function, outputs, *inputs):
    """What minibatch_gradient gave and got."""
    got = inspect.signature(function).bind(*inputs).arguments
    names = ["log_probs", "advantages", "returns", *({"values", "old_mean"} & got.keys())]
    found = {name: got[name].clone() if name == "old_mean" else got[name].clone().flatten() for name in names}
    return SimpleNamespace(phase=got.get("phase", "policy"), log_ratio=outputs[0].clone().flatten(), **found)


# The recording


def whole_step(parts):
    """One step of all environments, from its parts: (rows, what was seen of them), which have stepped in turns."""
    order = np.argsort(np.concatenate([np.arange(ENVS)[rows] for rows, _ in parts]))
    step = SimpleNamespace(halves=len(parts))
    for name in vars(parts[0][1]).keys() - {"draws"}:
        setattr(step, name, np.concatenate([getattr(part, name) for _, part in parts])[order])
    draws = zip(*(part.draws for _, part in parts), strict=True)  # a draw of all parts at a time
    step.draws = []
    for parameters, actions, log_probs in (zip(*draw) for draw in draws):
        # a logarithm of standard deviations is one for all environments
        parameters = [x[0] if x[0].ndim == 1 else torch.cat(x)[order] for x in zip(*parameters)]
        step.draws.append((parameters, torch.cat(actions)[order], torch.cat(log_probs)[order]))
    return step


def unlike_at_the_start(agent):
    """Policies that are alike in every state, as at the start, would hide much."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def record(name, flags, patch, run_dir):
    """Trains, and returns what was seen: in `rollouts` one entry for each time that steps were collected."""
    script = import_module(name)
    args = make_args(name, script, flags, run_dir=str(run_dir))
    run = SimpleNamespace(name=name, args=args, rollouts=[], statistics=[], sent=[], parts=[])

    def statistics():
        norms = [run.agent.obs_norm] * args.norm_obs + [run.return_norm] * args.norm_reward
        return [[x.numpy().copy() for x in (norm.mean, norm.var, norm.count)] for norm in norms]

    def after_begin(_, self, envs, **parts):
        run.agent, run.return_norm, run.space = parts["model"], parts["return_norm"], envs.single_action_space
        unlike_at_the_start(run.agent)

    def after_reset(obs, envs):
        run.obs, run.first, run.begun = obs.copy(), np.ones(ENVS, bool), False

    def after_draw(parameters, actions, log_probs):
        if not run.begun or run.rollouts[-1].gae:
            run.statistics.append(statistics())
            run.rollouts.append(SimpleNamespace(agent=copy.deepcopy(run.agent), steps=[], gae=[], minibatches=[]))
            run.begun, run.draws = True, []
        run.draws.append(([x.clone() for x in parameters], actions.clone(), log_probs.clone()))

    def after_send(_, envs, actions, active=True, rows=slice(None), command=script.STEP):
        if command == script.STEP:  # else a reset
            run.sent.append((rows, np.array(actions), np.broadcast_to(active, ENVS)[rows].copy(), run.draws))
            run.draws = []

    def after_receive(outcome, envs, rows=slice(None)):
        if run.sent:  # else this is the answer to a reset
            sent_rows, actions, active, draws = run.sent.pop(0)
            assert sent_rows == rows
            obs, rewards, terminated, truncated = (x.copy() for x in outcome)
            done = terminated | truncated
            followed = obs.copy()
            followed[done] = envs.final_obs[rows][done]
            part = dict(obs=run.obs[rows].copy(), first=run.first[rows].copy(), followed=followed, done=done)
            part |= dict(rewards=rewards.astype(np.float64), terminated=terminated, sent=actions, active=active)
            run.parts.append((rows, SimpleNamespace(**part, draws=draws)))
            run.obs[rows], run.first[rows] = obs, done
            if sum(len(part.done) for _, part in run.parts) == ENVS:
                run.rollouts[-1].steps.append(whole_step(run.parts))
                run.parts = []

    def after_step(outcome, envs, actions, active=True):
        after_send(None, envs, actions, active)
        after_receive(outcome, envs)

    def after_gae(advantages, rewards, values, next_values, terminated, done, *coefficients):
        call = dict(rewards=rewards, values=values, next_values=next_values, terminated=terminated, done=done)
        call = {key: x.clone() for key, x in (call | {"advantages": advantages}).items()}
        call |= dict(coefficients=coefficients, agent=copy.deepcopy(run.agent))
        run.rollouts[-1].gae.append(SimpleNamespace(**call))

    watch(patch, script.Run, "begin", after_begin)
    watch(patch, script.SubprocVecEnv, "reset", after_reset)
    if name in (FLAGSHIP, RECURRENT):  # halves of the environments take turns
        watch(patch, script.SubprocVecEnv, "send", after_send)
        watch(patch, script.SubprocVecEnv, "receive", after_receive)
    else:
        watch(patch, script.SubprocVecEnv, "step", after_step)
    if hasattr(script, "collect"):  # also of episodes that no advantages follow
        watch(patch, script, "collect", lambda *_, **__: setattr(run, "begun", False))
    watch(patch, script, "compute_gae", after_gae)
    after_iteration = lambda _, self, metrics, *times: setattr(run.rollouts[-1], "metrics", metrics)  # noqa: E731
    watch(patch, script.Run, "end_iteration", after_iteration)
    gradient = script.minibatch_gradient
    after_minibatch = lambda *call: run.rollouts[-1].minibatches.append(trained_on(gradient, *call))  # noqa: E731
    watch(patch, script, "minibatch_gradient", after_minibatch)
    watch_draws(patch, script, after_draw)
    script.train(args)
    run.statistics.append(statistics())
    return run


def moments(seen, shape):
    """Mean, variance and count of everything seen."""
    return [np.mean(seen, 0), np.var(seen, 0), len(seen)] if seen else [np.zeros(shape), np.ones(shape), 0]


def discount(args, iteration):
    """The flagship's goes from --init-gamma to --gamma, linearly over the first half of the budget's steps."""
    first = getattr(args, "init_gamma", args.gamma)
    step = iteration * args.num_envs * args.num_steps  # taken before the iteration
    return first + (args.gamma - first) * min(1, step / (args.total_timesteps / 2))


def expect_statistics(run):
    """Those of observations and of discounted returns, before each rollout and at the end."""
    obs, returns, running = [], [], np.zeros(ENVS)
    run.expected_statistics = [(moments([], run.obs.shape[1:]), moments([], ()))]
    for rollout in run.rollouts:
        obs.extend(rollout.obs[rollout.active].astype(np.float64))
        gamma = discount(run.args, len(run.expected_statistics) - 1)
        scaled = rollout.rewards * getattr(run.args, "reward_scale", 1.0)
        for first, rewards, active in zip(rollout.first, scaled, rollout.active if rollout.gae else []):
            running = np.where(first, 0.0, running * gamma) + rewards
            returns.extend(running[active])
        run.expected_statistics.append((moments(obs, ()), moments(returns, ())))


@torch.no_grad()
def expect_policy_and_values(run):
    """The policy's parameters at each step; for each call of compute_gae V of what was seen and of what followed."""
    memory = Memory()
    for rollout, ((mean, var, _), _) in zip(run.rollouts, run.expected_statistics):

        def normalise(obs, mean=mean, var=var):
            return normalised(run.args, obs, mean, var)

        rollout.parameters = []
        for call in rollout.gae:
            call.expected_values, call.expected_next_values = torch.zeros(2, len(rollout.steps), ENVS)
        for t, step in enumerate(rollout.steps):
            memory.forget(step.first)
            rollout.parameters.append(memory.look(rollout.agent, normalise, step.obs)[0])
            for call in rollout.gae:
                call.expected_values[t] = memory.look(call.agent, normalise, step.obs)[1]
            memory.remember(rollout.agent, normalise, step.obs, step.draws[0][1])
            for call in rollout.gae:
                call.expected_next_values[t] = memory.look(call.agent, normalise, step.followed)[1]


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def run(request, tmp_path_factory):
    """A recorded training; beside what was found stands what is expected."""
    with pytest.MonkeyPatch.context() as patch:
        run = record(*request.param, patch, tmp_path_factory.mktemp("loop") / "run")
    run.iterations = [rollout for rollout in run.rollouts if rollout.gae]  # the post's scaler begins with another one
    for rollout in run.rollouts:
        for key in vars(rollout.steps[0]).keys() - {"draws", "halves"}:
            setattr(rollout, key, np.stack([getattr(step, key) for step in rollout.steps]))  # [steps, num_envs, ...]
    expect_statistics(run)
    expect_policy_and_values(run)
    return run


def close(found, expected, atol=1e-5, rtol=1e-5):
    found, expected = torch.as_tensor(found), torch.as_tensor(expected)
    torch.testing.assert_close(found, expected, atol=atol, rtol=rtol, check_dtype=False)


# The tests


def test_episodes_end_in_both_ways(run):
    """Some with the last step of a rollout; else the tests below would show less."""
    assert len(run.iterations) >= 3
    assert len(run.rollouts) - len(run.iterations) == (is_post(run.args) and run.args.norm_obs)
    assert sum(rollout.terminated.sum() for rollout in run.iterations) >= 3
    assert sum((rollout.done & ~rollout.terminated).sum() for rollout in run.iterations) >= 3
    assert any(rollout.done[-1].any() for rollout in run.iterations)


def test_halves_take_turns_where_inference_is_dear(run):
    halves = 2 if run.name in (FLAGSHIP, RECURRENT) else 1
    assert {step.halves for rollout in run.rollouts for step in rollout.steps} == {halves}


def test_actions_are_drawn_from_the_policy_at_the_normalised_observations(run):
    for rollout in run.rollouts:
        for step, expected in zip(rollout.steps, rollout.parameters):
            ((parameters, actions, _),) = step.draws
            for x, y in zip(parameters, expected, strict=True):
                close(x, y)
            close(step.sent, for_environment(run.args, run.space, actions.numpy()), 1e-6, 1e-6)


def test_values_are_of_what_was_seen_and_of_what_followed(run):
    for rollout in run.iterations:
        for call in rollout.gae:
            close(call.values[rollout.active], call.expected_values[rollout.active])
            counts = rollout.active & ~call.terminated.bool().numpy()
            close(call.next_values[counts], call.expected_next_values[counts])


def test_rewards_and_ends_are_the_environments(run):
    args = run.args
    limits_are_ends = is_post(args) and not args.bootstrap_time_limit
    for iteration, (rollout, (_, (_, var, _))) in enumerate(zip(run.rollouts, run.expected_statistics)):
        shrunk = is_post(args) and not args.norm_reward and args.gamma < 0.999
        rewards = rollout.rewards * getattr(args, "reward_scale", 1 - args.gamma if shrunk else 1)
        if args.norm_reward:
            rewards = np.clip(rewards / np.sqrt(var + 1e-8), -10, 10)
        for i, call in enumerate(rollout.gae):
            close(call.rewards, rewards)
            assert np.array_equal(call.done, rollout.done)
            assert np.array_equal(call.terminated, rollout.done if limits_are_ends else rollout.terminated)
            gae_lambda = 1.0 if is_post(args) and i == 1 else args.gae_lambda
            assert call.coefficients == (discount(args, iteration), gae_lambda)


def test_statistics_are_of_everything_seen_before_the_iteration(run):
    for found, (obs, returns) in zip(run.statistics, run.expected_statistics, strict=True):
        expected = [obs] * run.args.norm_obs + [returns] * run.args.norm_reward
        for x, y in zip(found, expected, strict=True):
            for moment, expected_moment in zip(x, y, strict=True):
                close(moment, expected_moment, 1e-9, 1e-6)


def test_the_first_minibatch_has_the_log_probs_of_the_draws(run):
    """Ratios of 1, log-probabilities as recorded at the draw; and in each what else belongs to its steps."""
    value_first = run.name == VALUE_FIRST and run.args.order == "value-first"
    for rollout in run.iterations:
        drawn = torch.stack([step.draws[0][2] for step in rollout.steps])[rollout.active]
        targets = rollout.gae[1 if is_post(run.args) else 0]  # the post's have a lambda of 1
        returns = (targets.advantages + targets.values)[rollout.active]
        for phase, call in ("value", rollout.gae[0]), ("policy", rollout.gae[-1 if value_first else 0]):
            minibatches = [minibatch for minibatch in rollout.minibatches if minibatch.phase in (phase, "joint")]
            advantages, order = call.advantages[rollout.active].sort()
            for minibatch in minibatches:  # which step a row is shows in its advantage
                place = torch.searchsorted(advantages, minibatch.advantages).clamp(max=len(order) - 1)
                assert torch.equal(minibatch.advantages, advantages[place])
                minibatch.rows = order[place]
                assert torch.equal(minibatch.returns, returns[minibatch.rows])
                if hasattr(minibatch, "values"):
                    assert torch.equal(minibatch.values, rollout.gae[0].values[rollout.active][minibatch.rows])
                if hasattr(minibatch, "old_mean"):
                    means = torch.stack([step.draws[0][0][0] for step in rollout.steps])[rollout.active]
                    close(minibatch.old_mean, means[minibatch.rows])
        epoch = torch.cat([minibatch.rows for minibatch in minibatches[: run.args.num_minibatches]])
        assert torch.equal(epoch.sort()[0], torch.arange(len(drawn)))
        first, last, ones = minibatches[0], minibatches[-1], torch.ones(len(minibatches[0].rows))
        close(first.log_ratio.exp(), ones, 1e-5, 0)
        close((first.log_ratio + first.log_probs - drawn[first.rows]).exp(), ones, 1e-5, 0)
        assert (last.log_ratio.exp() - 1).abs().max() > 1e-3


def test_explained_variance_is_the_share_of_the_returns_variance_that_the_old_values_have(run):
    for rollout in run.iterations:
        call = rollout.gae[1 if is_post(run.args) else 0]
        advantages, values = call.advantages[rollout.active], call.values[rollout.active]
        close(rollout.metrics["losses/explained_variance"], 1 - advantages.var() / (advantages + values).var())


@pytest.mark.slow
@pytest.mark.parametrize("name", [BASE, FLAGSHIP, VALUE_FIRST, ADAPTIVE, RECURRENT, COMB])
def test_compiled_training_gives_what_eager_training_gives(name, monkeypatch, tmp_path):
    """The parameters after two iterations. Adam moves them by up to 3e-3 in each of some eight steps: a wrong gradient
    shows as much. Rounding made a difference of 1e-6 at most; 1e-4 leaves room for other machines."""
    script, flags = import_module(name), next(flags for other, flags in VARIANTS if other == name)
    before, after, functions = [], [], []

    def after_begin(_, self, envs, **parts):
        unlike_at_the_start(parts["model"])
        before.append(copy.deepcopy(parts["model"]))
        after.append(parts["model"])

    watch(monkeypatch, script.Run, "begin", after_begin)
    watch(monkeypatch, torch, "compile", lambda *call, **_: functions.append(call))
    with import_module("torch._inductor.config").patch(fallback_random=True):  # draws that are compiled are the same
        for compiled in (False, True):
            script.train(make_args(name, script, flags, 2, compile=compiled, run_dir=str(tmp_path / str(compiled))))
    start, eager, compiled = (torch.cat([p.flatten() for p in x.parameters()]) for x in (before[0], *after))
    assert functions and (eager - start).abs().max() > 1e-2
    close(compiled, eager, 1e-4, 0)
    assert after[0].state_dict().keys() == after[1].state_dict().keys()  # which a checkpoint saves


def stub_robot(control, render_mode=None):
    """What PoseActions reads of a robot of HumanoidBench's. It stands at 0.2, 1.5, -0.4, until a reset changes that."""
    robot = type("Robot", (gym.Env,), {"__module__": "humanoid_bench.stub"})()
    robot.observation_space = robot.action_space = gym.spaces.Box(-1, 1, (3,))
    robot.action_low, robot.action_high = np.array([-1, 0, -0.5]), np.array([1, 2, 0.5])
    robot.model, robot.keyframe = SimpleNamespace(key_qpos={"stand": np.array([0.6, 1.25, 0.3])}), "stand"
    robot.data, robot.init_qvel = SimpleNamespace(actuator_length=np.zeros(3)), np.zeros(3)
    robot.set_state = lambda qpos, qvel: np.copyto(robot.data.actuator_length, 2 * qpos - 1 + qvel)
    robot.reset = lambda **_: (robot.data.actuator_length.fill(0) or np.zeros(3), {})
    robot.step = lambda action: (np.zeros(3), 0.0, False, False, {"got": action})
    return robot


@pytest.mark.parametrize(
    "control, action, got",
    [
        ("pos", 0, [0.2, 0.5, -0.8]),
        ("pos", 0.1, [0.3, 0.6, -0.6]),
        ("pos", [0.4, -0.7, 0.25], [0.6, -0.2, -0.3]),
        ("pos", 1, [1, 1, 1]),
        ("pos", -1, [-0.8, -0.5, -1]),
        ("torque", 0.1, [0.1, 0.1, 0.1]),
    ],
)
def test_pose_actions_of_a_stub_robot_are_radians_from_its_first_pose(control, action, got, monkeypatch):
    spec = gym.envs.registration.EnvSpec("Stub-v0", entry_point=stub_robot, kwargs={"control": control})
    monkeypatch.setitem(gym.registry, "Stub-v0", spec)
    env = import_module(FLAGSHIP).make_env("Stub-v0")
    env.reset()
    close(env.step(np.zeros(3, np.float32) + np.float32(action))[-1]["got"], np.float64(got))


@scripts(*(module for module in SCRIPTS.values() if module is not recurrent))
def test_updates_stand_on_one_device(module, tmp_path):
    """Nothing that an update makes is on a device of its own: the check that needs no GPU."""
    gpu_check.check_placement(module, tmp_path / "run")
