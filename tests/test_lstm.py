"""The recurrent script: sequences against a step-by-step reference, games with lives, memory at work."""

import sys
from functools import partial
from types import SimpleNamespace

import gymnasium as gym
import mujoco
import numpy as np
import pytest
import torch
from test_sturdy import one_line

import ppo_lstm_atari as ppo
from results.memory_tasks import Forgetful

FRAMES = gym.spaces.Box(0, 255, (84, 84), np.uint8)
VECTORS = gym.spaces.Box(-np.inf, np.inf, (3,))
ACTIONS = gym.spaces.Discrete(4)
BOX = gym.spaces.Box(np.float32([-1, -2]), np.float32([1, 0.5]))
SEVERAL = gym.spaces.MultiDiscrete([3, 2], start=[-1, 5])
ONE = gym.spaces.MultiDiscrete([5], dtype=np.uint16)

cells = pytest.mark.parametrize("rnn", ["lstm", "gru"])
spaces = pytest.mark.parametrize("space", [VECTORS, FRAMES], ids=["vectors", "frames"])
action_spaces = pytest.mark.parametrize("actions", [ACTIONS, BOX, SEVERAL], ids=["discrete", "box", "several"])


class Any(gym.Env):
    """Random observations in `space`, whatever the actions; episodes of ten steps."""

    def __init__(self, space, actions, render_mode=None):
        self.observation_space, self.action_space = space, actions

    def look(self):
        self.time += 1
        if self.observation_space.dtype == np.uint8:
            return self.np_random.integers(0, 256, self.observation_space.shape, np.uint8)
        return self.np_random.normal(size=self.observation_space.shape).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = -1
        return self.look(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"not a valid action: {action!r}"
        return self.look(), 1.0, self.time == 10, False, {}


def register(name, space, actions):
    gym.register(f"{name}-v0", "test_lstm:Any", kwargs={"space": space, "actions": actions})


for name, actions in ("Discrete", ACTIONS), ("Box", BOX), ("Several", SEVERAL), ("One", ONE):
    register(f"Vectors{name}", VECTORS, actions)
register("Picture", gym.spaces.Box(0, 255, (40, 48, 3), np.uint8), BOX)
register("Film", gym.spaces.Box(0, 255, (40, 3, 48), np.uint8), BOX)
register("Films", gym.spaces.Box(0, 255, (2, 40, 48, 3), np.uint8), BOX)
register("Binary", VECTORS, gym.spaces.MultiBinary(3))


def agent(space=VECTORS, actions=ACTIONS, **flags):
    torch.manual_seed(0)
    policy = ppo.Agent(space, actions, ppo.Args(**flags))
    with torch.no_grad():  # far from the uniform start
        policy.actor.weight.normal_()
    return policy


def observations(space, num_steps, num_envs):
    if space is FRAMES:
        return torch.randint(0, 256, (num_steps, num_envs, 84, 84), dtype=torch.uint8)
    return torch.randn(num_steps, num_envs, 3)


def random_first(num_steps, num_envs, rate=0.2):
    first = np.random.default_rng(0).random((num_steps, num_envs)) < rate
    first[0, 0], first[0, 1] = True, False  # one environment has just been reset, another goes on
    return torch.as_tensor(first)


def random_state(policy, num_envs):
    return torch.randn(policy.initial_state(num_envs).shape)


def slow_outputs(policy, obs, first, state):
    """The RNN's outputs [num_steps, num_envs, 128] and the last state: one call for each step and environment."""
    outputs, state = [], list(state)
    for t in range(len(obs)):
        for env in range(obs.shape[1]):
            h_and_c = (state[env] * ~first[t, env]).view(-1, 1, 1, 128)
            features = policy.encode(obs[t, env][None])[None]  # [1, 1, num_features]
            lstm = isinstance(policy.rnn, torch.nn.LSTM)
            output, after = policy.rnn(features, tuple(h_and_c) if lstm else h_and_c[0])
            state[env] = torch.cat(after if lstm else (after,), -1)[0, 0]
            outputs.append(output[0, 0])
    return torch.stack(outputs).unflatten(0, obs.shape[:2]), torch.stack(state)


def fused_outputs(policy, obs, first, state):
    """The same outputs by one call."""
    return policy.unroll(policy.encode(obs.transpose(0, 1)), first.T, state).transpose(0, 1)


# Sequences


def table_of(first, state):
    """What `unroll` gives to the RNN: the steps, counted from 1, [longest, num_sequences], their states."""
    policy, seen = agent(), []
    policy.recur = lambda table, states: (seen.append((table[..., 0].int(), states[:, 0])) or table, None)
    steps = torch.arange(1.0, first.numel() + 1).view(*first.shape, 1)
    assert torch.equal(policy.unroll(steps, first, state), steps)  # back in their places
    return seen[0]


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.5, 1.0])
def test_sequences_are_whole_episodes_and_every_step_is_in_one(rate):
    first = random_first(12, 5, rate).T  # [num_envs, num_steps]
    table, states = table_of(first, torch.arange(1.0, 6)[:, None])
    assert sorted(table[table > 0].tolist()) == list(range(1, 61))
    assert (table > 0).any(1).all()  # no longer than the longest
    for sequence, state in zip(table.T, states):
        length, start = (sequence > 0).sum(), sequence[0].item()
        env, t = divmod(start - 1, 12)
        assert sequence[:length].tolist() == list(range(start, start + length)) and t + length <= 12
        assert state == (0 if first[env, t] else env + 1) and (first[env, t] or t == 0)
        assert not first[env, t + 1 : t + length].any()  # it ends where the next episode begins
        assert t + length == 12 or first[env, t + length]


def test_the_example_of_four_steps():
    table, states = table_of(torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0]], dtype=torch.bool), torch.tensor([[7.0], [8]]))
    assert table.T.tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 8]] and states.tolist() == [7, 0, 0]


@cells
@spaces
def test_fused_outputs_and_gradients_equal_the_step_by_step_reference(rnn, space):
    policy = agent(space, rnn=rnn)
    num_steps, num_envs = (7, 3) if space is FRAMES else (40, 6)
    obs, first = observations(space, num_steps, num_envs), random_first(num_steps, num_envs)
    state, weights = random_state(policy, num_envs), torch.randn(num_steps, num_envs, 128)

    expected = slow_outputs(policy, obs, first, state)[0]
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
    assert any(name.startswith("encoder") for name in gradients) and any(name.startswith("rnn") for name in gradients)
    policy.zero_grad()
    for envs in (torch.arange(num_envs - 1, 0, -1), torch.tensor([0])):  # two minibatches of unequal size
        outputs = fused_outputs(policy, obs[:, envs], first[:, envs], state[envs])
        torch.testing.assert_close(outputs, expected[:, envs], atol=1e-5, rtol=0)
        (outputs * weights[:, envs]).sum().backward()
    for name, p in policy.named_parameters():
        if name in gradients:
            torch.testing.assert_close(p.grad, gradients[name], atol=1e-4, rtol=1e-3)


def torch_distribution(policy, outputs):
    """The same policy by torch.distributions: what has its log_prob and entropy."""
    if policy.box:
        normal = torch.distributions.Normal(outputs, policy.log_std.exp())
        return torch.distributions.Independent(normal, 1)
    parts = [torch.distributions.Categorical(logits=x) for x in outputs.split(policy.sizes, -1)]
    if len(parts) == 1:
        return parts[0]
    log_prob = lambda actions: sum(part.log_prob(x) for part, x in zip(parts, actions.unbind(-1)))  # noqa: E731
    return SimpleNamespace(log_prob=log_prob, entropy=lambda: sum(part.entropy() for part in parts))


@cells
@action_spaces
@pytest.mark.parametrize("clip_vloss, norm_adv", [(True, True), (False, False)])
def test_the_gradient_of_a_minibatch_is_that_of_the_equations(rnn, actions, clip_vloss, norm_adv):
    args = ppo.Args(rnn=rnn, clip_vloss=clip_vloss, norm_adv=norm_adv, ent_coef=0.3, vf_coef=0.7)
    args.max_grad_norm = 0.1 * norm_adv  # 0 is no limit
    policy, shape = agent(actions=actions, rnn=rnn), (30, 4)
    obs, first, state = observations(VECTORS, *shape), random_first(*shape), random_state(policy, 4)
    with torch.no_grad():
        policy.actor.weight.mul_(0.1)  # else the ratios of normal densities are enormous
        actions = policy.policy(torch.randn(*shape, 128)).sample()
    old_log_probs, values, advantages, returns = torch.randn(4, *shape)
    old_log_probs = old_log_probs.abs().neg()

    outputs = slow_outputs(policy, obs, first, state)[0]
    new = torch_distribution(policy, policy.actor(outputs))
    new_values = policy.critic(outputs)[..., 0]
    log_ratio = new.log_prob(actions) - old_log_probs
    ratio, scaled = log_ratio.exp(), advantages
    if norm_adv:
        scaled = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -torch.min(ratio * scaled, ratio.clamp(0.9, 1.1) * scaled).mean()
    errors = (new_values - returns).square()
    if clip_vloss:
        errors = torch.max(errors, (values + (new_values - values).clamp(-0.1, 0.1) - returns).square())
    value_loss, entropy = errors.mean() / 2, new.entropy().mean()
    (policy_loss + 0.7 * value_loss - 0.3 * entropy).backward()
    if norm_adv:
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.1)
    gradients = [p.grad.clone() for p in policy.parameters()]

    policy.zero_grad()
    envs = torch.randperm(4)
    rollout = obs, first, actions, old_log_probs, values, advantages, returns
    found, losses = ppo.minibatch_gradient(policy, args, state[envs], *(x.transpose(0, 1)[envs] for x in rollout))
    torch.testing.assert_close(found, log_ratio.T[envs], atol=1e-5, rtol=0)
    expected = {"losses/policy_loss": policy_loss, "losses/value_loss": value_loss, "losses/entropy": entropy}
    torch.testing.assert_close(losses, {k: x.detach() for k, x in expected.items()}, atol=1e-5, rtol=1e-5)
    for p, gradient in zip(policy.parameters(), gradients):
        torch.testing.assert_close(p.grad, gradient, atol=1e-6, rtol=1e-3)


@cells
def test_a_state_never_leaks_over_an_episode_end(rnn):
    policy, first = agent(rnn=rnn), torch.zeros(20, 2, dtype=torch.bool)
    first[8, 0] = first[0, 1] = True
    obs, state = observations(VECTORS, 20, 2), random_state(policy, 2)
    before = fused_outputs(policy, obs, first, state)
    obs[:8, 0] += 10.0  # the first episode of environment 0
    changed = (before != fused_outputs(policy, obs, first, state + 1.0)).any(-1)
    assert changed[:8, 0].all()  # obs or the state it goes on from
    assert not changed[8:, 0].any()
    assert not changed[:, 1].any()  # it began with this rollout, and the other environment is nothing to it

    obs.requires_grad_()
    fused_outputs(policy, obs, first, state)[8:, 0].sum().backward()
    assert obs.grad[:8, 0].abs().max() == 0 and obs.grad[8:, 0].abs().min() > 0 and obs.grad[:, 1].abs().max() == 0


@cells
def test_acting_remembers_the_episode_and_nothing_else(rnn):
    policy, num_steps, num_envs = agent(rnn=rnn), 15, 3
    obs, first = observations(VECTORS, num_steps, num_envs), random_first(num_steps, num_envs)
    first[0] = True
    state = policy.initial_state(num_envs)
    assert state.abs().max() == 0 and state.shape == (num_envs, 256 if rnn == "lstm" else 128)
    with torch.no_grad():
        expected, last_state = slow_outputs(policy, obs, first, state)
    state = torch.full_like(state, 99.0)  # of episodes that are over
    for t in range(num_steps):
        actions, state = policy.act(obs[t], first[t], state)
        assert torch.equal(actions, policy.actor(expected[t]).argmax(-1))
    torch.testing.assert_close(state, last_state, atol=1e-5, rtol=0)


def test_what_the_environment_gets_is_greedy_within_bounds_and_counted_from_the_start():
    obs, first = observations(VECTORS, 1, 64)[0], torch.ones(64, dtype=torch.bool)
    for actions in (BOX, SEVERAL):
        policy = agent(actions=actions)
        outputs = policy.actor(policy.recur(policy.encode(obs)[None], policy.initial_state(64))[0][0])
        found = policy.act(obs, first, policy.initial_state(64))[0]
        if actions is BOX:
            assert torch.equal(found, torch.minimum(torch.maximum(outputs, found.new_tensor([-1, -2])), policy.high))
            assert (outputs != found).any()
        else:
            assert torch.equal(found, torch.stack([outputs[:, :3].argmax(-1) - 1, outputs[:, 3:].argmax(-1) + 5], -1))
        assert all(actions.contains(x) for x in found.numpy())


def test_actions_for_frames_are_sampled_by_the_generator():
    policy, obs = agent(FRAMES), observations(FRAMES, 1, 1)[0].expand(64, 84, 84)
    first, state = torch.ones(64, dtype=torch.bool), policy.initial_state(64)
    with torch.no_grad():
        policy.actor.weight.mul_(0.1)
    draws = [policy.act(obs, first, state, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert len(draws[0].unique()) > 1


# Networks and distribution


def test_several_choices_are_independent_ones():
    logits, policy = 2 * torch.randn(50, 5), agent(actions=SEVERAL)
    actions = torch.stack([torch.randint(0, 3, (50,)), torch.randint(0, 2, (50,))], -1)
    found, expected = ppo.Categoricals(logits, [3, 2]), torch_distribution(policy, logits)
    torch.testing.assert_close(found.log_prob(actions), expected.log_prob(actions))
    torch.testing.assert_close(found.entropy(), expected.entropy())
    assert torch.equal(found.mode(), torch.stack([logits[:, :3].argmax(-1), logits[:, 3:].argmax(-1)], -1))
    draws = ppo.Categoricals(logits[0].expand(40000, 5), [3, 2]).sample()
    pairs = (2 * draws[:, 0] + draws[:, 1]).bincount(minlength=6) / 40000
    joint = logits[0, :3].softmax(-1)[:, None] * logits[0, 3:].softmax(-1)
    torch.testing.assert_close(pairs, joint.flatten(), atol=0.01, rtol=0)


@cells
def test_networks_start_as_in_the_source(rnn):
    policy = ppo.Agent(FRAMES, ACTIONS, ppo.Args(rnn=rnn))
    assert type(policy.rnn) is {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[rnn]
    scales = {"encoder": 2**0.5, "rnn": 1.0, "actor": 0.01, "critic": 1.0}
    for name, parameter in policy.named_parameters():
        if "bias" in name:
            assert parameter.abs().max() == 0
        else:
            matrix = parameter.flatten(1)
            matrix = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
            scale = scales[name.split(".")[0]]
            torch.testing.assert_close(matrix @ matrix.T, scale**2 * torch.eye(len(matrix)), atol=1e-4, rtol=0)


@spaces
def test_the_encoder_sees_scaled_frames_and_normalised_vectors(space):
    policy, seen, obs = agent(space, norm_obs=space is VECTORS), [], observations(space, 30, 2)
    policy.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    if space is VECTORS:
        policy.obs_norm.update(obs * 3 + 1)
    policy.encode(obs[0])
    expected = obs[0][:, None].float() / 255 if space is FRAMES else policy.obs_norm(obs[0])
    torch.testing.assert_close(seen[0], expected)


@pytest.mark.parametrize(
    "shape, size",
    [((84, 84), (1, 84, 84)), ((96, 90, 3), (3, 96, 90)), ((4, 84, 84), (4, 84, 84)), ((36, 36), (1, 36, 36))],
)
def test_images_reach_the_cnn_with_their_channels_first(shape, size):
    policy, seen = agent(gym.spaces.Box(0, 255, shape, np.uint8)), []
    policy.encoder.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    obs = torch.randint(0, 256, (5, 2, *shape), dtype=torch.uint8)
    assert policy.encode(obs).shape == (5, 2, 512) and seen[0].shape == (10, *size)
    channel = (obs[3, 1, ..., 1] if shape[-1] == 3 else obs[3, 1, 1] if shape[0] == 4 else obs[3, 1]) / 255
    torch.testing.assert_close(seen[0][7, 0 if size[0] == 1 else 1], channel)


# Training


@pytest.mark.parametrize("name", ["VectorsBox", "VectorsSeveral", "VectorsOne", "Picture"])
def test_all_it_takes_is_trained_evaluated_and_resumed(name, tmp_path):
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "num_workers": 1, "eval_episodes": 2, "cuda": False}
    args = ppo.Args(env_id=f"test_lstm:{name}-v0", total_timesteps=128, run_dir=str(tmp_path / "run"), **sizes)
    result = ppo.train(args)
    assert result["eval_returns"] == [10.0, 10.0] and result["mean_return_last_100"] == 10
    resumed = ppo.Args(**vars(args) | {"resume": str(tmp_path / "run"), "run_dir": None, "total_timesteps": 192})
    assert ppo.train(resumed)["iterations"] == 3


@pytest.mark.slow
def test_compiled_gradients_equal_the_eager_ones():
    gradients = []
    for compiled in (False, True):
        policy, gradient = agent(FRAMES), ppo.minibatch_gradient
        if compiled:
            policy.unroll = torch.compiler.disable(policy.unroll)
            gradient = ppo.compile_function(gradient, torch.device("cpu"))
        torch.manual_seed(1)
        for rate in (0.0, 0.1, 0.3):  # other numbers of sequences
            obs, first, state = observations(FRAMES, 16, 2), random_first(16, 2, rate), random_state(policy, 2)
            policy.zero_grad()
            batch = obs, first, torch.randint(0, 4, (16, 2)), *torch.randn(4, 16, 2)
            log_ratio, losses = gradient(policy, ppo.Args(), state, *(x.transpose(0, 1) for x in batch))
            gradients.append([log_ratio, *losses.values(), *(p.grad.clone() for p in policy.parameters())])
    for eager, compiled in zip(gradients[:3], gradients[3:]):
        for x, y in zip(eager, compiled):
            torch.testing.assert_close(x, y, atol=1e-4, rtol=1e-3)


# Memory at work

CARTPOLE = {
    "env_id": "CartPole-v1", "mask_velocity": True, "total_timesteps": 150_000, "num_envs": 16, "num_steps": 64,
    "update_epochs": 10, "learning_rate": 1e-3, "clip_coef": 0.2, "clip_vloss": False, "ent_coef": 0.0,
    "norm_reward": True, "eval_episodes": 0, "cuda": False,
}  # fmt: skip


@pytest.mark.slow
@cells
def test_memory_makes_up_for_hidden_velocities(rnn, tmp_path):
    result = ppo.train(ppo.Args(**CARTPOLE, rnn=rnn, run_dir=str(tmp_path / "run")))
    assert result["mean_return_last_100"] > 400


@pytest.mark.slow
def test_without_memory_hidden_velocities_stay_hidden(monkeypatch, tmp_path):
    monkeypatch.setattr(ppo, "Agent", Forgetful)
    result = ppo.train(ppo.Args(**CARTPOLE, run_dir=str(tmp_path / "run")))
    assert result["mean_return_last_100"] < 100


# Games


class Game(gym.Env):
    """Loses a life after each of the given steps, is over after `length` steps, and pays 2 t in step t (from 1)."""

    def __init__(self, lost, length):
        self.lost, self.length = lost, length
        self.observation_space, self.action_space = gym.spaces.Box(0, 1000, (1,)), gym.spaces.Discrete(3)

    def get_action_meanings(self):
        return ["NOOP", "FIRE", "RIGHT"]

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return np.zeros(1, np.float32), {"lives": len(self.lost)}

    def step(self, action):
        self.t += 1
        lives = sum(t > self.t for t in self.lost)
        return np.float32([self.t]), 2.0 * self.t, self.t == self.length, False, {"lives": lives}


def make_game(lost, length):
    return ppo.AtariGame(Game(lost, length))


@pytest.mark.parametrize(
    "lost, length, ended, games",
    # FIRE is step 1 of a game; a reset within it takes a no-op and FIRE. The agent's steps of a game are ...
    [
        ((5, 10, 15), 15, [4, 7, 10], {10: 1}),  # 2 to 5, 8 to 10, 13 to 15
        ((5, 6), 6, [4, 8], {4: 1, 8: 1}),  # 2 to 5; it is over in the no-op
        ((5, 7), 7, [4, 9], {4: 1, 9: 1}),  # 2 to 5, the next time 1 to 5; it is over in FIRE
        ((1, 6), 6, [4, 8], {4: 1, 8: 1}),  # 3 to 6; a life is lost in FIRE
        ((5,), 8, [7], {7: 1}),  # 2 to 8; without a life left it goes on for a while
        ((1,), 1, [1, 2], {1: 3, 2: 2}),  # 1; every other game is over in FIRE, the first one before all steps
    ],
)
def test_the_reported_return_of_a_game_with_several_lives_is_the_games(lost, length, ended, games):
    with ppo.SubprocVecEnv(partial(make_game, lost, length), 2, 1, 1) as envs:
        envs.reset()
        for t in range(1, max(ended) + 1):
            _, rewards, terminated, truncated = envs.step(np.zeros(2))
            assert not truncated.any() and terminated.tolist() == [t in ended] * 2 and rewards.tolist() == [1, 1]
            whole = float(length * (length + 1)), length
            assert envs.episodes == [(env, *whole) for env in (0, 1) for _ in range(games.get(t, 0))]


def test_rewards_are_signs_and_a_game_is_worth_what_it_paid():
    env, paid = make_game((9,), 9), [44.0, -3.0, 0.0, 2.0**25, 1.0, -0.1]
    env.reset()
    env.score, env.length = 0.0, 0  # without FIRE
    env.env.step = lambda _: (0, paid.pop(0), not paid, False, {"lives": 1})
    assert [env.step(0)[1] for _ in range(6)] == [1, -1, 0, 1, 1, -1]
    assert env.ended_games == [(44.0 - 3.0 + 2.0**25 + 1.0 - 0.1, 6)]


def test_a_real_game_is_reported_whole_and_its_lives_are_episodes():
    env = ppo.make_env("BreakoutNoFrameskip-v4")
    inner_step, inner_reset = env.unwrapped.step, env.unwrapped.reset
    games = []  # what the emulator paid in each

    def reset(**kwargs):
        games.append(0.0)
        return inner_reset(**kwargs)

    def step(action):
        result = inner_step(action)
        games[-1] += result[1]
        return result

    env.unwrapped.step, env.unwrapped.reset = step, reset
    env.reset(seed=1)
    env.action_space.seed(1)
    lives, rewards = 0, set()
    while len(env.ended_games) < 3:
        _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        rewards.add(float(reward))
        if terminated or truncated:
            lives += 1
            env.reset()
    assert [paid for paid, _ in env.ended_games] == games[:3] and sum(games) > 0
    assert lives == 15 and rewards == {0.0, 1.0}  # five lives each


def test_fire_starts_the_game_after_each_reset():
    env = ppo.make_env("BreakoutNoFrameskip-v4")
    env.reset(seed=1)
    for _ in range(2):  # the ball flies and is missed without an action of the agent's
        assert True in (env.step(0)[2] for _ in range(100))
        env.reset()


@pytest.mark.parametrize(
    "env_id",
    ["PongNoFrameskip-v4", "BeamRiderNoFrameskip-v4", "ale_py:ALE/Breakout-v5", "Freeway-v4", "ALE/Backgammon-v5"],
)
def test_every_atari_id_gives_84_x_84_frames_and_begins_with_fire(env_id):
    env = ppo.make_env(env_id, eval_episodes=3)
    wrappers, inner, pressed = [], env, []
    while isinstance(inner, gym.Wrapper):
        wrappers.append(type(inner).__name__)
        inner = inner.env
    assert wrappers[:3] == ["AtariGame", "AtariPreprocessing", "TimeLimit"]
    assert env.get_wrapper_attr("_max_episode_steps") == 4 * 27000  # frames
    meanings, step = env.unwrapped.get_action_meanings(), env.env.step
    assert meanings[0] == "NOOP"  # for the start and between lives
    env.env.step = lambda action: (pressed.append(meanings[action]), step(action))[1]
    obs, _ = env.reset(seed=1)
    assert pressed == ([] if env_id == "Freeway-v4" else ["FIRE"])
    assert env.observation_space.contains(obs) and obs.shape == (84, 84) and obs.dtype == np.uint8
    frames = [env.step(0)[4]["frame_number"] for _ in range(3)]
    assert np.diff(frames).tolist() == [4, 4]


def test_the_same_seed_plays_the_same_games_whatever_the_number_of_workers():
    make, played = partial(ppo.make_env, "BreakoutNoFrameskip-v4"), []
    actions = np.random.default_rng(0).integers(4, size=(120, 2))  # long enough for lives to be lost
    for seed, num_workers in ((3, 1), (3, 2), (4, 2)):
        with ppo.SubprocVecEnv(make, 2, num_workers, seed) as envs:
            frames, ends = [envs.reset().copy()], 0
            for action in actions:
                obs, _, terminated, _ = envs.step(action)
                frames.append(obs.copy())
                ends += terminated.sum()
        assert ends > 2 and frames[0].dtype == np.uint8
        played.append(np.stack(frames))
    assert np.array_equal(played[0], played[1]) and not np.array_equal(played[0], played[2])
    assert not np.array_equal(played[0][:, 0], played[0][:, 1])


class Scripted:
    """Two environments for `evaluate`; at each step they lose lives and games end as written down here."""

    steps = [  # (terminated, [(environment, return), ...])
        ([True, False], []),
        ([True, True], [(1, 10.0)]),  # environment 0 loses a life where a game ends in environment 1
        ([False, True], [(0, 20.0)]),  # by a time limit
        ([False, True], [(1, 40.0), (1, 50.0), (1, 60.0)]),  # two games of it are over in a reset: 60 is the sixth of 5
        ([True, True], [(0, 30.0), (1, 70.0)]),
    ]

    def __init__(self, *inputs):
        self.inputs, self.t, self.active = inputs, 0, []
        Scripted.made = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def reset(self):
        return np.ones((2, 3), np.float32)

    def step(self, actions, active):
        terminated, games = self.steps[self.t]
        self.t += 1
        self.active.append(active.tolist())
        self.episodes = [(env, paid, 7) for env, paid in games if active[env]]
        truncated = np.array([self.t == 3, False])
        return np.ones((2, 3), np.float32), np.zeros(2), terminated & active, truncated & active


def scripted_evaluation(policy):
    """-> returns, lengths, and what was logged"""
    logged, args = {}, ppo.Args(num_envs=2, eval_episodes=5)
    run = SimpleNamespace(args=args, device=torch.device("cpu"), spaces="both", show=lambda *_, **__: None)
    run.log = logged.update
    return *ppo.evaluate(run, policy, ppo.make_env), logged


def test_evaluation_takes_the_first_games_started(monkeypatch):
    monkeypatch.setattr(ppo, "SubprocVecEnv", Scripted)
    # Started: 0 and 1; 2 in environment 1 after 10; 3 in environment 0 after 20; 4 in environment 1 after 40.
    returns, lengths, logged = scripted_evaluation(agent())
    assert returns == [20.0, 10.0, 40.0, 30.0, 50.0] and lengths == [7] * 5
    assert logged == {"eval/episodic_return": 30.0, "eval/episodic_length": 7.0}
    assert Scripted.made.active == [[True, True]] * 4 + [[True, False]]  # who has no game left rests
    assert Scripted.made.inputs[1:] == (2, 0, [1, 2**31], "both")


@cells
def test_evaluation_carries_the_state_to_the_end_of_each_episode(rnn, monkeypatch):
    monkeypatch.setattr(ppo, "SubprocVecEnv", Scripted)
    policy, calls = agent(rnn=rnn), []
    act = policy.act

    def spy(obs, first, state, generator):
        assert generator is not None
        actions, next_state = act(obs, first, state, generator)
        calls.append((first.tolist(), state, next_state))
        return actions, next_state

    monkeypatch.setattr(policy, "act", spy)
    scripted_evaluation(policy)
    # A life lost or a time limit is the end of an episode, reported or not.
    ends = [[True, False], [True, True], [True, True], [False, True]]
    assert [first for first, _, _ in calls] == [[True, True], *ends]
    assert not calls[0][1].any()
    for (_, _, after), (_, before, _) in zip(calls, calls[1:]):
        assert torch.equal(before, after) and after.abs().max() > 0


# What can go wrong


@pytest.mark.parametrize("package, words", [("ale_py", "pip install ale-py"), ("cv2", "opencv")])
def test_missing_atari_packages_are_one_line(package, words, monkeypatch):
    env_id = "PongNoFrameskip-v4"
    ppo.make_env(env_id)  # registers the id, if nobody has
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(gym.registry, env_id)
    message = one_line(ppo.make_env, env_id)
    assert env_id in message and words in message and package in message


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"rnn": "elman"}, ["--rnn elman", "lstm or gru"]),
        ({"num_envs": 4, "num_minibatches": 8}, ["--num-minibatches 8", "--num-envs 4"]),
        ({"norm_obs": True}, ["--norm-obs"]),
        ({"mask_velocity": True}, ["--mask-velocity", "CartPole-v1", "BreakoutNoFrameskip-v4"]),
        ({"env_id": "test_lstm:Binary-v0"}, ["MultiBinary", "flat Box", "Discrete"]),
        ({"env_id": "test_lstm:Film-v0"}, ["(40, 3, 48)", "channels first, last or not at all"]),
        ({"env_id": "test_lstm:Films-v0"}, ["(2, 40, 48, 3)", "channels first, last or not at all"]),
        ({"env_id": "CartPole-v1", "randomise": True}, ["--randomise", "MuJoCo", "CartPole-v1"]),
        ({"env_id": "BreakoutNoFrameskip-v5"}, ["BreakoutNoFrameskip-v5"]),
        ({"env_id": "ALE/Pong"}, ["ALE/Pong", "version", "ALE/Pong-v5"]),
    ],
    ids=str,
)
def test_what_the_script_can_not_do_is_named(changes, words, tmp_path):
    args = ppo.Args(**{"cuda": False, "num_workers": 1, "run_dir": str(tmp_path / "run")} | changes)
    message = one_line(ppo.train, args)
    assert [word for word in words if word not in message] == []
    assert not (tmp_path / "run").exists()


def test_a_game_that_a_function_of_ones_own_makes_is_taken_as_it_is():
    gym.register("ColourPong-v0", lambda **kwargs: gym.wrappers.AtariPreprocessing(
        gym.make("PongNoFrameskip-v4", **kwargs), grayscale_obs=False))  # fmt: skip
    assert ppo.make_env("ColourPong-v0").observation_space.shape == (84, 84, 3)


@pytest.mark.parametrize(
    "env_id, positions",
    [("CartPole-v1", [0, 2]), ("MountainCar-v0", [0]), ("Acrobot-v1", range(4)), ("Pendulum-v1", [0, 1])]
    + [("Hopper-v5", range(5)), ("HalfCheetah-v5", range(8)), ("Walker2d-v5", range(8))]
    + [("Ant-v5", [*range(13), *range(27, 105)])],
)
def test_hidden_velocities_are_zero_and_the_rest_is_as_it_was(env_id, positions):
    masked, plain = ppo.make_env(env_id, mask_velocity=True), ppo.make_env(env_id)
    masked.reset(seed=3), plain.reset(seed=3)
    action = 1 if isinstance(plain.action_space, gym.spaces.Discrete) else plain.action_space.high / 3
    for _ in range(3):
        obs, whole = masked.step(action)[0], plain.step(action)[0]
    shown = np.isin(np.arange(len(obs)), positions)
    assert (obs[shown] == whole[shown]).all() and (obs[~shown] == 0).all() and (whole[~shown] != 0).all()
    assert obs.dtype == whole.dtype
    if hasattr(plain.unwrapped, "data"):
        np.testing.assert_array_equal(whole[~shown], plain.unwrapped.data.qvel.clip(-10, 10))


# Dynamics that differ


MODEL = "body_mass", "body_inertia", "geom_friction", "dof_damping", "actuator_gainprm", "actuator_biasprm"


def values(env):
    """What is drawn anew, as factors on the nominal model (0 / 0 is 1), and gravity."""
    nominal, model = gym.make(env.spec.id).unwrapped.model, env.unwrapped.model
    with np.errstate(invalid="ignore"):
        factors = {x: np.nan_to_num(getattr(model, x) / getattr(nominal, x), nan=1.0) for x in MODEL}
    return factors, model.opt.gravity - nominal.opt.gravity


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Ant-v5"])
def test_randomised_dynamics_are_in_range_drawn_at_each_reset_and_seeded(env_id):
    env, other = (ppo.make_env(env_id, randomise=True) for _ in range(2))
    drawn, logs = [], []
    for i in range(20):  # factors on factors would leave the ranges
        obs = [x.reset(seed=5 if i == 0 else None)[0] for x in (env, other)]
        assert (obs[0] == obs[1]).all()
        factors, gravity = values(env)
        for name in MODEL:
            assert (factors[name] == values(other)[0][name]).all()
        bounds = {"body_mass": (0.5, 1.5), "geom_friction": (0.7, 1.3), "dof_damping": (0.3, 3)}
        for name, (low, high) in (bounds | {"actuator_gainprm": (0.75, 1.5)}).items():
            assert low <= factors[name].min() and factors[name].max() <= high
        assert 0 < np.abs(gravity).max() <= 0.7
        mass = factors["body_mass"]
        np.testing.assert_allclose(factors["body_inertia"][1:], np.repeat(mass[1:, None], 3, 1))
        model = env.unwrapped.model
        np.testing.assert_allclose(model.body_subtreemass[0], model.body_mass.sum())  # what follows from it
        damped = env.nominal["dof_damping"] > 0  # not the joints of the trunk
        drawn.append([*mass[1:], *factors["dof_damping"][damped], *gravity])
        logs += [*np.log(factors["dof_damping"][damped])]
        assert len(set(gravity)) == 3 and len(set(factors["geom_friction"][:, 0])) > 3  # one factor for each
        env.step(env.action_space.high), other.step(env.action_space.high)
    assert (np.std(drawn, 0) > 0.1).all()
    assert abs(np.mean(logs) - np.log(0.3 * 3) / 2) < 0.25, "log-uniform"
    starts = [ppo.make_env(env_id, randomise=x).reset(seed=5)[0][:5] for x in (False, True)]
    assert (starts[0] == starts[1]).all()
    env.reset(seed=6)
    assert not np.allclose([*values(env)[0]["body_mass"][1:]], drawn[0][: env.unwrapped.model.nbody - 1])
    plain = ppo.make_env(env_id)
    plain.reset(seed=5)
    assert all((x == 1).all() for x in values(plain)[0].values()) and (values(plain)[1] == 0).all()


def test_muscles_whose_gain_is_a_curve_are_refused():
    env = gym.make("Hopper-v5")
    env.unwrapped.model.actuator_gaintype[1] = 2
    message = one_line(ppo.RandomisedDynamics, env)
    assert "--randomise" in message and "muscles" in message and "Hopper-v5" in message


def test_a_servos_gain_is_scaled_as_a_whole():
    """A position servo's force is gain * action + bias * position: one factor for both, or its target moves."""
    env = ppo.make_env("Hopper-v5", randomise=True)
    env.nominal["actuator_gainprm"][:, 0], env.nominal["actuator_biasprm"][:, 1] = 5.0, -5.0
    env.reset(seed=1)
    model = env.unwrapped.model
    assert (model.actuator_gainprm[:, 0] == -model.actuator_biasprm[:, 1]).all()
    assert len(set(model.actuator_gainprm[:, 0])) == 3


def test_a_pair_of_geoms_draws_one_friction():
    class Ball(gym.Env):
        model = mujoco.MjModel.from_xml_string("""<mujoco>
            <worldbody><geom name="a" size="1"/><body><freejoint/><geom name="b" size="1"/></body></worldbody>
            <contact><pair geom1="a" geom2="b" friction="0.8 0.4 0.2 0.1 0.1"/></contact></mujoco>""")

        def reset(self, **_):
            return 0, {}

    env, drawn = ppo.RandomisedDynamics(Ball()), []
    for _ in range(9):
        env.reset()
        factors = env.unwrapped.model.pair_friction[0] / [0.8, 0.4, 0.2, 0.1, 0.1]
        np.testing.assert_allclose(factors, factors[0])
        drawn.append(factors[0])
    assert 0.7 <= min(drawn) < 0.95 and 1.05 < max(drawn) <= 1.3


def test_randomised_dynamics_do_not_depend_on_the_number_of_workers():
    found = []
    for workers in (1, 2):
        with ppo.SubprocVecEnv(partial(ppo.make_env, "Hopper-v5", randomise=True), 4, workers, 3) as envs:
            seen = [envs.reset().copy()]
            seen += [envs.step(np.full((4, 3), 0.5, np.float32))[0].copy() for _ in range(60)]
        found.append(np.stack(seen))
    assert (found[0] == found[1]).all()
    assert (found[0][20, 0] != found[0][20, 1]).all()


def test_evaluations_play_nominal_and_randomised_dynamics(monkeypatch, tmp_path, capsys):
    made, init, logged = [], ppo.SubprocVecEnv.__init__, {}
    monkeypatch.setattr(
        ppo.SubprocVecEnv, "__init__", lambda envs, *inputs: (made.append(inputs[0]), init(envs, *inputs))[1]
    )
    monkeypatch.setattr(ppo.Run, "log", lambda run, scalars: logged.update(scalars))
    args = ppo.Args(
        env_id="Hopper-v5", randomise=True, mask_velocity=True, total_timesteps=64, num_envs=4, num_steps=16,
        cuda=False, num_workers=1, eval_episodes=3, run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    result = ppo.train(args)
    assert [make.keywords["randomise"] for make in made] == [True, False, True]
    assert all(make.keywords["mask_velocity"] for make in made)
    assert logged["eval/episodic_return"] == pytest.approx(np.mean(result["eval_returns"]))
    assert logged["eval_nominal/episodic_return"] != logged["eval/episodic_return"]
    assert "evaluation of the nominal dynamics: mean return" in capsys.readouterr().out
