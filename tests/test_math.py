"""The base's equations against closed forms and slow references."""

from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo_mlp_gaussian as ppo

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (5,))
ACTIONS = gym.spaces.Box(np.array([-1.0, -2.0, 0.0], np.float32), np.array([1.0, 2.0, 4.0], np.float32))


def agent(**flags):
    torch.manual_seed(0)
    return ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(**flags))


def slow_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda):
    """The definition: a sum of discounted temporal differences up to the end of the episode or rollout."""
    advantages = np.zeros_like(rewards)
    for env in range(rewards.shape[1]):
        for start in range(len(rewards)):
            for t in range(start, len(rewards)):
                target = rewards[t, env] + gamma * (0.0 if terminated[t, env] else next_values[t, env])
                advantages[start, env] += (gamma * gae_lambda) ** (t - start) * (target - values[t, env])
                if done[t, env]:
                    break
    return advantages


def test_gae_equals_its_definition():
    rng = np.random.default_rng(0)
    rewards, values, next_values = rng.normal(size=(3, 40, 3))
    terminated = rng.random((40, 3)) < 0.1
    done = terminated | (rng.random((40, 3)) < 0.1)
    inputs = [torch.tensor(x, dtype=torch.float32) for x in (rewards, values, next_values, terminated, done)]
    for gamma, gae_lambda in ((0.99, 0.95), (0.9, 0.0), (1.0, 1.0)):
        expected = slow_gae(rewards, values, next_values, terminated, done, gamma, gae_lambda)
        np.testing.assert_allclose(ppo.compute_gae(*inputs, gamma, gae_lambda), expected, atol=2e-5)


def gradient_of(log_prob, new_values, values=0, returns=0, advantages=None, **flags):
    """minibatch_gradient of a policy with these log-probabilities, once 0, and values. -> losses by name"""
    policy = SimpleNamespace(log_prob=lambda _: log_prob, entropy=lambda: torch.zeros(1))
    stub = SimpleNamespace(policy=lambda _: policy, value=lambda _: new_values)
    args = ppo.Args(norm_adv=False, max_grad_norm=0, **flags)
    return ppo.minibatch_gradient(stub, args, None, None, 0, values, advantages, returns)[1]


@pytest.mark.parametrize(
    "ratio, advantage, value, gradient",
    [  # the six rows of the clipping table, epsilon 0.2: what min returns, and its derivative by the ratio
        (1.1, 2.0, 2.2, 2.0),
        (0.9, -2.0, -1.8, -2.0),
        (0.5, 2.0, 1.0, 2.0),
        (0.5, -2.0, -1.6, 0.0),
        (1.5, 2.0, 2.4, 0.0),
        (1.5, -2.0, -3.0, -2.0),
    ],
)
def test_clipping_table(ratio, advantage, value, gradient):
    log_prob = torch.tensor([np.log(ratio)], requires_grad=True)
    losses = gradient_of(log_prob, torch.zeros(1), advantages=torch.tensor([advantage]))
    assert -losses["losses/policy_loss"].item() == pytest.approx(value)
    assert -log_prob.grad.item() / ratio == pytest.approx(gradient)


def test_clipped_value_loss():
    new, old, returns = torch.tensor([0.5, 0.1, -0.5], requires_grad=True), torch.zeros(3), torch.ones(3)
    # change cut to 0.2: error 0.8; change 0.1 kept: 0.9; the larger of 1.5 and 1.2
    for clip_vloss, squares in ((True, [0.64, 0.81, 2.25]), (False, [0.25, 0.81, 2.25])):
        losses = gradient_of(torch.zeros(3), new, old, returns, torch.zeros(3), clip_vloss=clip_vloss)
        assert losses["losses/value_loss"].item() == pytest.approx(0.5 * np.mean(squares))


def test_the_gaussian_draws_what_it_scores():
    torch.manual_seed(0)
    mean, log_std, actions = torch.randn(50, 3), torch.tensor([-1.0, 0.0, 0.7]), torch.randn(50, 3)
    policy, normal = ppo.Gaussian(mean, log_std), torch.distributions.Normal(mean, log_std.exp().expand(50, 3))
    torch.testing.assert_close(policy.log_prob(actions), normal.log_prob(actions).sum(-1))
    torch.testing.assert_close(policy.entropy(), normal.entropy()[0].sum())
    assert policy.mode() is mean
    drawn = ppo.Gaussian(mean[:1].expand(40000, 3), log_std).sample()
    torch.testing.assert_close(drawn.mean(0), mean[0], atol=0.05, rtol=0)
    torch.testing.assert_close(drawn.std(0), log_std.exp(), atol=0.05, rtol=0)


def test_networks_start_as_the_37_details_say():
    policy = agent()
    for network, scale in ((policy.actor, 0.01), (policy.critic, 1.0)):
        for layer, std in ((network[0], 2**0.5), (network[2], 2**0.5), (network[4], scale)):
            weight = layer.weight if layer.weight.shape[0] < layer.weight.shape[1] else layer.weight.T
            torch.testing.assert_close(weight @ weight.T, std**2 * torch.eye(len(weight)), atol=1e-5, rtol=0)
    assert all(p.abs().max() == 0 for name, p in policy.named_parameters() if name.endswith(("bias", "log_std")))


def test_fixed_std_is_a_fraction_of_the_action_range():
    torch.testing.assert_close(agent(fixed_std=0.05).log_std.exp(), torch.tensor([0.1, 0.2, 0.2]))
    fixed = agent(fixed_std=0.05, scale_actions=True)
    torch.testing.assert_close(fixed.log_std.exp(), torch.full((3,), 0.1))
    assert not fixed.log_std.requires_grad and "log_std" in fixed.state_dict()


def test_scaled_actions_stay_within_bounds_that_are_not_symmetric():
    """Rounding alone would carry one of ten upper bounds across, here those of a thousand dimensions."""
    low = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    high = (low + np.random.default_rng(1).exponential(size=1000)).astype(np.float32)
    policy = ppo.Agent(OBSERVATIONS, gym.spaces.Box(low, high), ppo.Args(scale_actions=True))
    for end in (-1.0, 1.0):
        action = policy.to_env(torch.full((1000,), end)).numpy()
        assert ((low <= action) & (action <= high)).all()
        np.testing.assert_allclose(action, low if end < 0 else high, atol=1e-6)


def test_running_norm_equals_one_pass_over_everything():
    x = torch.randn(1000, 4) * torch.tensor([1.0, 10.0, 0.1, 3.0]) + torch.tensor([0.0, 1000.0, 5.0, -3.0])
    norm = ppo.RunningNorm(4)
    torch.testing.assert_close(norm(x), x.clamp(-10, 10))  # mean 0 and variance 1 until the first update
    for batch in (x[:1], x[1:300].reshape(13, 23, 4), x[300:]):
        norm.update(batch)
    torch.testing.assert_close(norm.mean, x.double().mean(0))
    torch.testing.assert_close(norm.var, x.double().var(0, correction=0))
    assert norm.count == 1000
    expected = (x.double() - norm.mean) / norm.var.sqrt()
    torch.testing.assert_close(norm(x), expected.clamp(-10, 10).float())
    assert norm(x * 1e6).abs().max() == 10


@pytest.mark.parametrize("target_kl, epochs", [(None, 3), (1e-9, 1)])
def test_losses_are_means_over_the_update_which_target_kl_ends_after_an_epoch(target_kl, epochs):
    args, policy, seen = ppo.Args(num_minibatches=4, update_epochs=3, target_kl=target_kl), agent(), []

    def gradient(*inputs):
        seen.append(ppo.minibatch_gradient(*inputs))
        return seen[-1]

    batch = (torch.randn(64, 5), torch.randn(64, 3), torch.randn(64) - 5, *torch.randn(3, 64))
    metrics = ppo.update(policy, torch.optim.Adam(policy.parameters(), lr=1e-3), gradient, args, batch)
    assert len(seen) == 4 * epochs
    log_ratio = torch.cat([ratios for ratios, _ in seen])
    expected = {name: torch.stack([losses[name] for _, losses in seen]).mean() for name in seen[0][1]}
    expected["losses/old_approx_kl"] = -log_ratio.mean()
    expected["losses/approx_kl"] = (log_ratio.exp() - 1 - log_ratio).mean()
    expected["losses/clipfrac"] = ((log_ratio.exp() - 1).abs() > 0.2).float().mean()
    assert len(metrics) == 6 and metrics["losses/policy_loss"] != 0
    torch.testing.assert_close(metrics, expected)
