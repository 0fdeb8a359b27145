"""Value first: the two-hot encoding, what each order trains on what, and when it is the base's update."""

import copy
import json
import shutil
import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load, resume_args, small_args
from test_math import slow_gae
from torch.utils.tensorboard import SummaryWriter

import ppo_mlp_gaussian as base
import ppo_value_first as ppo

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (5,))
BOX = gym.spaces.Box(np.array([-1.0, -2.0, 0.0], np.float32), np.array([1.0, 2.0, 4.0], np.float32))
DISCRETE = gym.spaces.Discrete(4)
ORDERS = ("joint", "phases", "value-first")

spaces = pytest.mark.parametrize("space", [BOX, DISCRETE], ids=["box", "discrete"])


def agent(space, **flags):
    torch.manual_seed(0)
    return ppo.Agent(OBSERVATIONS, space, ppo.Args(**flags))


def random_batch(policy, size=512):
    """obs, actions, log_probs, values, advantages, returns; the returns far off, so that gradients are clipped."""
    torch.manual_seed(1)
    obs = torch.randn(size, 5)
    with torch.no_grad():
        distribution, values = policy.policy(obs), policy.value(obs)
        actions = distribution.sample()
        log_probs = distribution.log_prob(actions) + 0.3 * torch.randn(size)
    return obs, actions, log_probs, values, torch.randn(size), values + 20 * torch.randn(size)


def updated(policy, args, batch, *phases):
    """The parameters {name: tensor} after these phases, and the metrics of each."""
    policy = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    torch.manual_seed(2)
    metrics = [ppo.update(policy, optimizer, partial(ppo.minibatch_gradient, x), args, batch) for x in phases]
    return dict(policy.named_parameters()), metrics


def as_base(policy):
    """The base's agent with the same parameters, for Box actions."""
    gaussian = base.Agent(OBSERVATIONS, BOX, base.Args(norm_obs=False))
    gaussian.load_state_dict({name.replace("actor.log_std", "log_std"): x for name, x in policy.state_dict().items()})
    return gaussian


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# The value support


@pytest.mark.parametrize("low, high, atoms", [(-110, 110, 221), (-50, 50, 101), (-1.7, 3.3, 12), (0, 1e4, 2)])
def test_two_hot_inverts_to_its_value_and_sums_to_one(low, high, atoms):
    support = torch.linspace(low, high, atoms)
    values = torch.cat([low + (high - low) * torch.rand(1000), support])
    weights = ppo.two_hot(values, support)
    assert weights.shape == (1000 + atoms, atoms) and (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(1000 + atoms), atol=1e-6, rtol=0)
    torch.testing.assert_close(weights @ support, values, atol=1e-6 * (high - low), rtol=0)
    held = weights > 0
    assert held.sum(-1).max() == 2
    assert (held[:, :-1] & held[:, 1:]).sum(-1)[held.sum(-1) == 2].min() == 1  # two neighbours


def test_two_hot_of_known_values():
    values = torch.tensor([[0.25, -0.5], [1.0, 0.0], [7.0, -1e9]])
    expected = [[[0, 0.75, 0.25], [0.5, 0.5, 0]], [[0, 0, 1], [0, 1, 0]], [[0, 0, 1], [1, 0, 0]]]
    torch.testing.assert_close(ppo.two_hot(values, torch.linspace(-1, 1, 3)), torch.tensor(expected))


def test_value_loss_and_gradient_of_the_support_critic():
    policy, args = agent(DISCRETE, critic="support"), ppo.Args(critic="support", max_grad_norm=0, vf_coef=2.0)
    batch = random_batch(policy, 64)
    p = policy.critic(batch[0]).double().softmax(-1).detach()
    value = (p * torch.arange(-110.0, 111.0).double()).sum(-1)
    torch.testing.assert_close(policy.value(batch[0]).double(), value, atol=1e-4, rtol=0)
    targets, rows = torch.zeros(64, 221).double(), torch.arange(64)
    below = batch[5].double().floor()
    targets[rows, below.long() + 110] = 1 - (batch[5] - below)
    targets[rows, below.long() + 111] = batch[5] - below
    _, losses = ppo.minibatch_gradient("value", policy, args, *batch)
    assert losses["losses/value_loss"].item() == pytest.approx(-(targets * p.log()).sum(-1).mean().item(), rel=1e-5)
    gradient = 2.0 * (p - targets).mean(0)  # of vf_coef * cross-entropy by the logits
    torch.testing.assert_close(policy.critic[4].bias.grad.double(), gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bound, fitted", [(110.0, 99.3), (50.0, 50.0)])
def test_support_critic_learns_its_target_only_if_the_support_holds_it(bound, fitted):
    flags = dict(critic="support", support_min=-bound, support_max=bound, support_atoms=int(2 * bound) + 1)
    args = ppo.Args(update_epochs=20, learning_rate=1e-2, **flags)
    policy = agent(DISCRETE, **flags)
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate)
    batch = (*random_batch(policy)[:-1], torch.full((512,), 99.3))
    ppo.update(policy, optimizer, partial(ppo.minibatch_gradient, "value"), args, batch)
    torch.testing.assert_close(policy.value(batch[0]), torch.full((512,), fitted), atol=0.5, rtol=0)


# The policies


def test_discrete_policy_equals_torch_categorical_and_samples_from_it():
    policy = agent(DISCRETE)
    obs, actions = torch.randn(50, 5), torch.randint(4, (50,))
    with torch.no_grad():
        policy.actor[4].weight.mul_(100)
        expected = torch.distributions.Categorical(logits=policy.actor(obs))
        found = policy.policy(obs)
        torch.testing.assert_close(found.log_prob(actions), expected.log_prob(actions))
        torch.testing.assert_close(found.entropy(), expected.entropy())
        drawn = policy.policy(obs[:1].expand(40000, 5)).sample()
        assert drawn.dtype == torch.long and drawn.shape == (40000,)
        frequencies = torch.bincount(drawn, minlength=4) / 40000
        torch.testing.assert_close(frequencies, expected.probs[0], atol=0.01, rtol=0)
        assert expected.probs[0].max() - expected.probs[0].min() > 0.2
        assert torch.equal(policy.act(obs), expected.probs.argmax(-1))


def test_discrete_actions_are_counted_from_the_start_of_the_space():
    policy, obs = agent(gym.spaces.Discrete(4, start=-1)), torch.randn(50, 5)
    assert policy.to_env(torch.arange(4)).tolist() == [-1, 0, 1, 2]
    assert torch.equal(policy.act(obs), policy.actor(obs).argmax(-1) - 1)


# The update


@pytest.mark.parametrize("norm_adv", [True, False])
def test_shared_joint_update_equals_the_base_update(norm_adv):
    flags = dict(num_minibatches=8, update_epochs=4, learning_rate=1e-3, ent_coef=0.01, norm_adv=norm_adv)
    policy, args = agent(BOX), ppo.Args(shared_update=True, **flags)
    batch, gaussian = random_batch(policy), as_base(policy)
    optimizer = torch.optim.Adam(gaussian.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
    torch.manual_seed(2)
    expected_metrics = base.update(gaussian, optimizer, base.minibatch_gradient, base.Args(**flags), batch)
    expected = {n.replace("log_std", "actor.log_std"): x for n, x in gaussian.named_parameters()}

    found, (metrics,) = updated(policy, args, batch, "joint")
    assert largest_difference(found, expected) < 1e-6
    torch.testing.assert_close(metrics, expected_metrics, rtol=1e-5, atol=1e-7)
    for change in ({"shared_update": False}, {"shared_update": True, "clip_vloss": False}):  # what it is made of
        assert largest_difference(updated(policy, ppo.Args(**flags | change), batch, "joint")[0], expected) > 1e-4


def test_values_are_clipped_only_in_a_shared_update():
    policy = agent(BOX)
    obs, actions, log_probs, values, advantages, returns = random_batch(policy)
    far = values + 5  # a change of -5 since the rollout: clipped, it would be -0.2
    free, clipped = (0.5 * (x - returns).square() for x in (values, far - 0.2))
    for flags, errors in (
        ({}, free),
        ({"shared_update": True}, torch.max(free, clipped)),
        ({"shared_update": True, "clip_vloss": False}, free),
    ):
        batch = (obs, actions, log_probs, far, advantages, returns)
        _, losses = ppo.minibatch_gradient("value", policy, ppo.Args(**flags), *batch)
        assert losses["losses/value_loss"].item() == pytest.approx(errors.mean().item(), rel=1e-5)
    assert clipped.mean() > 1.05 * free.mean()


def cleanrl_update(policy, args, batch):
    """The update of CleanRL's ppo.py, written anew with torch.distributions, in the minibatches of `ppo.update`."""
    obs, actions, log_probs, values, advantages, returns = batch
    optimizer = torch.optim.Adam(policy.parameters(), lr=args.learning_rate, eps=1e-5)
    for _ in range(args.update_epochs):
        for i in torch.randperm(len(obs)).split(len(obs) // args.num_minibatches):
            categorical = torch.distributions.Categorical(logits=policy.actor(obs[i]))
            ratio = (categorical.log_prob(actions[i]) - log_probs[i]).exp()
            a = (advantages[i] - advantages[i].mean()) / (advantages[i].std() + 1e-8)
            policy_loss = torch.max(-a * ratio, -a * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
            v = policy.critic(obs[i]).view(-1)
            clipped = values[i] + (v - values[i]).clamp(-args.clip_coef, args.clip_coef)
            value_loss = 0.5 * torch.max((v - returns[i]) ** 2, (clipped - returns[i]) ** 2).mean()
            loss = policy_loss - args.ent_coef * categorical.entropy().mean() + args.vf_coef * value_loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
            optimizer.step()


def test_shared_joint_update_equals_cleanrl():
    policy, args = agent(DISCRETE), ppo.Args(shared_update=True, order="joint")
    batch, reference = random_batch(policy), copy.deepcopy(policy)
    torch.manual_seed(2)
    cleanrl_update(reference, args, batch)
    found, _ = updated(policy, args, batch, "joint")
    assert largest_difference(found, dict(reference.named_parameters())) < 1e-6
    assert largest_difference(found, dict(policy.named_parameters())) > 1e-3


@spaces
def test_one_adam_for_both_networks_is_two(space):
    """Each network with its own Adam and its own clipped norm, one after the other: bit for bit the same."""
    policy, args = agent(space), ppo.Args()
    batch, reference = random_batch(policy), copy.deepcopy(policy)
    networks = {"policy": reference.actor, "value": reference.critic}
    adams = {
        name: torch.optim.Adam(network.parameters(), lr=args.learning_rate, eps=1e-5, fused=True)
        for name, network in networks.items()
    }
    norms = {"policy": [], "value": []}
    torch.manual_seed(2)
    for phase in ("joint", "value", "policy"):
        for _ in range(args.update_epochs):
            for i in torch.randperm(512).split(512 // args.num_minibatches):
                for name in networks if phase == "joint" else [phase]:
                    reference.zero_grad()
                    ppo.minibatch_gradient(name, reference, args, *(x[i] for x in batch))
                    with_gradient = [n for n in networks if all(p.grad is not None for p in networks[n].parameters())]
                    assert with_gradient == [name]
                    norms[name].append(torch.cat([p.grad.flatten() for p in networks[name].parameters()]).norm().item())
                    adams[name].step()
    assert max(norms["value"]) == pytest.approx(args.max_grad_norm, rel=1e-4)  # clipped
    assert max(norms["policy"]) < args.max_grad_norm
    found, (_, value, policy_phase) = updated(policy, args, batch, "joint", "value", "policy")
    assert largest_difference(found, dict(reference.named_parameters())) == 0
    kl = {"losses/old_approx_kl", "losses/approx_kl", "losses/clipfrac"}
    assert value.keys() == kl | {"losses/value_loss"} and all(value[name] == 0 for name in kl)
    assert policy_phase.keys() == kl | {"losses/policy_loss", "losses/entropy"}
    assert all((value | policy_phase).values())


# Training


SIZES = {"num_steps": 32, "learning_rate": 3e-3, "total_timesteps": 3 * 128, "norm_obs": False, "norm_reward": False}


@pytest.fixture
def recorded_training(monkeypatch, tmp_path):
    """recorded_training(flags) -> the environments' steps, the updates and the metrics of a short training.

    steps: (rewards, terminated, truncated, the observations that really followed) of each; updates: [(phase, its
    batch, the agent that it began with)] of each iteration; metrics: of each iteration.
    """

    def train(**flags):
        steps, updates, metrics = [], [[]], []
        step, update, end_iteration = ppo.SubprocVecEnv.step, ppo.update, ppo.Run.end_iteration

        def spy_step(envs, actions):
            found = step(envs, actions)
            following = np.where((envs.terminated | envs.truncated)[:, None], envs.final_obs, envs.obs)
            steps.append((envs.rewards.copy(), envs.terminated.copy(), envs.truncated.copy(), following))
            return found

        def spy_update(agent, optimizer, gradient, args, batch):
            updates[-1].append((gradient.args[0], [x.clone() for x in batch], copy.deepcopy(agent)))
            return update(agent, optimizer, gradient, args, batch)

        def spy_end(run, found, *times):
            updates.append([])
            metrics.append(found)
            end_iteration(run, found, *times)

        monkeypatch.setattr(ppo.SubprocVecEnv, "step", spy_step)
        monkeypatch.setattr(ppo, "update", spy_update)
        monkeypatch.setattr(ppo.Run, "end_iteration", spy_end)
        ppo.train(small_args(ppo, tmp_path / "run", **SIZES | flags))
        return steps, updates[:-1], metrics

    return train


def gae_by(agent, steps, obs):
    """Values and advantages [num_steps, num_envs] by definition, from what the environments gave."""
    rewards, terminated, truncated, following = (np.stack(x) for x in zip(*steps))
    with torch.no_grad():
        values = agent.value(obs.view(*rewards.shape, -1)).numpy()
        next_values = agent.value(agent.obs_norm(torch.tensor(following))).numpy()
    return values, slow_gae(rewards, values, next_values, terminated, terminated | truncated, 0.99, 0.95)


@pytest.mark.parametrize("env_id", ["misbehaving:Healthy-v0", "CartPole-v1"])
@pytest.mark.parametrize("order, critic", [("value-first", "scalar"), ("value-first", "support"), ("phases", "scalar")])
def test_policy_phase_gets_the_advantages_of_its_order(recorded_training, env_id, order, critic):
    """Value-first: GAE on fresh values, the bootstrapped ones too. Phases: the old advantages."""
    flags = {"env_id": env_id, "order": order, "critic": critic, "norm_obs": True}
    steps, updates, metrics = recorded_training(**flags)
    ended = np.array([[terminated.sum(), truncated.sum()] for _, terminated, truncated, _ in steps]).sum(0)
    assert ended[0] > 5 and (ended[1] > 5 or env_id == "CartPole-v1")
    assert len(updates) == 3
    for i, ((first, batch, before), (second, policy_batch, after)) in enumerate(updates):
        assert (first, second) == ("value", "policy")
        rollout = steps[32 * i : 32 * (i + 1)]
        values, old = gae_by(before, rollout, batch[0])
        new_values, new = gae_by(after, rollout, batch[0])
        returns = values + old
        assert np.abs(new - old).max() > 0.05
        for found, expected in ((batch[3], values), (batch[4], old), (batch[5], returns)):
            np.testing.assert_allclose(found, expected.flatten(), atol=1e-3)
        expected = new if order == "value-first" else old
        np.testing.assert_allclose(policy_batch[4], expected.flatten(), atol=1e-3)
        assert all(torch.equal(batch[j], policy_batch[j]) for j in (0, 1, 2, 3, 5))
        measured = {
            "explained_variance": 1 - (returns - values).var() / returns.var(),
            "explained_variance_after": 1 - (returns - new_values).var() / returns.var(),
            "advantage_variance_ratio": new.var() / old.var(),
        }
        assert {name: metrics[i][f"losses/{name}"].item() for name in measured} == pytest.approx(
            measured, rel=1e-3, abs=1e-3
        )


def test_joint_is_one_phase_with_the_advantages_of_its_batch(recorded_training):
    steps, updates, metrics = recorded_training(env_id="CartPole-v1", order="joint")
    for i, ((phase, batch, agent),) in enumerate(updates):
        assert phase == "joint"
        np.testing.assert_allclose(batch[4], gae_by(agent, steps[32 * i :][:32], batch[0])[1].flatten(), atol=1e-3)
    assert not {"losses/explained_variance_after", "losses/advantage_variance_ratio"} & metrics[0].keys()


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_every_order_takes_as_many_gradient_steps_of_each_network(env_id, tmp_path):
    for order in ORDERS:
        ppo.train(small_args(ppo, tmp_path / order, env_id=env_id, order=order))
        saved = load(tmp_path / order)
        steps = [state["step"].item() for state in saved["optimizer"]["state"].values()]
        parameters = [name for name in saved["model"] if name.startswith(("actor", "critic"))]
        assert steps == [3 * 2 * 2] * len(parameters)


def test_clamped_targets_are_counted_and_warned_of_once(recorded_training):
    flags = {"env_id": "CartPole-v1", "critic": "support", "support_min": -3.0, "support_max": 3.0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        _, updates, metrics = recorded_training(support_atoms=7, **flags)
    for phases, found in zip(updates, metrics):
        expected = (phases[0][1][5].abs() > 3).float().mean().item()
        assert found["losses/clamped_targets"].item() == pytest.approx(expected) and 0.1 < expected < 1
    messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert len(messages) == 1 and "--support-min -3.0" in messages[0] and "--support-max 3.0" in messages[0]


def test_discrete_run_resumes_and_evaluates(tmp_path):
    """Two resumes of one checkpoint, with other numbers of workers, are the same run; and it plays greedily."""
    ppo.train(small_args(ppo, tmp_path / "run", env_id="CartPole-v1", critic="support", **SIZES))
    models = []
    for num_workers in (1, 2):
        directory = shutil.copytree(tmp_path / "run", tmp_path / str(num_workers))
        changes = {"total_timesteps": 5 * 128, "num_workers": num_workers, "eval_episodes": 3}
        result = ppo.train(resume_args(ppo, directory, **changes))
        assert result["iterations"] == 5 and all(8 <= x <= 500 and x == int(x) for x in result["eval_returns"])
        models.append(load(directory)["model"])
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0]) and len(models[0]) == 12


def test_a_support_given_anew_at_a_resume_is_used(monkeypatch, tmp_path):
    ppo.train(small_args(ppo, tmp_path / "run", env_id="CartPole-v1", critic="support", **SIZES))
    supports, two_hot = [], ppo.two_hot
    monkeypatch.setattr(ppo, "two_hot", lambda values, support: supports.append(support) or two_hot(values, support))
    changes = {"total_timesteps": 4 * 128, "support_min": -50.0, "eval_episodes": 3}
    result = ppo.train(resume_args(ppo, tmp_path / "run", **changes))
    assert result["iterations"] == 4 and all(8 <= x <= 500 and x == int(x) for x in result["eval_returns"])
    assert supports and all((x[0], x[-1], len(x)) == (-50, 110, 221) for x in supports)


@pytest.mark.slow
def test_cartpole_passes_400_by_150_k_steps_with_an_order(tmp_path):
    results = {}
    for order in ORDERS:
        flags = {"order": order, "total_timesteps": 150_000, "eval_episodes": 0, "cuda": False}
        results[order] = ppo.train(ppo.Args(run_dir=str(tmp_path / order), **flags))["mean_return_last_100"]
    assert max(results.values()) > 400, results


# results/value_first_bias.py


def test_bias_table_has_means_of_medians(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(ppo.__file__).parent / "results"))
    bias = import_module("value_first_bias")
    for seed, shift in ((1, 0.0), (2, 1.0), (3, 9.0)):  # the third is of joint, which has no value phase
        directory = tmp_path / f"run{seed}"
        args = {"env_id": "A-v0", "seed": seed, "exp_name": "ppo", "order": "joint" if seed == 3 else "phases"}
        with SummaryWriter(directory) as writer:
            writer.add_scalar("charts/episodic_return", 1, 1)
            for step, value in enumerate((0.1, 0.2, -90.0)):
                for k, name in enumerate(bias.SCALARS):
                    writer.add_scalar(name, k + value + shift, step)
        (directory / "args.json").write_text(json.dumps(args))
        (directory / "result.json").write_text(json.dumps({"status": "finished", "args": args}))
    monkeypatch.setattr(sys, "argv", ["value_first_bias.py", str(tmp_path)])
    bias.main()
    assert capsys.readouterr().out.splitlines()[2:] == ["| A-v0 | ppo | 2 | 0.60 | 1.60 | 2.60 |"]
