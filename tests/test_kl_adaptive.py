"""The adaptive KL script: penalties, servos, whole episodes, the value fit, presets, and what a resume restores."""

import json
import shutil
import sys
from argparse import Namespace
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import misbehaving  # noqa: F401 (registers the environments)
import numpy as np
import pytest
import torch

import plot_runs
import ppo_kl_adaptive as ppo
import ppo_mlp_gaussian as base

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (18,))  # HalfCheetah's, with the time
ACTIONS = gym.spaces.Box(-1, 1, (6,))


def paper_args(**flags):
    return ppo.Args(**ppo.Args.presets["paper"] | flags)


def agent(args=None):
    torch.manual_seed(0)
    return ppo.Agent(OBSERVATIONS, ACTIONS, args or ppo.Args())


def adam(policy, lr):
    groups = [[p for name, p in policy.named_parameters() if not name.startswith("critic")], policy.critic.parameters()]
    return torch.optim.Adam([{"params": group} for group in groups], lr=lr)


def random_batch(policy, size):
    """As `update` takes it, drawn from the policy."""
    with torch.no_grad():
        obs = torch.randn(size, 18)
        mean, actions = policy.get_mean(obs), policy.sample(obs)
        return obs, actions, policy.log_prob(mean, actions), mean, torch.randn(size), torch.randn(size)


# Penalties


def test_closed_form_kl_equals_sampling_and_torch():
    torch.manual_seed(0)
    old_mean, mean = torch.randn(2, 3, dtype=torch.float64) * 0.3
    old_log_std, log_std = torch.tensor([-0.5, 0.0, 0.4]).double(), torch.tensor([-0.3, -0.1, 0.3]).double()
    old, new = (torch.distributions.Normal(m, s.exp()) for m, s in ((old_mean, old_log_std), (mean, log_std)))
    kl = ppo.gaussian_kl(old_mean, old_log_std, mean, log_std)
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(old, new).sum())
    actions = old.sample((400_000,))
    samples = (old.log_prob(actions) - new.log_prob(actions)).sum(-1)
    assert abs(samples.mean() - kl) < 4 * samples.std() / 400_000**0.5 < 0.02 * kl
    assert kl > 0.1 and ppo.gaussian_kl(mean, log_std, old_mean, old_log_std) != pytest.approx(kl.item(), rel=0.05)


@pytest.mark.parametrize("objective", ppo.OBJECTIVES)
def test_objectives_and_their_gradients(objective):
    """By the ratio, and by the KL below and above the hinge at twice the target."""
    args = ppo.Args(objective=objective, kl_targ=0.01, eta=50.0, clip_coef=0.2)
    advantages, beta = torch.tensor([2.0, -1.0]), torch.tensor(3.0)
    for kl_value, hinge in ((0.0199, 0.0), (0.03, 0.01)):
        ratio, kl = torch.tensor([1.5, 1.1], requires_grad=True), torch.tensor(kl_value, requires_grad=True)
        loss = ppo.surrogate_loss(args, ratio, advantages, kl, beta)
        loss.backward()
        if objective == "clip":
            assert loss.item() == pytest.approx(-(1.2 * 2 - 1.1) / 2)
            assert ratio.grad.tolist() == pytest.approx([0.0, 0.5]) and kl.grad is None
        else:
            assert ratio.grad.tolist() == pytest.approx([-1.0, 0.5])
        if objective == "none":
            assert loss.item() == pytest.approx(-(1.5 * 2 - 1.1) / 2) and kl.grad is None
        if objective.startswith("kl"):
            assert loss.item() == pytest.approx(-(1.5 * 2 - 1.1) / 2 + 3 * kl_value + 50 * hinge**2)
            assert kl.grad.item() == pytest.approx(3 + 2 * 50 * hinge, rel=1e-5)


# What adapts


def servo(args, kls, beta=1.0, lr_multiplier=1.0):
    carried = ppo.Carried(beta, 3)
    carried.lr_multiplier = lr_multiplier
    steps = []
    for kl in kls:
        ppo.adapt(carried, kl, args)
        steps.append((carried.beta, carried.lr_multiplier))
    return steps


def test_the_posts_servo_step_by_step():
    args = ppo.Args()  # target 0.003: the band is 0.0015 to 0.006
    steps = servo(args, [0.0061, 0.1, 0.006, 0.0015, 0.0014, 0.0])
    assert [beta for beta, _ in steps] == pytest.approx([1.5, 2.25, 2.25, 2.25, 1.5, 1.0])
    assert {multiplier for _, multiplier in steps} == {1.0}
    # Up: beyond 30 the learning rate falls too, until it is below a tenth. 1.5^8 = 25.6; 1.5^-6 = 0.088
    steps = servo(args, [1.0] * 18)
    assert [beta for beta, _ in steps] == pytest.approx([1.5**n for n in range(1, 9)] + [35] * 10)
    assert [x for _, x in steps] == pytest.approx([1] * 8 + [1.5**-n for n in range(1, 7)] + [1.5**-6] * 4)
    # Down: 1.5^-9 < 1/35; 1.5^6 = 11.4
    steps = servo(args, [0.0] * 18)
    assert [beta for beta, _ in steps] == pytest.approx([1.5**-n for n in range(1, 9)] + [1 / 35] * 10)
    assert [x for _, x in steps] == pytest.approx([1] * 8 + [1.5**n for n in range(1, 7)] + [1.5**6] * 4)
    # Back inside: the learning rate stays where it is.
    assert servo(args, [0.0, 0.003], 35.0, 0.5) == [(35 / 1.5, 0.5), (35 / 1.5, 0.5)]


def test_the_papers_servo_step_by_step():
    args = paper_args(kl_targ=0.03)  # the band is 0.02 to 0.045
    steps = servo(args, [0.046, 9.0, 0.044, 0.021, 0.019, 0.0, 0.0, 0.0])
    assert steps == [(beta, 1.0) for beta in (2, 4, 4, 4, 2, 1, 0.5, 0.25)]
    assert servo(args, [9.0] * 40)[-1] == (2.0**40, 1.0) and servo(args, [0.0] * 40)[-1] == (2.0**-40, 1.0)


def one_update(epochs, num_minibatches=1, **flags):
    """One update of a new policy that nothing holds: the epochs it took, the KL after it, the KL before each step."""
    args = ppo.Args(update_epochs=epochs, num_minibatches=num_minibatches, objective="none", **flags)
    policy, kls = agent(), []

    def gradient(*inputs):
        kl, *rest = ppo.minibatch_gradient(*inputs)
        kls.append(kl.item())
        return kl, *rest

    scalars = ppo.update(policy, adam(policy, 1e-3), gradient, args, torch.tensor(1.0), random_batch(policy, 203))
    return scalars["losses/epochs"], scalars["losses/kl"], kls


def test_update_stops_after_the_first_epoch_whose_kl_is_too_large():
    kls = [one_update(epochs, kl_stop=None)[1] for epochs in range(1, 7)]
    assert kls == sorted(kls) and len(set(kls)) == 6
    limit = (kls[2] + kls[3]) / 2
    assert one_update(6, kl_stop=4.0, kl_targ=limit / 4)[:2] == (4, kls[3])
    assert one_update(6, kl_stop=4.0, kl_targ=kls[5] / 3.9)[:2] == (6, kls[5])
    assert one_update(6, kl_stop=4.0, kl_targ=kls[0] / 4.1)[:2] == (1, kls[0])
    assert one_update(6, kl_stop=None)[2] == pytest.approx([0.0] + kls[:5], abs=1e-7)  # one forward pass for both


def test_update_in_minibatches_stops_before_the_first_one_whose_kl_is_too_large():
    kls = one_update(3, 4, kl_stop=None)[2]
    assert len(kls) == 12 and kls[6] > max(kls[:6])
    epochs, _, seen = one_update(3, 4, kl_stop=4.0, kl_targ=(kls[6] + max(kls[:6])) / 2 / 4)
    assert epochs == 6 / 4 and seen == kls[:7]


def test_logged_kl_is_the_one_after_the_update():
    args, policy = ppo.Args(update_epochs=3), agent()
    batch, old_log_std = random_batch(policy, 64), policy.log_std.detach().clone()
    scalars = ppo.update(policy, adam(policy, 1e-3), ppo.minibatch_gradient, args, torch.tensor(1.0), batch)
    old = torch.distributions.Normal(batch[3], old_log_std.exp().expand(64, 6))
    new = torch.distributions.Normal(policy.get_mean(batch[0]), policy.log_std.exp().expand(64, 6))
    expected = torch.distributions.kl_divergence(old, new).sum(-1).mean()
    assert scalars["losses/kl"] == pytest.approx(expected.item(), rel=1e-3) and scalars["losses/kl"] > 1e-6


@pytest.mark.parametrize("preset", ["post", "paper"])
def test_only_the_paper_updates_both_functions_at_once(preset):
    args = ppo.Args(**ppo.Args.presets[preset] | {"update_epochs": 1, "num_minibatches": 1})
    policy = agent(args)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    scalars = ppo.update(
        policy, adam(policy, 1e-3), ppo.minibatch_gradient, args, torch.tensor(1.0), random_batch(policy, 64)
    )
    changed = {name.split(".")[0] for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"actor", "log_std_copies"} | ({"critic"} if preset == "paper" else set())
    assert (scalars["losses/value_loss"] > 0) == (preset == "paper")


@pytest.mark.parametrize("objective", ["kl-fixed", "kl-adaptive"])
def test_a_fixed_beta_stays(objective, tmp_path):
    ppo.train(small_args(tmp_path / "run", objective=objective, beta=3.0, kl_targ=1e-9, total_timesteps=1))
    carried = load(tmp_path / "run")["carried"]
    assert carried["beta"] == (3.0 if objective == "kl-fixed" else 4.5) and carried["lr_multiplier"] == 1


# The post's networks


def test_networks_are_sized_from_the_task():
    policy = agent()
    sizes = [[layer.out_features for layer in network[::2]] for network in (policy.actor, policy.critic)]
    assert sizes == [[180, 103, 60, 6], [180, 30, 5, 1]]  # 103 = int(sqrt(180 * 60)), 30 = int(sqrt(180 * 5))
    assert policy.lr_scales == pytest.approx([103**-0.5, 30**-0.5])
    for layer in (policy.actor[0], policy.actor[2], policy.actor[6], policy.critic[0]):
        std = layer.in_features**-0.5
        assert layer.weight.std().item() == pytest.approx(std, rel=0.15) and layer.bias.abs().max() == 0
    assert all(isinstance(layer, torch.nn.Tanh) for layer in policy.actor[1::2])


def test_speed_trick():
    policy = agent()
    assert policy.log_std_copies.shape == (12, 6)  # 10 * 60 // 48
    assert policy.log_std.tolist() == pytest.approx([-0.5] * 6)  # variance e^-1
    mean, actions = torch.zeros(1, 6), torch.linspace(-2, 2, 6)[None]
    policy.log_prob(mean, actions).sum().backward()
    by_log_std = actions[0].square() / np.exp(-1) - 1
    torch.testing.assert_close(policy.log_std_copies.grad, (by_log_std / 2).expand(12, 6))
    torch.optim.Adam([policy.log_std_copies], lr=1e-3).step()  # each copy moves by 1e-3: the log-variance by 12 of it
    torch.testing.assert_close(policy.log_std + 0.5, -12e-3 / 2 * by_log_std.sign(), atol=1e-6, rtol=0)


def test_whole_run_scaler_and_time():
    env = ppo.make_env("misbehaving:Healthy-v0", time_feature=True)
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        times = [obs[3]] + [env.step(np.zeros(2, np.float32))[0][3] for _ in range(3)]
        assert env.observation_space.contains(obs) and times == pytest.approx([0, 0.001, 0.002, 0.003])
    assert ppo.make_env("misbehaving:Healthy-v0").observation_space.shape == (3,)
    scaler, x = ppo.WholeRunScaler(3), torch.randn(100, 3) * torch.tensor([1.0, 50.0, 0.3]) + 7
    scaler.update(x[:30])
    scaler.update(x[30:])
    expected = (x - x.mean(0)) / (x.std(0, correction=0) + 0.1) / 3
    torch.testing.assert_close(scaler(x)[:, :2], expected[:, :2])
    assert torch.equal(scaler(x)[:, 2], x[:, 2])
    assert scaler(x * 1e6)[:, 0].abs().max() > 1e5  # not clipped


# Whole episodes


class Counting(gym.Env):
    """Observations (who, episode, step) of episodes of 1 to 12 steps; every third is cut by a time limit."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    episode = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if not self.episode:
            self.who = self.np_random.integers(1 << 20)
        self.episode, self.time, self.length = self.episode + 1, 0, self.np_random.integers(1, 13)
        return np.array([self.who, self.episode, self.time], float), {}

    def step(self, action):
        self.time += 1
        end = self.time == self.length
        cut = self.episode % 3 == 0
        return np.array([self.who, self.episode, self.time], float), 1.0, end and not cut, end and cut, {}


def make_counting():
    return gym.wrappers.RecordEpisodeStatistics(Counting())


def test_batch_is_the_first_episodes_that_started_and_they_are_whole():
    policy = Namespace(obs_norm=lambda obs: obs, to_env=lambda actions: actions)
    logged, seen, rested = [], [], 0
    run = Namespace(step=lambda episodes, steps: logged.append((episodes, steps)))
    with ppo.SubprocVecEnv(make_counting, 3, 2, 5) as envs:
        for _ in range(6):
            logged.clear()
            columns = ppo.collect(policy, lambda obs: obs[:, :1] * 0, envs, "cpu", num_episodes=7, run=run)
            obs, _, rewards, terminated, done, next_obs, taken = (x.numpy() for x in columns)
            assert obs.shape == (len(taken), 3, 3) and rewards.shape == done.shape == taken.shape == (len(taken), 3)
            episodes = {}  # (who, number) -> [(row, environment, time, time after it, terminated, done)]
            for row, env in np.argwhere(done + 1):
                rest = (obs[row, env, 2], next_obs[row, env, 2], terminated[row, env], done[row, env])
                episodes.setdefault(tuple(obs[row, env, :2]), []).append((row, env, *rest, taken[row, env]))
            in_order = sorted(episodes, key=lambda episode: episodes[episode][0][:2])
            for i, episode in enumerate(in_order):
                rows, _, times, after, _, ends, is_taken = map(np.array, zip(*episodes[episode]))
                assert (is_taken == (i < 7)).all()
                if i < 7:  # from its first step to its end, and where it ended the observation is its own last one
                    assert (times == np.arange(len(rows))).all() and (after == times + 1).all()
                    assert (np.diff(rows) == 1).all() and ends[-1] and not ends[:-1].any()
                    assert {x[4] for x in episodes[episode][:-1]} <= {0.0}
                    assert episodes[episode][-1][4] == (episode[1] % 3 != 0)
                else:  # begun, but not stepped
                    assert not times.any() and not after.any() and not ends.any()
                    rested += len(rows)
            assert sum(steps for _, steps in logged) == taken.sum() == sum(len(episodes[e]) for e in in_order[:7])
            assert [length for ended, _ in logged for _, length in ended] == [len(episodes[e]) for e in in_order[:7]]
            seen += in_order[:7]
    assert len(set(seen)) == 6 * 7 and rested > 12  # long enough for others to have ended in place of the last ones


def small_args(directory, **changes):
    sizes = {"env_id": "misbehaving:Healthy-v0", "num_envs": 4, "num_workers": 2, "episodes_per_batch": 6}
    sizes |= {"update_epochs": 3, "eval_episodes": 0, "cuda": False, "total_timesteps": 250, "run_dir": str(directory)}
    return ppo.Args(**sizes | changes)


def load(directory, name="checkpoint.pt"):
    return torch.load(directory / name, weights_only=True)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of whole episodes, and what went through its functions: only to be read."""
    directory, seen = tmp_path_factory.mktemp("kl") / "run", Namespace(rollouts=[], updates=[], replayed=[], ratios=[])
    real = Namespace(**{name: getattr(ppo, name) for name in ("collect", "update", "fit_value", "minibatch_gradient")})

    def collect(*inputs, **more):
        seen.rollouts.append(real.collect(*inputs, **more))
        return seen.rollouts[-1]

    def update(policy, optimizer, gradient, args, beta, batch):
        with torch.no_grad():  # by the value function and the statistics of the rollout
            next_values = policy.get_value(policy.obs_norm(seen.rollouts[-1][5]))
        lr = [group["lr"] for group in optimizer.param_groups]
        scalars = real.update(policy, optimizer, gradient, args, beta, batch)
        seen.updates.append(Namespace(batch=batch, next_values=next_values, beta=beta.item(), lr=lr, scalars=scalars))
        return scalars

    def fit_value(policy, optimizer, gradient, args, carried, obs, returns):
        seen.replayed.append(len(carried.obs))
        return real.fit_value(policy, optimizer, gradient, args, carried, obs, returns)

    def minibatch_gradient(*inputs):
        kl, log_ratio, losses = real.minibatch_gradient(*inputs)
        seen.ratios.append(log_ratio.exp())
        return kl, log_ratio, losses

    with pytest.MonkeyPatch.context() as patch:
        for spy in (collect, update, fit_value, minibatch_gradient):
            patch.setattr(ppo, spy.__name__, spy)
        # No KL is as small as this target, and beta is at its limit soon.
        result = ppo.train(small_args(directory, beta=25.0, kl_targ=1e-9, kl_stop=None, bootstrap_time_limit=True))
    return directory, seen, result


def test_first_minibatch_has_ratio_one(whole_run):
    _, seen, result = whole_run
    assert len(seen.ratios) == 3 * result["iterations"] >= 6
    for ratios, epochs in ((ratios, seen.ratios[i : i + 3]) for i, ratios in enumerate(seen.ratios) if i % 3 == 0):
        torch.testing.assert_close(ratios, torch.ones_like(ratios), atol=1e-5, rtol=0)
        assert (epochs[2] - 1).abs().max() > 1e-4


def test_servo_sets_the_next_iterations_beta_and_learning_rate(whole_run):
    _, seen, _ = whole_run
    assert all(step.scalars["losses/kl"] > 4e-9 and step.scalars["losses/epochs"] == 3 for step in seen.updates)
    assert [step.beta for step in seen.updates] == [25.0] + [35.0] * (len(seen.updates) - 1)
    # 4 observations with the time, 2 actions: sqrt(40 * 20) = 28, sqrt(40 * 5) = 14
    lr = [(9e-4 / 28**0.5 / 1.5**i, 1e-2 / 14**0.5) for i in range(len(seen.updates))]
    np.testing.assert_allclose([step.lr for step in seen.updates], lr)


def test_budget_is_checked_after_each_batch_and_the_first_five_episodes_are_not_counted(whole_run):
    directory, seen, result = whole_run
    first, *batches = (int(rollout[-1].sum()) for rollout in seen.rollouts)
    ends = [int((rollout[4] * rollout[-1]).sum()) for rollout in seen.rollouts]
    assert ends == [5] + [6] * len(batches)
    assert result["global_step"] == sum(batches) >= 250 > sum(batches[:-1])
    assert result["iterations"] == len(batches) and result["status"] == "finished"
    checkpoint = load(directory)
    assert len(checkpoint["recent_returns"]) == 6 * len(batches)
    assert checkpoint["model"]["obs_norm.count"] == first + sum(batches)


def test_value_targets_are_monte_carlo_returns_and_go_on_where_a_time_limit_cut(whole_run):
    """Of rewards times 1 - gamma: the definition, from each step to the end of its episode."""
    _, seen, _ = whole_run
    endings = set()
    for rollout, step in zip(seen.rollouts[1:], seen.updates):
        _, _, rewards, terminated, done, _, taken = (x.numpy() for x in rollout)
        expected = np.zeros(taken.shape)
        for row, env in np.argwhere(taken):
            for k in range(len(taken)):
                expected[row, env] += 0.995**k * 0.005 * rewards[row + k, env]
                if done[row + k, env]:
                    endings.add(float(terminated[row + k, env]))
                    if not terminated[row + k, env]:
                        expected[row, env] += 0.995 ** (k + 1) * step.next_values[row + k, env].item()
                    break
        np.testing.assert_allclose(step.batch[-1], expected[taken], atol=1e-5)
    assert endings == {0.0, 1.0}


def test_the_post_takes_a_time_limit_for_an_end(tmp_path, monkeypatch):
    calls, compute_gae = [], ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *inputs: calls.append(inputs) or compute_gae(*inputs))
    for gamma in (0.995, 1.0):
        ppo.train(small_args(tmp_path / str(gamma), total_timesteps=1, gamma=gamma))
    assert [inputs[-1] for inputs in calls] == [0.98, 1.0] * 2
    assert all(torch.equal(inputs[3], inputs[4]) and inputs[3].sum() >= 6 for inputs in calls)
    assert [inputs[0].abs().max() > 0.1 for inputs in calls[::2]] == [False, True]  # not times 1 - 1


def test_reward_statistics_are_those_of_the_episodes_taken(tmp_path, monkeypatch):
    rollouts, collect = [], ppo.collect
    monkeypatch.setattr(
        ppo, "collect", lambda *inputs, **more: rollouts.append(collect(*inputs, **more)) or rollouts[-1]
    )
    ppo.train(small_args(tmp_path / "run", norm_reward=True, norm_obs=False, total_timesteps=150))
    discounted = []
    for _, _, rewards, _, done, _, taken in rollouts:
        for env in range(4):
            running = 0.0
            for row in range(len(taken)):
                running = 0.995 * running + rewards[row, env].item()
                if taken[row, env]:
                    discounted.append(running)
                if done[row, env]:
                    running = 0.0
    norm = load(tmp_path / "run")["return_norm"]
    assert len(rollouts) > 1 and not all(rollout[-1].all() for rollout in rollouts)
    assert norm["count"] == len(discounted)
    assert norm["mean"].item() == pytest.approx(np.mean(discounted)) and norm["var"] == pytest.approx(
        np.var(discounted)
    )


def test_value_fit_replays_the_batch_before():
    policy, carried, seen = agent(), ppo.Carried(1.0, 18), []
    optimizer = adam(policy, 1e-3)
    batch = random_batch(policy, 64)
    ppo.update(
        policy, optimizer, ppo.minibatch_gradient, ppo.Args(), torch.tensor(1.0), batch
    )  # the actor's Adam moves
    before = {name: p.clone() for name, p in policy.named_parameters()}

    def gradient(policy, args, obs, returns):
        seen.append((obs, returns))
        return ppo.value_gradient(policy, args, obs, returns)

    first, second = (torch.randn(size, 18) for size in (700, 600))
    for obs, sizes, pool in ((first, [350] * 2, first), (second, [300] * 2, torch.cat([first, second]))):
        seen.clear()
        loss = ppo.fit_value(policy, optimizer, gradient, ppo.Args(), carried, obs, obs[:, 0])
        assert [len(x) for x, _ in seen] == sizes * 10 and loss > 0
        pool, orders = {row.numpy().tobytes() for row in pool}, set()
        for epoch in range(10):
            rows = [row.numpy().tobytes() for x, _ in seen[2 * epoch : 2 * epoch + 2] for row in x]
            assert len(set(rows)) == len(rows) == len(obs) and set(rows) <= pool
            orders.add(tuple(rows))
        assert len(orders) == 10
        assert all(torch.equal(x[:, 0], returns) for x, returns in seen)  # each with its own return
    replayed = torch.isin(torch.cat([returns for _, returns in seen]), first[:, 0])
    assert replayed.float().mean() == pytest.approx(700 / 1300, abs=0.03)
    assert torch.equal(carried.obs, second)
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("critic")}


# Checkpoints


def differences(a, b):
    """Keys at which two checkpoints differ, to the bit."""
    if isinstance(a, dict):
        return sorted(a.keys() ^ b.keys()) + [
            f"{key}.{x}" for key in a.keys() & b.keys() for x in differences(a[key], b[key])
        ]
    if isinstance(a, list):
        return [] if len(a) == len(b) and not any(differences(x, y) for x, y in zip(a, b)) else [""]
    return [] if (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b) else [""]


def trained(checkpoint):
    return {key: value for key, value in checkpoint.items() if key not in ("args", "seconds", "training_seconds")}


def resume_args(directory, **changes):
    return ppo.Args(**load(directory)["args"] | {"resume": str(directory), "run_dir": None} | changes)


def test_resume_restores_what_adapts_and_the_batch_that_is_replayed(whole_run, monkeypatch):
    directory, seen, _ = whole_run
    saved, live, begin = load(directory), {}, ppo.Run.begin

    def begin_and_stop(run, *inputs, **parts):
        begin(run, *inputs, **parts)
        live.update({name: part.state_dict() for name, part in parts.items()})
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo.Run, "begin", begin_and_stop)
    with pytest.raises(KeyboardInterrupt):
        ppo.train(resume_args(directory, total_timesteps=300))
    assert live.keys() == {"model", "optimizer", "return_norm", "carried"}
    assert differences(live, {name: saved[name] for name in live}) == []
    carried = saved["carried"]
    assert (carried["beta"], carried["lr_multiplier"]) == (35, pytest.approx(1.5 ** -len(seen.updates)))
    assert torch.equal(carried["obs"], seen.updates[-1].batch[0])
    assert torch.equal(carried["returns"], seen.updates[-1].batch[-1])
    assert saved.keys() - load(directory, "policy.pt").keys() == {"optimizer", "carried", "rng"}


def test_two_resumes_are_the_same_run_and_replay_the_saved_batch(whole_run, tmp_path, monkeypatch):
    directory, seen, _ = whole_run
    checkpoints, replayed, fit_value = [], [], ppo.fit_value
    monkeypatch.setattr(ppo, "fit_value", lambda *x: replayed.append(len(x[4].obs)) or fit_value(*x))
    monkeypatch.setattr(ppo, "collect", refuse_warm_up(ppo.collect))
    for name, num_workers in (("one", 1), ("two", 3)):
        copy = shutil.copytree(directory, tmp_path / name)
        result = ppo.train(
            resume_args(copy, total_timesteps=load(directory)["global_step"] + 1, num_workers=num_workers)
        )
        checkpoints.append(trained(load(copy)))
    assert result["iterations"] == len(seen.updates) + 1
    assert differences(*checkpoints) == []
    assert replayed == [len(seen.updates[-1].batch[0])] * 2
    assert seen.replayed == [0] + [len(step.batch[0]) for step in seen.updates[:-1]]


def refuse_warm_up(collect):
    def spy(*inputs, num_episodes=None, **more):
        assert num_episodes is None  # named only for the scaler's first episodes
        return collect(*inputs, **more)

    return spy


def test_resume_of_a_finished_run_that_overshot_its_budget(whole_run, tmp_path):
    copy = shutil.copytree(whole_run[0], tmp_path / "copy")
    assert ppo.train(resume_args(copy))["global_step"] == whole_run[2]["global_step"] > 250
    with pytest.raises(SystemExit, match="the run has"):
        ppo.train(resume_args(copy, total_timesteps=249))
    assert (
        ppo.train(resume_args(copy, total_timesteps=0, eval_episodes=3))["global_step"] == whole_run[2]["global_step"]
    )


def test_diverged_run_ends_with_its_status_and_last_mean(tmp_path):
    args = small_args(tmp_path / "run", total_timesteps=5000, objective="none", learning_rate=1e30)
    with pytest.raises(SystemExit, match="diverged at step"):
        ppo.train(args)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "diverged" and -100 < result["mean_return_last_100"] < 0


# Presets


def parse(monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", [ppo.__file__, *map(str, flags)])
    return ppo.parse_args(ppo.Args)


def test_preset_sets_defaults_that_flags_override(monkeypatch):
    assert parse(monkeypatch) == parse(monkeypatch, "--preset", "post") == ppo.Args()
    paper = parse(monkeypatch, "--preset", "paper")
    assert paper == paper_args()
    assert (paper.num_envs * paper.num_steps, paper.num_minibatches, paper.update_epochs) == (2048, 2048 // 64, 10)
    assert (paper.learning_rate, paper.anneal_lr, paper.gamma, paper.gae_lambda) == (3e-4, False, 0.99, 0.95)
    # a flag counts even where it says what another preset would
    flags = ["--gamma", 0.995, "--seed=3", "--preset=paper", "--kl-stop", 4, "--objective", "kl-fixed", "--beta", 10]
    expected = paper_args(gamma=0.995, seed=3, kl_stop=4.0, objective="kl-fixed", beta=10.0)
    assert parse(monkeypatch, *flags) == expected
    assert parse(monkeypatch, "--kl-stop", "None").kl_stop is None


@pytest.mark.parametrize(
    "flags",
    [{"preset": "past"}, {"objective": "kl"}, {"episodes_per_batch": 1}, {"kl_targ": 0.0}, {"kl_stop": 0.0}],
    ids=str,
)
def test_impossible_choices_are_named(flags, tmp_path):
    ((name, value),) = flags.items()
    with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} {value}.*: must be"):
        ppo.train(small_args(tmp_path / "run", **flags))


def test_unknown_preset_reaches_that_line(monkeypatch):
    assert parse(monkeypatch, "--preset", "past").preset == "past"


def test_the_papers_clipped_objective_is_the_base(tmp_path, monkeypatch):
    """The same steps of both scripts, to rounding; and a resumed run keeps its preset."""
    sizes = {"env_id": "misbehaving:Healthy-v0", "num_envs": 4, "num_steps": 16, "num_minibatches": 4}
    sizes |= {"num_workers": 2, "eval_episodes": 0, "cuda": False, "total_timesteps": 4 * 64}
    unlike = {"anneal_lr": False, "clip_vloss": False, "max_grad_norm": 1e9}
    base.train(base.Args(**sizes, **unlike, run_dir=str(tmp_path / "base")))
    ppo.train(paper_args(**sizes, objective="clip", run_dir=str(tmp_path / "run")))
    expected, found = load(tmp_path / "base")["model"], load(tmp_path / "run")["model"]
    found["log_std"] = found.pop("log_std_copies")[0]
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)

    args = parse(monkeypatch, "--resume", tmp_path / "run", "--total-timesteps", 5 * 64)
    assert (args.preset, args.num_steps, args.gamma, args.objective) == ("paper", 16, 0.99, "clip")
    args = parse(monkeypatch, "--resume", tmp_path / "run", "--preset", "post", "--total-timesteps", 5 * 64)
    with pytest.raises(SystemExit, match="--preset post: can't change"):
        ppo.train(args)


def test_episodes_in_a_batch_by_environment(monkeypatch, tmp_path):
    asked = []

    def collect(*inputs, num_episodes=None, **more):
        asked.append(num_episodes or inputs[5])
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "collect", collect)
    for env_id, episodes in (("Reacher-v5", 50), ("Swimmer-v5", 5), ("misbehaving:Healthy-v0", 20)):
        with pytest.raises(KeyboardInterrupt):
            ppo.train(small_args(tmp_path / env_id[:4], env_id=env_id, episodes_per_batch=None, norm_obs=False))
        assert asked.pop() == episodes


# results/kl_tables.py


@pytest.fixture
def kl_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "results"))
    return import_module("kl_tables")


def fake_run(env_id, seed, training, returns=(), **args):
    points = np.array([(0, 0, x) for x in returns], np.float64).reshape(-1, 3)
    args = {"exp_name": "ppo", "env_id": env_id, "seed": seed, **args}
    return plot_runs.Run(Path(), env_id, seed, args, points, "finished", training, np.nan, 1.0, "ppo")


def cells(lines):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")][2:]


def test_threshold_table_counts_episodes(kl_tables):
    returns = [0, 0, 0, 0, 500, 0, 0, 90, 90, 90, 90, 90, 400]  # one good episode: 100 for 5 in a row
    assert kl_tables.crossing(np.array(returns), 90) == 5
    assert kl_tables.crossing(np.array(returns), 100.5) == 8
    assert kl_tables.crossing(np.array(returns), 153) is None
    runs = [fake_run("Swimmer-v5", 2, 0, [0] * 9 + [450]), fake_run("Swimmer-v5", 1, 0, [-1] * 9)]
    (row,) = cells(kl_tables.thresholds(runs))
    assert row == ["Swimmer-v5", "ppo", "90", "137", "not in 9, 10", "372", "-1.00, 90.0"]


def test_objectives_are_scored_as_the_paper_does(kl_tables, tmp_path):
    clip, none = {"objective": "clip", "clip_coef": 0.2}, {"objective": "none", "clip_coef": 0.2}
    runs = [fake_run("A-v5", seed, score, **clip) for seed, score in ((1, 90), (2, 110))] + [
        fake_run("B-v5", 1, 3, **clip),
        fake_run("A-v5", 1, -50, **none),
        fake_run("B-v5", 1, 5, **none),
        fake_run("B-v5", 1, 9, objective="clip", clip_coef=0.3),  # no run on A: the row is left out
    ]
    rows, low = kl_tables.score(runs, {"A-v5": 0, "B-v5": 1}.get)
    # A: 0 to 100, B: 1 to 5. No penalty: (-50 / 100 + 1) / 2; clipping: (1 + (3 - 1) / 4) / 2, and its seed 1, the
    # only one that both environments have, (90 / 100 + (3 - 1) / 4) / 2.
    assert cells(kl_tables.objectives(rows, low)) == [
        ["none", "-0.39", "0.25", "0.25", "-50.0", "5.00"],
        ["clip, clip_coef 0.2", "0.82", "0.75", "0.70", "100", "3.00"],
        ["random actions", "0", "0", "", "0.00", "1.00"],
    ]
    kl_tables.draw(rows, tmp_path / "scores.svg")
    assert "clip, clip_coef 0.2" in (tmp_path / "scores.svg").read_text()


def test_random_actions_are_scored_by_whole_episodes(kl_tables):
    assert -500 < kl_tables.random_score("Pendulum-v1") / 2.5 < -400  # -1000 to -1250, 200 steps each
