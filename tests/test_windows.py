"""The flagship: windows against slow references, padding, the Beta policy against closed forms."""

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_interleaved_gru_beta as ppo

OBS_DIM, ACT_DIM, ENVS = 3, 2, 4
OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (OBS_DIM,))
ACTIONS = gym.spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 4.0], np.float32))


def agent(**flags):
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(hidden_size=16, **flags))
    with torch.no_grad():  # far from the symmetric start
        policy.actor[-1].weight.normal_()
    return policy


def random_trajectory(window, num_steps, rollouts):
    """A trajectory filled `rollouts` times, and what every environment really went through, episode by episode."""
    rng = np.random.default_rng(0)
    trajectory = ppo.Trajectory(num_steps, ENVS, OBS_DIM, ACT_DIM, window, "cpu")
    episodes = [[] for _ in range(ENVS)]  # of (state, action), the current episode's
    expected = []
    for step in range(rollouts * num_steps):
        first = torch.tensor(rng.random(ENVS) < 0.15) | (step == 0)
        states, actions = torch.randn(ENVS, OBS_DIM), torch.rand(ENVS, ACT_DIM)
        trajectory.append(states, first)
        trajectory.actions[trajectory.row] = actions
        for env in range(ENVS):
            if first[env]:
                episodes[env] = []
            episodes[env].append((states[env], actions[env]))
            expected.append((step, env, episodes[env][-window:]))
    return trajectory, [row for row in expected if row[0] >= (rollouts - 1) * num_steps]


@pytest.mark.parametrize("window", [1, 2, 8])
def test_windows_hold_the_last_steps_of_the_episode(window):
    num_steps, rollouts = 12, 3
    trajectory, expected = random_trajectory(window, num_steps, rollouts)
    assert len(trajectory.states) == window - 1 + num_steps  # stored once
    lengths = set()
    for step, env, episode in expected:
        row = torch.tensor([window - 1 + step - (rollouts - 1) * num_steps])
        states, actions, age = trajectory.windows(trajectory.states, row, torch.tensor([env]))
        length = len(episode)
        lengths.add(length)
        assert age.item() == length - 1 and states.shape == (1, window, OBS_DIM)
        torch.testing.assert_close(states[0, :length], torch.stack([state for state, _ in episode]))
        if length > 1:
            torch.testing.assert_close(actions[0, : length - 1], torch.stack([action for _, action in episode[:-1]]))
    assert lengths == set(range(1, window + 1))


@pytest.mark.parametrize("window", [1, 2, 8])
def test_windows_of_the_states_that_followed(window):
    num_steps, rollouts = 12, 3
    trajectory, expected = random_trajectory(window, num_steps, rollouts)
    rows = torch.tensor([window - 1 + step - (rollouts - 1) * num_steps for step, _, _ in expected])
    envs = torch.tensor([env for _, env, _ in expected])
    following = torch.randn(len(rows), OBS_DIM)
    stored = trajectory.states.clone()
    states, actions, age = trajectory.windows(trajectory.states, rows, envs, following)
    for i, (_, _, episode) in enumerate(expected):
        whole = [state for state, _ in episode][-window + 1 :] if window > 1 else []
        assert age[i] == len(whole)
        torch.testing.assert_close(states[i, : len(whole) + 1], torch.stack([*whole, following[i]]))
        if whole:
            torch.testing.assert_close(
                actions[i, : len(whole)], torch.stack([action for _, action in episode][-len(whole) :])
            )
    assert torch.equal(stored, trajectory.states)


def slow_forward(policy, states, actions):
    """One unpadded window: states [n, obs_dim] and the n - 1 actions between them, token by token."""
    tokens = []
    for j, state in enumerate(states):
        tokens.append(policy.state_encoder(state))
        if policy.interleave and j < len(actions):
            tokens.append(policy.action_encoder(2 * actions[j] - 1))
    outputs, _ = policy.gru(torch.stack(tokens)[None])
    head = policy.actor(outputs[0, -1])
    if policy.beta_head == "alpha":
        alpha, beta = (1 + (1 + head.exp()).log()).chunk(2)
    else:
        weight, concentration = 1 / (1 + (-head).exp()), policy.log_concentration.exp()
        alpha, beta = 1 + concentration * weight, 1 + concentration * (1 - weight)
    return alpha, beta, policy.critic(states[-1] if policy.separate_critic else outputs[0, -1])[0], outputs[0]


VARIANTS = [{}, {"beta_head": "alpha"}, {"interleave": False}, {"separate_critic": True}, {"window": 1}]


@pytest.mark.parametrize("flags", [*VARIANTS, {"window": 2}])
def test_padding_is_inert(flags):
    policy = agent(**flags)
    window = policy.window
    ages = torch.arange(window)
    states, actions = torch.randn(window, window, OBS_DIM), torch.rand(window, window - 1, ACT_DIM)
    with torch.no_grad():
        alpha, beta, values, outputs = policy(states, actions, ages)
        predictions = policy.predict(outputs)
        for i, age in enumerate(ages.tolist()):
            expected = slow_forward(policy, states[i, : age + 1], actions[i, :age])
            torch.testing.assert_close(alpha[i], expected[0])
            torch.testing.assert_close(beta[i], expected[1])
            torch.testing.assert_close(values[i], expected[2])
            for j in range(age):  # what is read before s_{j+1}: the token of a_j, or of s_j where actions are left out
                output = expected[3][2 * j + 1 if policy.interleave else j]
                torch.testing.assert_close(predictions[i, j], policy.decoder(output))
        for i, age in enumerate(ages.tolist()):  # and changing the padding changes nothing
            states[i, age + 1 :], actions[i, age:] = 99.0, 0.123
        again = policy(states, actions, ages)
    torch.testing.assert_close(alpha, again[0], atol=0, rtol=0)
    torch.testing.assert_close(values, again[2], atol=0, rtol=0)


def test_state_prediction_loss_is_masked():
    states, predictions = torch.randn(3, 4, OBS_DIM), torch.randn(3, 3, OBS_DIM)
    age = torch.tensor([0, 1, 3])
    errors = [(predictions[1, 0] - states[1, 1]).square().mean()]
    errors += [(predictions[2, j] - states[2, j + 1]).square().mean() for j in range(3)]
    torch.testing.assert_close(ppo.state_prediction_loss(predictions, states, age), torch.stack(errors).mean())
    assert ppo.state_prediction_loss(predictions, states, age * 0) == 0
    assert ppo.state_prediction_loss(predictions[:, :0], states[:, :1], age * 0) == 0  # --window 1


def test_log_prob_and_entropy_equal_torch_distributions_under_the_scaling():
    policy = agent()
    alpha, beta = 1 + 80 * torch.rand(100, ACT_DIM), 1 + 80 * torch.rand(100, ACT_DIM)
    x = ppo.inside(torch.distributions.Beta(alpha, beta).sample())
    scaled = torch.distributions.TransformedDistribution(
        torch.distributions.Beta(alpha.double(), beta.double()),
        torch.distributions.AffineTransform(policy.low.double(), (policy.high - policy.low).double()),
    )
    expected = scaled.log_prob(policy.low + x.double() * (policy.high - policy.low)).sum(-1)
    torch.testing.assert_close(policy.log_prob(alpha, beta, x).double(), expected, atol=2e-4, rtol=1e-5)
    entropy = torch.distributions.Beta(alpha.double(), beta.double()).entropy() + (policy.high - policy.low).log()
    torch.testing.assert_close(policy.entropy(alpha, beta).double(), entropy, atol=1e-5, rtol=1e-5)


def test_the_density_integrates_to_one():
    policy = agent()
    x = (torch.arange(200000) + 0.5) / 200000
    alpha, beta = torch.tensor([[3.0, 61.0]]), torch.tensor([[1.2, 61.0]])
    for i in range(ACT_DIM):  # the other dimension at its middle, its density divided out
        point = torch.full((len(x), ACT_DIM), 0.5)
        point[:, i] = x
        other = 1 - i
        alone = torch.distributions.Beta(alpha[0, other], beta[0, other]).log_prob(torch.tensor(0.5))
        alone -= (policy.high - policy.low)[other].log()
        density = (policy.log_prob(alpha, beta, point) - alone).exp()
        assert density.mean() * (policy.high - policy.low)[i] == pytest.approx(1, abs=1e-3)


def test_actions_at_the_edges_have_finite_log_probs_and_gradients():
    policy = agent()
    alpha = torch.full((2, ACT_DIM), 40.0, requires_grad=True)
    beta = torch.full((2, ACT_DIM), 1.0, requires_grad=True)
    x = ppo.inside(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
    log_prob = policy.log_prob(alpha, beta, x)
    log_prob.sum().backward()
    assert all(t.isfinite().all() for t in (log_prob, alpha.grad, beta.grad))
    assert (policy.to_env(x) >= policy.low).all() and (policy.to_env(x) <= policy.high).all()


@pytest.mark.parametrize("beta_head", ["mode", "alpha"])
@pytest.mark.parametrize("init_std", [0.02, 0.05, 0.15, 0.48])
def test_noise_of_the_first_actions(beta_head, init_std):
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(beta_head=beta_head, init_std=init_std))
    windows = torch.randn(64, 8, OBS_DIM), torch.rand(64, 7, ACT_DIM), torch.full((64,), 7)
    noise = torch.distributions.Beta(*policy(*windows)[:2])
    torch.testing.assert_close(2 * noise.stddev, torch.full((64, ACT_DIM), init_std), rtol=0.05, atol=0)
    torch.testing.assert_close(noise.mean, torch.full((64, ACT_DIM), 0.5), rtol=0, atol=0.02)


def test_the_head_gives_the_mode_of_the_beta():
    policy = agent()
    with torch.no_grad():
        policy.actor[-1].bias.copy_(torch.tensor([0.3, -1.2]))
        policy.log_concentration.copy_(torch.tensor([2.0, 0.5]))
        policy.actor[-1].weight.zero_()
        alpha, beta, _, _ = policy(torch.zeros(1, 8, OBS_DIM), torch.zeros(1, 7, ACT_DIM), torch.tensor([7]))
    x = torch.linspace(0, 1, 10_001, dtype=torch.float64)[1:-1, None]
    densest = x[torch.distributions.Beta(alpha.double(), beta.double()).log_prob(x).argmax(0), 0]
    torch.testing.assert_close(densest.float(), torch.tensor([0.3, -1.2]).sigmoid(), rtol=0, atol=1e-4)
    torch.testing.assert_close(alpha + beta - 2, torch.tensor([[2.0, 0.5]]).exp(), rtol=1e-5, atol=0)


def test_greedy_actions_are_the_mean_of_the_remembered_window():
    policy = agent()
    memory = policy.memory(num_envs=2)
    seen = [[], []]
    for step in range(12):
        first = np.array([step in (0, 5), step == 0])
        obs = torch.randn(2, OBS_DIM)
        actions = policy.act(obs, torch.as_tensor(first), memory)
        for env in range(2):
            if first[env]:
                seen[env] = []
            states = torch.stack([state for state, _ in seen[env][-7:]] + [obs[env]])
            past = torch.stack([x for _, x in seen[env][-7:]]) if seen[env] else torch.zeros(0, ACT_DIM)
            with torch.no_grad():
                alpha, beta, _, _ = slow_forward(policy, states.clamp(-10, 10), past)
            x = alpha / (alpha + beta)
            torch.testing.assert_close(actions[env], policy.low + x * (policy.high - policy.low))
            seen[env].append((obs[env], x))


def test_evaluation_says_where_episodes_begin(monkeypatch):
    calls, ends, act, step = [], [], ppo.Agent.act, ppo.SubprocVecEnv.step

    def spy_act(policy, obs, first, memory):
        calls.append((first.tolist(), memory))
        return act(policy, obs, first, memory)

    def spy_step(*inputs):
        outcome = step(*inputs)
        ends.append((outcome[2] | outcome[3]).tolist())
        return outcome

    monkeypatch.setattr(ppo.Agent, "act", spy_act)
    monkeypatch.setattr(ppo.SubprocVecEnv, "step", spy_step)
    args = ppo.Args(env_id="misbehaving:Healthy-v0", num_envs=2, num_workers=1, eval_episodes=5, hidden_size=16)
    env = ppo.make_env(args.env_id)
    policy = ppo.Agent(env.observation_space, env.action_space, args)
    returns, _ = ppo.evaluate(policy, args, torch.device("cpu"))
    assert len(returns) == 5 and [first for first, _ in calls] == [[True, True], *ends[:-1]]
    assert sum(map(sum, ends[:-1])) >= 3 and len({id(memory) for _, memory in calls}) == 1


@pytest.mark.parametrize("flags", VARIANTS)
def test_first_minibatch_has_ratio_one_in_training(flags, record_ratios, tmp_path):
    ratios = record_ratios(ppo)
    args = ppo.Args(
        env_id="Hopper-v5", total_timesteps=512, num_envs=4, num_steps=64, num_minibatches=4, update_epochs=2,
        num_workers=1, eval_episodes=0, cuda=False, hidden_size=16, run_dir=str(tmp_path / "run"), **flags,
    )  # fmt: skip
    ppo.train(args)
    for first in (ratios[0], ratios[8]):  # the second iteration's windows reach back into the first's rollout
        torch.testing.assert_close(first, torch.ones_like(first), atol=1e-5, rtol=0)
    assert (ratios[7] - 1).abs().max() > 1e-4


def test_state_coef_0_leaves_the_decoder_as_it_was():
    args = ppo.Args(hidden_size=16, state_coef=0.0)
    policy = agent()
    window = (torch.randn(8, 8, OBS_DIM), torch.rand(8, 7, ACT_DIM), torch.arange(8))
    ppo.minibatch_gradient(policy, args, *window, torch.rand(8, ACT_DIM), *torch.randn(4, 8))
    assert all(p.grad is None or p.grad.abs().max() == 0 for p in policy.decoder.parameters())
    ppo.minibatch_gradient(policy, ppo.Args(), *window, torch.rand(8, ACT_DIM), *torch.randn(4, 8))
    assert all(p.grad.abs().max() > 0 for p in policy.decoder.parameters())


@pytest.mark.parametrize("separate", [False, True])
def test_a_separate_critic_shares_nothing_with_the_policy(separate):
    policy = agent(separate_critic=separate)
    alpha, _, values, _ = policy(torch.randn(8, 8, OBS_DIM), torch.rand(8, 7, ACT_DIM), torch.arange(8))
    parameters, flags = list(policy.parameters()), {"retain_graph": True, "allow_unused": True}
    own, shared = (torch.autograd.grad(x.sum(), parameters, **flags) for x in (values, alpha))
    assert any(a is not None and b is not None for a, b in zip(own, shared)) == (not separate)


class Paying(gym.Env):
    """Pays what it is told to, and terminates after the last."""

    observation_space, action_space = OBSERVATIONS, ACTIONS

    def __init__(self, rewards):
        self.rewards = rewards

    def reset(self, *, seed=None, options=None):
        self.left = list(self.rewards)
        return np.zeros(OBS_DIM), {}

    def step(self, action):
        reward = self.left.pop(0)
        return np.zeros(OBS_DIM), reward, not self.left, False, {}


@pytest.mark.parametrize(
    "rewards, length, truncated",
    [
        ([0.5, 0, 0, 0.009, 0.5, 0.5], 4, True),  # three steps in a row
        ([0, 0, 0.5, 0, 0, 0.01, 0, 0], 8, False),  # never three, and 0.01 is a reward
        ([0, 0, 0, 0, 0.5, 0, 0, 0, 0.5], 8, True),  # what it waits for at first is no stall
        ([-0.5] * 5, 5, False),  # costs are no stall
        ([0.5, 0, 0, 0], 4, True),  # the last is terminal too
    ],
)
def test_an_episode_that_earns_nothing_is_truncated(rewards, length, truncated):
    env = ppo.EndStalled(Paying(rewards), 3)
    for _ in range(2):  # the count begins anew
        env.reset()
        ends, n = (False, False), 0
        while not any(ends):
            _, reward, *ends, _ = env.step(None)
            n += 1
        assert n == length and reward == rewards[n - 1]
        assert ends == [n == len(rewards), truncated]


def test_a_stalled_episode_is_reported_as_any_other():
    def make(control, render_mode=None):
        return Paying([0.5, 1, 0, 0, 0, 0])

    gym.register("Paying-v0", make, kwargs={"control": "torque"})  # HumanoidBench's ids have it
    try:
        env = ppo.make_env("Paying-v0", stall_steps=3)
        env.reset()
        infos = [env.step(env.action_space.sample())[-1] for _ in range(5)]
    finally:
        del gym.registry["Paying-v0"]
    assert [("episode" in info) for info in infos] == [False] * 4 + [True]
    assert (infos[-1]["episode"]["r"], infos[-1]["episode"]["l"]) == (1.5, 5)


def test_only_training_ends_stalled_episodes(tmp_path, monkeypatch):
    made = []

    class Recording(ppo.SubprocVecEnv):
        def __init__(self, make, *arguments):
            made.append(make.keywords.get("stall_steps", 0))
            super().__init__(make, *arguments)

    monkeypatch.setattr(ppo, "SubprocVecEnv", Recording)
    args = ppo.Args(
        env_id="Pendulum-v1", total_timesteps=64, num_envs=2, num_steps=32, num_minibatches=2, num_workers=1,
        eval_episodes=1, hidden_size=16, stall_steps=7, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    ppo.train(args)
    assert made == [7, 0]
