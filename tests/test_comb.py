"""The comb: its density, sampler and entropy against quadrature and slow references; what training does with it."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import base
from conftest import comb as ppo

from results import plot_comb

OBSERVATIONS = gym.spaces.Box(-np.inf, np.inf, (5,))
ACTIONS = gym.spaces.Box(np.array([-0.4, 0.0], np.float32), np.array([0.4, 3.0], np.float32))
LOW, HIGH = (torch.as_tensor(bound, dtype=torch.float64) for bound in (ACTIONS.low, ACTIONS.high))
TEETH = 32
EVERY = ("flat", "almost flat", "random", "two peaks", "steep", "cliff", "first tooth")


def rows(*shapes, teeth=TEETH):
    """Logits [len(shapes), 2, teeth], float64: what the names say, the second dimension the mirror image."""
    torch.manual_seed(0)
    k = torch.arange(teeth, dtype=torch.float64)
    logits = {
        "flat": 0 * k,
        "almost flat": 0.01 * torch.randn(teeth).double(),
        "random": torch.randn(teeth).double(),
        "two peaks": -0.5 * torch.minimum((k - teeth / 4).abs(), (k - 3 * teeth / 4).abs()).square(),
        "steep": 30 * (1 - 2 * (k % 2)),  # from e^30 to e^-30 in each piece
        "cliff": torch.where(k < teeth / 2, -30.0, 30.0).double(),
        "first tooth": torch.where(k == 0, 30.0, -30.0).double(),
    }
    return torch.stack([torch.stack([logits[name], logits[name].flip(0)]) for name in shapes])


def apart(logits, low=LOW, high=HIGH, **flags):
    """A comb of one dimension for each of two: actions [..., 2, 1], results [..., 2] that are not summed."""
    low, high = (x[:, None].type_as(logits) for x in (low, high))
    return ppo.Comb(logits[..., None, :], low, high, **flags)


def grid(points_a_piece, teeth=TEETH):
    """Actions [1, points, 2], the teeth among them, and their weights [points, 2] in Simpson's rule."""
    points = (teeth - 1) * points_a_piece + 1
    x = torch.linspace(0, 1, points, dtype=torch.float64)[:, None]
    weights = torch.full((points, 1), 2.0, dtype=torch.float64)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    return (LOW + x * (HIGH - LOW))[None], weights / 3 / (points - 1) * (HIGH - LOW)


def slow_density(logits, actions):
    """np.interp of the teeth's densities, over its integral: [n, 2, teeth] and [1, points, 2] -> [n, points, 2]."""
    found = np.zeros((len(logits), *actions.shape[1:]))
    for i, j in np.ndindex(len(logits), 2):
        teeth = np.linspace(LOW[j].item(), HIGH[j].item(), logits.shape[-1])
        density = np.exp(logits[i, j].numpy())
        found[i, :, j] = np.interp(actions[0, :, j], teeth, density / np.trapezoid(density, teeth))
    return torch.tensor(found)


def slow_entropy(logits, points_a_piece=1000):
    """By quadrature: [n, 2, teeth] -> [n, 2]"""
    actions, weights = grid(points_a_piece, logits.shape[-1])
    density = slow_density(logits, actions)
    return -(density * density.clamp(min=1e-300).log() * weights).sum(1)


def slow_cdf(logits, x, as_coded=False):
    """CDF at x [points] of one dimension on [0, 1], piece by piece."""
    p, position = np.exp(logits - logits.max()), x * (len(logits) - 1)
    piece = np.minimum(position.astype(int), len(logits) - 2)
    s = position - piece
    a, b = p[piece], p[piece + 1]
    if as_coded:
        mass = np.append(p[:-2], p[-2] + p[-1])
        inside = s * mass[piece]
    else:
        mass = (p[:-1] + p[1:]) / 2
        inside = a * s + (b - a) * s**2 / 2
    return (np.append(0, mass.cumsum())[piece] + inside) / mass.sum()


def kolmogorov_smirnov(cdf):
    """sqrt(n) sup |F_n - F| of the samples whose F is `cdf`: over 1.95 once in a thousand times."""
    cdf, n = np.sort(cdf), len(cdf)
    return np.sqrt(n) * max((np.arange(1, n + 1) / n - cdf).max(), (cdf - np.arange(n) / n).max())


def agent(**flags):
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(**flags))
    with torch.no_grad():  # far from the flat start
        policy.actor[-1].weight.normal_()
    return policy


@pytest.mark.parametrize("teeth", [2, 3, TEETH])
def test_density_is_the_interpolation_and_integrates_to_one(teeth):
    logits = rows(*EVERY, teeth=teeth)
    comb = apart(logits[:, None])
    actions, weights = grid(4, teeth)
    density = comb.log_prob(actions[..., None]).exp()  # [7, points, 2]
    torch.testing.assert_close(density, slow_density(logits, actions), rtol=1e-9, atol=1e-13)
    torch.testing.assert_close((density * weights).sum(1), torch.ones(7, 2).double(), rtol=1e-12, atol=0)
    between = LOW + torch.rand(1, 1000, 2) * (HIGH - LOW)
    expected = slow_density(logits, between)
    torch.testing.assert_close(comb.log_prob(between[..., None]).exp(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("as_coded", [False, True])
def test_log_prob_and_entropy_are_sums_over_the_dimensions(as_coded):
    logits, actions = rows(*EVERY), LOW + torch.rand(7, 2).double() * (HIGH - LOW)
    comb, single = ppo.Comb(logits, LOW, HIGH, as_coded), apart(logits, as_coded=as_coded)
    torch.testing.assert_close(comb.log_prob(actions), single.log_prob(actions[..., None]).sum(-1))
    torch.testing.assert_close(comb.entropy(), single.entropy().sum(-1))
    assert comb.sample().shape == comb.mode().shape == (7, 2)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_samples_follow_the_cdf(name, dtype):
    torch.manual_seed(1)
    logits, low, high = (x.to(dtype) for x in (rows(name)[0], LOW, HIGH))
    samples = ppo.Comb(logits.expand(50_000, 2, TEETH), low, high).sample()
    assert (samples >= low).all() and (samples <= high).all()
    for j in range(2):
        x = ((samples[:, j].double() - LOW[j]) / (HIGH[j] - LOW[j])).clamp(0, 1).numpy()
        assert kolmogorov_smirnov(slow_cdf(logits[j].double().numpy(), x)) < 1.95


def test_no_random_number_leads_out_of_the_bounds_or_to_a_tooth_without_mass(monkeypatch):
    comb = apart(torch.cat([rows(*EVERY).float(), 10 * rows("steep", "cliff", "first tooth").float()]))
    numbers = torch.tensor([0.0, 2.0**-24, 0.5, 1 - 2.0**-24])  # torch.rand's least and largest among them
    for pair in torch.cartesian_prod(numbers, numbers):

        def rand_like(x, pair=pair):
            noise = numbers[torch.randint(len(numbers), x.shape)].where(torch.rand(x.shape) < 0.2, torch.rand(x.shape))
            noise[..., :2] = pair
            return noise

        monkeypatch.setattr(torch, "rand_like", rand_like)
        samples = torch.stack([comb.sample() for _ in range(20)])
        assert (samples >= comb.low).all() and (samples <= comb.high).all()  # and no NaN
        assert comb.log_prob(samples).isfinite().all()
        if abs(pair.sum() - 1) <= 0.5:  # not at the end of a tooth's triangle, where the density may be 0
            assert (comb.log_prob(samples) > -30).all()


@pytest.mark.parametrize("name", EVERY)
def test_entropy_and_mean_equal_quadrature(name):
    logits = rows(name)
    comb, single = apart(logits), apart(logits.float())
    actions, weights = grid(1000)
    torch.testing.assert_close(comb.entropy(), slow_entropy(logits), rtol=0, atol=1e-6)
    torch.testing.assert_close(single.entropy().double(), comb.entropy(), rtol=0, atol=1e-5)
    mean = (slow_density(logits, actions) * actions * weights).sum(1)
    comb, single = ppo.Comb(logits, LOW, HIGH), ppo.Comb(logits.float(), LOW.float(), HIGH.float())
    torch.testing.assert_close(plot_comb.mean(comb), mean, rtol=0, atol=1e-9)
    torch.testing.assert_close(plot_comb.mean(single).double(), mean, rtol=0, atol=1e-5)


@pytest.mark.parametrize("difference", [0.0, 1e-8, 1e-4, 9.9e-4, 1.01e-3, 0.04, 0.3, 5.0, 20.0, 60.0, 100.0])
def test_entropy_of_one_piece_and_its_slope(difference):
    """Of densities 1 : e^d, where its closed form is 0 / 0 (d = 0) and far from there, in single precision too."""

    def found(logits):
        comb = apart(logits)
        return comb.entropy().detach().double(), torch.autograd.grad(comb.entropy().sum(), logits)[0].double()

    for sign in (1, -1):
        logits, step = torch.tensor([[[0.0, sign * difference]] * 2], dtype=torch.float64), 1e-4
        entropy, slope = found(logits.clone().requires_grad_())
        torch.testing.assert_close(entropy, slow_entropy(logits, 20_000), rtol=0, atol=1e-6)
        moved = torch.tensor([0.0, step], dtype=torch.float64)
        expected = (slow_entropy(logits + moved, 20_000) - slow_entropy(logits - moved, 20_000)) / (2 * step)
        torch.testing.assert_close(slope[..., 1], expected, rtol=0, atol=4e-4)  # next to 0 it is a constant's, 0
        if abs(difference) > 2e-3:
            torch.testing.assert_close(slope[..., 1], expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(slope[..., 0], -slope[..., 1])  # one constant on all teeth changes nothing
        single, single_slope = found(logits.float().requires_grad_())
        torch.testing.assert_close(single, entropy, rtol=0, atol=1e-5)
        torch.testing.assert_close(single_slope, slope, rtol=0, atol=4e-4)


@pytest.mark.parametrize("as_coded", [False, True])
@pytest.mark.parametrize("name", ["flat", "almost flat", "random", "two peaks"])
def test_gradients(as_coded, name):
    logits = rows(name, teeth=6).requires_grad_()
    actions = torch.tensor([[[0.0, 1.0], [0.2, 0.4], [0.21, 0.999], [0.5, 0.77]]]).double()
    actions = (LOW + actions * (HIGH - LOW))[..., None]
    assert torch.autograd.gradcheck(lambda x: apart(x[:, None], as_coded=as_coded).log_prob(actions), logits)
    assert torch.autograd.gradcheck(lambda x: apart(x, as_coded=as_coded).entropy(), logits)


@pytest.mark.parametrize("as_coded", [False, True])
def test_steep_logits_give_finite_values_and_gradients_in_single_precision(as_coded):
    low, high = LOW.float(), HIGH.float()
    x = torch.cat([grid(2)[0][0], LOW + torch.rand(500, 2) * (HIGH - LOW)]).float()
    x = torch.cat([x, x.nextafter(high), x.nextafter(low)])[:, None, :, None]  # [points, 1, 2, 1]
    logits = rows(*EVERY).float()[None]
    for scale in (1, 10):  # up to 30, and far beyond
        leaf = (scale * logits).requires_grad_()
        log_prob, entropy = apart(leaf, as_coded=as_coded).log_prob(x), apart(leaf, as_coded=as_coded).entropy()
        (gradient,), (entropy_gradient,) = (torch.autograd.grad(y.sum(), leaf) for y in (log_prob, entropy))
        for tensor in (log_prob, gradient, entropy_gradient, entropy):
            assert tensor.isfinite().all()
        assert gradient.abs().max() <= 2 * len(x)
    # And they are what double precision gives, but for an action's rounding where the density leaves a tooth near 0.
    single, double = (apart(y, as_coded=as_coded) for y in (logits, logits.double()))
    error = (single.log_prob(x) - double.log_prob(x.double())).abs()  # [points, 7, 2]
    for name, largest in zip(EVERY, (1e-6, 2e-6, 1e-3, 5e-3)):
        assert error[:, EVERY.index(name)].max() < largest


def test_bounds_are_reachable():
    low, high = LOW.float(), HIGH.float()
    ends = ppo.Comb(rows("first tooth", "cliff").float(), low, high)
    assert torch.equal(ends.mode()[0], torch.stack([low[0], high[1]]))  # exactly
    for x, tooth in ((low, 0), (high, -1)):
        torch.testing.assert_close(ends.log_prob(x.expand(2, 2)), ends.log_density[..., tooth].sum(-1))
    torch.manual_seed(0)
    samples = ppo.Comb(rows("first tooth")[0].float().expand(50_000, 2, TEETH), low, high).sample()
    assert (samples[:, 0] - low[0]).min() / (high - low)[0] < 1e-6
    assert (high[1] - samples[:, 1]).min() / (high - low)[1] < 1e-6
    assert torch.equal(ends.at(torch.tensor([-1e-6, 31.0001])), torch.stack([low[0], high[1]]))  # as rounding may give
    many = ppo.Comb(torch.randn(1000, 1, TEETH), -10 * torch.rand(1000, 1), 10 * torch.rand(1000, 1))
    assert ((many.high - many.low) / many.width > TEETH - 1).any()  # so it does here
    torch.testing.assert_close(many.log_prob(many.high), many.log_density[:, 0, -1], rtol=0, atol=1e-3)


def test_greedy_action_is_the_mode_and_not_the_mean_between_two_peaks():
    logits = rows("two peaks")
    comb, mode = apart(logits), apart(logits).mode()
    mean = plot_comb.mean(ppo.Comb(logits, LOW, HIGH))[..., None]
    assert (comb.log_prob(mean) < comb.log_prob(mode) - 5).all()
    assert (comb.log_prob(mode) >= apart(logits[:, None]).log_prob(grid(10)[0][..., None]).amax(-2)).all()
    policy, obs = agent(), torch.randn(7, 5)
    best = policy.policy(obs.clamp(-10, 10)).log_density.argmax(-1) / (TEETH - 1)
    torch.testing.assert_close(policy.act(obs), policy.low + best * (policy.high - policy.low))
    torch.testing.assert_close(policy.act(obs)[3], policy.act(obs[3]))


def test_as_coded_draws_one_density_and_scores_another():
    torch.manual_seed(1)
    logits = rows("random")[0]
    samples = ppo.Comb(logits.expand(50_000, 2, TEETH), LOW, HIGH, as_coded=True).sample()
    for j in range(2):
        x = ((samples[:, j] - LOW[j]) / (HIGH[j] - LOW[j])).numpy()
        assert kolmogorov_smirnov(slow_cdf(logits[j].numpy(), x, as_coded=True)) < 1.95
        assert kolmogorov_smirnov(slow_cdf(logits[j].numpy(), x)) > 10
    p, comb = logits.softmax(-1), apart(logits, as_coded=True)
    x = torch.tensor([3.25, 30.5]) / 31 * (HIGH - LOW) + LOW
    expected = torch.stack([0.75 * p[0, 3] + 0.25 * p[0, 4], 0.5 * p[1, 30] + 0.5 * p[1, 31]]).log()
    torch.testing.assert_close(comb.log_prob(x[:, None]), expected)
    torch.testing.assert_close(comb.entropy(), torch.distributions.Categorical(probs=p).entropy())
    # its flat comb is not uniform: the last piece is drawn twice as often, and the mean on [-1, 1] is 0.03
    flat = ppo.Comb(torch.zeros(100_000, 1, TEETH), -torch.ones(1), torch.ones(1), as_coded=True).sample()
    assert (flat > 1 - 2 / 31).float().mean() == pytest.approx(2 / 32, abs=3e-3)
    assert (flat > 1 - 1 / 31).float().mean() == pytest.approx(1 / 32, abs=3e-3)
    assert flat.mean() == pytest.approx(15.96875 / 31 * 2 - 1, abs=6e-3)


def test_entropy_bonus_flattens_the_densities_and_is_left_out_at_zero():
    policy = agent()
    obs, actions = torch.randn(16, 5), LOW.float().expand(16, 2)
    for ent_coef in (0.0, 1.0):
        policy.zero_grad()
        args = ppo.Args(ent_coef=ent_coef, max_grad_norm=0)
        _, losses = ppo.minibatch_gradient(policy, args, obs, actions, torch.zeros(16), *torch.zeros(3, 16))
        torch.testing.assert_close(losses["losses/entropy"], policy.policy(obs).entropy().mean().detach())
        gradient = policy.actor[-1].weight.grad
        assert (gradient.abs().max() == 0) == (ent_coef == 0)
    before = policy.policy(obs).entropy().mean()
    with torch.no_grad():
        policy.actor[-1].weight -= 0.01 * gradient
    assert policy.policy(obs).entropy().mean() > before


@pytest.mark.parametrize("norm_adv", [True, False])
def test_the_gradient_of_a_minibatch_is_the_bases(norm_adv):
    policy, args = agent(), ppo.Args(ent_coef=0.3, vf_coef=0.7, norm_adv=norm_adv)
    obs, scalars, gradients = torch.randn(16, 5), torch.randn(4, 16), []
    actions = policy.policy(obs).sample()
    for module in (ppo, base):
        policy.zero_grad()
        found = module.minibatch_gradient(policy, args, obs, actions, *scalars)
        gradients.append([*(p.grad.clone() for p in policy.parameters()), found[0], *found[1].values()])
    torch.testing.assert_close(*gradients)


def test_networks_start_with_flat_densities():
    torch.manual_seed(0)
    policy = ppo.Agent(OBSERVATIONS, ACTIONS, ppo.Args(num_teeth=7))
    assert policy.actor[-1].weight.shape == (14, 64)
    comb = policy.policy(torch.randn(100, 5))
    uniform = (policy.high - policy.low).log()
    torch.testing.assert_close(comb.log_density, -uniform[:, None].expand(100, 2, 7), rtol=0, atol=0.1)
    torch.testing.assert_close(comb.entropy(), uniform.sum().expand(100), rtol=0, atol=2e-3)


@pytest.mark.parametrize("density", ["linear", "as-coded"])
def test_density_flag_chooses(density):
    assert agent(density=density).policy(torch.randn(5)).as_coded == (density == "as-coded")


def test_picture_puts_two_peaks_first(tmp_path):
    density = ppo.Comb(rows("flat", "cliff", "first tooth", "two peaks"), LOW, HIGH).log_density.exp()
    found = plot_comb.second_peak(density)
    torch.testing.assert_close(found, torch.tensor([[0.0, 0.0]] * 3 + [[1.0, 1.0]]).double(), rtol=0, atol=0.05)
    args = ppo.Args(env_id="Hopper-v5")
    env = ppo.make_env(args.env_id)
    policy = ppo.Agent(env.observation_space, env.action_space, args)
    with torch.no_grad():
        policy.actor[-1].bias.view(3, TEETH)[1] = rows("two peaks")[0, 0]
    checkpoint = {"args": vars(args), "model": policy.state_dict(), "global_step": 0}
    shares = plot_comb.draw(checkpoint, tmp_path / "densities.png")
    assert shares.tolist() == [0, 1, 0]
    assert (tmp_path / "densities.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("density", ["linear", "as-coded"])
@pytest.mark.parametrize("ent_coef", [0.0, 0.01])
def test_compiled_gradient_is_the_eager_one(density, ent_coef):
    gradients, args = [], ppo.Args(density=density, ent_coef=ent_coef)
    for function in (ppo.minibatch_gradient, ppo.compile_function(ppo.minibatch_gradient, torch.device("cpu"))):
        policy = agent(density=density)
        obs = torch.randn(16, 5)
        actions = policy.policy(obs).sample().detach()
        function(policy, args, obs, actions, torch.zeros(16) - 1, *torch.randn(3, 16))
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
