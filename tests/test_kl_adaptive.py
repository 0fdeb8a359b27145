"""The adaptive KL script: penalties, servos, whole episodes, the value fit, presets, and what a resume restores."""

import json
import shutil
from argparse import Namespace
from importlib import import_module
from pathlib import Path
from unittest.mock import Mock

import gymnasium as gym
import misbehaving  # noqa: F401 (registers the environments)
import numpy as np
import pytest
import torch
from conftest import load, parse
from conftest import resume_args as resume
from test_resume import differences, points, trained

import plot_runs
import ppo_kl_adaptive as ppo
import ppo_mlp_gaussian as base

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (18,))  # HalfCheetah's, with the time
ACTIONS = gym.spaces.Box(-1, 1, (6,))


def paper_args(**flags):
    return ppo.Args(**ppo.PRESETS["paper"] | flags)


def agent(args=None):
    torch.manual_seed(0)
    return ppo.Agent(OBSERVATIONS, ACTIONS, args or ppo.Args())


def adam(policy, lr=1e-3):
    groups = [[p for name, p in policy.named_parameters() if not name.startswith("critic")], policy.critic.parameters()]
    return torch.optim.Adam([{"params": group} for group in groups], lr=lr)


@torch.no_grad()
def random_batch(policy, size):
    """What `update` takes last, drawn from the policy: log_std and batch."""
    drawn = policy.policy(obs := torch.randn(size, 18))
    actions = drawn.sample()
    return drawn.log_std, [obs, actions, drawn.log_prob(actions), drawn.mean, torch.randn(size), torch.randn(size)]


def update(policy, args, size, gradient=ppo.minibatch_gradient, optimizer=None):
    """One update of the policy, on a batch drawn from it. -> metrics, log_std before, batch"""
    drawn = random_batch(policy, size)
    optimizer = optimizer or adam(policy)
    return ppo.update(policy, optimizer, gradient, args, torch.tensor(1.0), *drawn), *drawn


# Penalties


def test_closed_form_kl_equals_sampling_and_torch():
    torch.manual_seed(0)
    means = torch.randn(2, 3, dtype=torch.float64) * 0.3
    log_stds = torch.tensor([[-0.5, 0.0, 0.4], [-0.3, -0.1, 0.3]]).double()
    old, new = (torch.distributions.Normal(m, s.exp()) for m, s in zip(means, log_stds))
    kl = ppo.gaussian_kl(*map(ppo.Gaussian, means, log_stds))
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(old, new).sum())
    actions = old.sample((400_000,))
    samples = (old.log_prob(actions) - new.log_prob(actions)).sum(-1)
    assert abs(samples.mean() - kl) < 4 * samples.std() / 400_000**0.5 < 0.02 * kl
    exchanged = ppo.gaussian_kl(*map(ppo.Gaussian, means.flip(0), log_stds.flip(0)))
    assert kl > 0.1 and exchanged != pytest.approx(kl.item(), rel=0.05)


@pytest.mark.parametrize("objective", ["clip", "none", "kl-fixed", "kl-adaptive"])
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
    carried, steps = {"beta": beta, "lr_multiplier": lr_multiplier}, []
    for kl in kls:
        ppo.adapt(carried, kl, args)
        steps.append(tuple(carried.values()))
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
    args, kls = ppo.Args(update_epochs=epochs, num_minibatches=num_minibatches, objective="none", **flags), []

    def gradient(*inputs):
        log_ratio, losses = ppo.minibatch_gradient(*inputs)
        kls.append(losses["losses/kl"].item())
        return log_ratio, losses

    metrics, *_ = update(agent(), args, 203, gradient)
    return metrics["losses/epochs"], metrics["losses/kl"].item(), kls


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


def test_minibatches_of_a_batch_that_does_not_divide_hold_two_samples_or_more():
    """Each epoch all samples, in an order of its own; of one sample the advantages have no standard deviation."""
    seen, args = [], ppo.Args(update_epochs=2, num_minibatches=4, kl_stop=None)

    def gradient(*inputs):
        seen.append(inputs[-1])
        return ppo.minibatch_gradient(*inputs)

    for size, sizes in ((10, [3, 3, 2, 2]), (5, [3, 2])):
        seen.clear()
        _, _, batch = update(agent(), args, size, gradient)
        assert [len(returns) for returns in seen] == 2 * sizes
        first, second = torch.cat(seen).chunk(2)
        assert torch.equal(first.sort()[0], batch[-1].sort()[0]) and torch.equal(second.sort()[0], first.sort()[0])
        assert not torch.equal(first, second)


def test_logged_kl_is_the_one_after_the_update_and_losses_are_means_over_it():
    policy, seen = agent(), []

    def gradient(*inputs):
        seen.append(ppo.minibatch_gradient(*inputs))
        return seen[-1]

    metrics, old_log_std, batch = update(policy, ppo.Args(update_epochs=3, kl_stop=None), 64, gradient)
    for name in ("losses/policy_loss", "losses/entropy"):
        assert metrics[name] == pytest.approx(np.mean([losses[name].item() for _, losses in seen]), abs=1e-6)
    old = torch.distributions.Normal(batch[3], old_log_std.exp().expand(64, 6))
    policy = policy.policy(batch[0])
    new = torch.distributions.Normal(policy.mean, policy.log_std.exp().expand(64, 6))
    expected = torch.distributions.kl_divergence(old, new).sum(-1).mean()
    assert metrics["losses/kl"].item() == pytest.approx(expected.item(), rel=1e-3) and metrics["losses/kl"] > 1e-6


@pytest.mark.parametrize("preset", ["post", "paper"])
def test_only_the_paper_updates_both_functions_at_once(preset):
    args = ppo.Args(**ppo.PRESETS[preset] | {"update_epochs": 1, "num_minibatches": 1})
    policy = agent(args)
    before = {name: p.clone() for name, p in policy.named_parameters()}
    metrics, *_ = update(policy, args, 64)
    changed = {name.split(".")[0] for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"actor", "log_std_copies"} | ({"critic"} if preset == "paper" else set())
    assert (metrics.get("losses/value_loss", 0) > 0) == (preset == "paper")


@pytest.mark.parametrize("objective", ["kl-fixed", "kl-adaptive"])
def test_a_beta_goes_on_until_another_is_given(objective, tmp_path, monkeypatch):
    directory, betas, real = tmp_path / "run", [], ppo.update
    monkeypatch.setattr(ppo, "update", lambda *inputs: betas.append(inputs[4].item()) or real(*inputs))
    ppo.train(small_args(directory, objective=objective, beta=3.0, kl_targ=1e-9, kl_stop=None, total_timesteps=150))
    carried, first = load(directory)["carried"], len(betas)
    assert first > 1 and carried["beta"] == (3.0 if objective == "kl-fixed" else pytest.approx(3 * 1.5**first))
    assert carried["lr_multiplier"] == 1
    ppo.train(resume(ppo, directory, beta=7.0, total_timesteps=load(directory)["global_step"] + 1))
    grows = 1.0 if objective == "kl-fixed" else 1.5
    assert betas == pytest.approx([*(3 * grows**i for i in range(first)), 7.0])
    assert [beta for _, beta in points(directory)["losses/beta"]] == pytest.approx(betas)
    if objective == "kl-fixed":  # nothing has adapted yet: the adaptive one begins with what is given
        steps = load(directory)["global_step"]
        changed = resume(ppo, directory, objective="kl-adaptive", beta=9.0, total_timesteps=steps + 1)
        with monkeypatch.context() as patch, pytest.raises(StopIteration):  # also if it is stopped at once
            patch.setattr(ppo, "collect", Mock(side_effect=StopIteration))
            ppo.train(changed)
        ppo.train(resume(ppo, directory))
        ppo.train(resume(ppo, directory, beta=5.0, total_timesteps=load(directory)["global_step"] + 1))
        assert betas[first + 1 :] == pytest.approx([9.0, 5.0])
    ppo.train(resume(ppo, directory, total_timesteps=load(directory)["global_step"] + 1))
    assert betas[-1] == pytest.approx(5 * 1.5 if objective == "kl-fixed" else 7 * 1.5)


def test_whole_episodes_may_overrun_any_budget(tmp_path):
    args = small_args(tmp_path / "run", total_timesteps=1, num_envs=2, episodes_per_batch=2)
    assert ppo.train(args)["iterations"] == 1


# The post's networks


def test_networks_are_sized_from_the_task():
    policy = agent()
    sizes = [[layer.out_features for layer in network[::2]] for network in (policy.actor, policy.critic)]
    assert sizes == [[180, 103, 60, 6], [180, 30, 5, 1]]  # 103 = int(sqrt(180 * 60)), 30 = int(sqrt(180 * 5))
    for layer in (policy.actor[0], policy.actor[2], policy.actor[6], policy.critic[0]):
        std = layer.in_features**-0.5
        assert layer.weight.std().item() == pytest.approx(std, rel=0.15) and layer.bias.abs().max() == 0
    assert all(isinstance(layer, torch.nn.Tanh) for layer in policy.actor[1::2])


def test_the_variance_learns_faster():
    policy, obs, actions = agent(), torch.zeros(1, 18), torch.linspace(-2, 2, 6)[None]
    assert policy.log_std_copies.shape == (12, 6)  # 10 * 60 // 48
    drawn = policy.policy(obs)
    assert drawn.log_std.tolist() == pytest.approx([-0.5] * 6)  # variance e^-1
    (drawn.log_prob(actions + drawn.mean.detach())).sum().backward()
    by_log_std = actions[0].square() / np.exp(-1) - 1
    torch.testing.assert_close(policy.log_std_copies.grad, (by_log_std / 2).expand(12, 6))
    torch.optim.Adam([policy.log_std_copies], lr=1e-3).step()  # each copy moves by 1e-3: the log-variance by 12 of it
    log_std = policy.policy(obs).log_std
    torch.testing.assert_close(log_std + 0.5, -12e-3 / 2 * by_log_std.sign(), atol=1e-6, rtol=0)


def test_post_norm_and_time():
    env = ppo.make_env("misbehaving:Healthy-v0", time_feature=True)
    for _ in range(2):
        obs, _ = env.reset(seed=1)
        times = [obs[3]] + [env.step(np.zeros(2, np.float32))[0][3] for _ in range(3)]
        assert env.observation_space.contains(obs) and times == pytest.approx([0, 0.001, 0.002, 0.003])
    assert ppo.make_env("misbehaving:Healthy-v0").observation_space.shape == (3,)
    with pytest.raises(ValueError, match="dimension"):  # no shape is mended in silence
        env.observation(obs[None, :3])
    scaler, x = ppo.PostNorm(3), torch.randn(100, 3) * torch.tensor([1.0, 50.0, 0.3]) + 7
    scaler.update(x[:30])
    scaler.update(x[30:])
    expected = (x - x.mean(0)) / (x.std(0, correction=0) + 0.1) / 3
    torch.testing.assert_close(scaler(x)[:, :2], expected[:, :2])
    assert torch.equal(scaler(x)[:, 2], x[:, 2])
    assert scaler(x * 1e6)[:, 0].abs().max() > 1e5  # not clipped
    assert scaler(x.double()).dtype == torch.float32  # as the networks are; observations with the time are float64


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


def test_batch_is_the_first_episodes_that_started_and_they_are_whole():
    policy, seen, rested = Namespace(to_env=lambda actions: actions), [], 0
    with ppo.SubprocVecEnv(Counting, 3, 2, 5) as envs:
        envs.reset()
        for _ in range(6):
            *columns, logged = ppo.collect(policy, lambda obs: obs[:, :1] * 0, envs, "cpu", num_episodes=7)
            obs, _, rewards, terminated, done, followed, taken = (x.numpy() for x in columns)
            assert obs.shape == (len(taken), 3, 3) and rewards.shape == done.shape == taken.shape == (len(taken), 3)
            episodes = {}  # (who, number) -> [(row, environment, time, time after it, terminated, done, taken)]
            for row, env in np.argwhere(done + 1):
                rest = (obs[row, env, 2], followed[row, env, 2], terminated[row, env], done[row, env])
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
            taken_episodes = [episodes[episode] for episode in in_order[:7]]
            assert taken.sum() == rewards.sum() == sum(map(len, taken_episodes))
            assert logged == [(steps[0][1], len(steps), len(steps)) for steps in taken_episodes]
            seen += in_order[:7]
    assert len(set(seen)) == 6 * 7 and rested > 12  # long enough for others to have ended in place of the last ones


def small_args(directory, **changes):
    sizes = {"env_id": "misbehaving:Healthy-v0", "num_envs": 4, "num_workers": 2, "episodes_per_batch": 6}
    sizes |= {"update_epochs": 3, "eval_episodes": 0, "cuda": False, "total_timesteps": 250, "run_dir": str(directory)}
    return ppo.Args(**sizes | changes)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A run of whole episodes, and what went through its functions: only to be read."""
    directory, seen = tmp_path_factory.mktemp("kl") / "run", Namespace(rollouts=[], updates=[], replayed=[])
    real = Namespace(**{name: getattr(ppo, name) for name in ("collect", "update", "fit_value")})

    def collect(*inputs, **more):
        *rollout, episodes = real.collect(*inputs, **more)
        seen.rollouts.append(rollout)
        return *rollout, episodes

    def update(policy, optimizer, gradient, args, beta, old_log_std, batch):
        lr = [group["lr"] for group in optimizer.param_groups]
        metrics = real.update(policy, optimizer, gradient, args, beta, old_log_std, batch)
        seen.updates.append(Namespace(batch=batch, beta=beta.item(), lr=lr, metrics=metrics))
        return metrics

    def fit_value(*inputs):
        seen.replayed.append(len(inputs[4]["batch"][0]))
        return real.fit_value(*inputs)

    with pytest.MonkeyPatch.context() as patch:
        for spy in (collect, update, fit_value):
            patch.setattr(ppo, spy.__name__, spy)
        # No KL is as small as this target, and beta is at its limit soon.
        result = ppo.train(small_args(directory, beta=25.0, kl_targ=1e-9, kl_stop=None, anneal_lr=True))
    return directory, seen, result


def test_servo_sets_the_next_iterations_beta_and_learning_rate(whole_run):
    _, seen, _ = whole_run
    assert all(step.metrics["losses/kl"] > 4e-9 and step.metrics["losses/epochs"] == 3 for step in seen.updates)
    assert [step.beta for step in seen.updates] == [25.0] + [35.0] * (len(seen.updates) - 1)
    # 4 observations with the time, 2 actions: sqrt(40 * 20) = 28, sqrt(40 * 5) = 14
    lr = [(9e-4 / 28**0.5 / 1.5**i, 1e-2 / 14**0.5) for i in range(len(seen.updates))]
    before = np.cumsum([0, *(len(step.batch[0]) for step in seen.updates[:-1])])
    np.testing.assert_allclose([step.lr for step in seen.updates], np.array(lr) * (1 - before[:, None] / 250))


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


@pytest.mark.parametrize("flags", [{}, {"num_steps": 16}], ids=["batch", "scaler"])
def test_whole_episodes_of_a_task_without_a_time_limit_end(flags, tmp_path, monkeypatch):
    gym.register("Endless-v0", misbehaving.Misbehaving)
    made = []

    def spy(make, *_):
        made.append(make())
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "SubprocVecEnv", spy)
    with pytest.raises(KeyboardInterrupt):
        ppo.train(small_args(tmp_path / "run", env_id="Endless-v0", **flags))
    gym.registry.pop("Endless-v0")
    assert made[0].get_wrapper_attr("_max_episode_steps") == 27000


def test_the_gradient_of_the_value_is_clipped():
    norms = []
    for limit in (1e-3, 0):  # 0 is no limit
        policy = agent()
        ppo.value_gradient(policy, ppo.Args(max_grad_norm=limit), torch.randn(64, 18), torch.randn(64))
        norms.append(torch.cat([p.grad.flatten() for p in policy.critic.parameters()]).norm().item())
    assert norms[0] == pytest.approx(1e-3, rel=1e-3) and norms[1] > 1e-2


def test_value_fit_replays_the_batch_before():
    policy, seen = agent(), []
    carried, optimizer = {"batch": (torch.zeros(0, 18), torch.zeros(0))}, adam(policy)
    update(policy, ppo.Args(), 64, optimizer=optimizer)  # the actor's Adam moves
    before = {name: p.clone() for name, p in policy.named_parameters()}

    def gradient(policy, args, obs, returns):
        seen.append((obs, returns))
        return ppo.value_gradient(policy, args, obs, returns)

    first, second = (torch.randn(size, 18) for size in (700, 601))
    for obs, sizes, pool in ((first, [350] * 2, first), (second, [300] * 2, torch.cat([first, second]))):
        seen.clear()
        loss = ppo.fit_value(policy, optimizer, gradient, ppo.Args(), carried, obs, obs[:, 0])
        assert [len(x) for x, _ in seen] == sizes * 10 and loss > 0
        pool, orders = {row.numpy().tobytes() for row in pool}, set()
        for epoch in range(10):
            rows = [row.numpy().tobytes() for x, _ in seen[2 * epoch : 2 * epoch + 2] for row in x]
            assert len(set(rows)) == len(rows) == sum(sizes) and set(rows) <= pool
            orders.add(tuple(rows))
        assert len(orders) == 10
        assert all(torch.equal(x[:, 0], returns) for x, returns in seen)  # each with its own return
    replayed = torch.isin(torch.cat([returns for _, returns in seen]), first[:, 0])
    assert replayed.float().mean() == pytest.approx(700 / 1301, abs=0.03)
    assert carried["batch"][0] is second
    changed = {name for name, p in policy.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if name.startswith("critic")}


# Checkpoints


def test_what_has_adapted_goes_with_its_objective(whole_run, tmp_path):
    copy = Path(shutil.copytree(whole_run[0], tmp_path / "copy"))
    ppo.train(resume(ppo, copy, objective="clip", total_timesteps=load(copy)["global_step"] + 1))
    assert load(copy)["carried"]["lr_multiplier"] == 1 < load(whole_run[0])["carried"]["lr_multiplier"] ** -1


def test_a_checkpoint_holds_what_adapts_and_the_batch_that_is_replayed(whole_run):
    carried, updates = load(whole_run[0])["carried"], whole_run[1].updates
    assert (carried["beta"], carried["lr_multiplier"]) == (35, pytest.approx(1.5 ** -len(updates)))
    assert differences(carried["batch"], (updates[-1].batch[0], updates[-1].batch[-1])) == []


def test_an_evaluation_alone_leaves_the_statistics_even_before_the_first_iteration(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ppo, "compute_gae", Mock(side_effect=KeyboardInterrupt))
        ppo.train(small_args(tmp_path / "run"))
    saved = load(tmp_path / "run")
    assert saved["iteration"] == saved["model"]["obs_norm.count"] == 0
    counts, act = [], ppo.Agent.act
    monkeypatch.setattr(
        ppo.Agent, "act", lambda agent, obs: counts.append(agent.obs_norm.count.item()) or act(agent, obs)
    )
    ppo.train(resume(ppo, tmp_path / "run", total_timesteps=0, eval_episodes=1))
    assert set(counts) == {0}


def test_two_resumes_are_the_same_run_and_replay_the_saved_batch(whole_run, tmp_path, monkeypatch):
    directory, seen, _ = whole_run
    checkpoints, replayed, fit_value, collect = [], [], ppo.fit_value, ppo.collect
    monkeypatch.setattr(ppo, "fit_value", lambda *x: replayed.append(len(x[4]["batch"][0])) or fit_value(*x))
    monkeypatch.setattr(ppo, "collect", lambda *x: collect(*x))  # the scaler's episodes are asked for by name: an error
    for name, num_workers in (("one", 1), ("two", 3)):
        copy = Path(shutil.copytree(directory, tmp_path / name))
        budget = load(directory)["global_step"] + 1
        result = ppo.train(resume(ppo, copy, total_timesteps=budget, num_workers=num_workers))
        checkpoints.append(trained(load(copy)))
    assert result["iterations"] == len(seen.updates) + 1
    assert differences(*checkpoints) == []
    assert replayed == [len(seen.updates[-1].batch[0])] * 2
    assert seen.replayed == [0] + [len(step.batch[0]) for step in seen.updates[:-1]]


def test_resume_of_a_finished_run_that_overshot_its_budget(whole_run, tmp_path):
    copy, steps = Path(shutil.copytree(whole_run[0], tmp_path / "copy")), whole_run[2]["global_step"]
    assert steps > 250
    for changes in ({}, {"total_timesteps": 249}, {"total_timesteps": 0, "eval_episodes": 3}):
        assert ppo.train(resume(ppo, copy, **changes))["global_step"] == load(copy)["global_step"] == steps


def test_diverged_run_ends_with_its_status_and_last_mean(tmp_path):
    args = small_args(tmp_path / "run", total_timesteps=5000, objective="none", learning_rate=1e30)
    with pytest.raises(SystemExit, match="diverged at step"):
        ppo.train(args)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["status"] == "diverged" and -100 < result["mean_return_last_100"] < 0


# Presets


def test_preset_sets_defaults_that_flags_override(monkeypatch):
    assert parse(monkeypatch, ppo) == parse(monkeypatch, ppo, "--preset", "post") == ppo.Args()
    paper = parse(monkeypatch, ppo, "--preset", "paper")
    assert paper == paper_args()
    assert (paper.num_envs * paper.num_steps, paper.num_minibatches, paper.update_epochs) == (2048, 2048 // 64, 10)
    assert (paper.learning_rate, paper.anneal_lr, paper.gamma, paper.gae_lambda) == (3e-4, False, 0.99, 0.95)
    # a flag counts even where it says what another preset would
    flags = ["--gamma", 0.995, "--seed=3", "--preset=paper", "--kl-stop", 4, "--objective", "kl-fixed", "--beta", 10]
    expected = paper_args(gamma=0.995, seed=3, kl_stop=4.0, objective="kl-fixed", beta=10.0)
    assert parse(monkeypatch, ppo, *flags) == expected
    assert parse(monkeypatch, ppo, "--kl-stop", "None").kl_stop is None


@pytest.mark.parametrize(
    "flags",
    [
        {"preset": "past"}, {"objective": "kl"}, {"episodes_per_batch": 1}, {"kl_targ": 0.0}, {"kl_stop": 0.0},
        {"num_steps": -1}, {"num_minibatches": 0}, {"num_envs": 0}, {"total_timesteps": -1},
        {"kl_targ": np.nan}, {"beta": 0.0},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_choices_are_named(flags, tmp_path):
    ((name, value),) = flags.items()
    with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} {value}.*: must be"):
        ppo.train(small_args(tmp_path / "run", **flags))


def test_unknown_preset_reaches_that_line(monkeypatch):
    assert parse(monkeypatch, ppo, "--preset", "past").preset == "past"


@pytest.mark.parametrize("norm_adv, max_grad_norm", [(False, 0.0), (True, 0.02)])
def test_the_papers_clipped_objective_is_the_base(norm_adv, max_grad_norm, tmp_path, monkeypatch):
    """The same steps and losses of both scripts, to rounding; and a resumed run keeps its preset."""
    sizes = {"env_id": "misbehaving:Healthy-v0", "num_envs": 4, "num_steps": 16, "num_minibatches": 4}
    sizes |= {"num_workers": 2, "eval_episodes": 0, "cuda": False, "total_timesteps": 4 * 64}
    sizes |= {"ent_coef": 0.1, "norm_adv": norm_adv, "max_grad_norm": max_grad_norm, "clip_coef": 0.01}
    unlike = {"anneal_lr": False, "clip_vloss": False}
    base.train(base.Args(**sizes, **unlike, run_dir=str(tmp_path / "base")))
    ppo.train(paper_args(**sizes, objective="clip", run_dir=str(tmp_path / "run")))
    expected, found = load(tmp_path / "base")["model"], load(tmp_path / "run")["model"]
    found["log_std"] = found.pop("log_std_copies")[0]
    assert found.keys() == expected.keys() and "losses/beta" not in points(tmp_path / "run")
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-4)
    ours, theirs = points(tmp_path / "run"), points(tmp_path / "base")
    for name in [x for x in theirs if x.startswith("losses/") and x in ours]:
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-5, rtol=1e-3, err_msg=name)
    assert theirs["losses/clipfrac"][-1][1] > 0

    flags = "--resume", tmp_path / "run", "--total-timesteps", 5 * 64
    args = parse(monkeypatch, ppo, *flags)
    assert (args.preset, args.num_steps, args.gamma, args.objective) == ("paper", 16, 0.99, "clip")
    args = parse(monkeypatch, ppo, *flags, "--preset", "post")
    assert (args.preset, args.num_steps, args.gamma) == ("post", 16, 0.99)  # the other flags are the run's
    with pytest.raises(SystemExit, match="does not fit"):
        ppo.train(args)


def test_episodes_in_a_batch_by_environment(monkeypatch, tmp_path):
    asked = []

    def collect(*inputs):
        asked.extend([inputs[2].num_envs, *inputs[4:]])
        raise KeyboardInterrupt

    monkeypatch.setattr(ppo, "collect", collect)
    fives = [(f"{name}-v5", 5) for name in ("HalfCheetah", "HumanoidStandup", "Swimmer")]
    for env_id, episodes in [("Reacher-v5", 50), *fives, ("Healthy-v0", 20)]:
        asked.clear()
        flags = {"env_id": f"misbehaving:{env_id}" if env_id == "Healthy-v0" else env_id, "norm_obs": False}
        with pytest.raises(KeyboardInterrupt):
            ppo.train(small_args(tmp_path / env_id, episodes_per_batch=None, num_envs=7, **flags))
        assert asked == [min(7, episodes), np.inf, episodes]


# results/kl_tables.py


@pytest.fixture
def kl_tables(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "results"))
    return import_module("kl_tables")


def fake_run(env_id, seed, training, returns=(), **args):
    points = np.array([(0, 0, x) for x in returns], np.float64).reshape(-1, 3)
    args = {"exp_name": "ppo", "env_id": env_id, "seed": seed, **args}
    return plot_runs.Run(Path(), env_id, seed, args, points, "finished", training, np.nan, "ppo")


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
    with pytest.raises(SystemExit, match="a second run of clip, clip_coef 0.2"):
        kl_tables.score([*runs, fake_run("A-v5", 1, 0, gamma=0.9, **clip)], {}.get)
    with pytest.raises(SystemExit, match="no row has a run in every environment"):
        kl_tables.score([runs[0], runs[-1]], {}.get)
    kl_tables.draw(rows, tmp_path / "scores.svg")
    assert "clip, clip_coef 0.2" in (tmp_path / "scores.svg").read_text()


def test_random_actions_are_scored_by_whole_episodes(kl_tables):
    assert -500 < kl_tables.random_score("Pendulum-v1") / 2.5 < -400  # -1000 to -1250, 200 steps each


def test_help_lists_the_defaults_of_the_preset_or_of_the_saved_run(monkeypatch, capsys, finished):
    monkeypatch.setenv("COLUMNS", "250")
    for flags, rows in ((["--preset", "paper"], 256), (["--resume", finished(ppo)], 16)):
        with pytest.raises(SystemExit) as end:
            parse(monkeypatch, ppo, *flags, "--help")
        line = next(x for x in capsys.readouterr().out.splitlines() if "--num-steps" in x)
        assert end.value.code == 0 and f"(default: {rows})" in line
