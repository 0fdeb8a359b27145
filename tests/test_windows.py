"""The flagship: windows against slow references, padding, and the Beta against closed forms."""

import copy
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import conftest
import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import resume_args, small_args

import ppo_interleaved_gru_beta as ppo

OBS_DIM, ACT_DIM, ENVS = 3, 2, 4
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
ACTIONS = gym.spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))
LOW, SIZE = torch.as_tensor(ACTIONS.low), torch.as_tensor(ACTIONS.high - ACTIONS.low)


def agent(**flags):
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(hidden_size=16, **flags))
    with torch.no_grad():  # far from the symmetric start
        policy.actor[-1].weight.normal_()
    return policy


def random_actions(*shape):
    return LOW + SIZE * torch.rand(*shape, ACT_DIM)


def random_windows(num_before, window=8):
    num_windows = len(num_before)
    return torch.randn(num_windows, window, OBS_DIM), random_actions(num_windows, window), num_before


@pytest.mark.parametrize("window", [1, 2, 8])
def test_windows_hold_the_last_steps_of_the_episode(window):
    rng = np.random.default_rng(0)
    windows = agent(window=window).empty_windows(ENVS)
    episodes = [[] for _ in range(ENVS)]  # of (state, action), the current episode's
    lengths = set()
    for step in range(40):
        first = (rng.random(ENVS) < 0.15) | (step == 0)
        next_states, taken = torch.randn(ENVS, OBS_DIM), random_actions(ENVS)
        before = copy.deepcopy(windows)
        states, actions, num_before = ppo.slide(*windows, next_states, first)
        assert all(map(torch.equal, before, windows))  # what was kept of earlier steps stays
        windows = states, actions, num_before
        actions[torch.arange(ENVS), num_before] = taken
        assert states.shape == (ENVS, window, OBS_DIM) and actions.shape == (ENVS, window, ACT_DIM)
        for env in range(ENVS):
            episodes[env] = [*([] if first[env] else episodes[env]), (next_states[env], taken[env])][-window:]
            length = len(episodes[env])
            lengths.add(length)
            assert num_before[env] == length - 1
            for tensor, expected in zip((states, actions), zip(*episodes[env])):
                assert torch.equal(tensor[env, :length], torch.stack(expected))
    assert lengths == set(range(1, window + 1))


def slow(policy, states, actions):
    """One window without padding, token by token: states [n, obs_dim] and the n - 1 actions between them.

    -> the distribution of the action as a fraction of its range, the value, and the errors of the n - 1 predictions
    """
    tokens = []
    for j, state in enumerate(states):
        tokens.append(policy.state_encoder(state))
        if policy.args.interleave and j < len(actions):
            tokens.append(policy.action_encoder(2 * (actions[j] - policy.low) / (policy.high - policy.low) - 1))
    outputs = policy.gru(torch.stack(tokens)[None])[0][0]
    head = policy.actor(outputs[-1])
    if policy.args.beta_head == "alpha":
        alpha, beta = (1 + (1 + head.exp()).log()).chunk(2)
    else:
        mode, concentration = 1 / (1 + (-head).exp()), policy.log_concentration.exp()
        alpha, beta = 1 + concentration * mode, 1 + concentration * (1 - mode)
    value = policy.critic(states[-1] if policy.args.separate_critic else outputs[-1])[0]
    before = outputs[1::2] if policy.args.interleave else outputs[:-1]  # what is read before each of states[1:]
    errors = [(policy.decoder(output) - state).square().mean() for output, state in zip(before, states[1:])]
    return torch.distributions.Beta(alpha.double(), beta.double()), value, errors


def slow_log_prob(policy, noise, action):
    size = policy.high - policy.low
    return (noise.log_prob((action.double() - policy.low) / size) - size.log()).sum()


@torch.no_grad()
@pytest.mark.parametrize(
    "flags",
    [{}, {"beta_head": "alpha"}, {"interleave": False}, {"separate_critic": True}, {"window": 1}, {"window": 2}],
)
def test_padding_is_inert(flags):
    policy, errors = agent(**flags), []
    window = policy.args.window
    states, actions, num_before = windows = random_windows(torch.arange(window), window)
    output, outputs, current = policy.read(*windows)
    noise, values = policy.policy(output), policy.value(output, current)
    for i in range(window):
        expected, value, new_errors = slow(policy, states[i, : i + 1], actions[i, :i])
        torch.testing.assert_close(noise.beta.mean[i], expected.mean, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(noise.beta.stddev[i], expected.stddev, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(values[i], value)
        errors += new_errors
    loss = policy.prediction_loss(outputs, states, num_before)
    torch.testing.assert_close(loss, torch.stack(errors).mean() if errors else torch.tensor(0.0))
    for i in range(window):  # changing the padding changes nothing
        states[i, i + 1 :], actions[i, i:] = 99.0, 0.123
    again, outputs, _ = policy.read(*windows)
    assert torch.equal(output, again)
    torch.testing.assert_close(policy.prediction_loss(outputs, states, num_before), loss)
    assert policy.prediction_loss(outputs, states, 0 * num_before) == 0  # nothing to predict


def test_the_beta_draws_what_it_scores():
    """The density of each dimension integrates to 1, -log p over it to the entropy; samples have its moments."""
    torch.manual_seed(0)
    alpha, beta = torch.tensor([3.0, 61.0]), torch.tensor([1.2, 58.0])
    drawn = ppo.Beta(alpha.expand(200_000, 2), beta.expand(200_000, 2), LOW, LOW + SIZE).sample()
    assert ((LOW <= drawn) & (drawn <= LOW + SIZE)).all()
    log_prob, entropy = torch.zeros(100_000), 0
    for i in range(ACT_DIM):
        alone = ppo.Beta(alpha[i, None], beta[i, None], LOW[i, None], (LOW + SIZE)[i, None])
        points = LOW[i] + SIZE[i] * (torch.arange(100_000) + 0.5) / 100_000
        density = alone.log_prob(points[:, None]).exp() * SIZE[i]
        assert density.mean() == pytest.approx(1, abs=1e-3)
        mean = (points * density).mean()
        assert drawn[:, i].mean() == pytest.approx(mean.item(), abs=0.01)
        std = ((points - mean).square() * density).mean().sqrt()
        assert drawn[:, i].std() == pytest.approx(std.item(), rel=0.01)
        log_prob += alone.log_prob(drawn[:100_000, i, None])
        entropy += torch.special.entr(density / SIZE[i]).mean().item() * SIZE[i].item()
    noise = ppo.Beta(alpha, beta, LOW, LOW + SIZE)
    torch.testing.assert_close(noise.log_prob(drawn[:100_000]), log_prob, atol=1e-5, rtol=1e-5)  # the sum over both
    assert noise.entropy() == pytest.approx(entropy, abs=2e-3)


def test_actions_at_the_bounds_have_finite_log_probs_and_gradients():
    alpha = torch.full((2, ACT_DIM), 40.0, requires_grad=True)
    beta = torch.full((2, ACT_DIM), 1.0, requires_grad=True)
    log_prob = ppo.Beta(alpha, beta, LOW, LOW + SIZE).log_prob(LOW + SIZE * torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    log_prob.sum().backward()
    assert all(t.isfinite().all() for t in (log_prob, alpha.grad, beta.grad))


@pytest.mark.parametrize("beta_head", ["mode", "alpha"])
@pytest.mark.parametrize("init_std", [0.02, 0.05, 0.15, 0.48])
def test_noise_of_the_first_actions(beta_head, init_std):
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(beta_head=beta_head, init_std=init_std))
    noise = policy.policy(policy.read(*random_windows(torch.full((64,), 7)))[0]).beta
    torch.testing.assert_close(2 * noise.stddev, torch.full((64, ACT_DIM), init_std).double(), rtol=0.05, atol=0)
    torch.testing.assert_close(noise.mean, torch.full((64, ACT_DIM), 0.5).double(), rtol=0, atol=0.02)


def test_the_head_gives_the_mode_of_the_beta():
    policy = agent()
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.3, -1.2]))
        policy.log_concentration.copy_(torch.tensor([2.0, 0.5]))
        policy.actor[-1].weight.zero_()
        noise = policy.policy(torch.zeros(1, 16))
    x = torch.linspace(0, 1, 10_001, dtype=torch.float64)[1:-1, None]
    densest = x[noise.beta.log_prob(x).argmax(0), 0].float()
    torch.testing.assert_close(densest, torch.tensor([0.3, -1.2]).sigmoid(), rtol=0, atol=1e-4)
    torch.testing.assert_close(noise.mode()[0], LOW + SIZE * densest, rtol=0, atol=1e-3)
    concentration = noise.beta.concentration1 + noise.beta.concentration0 - 2
    torch.testing.assert_close(concentration.float(), torch.tensor([[2.0, 0.5]]).exp(), rtol=1e-5, atol=0)


@torch.no_grad()
def test_greedy_actions_are_the_mode_after_the_remembered_window():
    policy = agent()
    windows, seen = policy.empty_windows(2), [[], []]
    for step in range(12):
        first, obs = np.array([step in (0, 5), step == 0]), torch.randn(2, OBS_DIM)
        actions, windows = policy.act(obs, first, windows)
        for env in range(2):
            seen[env] = [] if first[env] else seen[env][-7:]
            states = torch.stack([*(state for state, _ in seen[env]), obs[env]])
            noise, _, _ = slow(policy, states, [action for _, action in seen[env]])
            alpha, beta = noise.concentration1, noise.concentration0
            torch.testing.assert_close(actions[env], (LOW + SIZE * (alpha - 1) / (alpha + beta - 2)).float())
            seen[env].append((obs[env], actions[env]))


def test_evaluation_says_where_episodes_begin_and_plays_them_whole(tmp_path, monkeypatch):
    act, step, init = ppo.Agent.act, ppo.SubprocVecEnv.step, ppo.SubprocVecEnv.__init__
    calls, ends, made, seeds = [], [], [], []

    def spy_act(policy, obs, first, windows):
        actions, after = act(policy, obs, first, windows)
        calls.append((first.tolist(), windows, after))
        return actions, after

    def spy_step(*inputs):
        outcome = step(*inputs)
        ends.append((outcome[2] | outcome[3]).tolist())
        return outcome

    def spy_init(self, make, *inputs):
        given = make.keywords
        made.append((given["lying_steps"], given["pose_actions"], given.get("eval_episodes", 0)))
        seeds.append(inputs[2])
        init(self, make, *inputs)

    monkeypatch.setattr(ppo.Agent, "act", spy_act)
    monkeypatch.setattr(ppo.SubprocVecEnv, "step", spy_step)
    monkeypatch.setattr(ppo.SubprocVecEnv, "__init__", spy_init)
    flags = {"num_envs": 2, "num_steps": 32, "lying_steps": 7, "pose_actions": False}
    ppo.train(small_args(ppo, tmp_path / "run", 1, eval_episodes=5, **flags))
    assert made == [(7, False, 0), (7, False, 5)] and seeds == [[1, 0], [1, 2**31]]
    assert [first for first, _, _ in calls] == [[True, True], *ends[:-1]] and sum(map(sum, ends[:-1])) >= 3
    assert all(before is after for (_, before, _), (_, _, after) in zip(calls[1:], calls))


@pytest.mark.parametrize(
    "flags", [{}, {"entropy_mean": True, "norm_adv": False}, {"separate_critic": True, "max_grad_norm": 0.1}]
)
def test_the_gradient_of_a_minibatch_is_that_of_the_equations(flags):
    policy, other = agent(**flags), agent(**flags)
    args = ppo.Args(hidden_size=16, ent_coef=0.3, vf_coef=0.7, state_coef=0.4, **{"max_grad_norm": 0} | flags)
    states, past, _ = windows = random_windows(torch.arange(8))
    actions, (log_probs, advantages, returns) = random_actions(8), torch.randn(3, 8)
    log_ratio, losses = ppo.minibatch_gradient(policy, args, *windows, actions, log_probs, advantages, returns)
    normed, errors = (advantages - advantages.mean()) / (advantages.std() + 1e-8), []
    normed = normed if args.norm_adv else advantages
    terms = dict.fromkeys(["policy_loss", "value_loss", "entropy"], 0)
    for i in range(8):
        noise, value, new_errors = slow(other, states[i, : i + 1], past[i, :i])
        expected = slow_log_prob(other, noise, actions[i]) - log_probs[i]
        torch.testing.assert_close(log_ratio[i], expected.detach().float(), atol=1e-3, rtol=1e-4)
        ratio = expected.exp()
        entropy = (noise.entropy() + SIZE.log()).sum() / (ACT_DIM if args.entropy_mean else 1)
        terms["policy_loss"] -= torch.min(ratio * normed[i], ratio.clamp(0.8, 1.2) * normed[i]) / 8
        terms["value_loss"] += (value - returns[i]).square() / 8
        terms["entropy"] += entropy / 8
        errors += new_errors
    terms["state_loss"] = torch.stack(errors).mean()
    for name, term in terms.items():
        torch.testing.assert_close(losses[f"losses/{name}"], term.detach().float(), atol=1e-3, rtol=1e-3, msg=name)
    weights = {"policy_loss": 1, "value_loss": 0.7, "entropy": -0.3, "state_loss": 0.4}
    sum(weights[name] * term for name, term in terms.items()).backward()
    if args.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(other.parameters(), args.max_grad_norm)
    for (name, ours), theirs in zip(policy.named_parameters(), other.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-3, msg=name)
    assert losses["losses/state_loss"] == pytest.approx(torch.stack(errors).mean().item(), rel=1e-4)


def test_state_coef_0_leaves_the_decoder_as_it_was():
    policy, windows = agent(), random_windows(torch.arange(8))
    rest = random_actions(8), *torch.randn(3, 8)
    ppo.minibatch_gradient(policy, ppo.Args(state_coef=0.0), *windows, *rest)
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in policy.decoder.parameters())
    ppo.minibatch_gradient(policy, ppo.Args(), *windows, *rest)
    assert all(p.grad.abs().max() > 0 for p in policy.decoder.parameters())


@pytest.mark.parametrize("separate", [False, True])
def test_a_separate_critic_shares_nothing_with_the_policy(separate):
    policy = agent(separate_critic=separate)
    output, _, current = policy.read(*random_windows(torch.arange(8)))
    parameters, flags = list(policy.parameters()), {"retain_graph": True, "allow_unused": True}
    outcomes = policy.value(output, current), policy.policy(output).beta.mean
    own, shared = (torch.autograd.grad(x.sum(), parameters, **flags) for x in outcomes)
    assert any(a is not None and b is not None for a, b in zip(own, shared)) == (not separate)


def test_an_environment_that_can_not_be_made_starts_no_cluster(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", ray := Mock())
    with pytest.raises(SystemExit, match="--env-id NoSuch-v0"):
        ppo.train(small_args(ppo, tmp_path / "run", env_id="NoSuch-v0", ray="auto"))
    assert not ray.init.called


def test_presets_are_defaults_that_flags_override(monkeypatch):
    parse = partial(conftest.parse, monkeypatch, ppo)
    assert parse() == ppo.Args() == ppo.Args(**ppo.PRESETS["default"])
    paper = ppo.Args(**ppo.PRESETS["paper"])
    assert parse("--preset", "paper") == parse("--preset=paper") == paper and paper.hidden_size == 512
    assert paper.init_gamma == paper.gamma == 0.99
    assert parse("--preset", "paper", "--gamma", "0.9") == ppo.Args(**ppo.PRESETS["paper"] | {"gamma": 0.9})
    with pytest.raises(SystemExit, match="--preset Paper: must be one of default, paper"):
        ppo.train(parse("--preset", "Paper"))


def test_a_resume_refuses_another_preset(tmp_path):
    """It keeps the run's flags, so the record would be wrong."""
    ppo.train(small_args(ppo, tmp_path / "run"))
    with pytest.raises(SystemExit, match="--preset paper: a resume keeps the run's flags"):
        ppo.train(resume_args(ppo, tmp_path / "run", preset="paper", total_timesteps=4 * 64))


class Paying(gym.Env):
    """Pays what it is told to, and terminates after the last. Its robot lies where it earns 0 to 0.2."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def __init__(self, rewards=(0.5, 1, 0, 0, 0, 0), control=None):
        self.rewards = rewards
        above = {-1: 0.71, 0: 0.69, 0.01: 0.69, 0.2: 0.29, 0.5: 0.31, 1: 1.5}  # reward: the head above the left foot
        # the other foot is far above, as a fallen robot's may be
        heights = {"head": lambda: above[self.reward], "left_foot": lambda: 0, "right_foot": lambda: 3}
        self.robot = SimpleNamespace(**{f"{part}_height": height for part, height in heights.items()})

    def reset(self, *, seed=None, options=None):
        self.left = list(self.rewards)
        return np.zeros(OBS_DIM, np.float32), {}

    def step(self, action):
        self.reward = self.left.pop(0)
        return np.zeros(OBS_DIM, np.float32), self.reward, not self.left, False, {}


@pytest.mark.parametrize(
    "module, control, flags, pose, lying",
    [
        ("humanoid_bench.env", "pos", {"lying_steps": 3}, True, True),
        ("humanoid_bench.env", "pos", {"lying_steps": 3, "eval_episodes": 1}, True, False),
        ("humanoid_bench.env", "pos", {"pose_actions": False}, False, False),
        ("humanoid_bench.env", "torque", {"lying_steps": 3}, False, True),
        ("another.env", "pos", {"lying_steps": 3}, False, False),  # it may have a keyword of that name
    ],
)
def test_humanoid_bench_alone_is_wrapped(module, control, flags, pose, lying, monkeypatch):
    monkeypatch.setattr(Paying, "__module__", module)
    monkeypatch.setattr(ppo, "PoseActions", type("Wrapped", (gym.Wrapper,), {}))
    gym.register("Paying-v0", Paying, kwargs={"control": control})
    try:
        env = ppo.make_env("Paying-v0", **flags)
    finally:
        del gym.registry["Paying-v0"]
    wrappers = []
    while isinstance(env, gym.Wrapper):
        wrappers.append(type(env))
        env = env.env
    assert (ppo.PoseActions in wrappers, ppo.EndLying in wrappers) == (pose, lying)


@pytest.mark.parametrize(
    "rewards, length, truncated",
    [
        ([0.5, 0, 0, 0, 0.5, 0.5], 4, True),  # three steps in a row
        ([0.5, 0.2, 0.01, 0, 1], 4, True),  # paid or not
        ([0, 0, 0.5, 0, 0.2, -1, 0], 7, False),  # never three
        ([0.5, 0, 0, 0], 4, True),  # the last is terminal too
    ],
)
def test_an_episode_is_truncated_where_the_robot_lies(rewards, length, truncated):
    env = ppo.EndLying(Paying(rewards), 3)
    for _ in range(2):  # the count begins anew
        env.reset()
        ends, n = (False, False), 0
        while not any(ends):
            _, reward, *ends, _ = env.step(None)
            n += 1
        assert n == length and reward == rewards[n - 1]
        assert ends == [n == len(rewards), truncated]


def make_lying():
    return ppo.EndLying(Paying(), 3)


def test_an_episode_cut_as_the_robot_lies_is_reported_as_any_other():
    with ppo.SubprocVecEnv(make_lying, 1, 1, 1) as envs:
        envs.reset()
        episodes = []
        for _ in range(7):
            envs.step(np.zeros((1, ACT_DIM), np.float32))
            episodes.append(envs.episodes)
    assert episodes == [[], [], [], [], [(0, 1.5, 5)], [], []]
