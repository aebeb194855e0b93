"""MovingAverageEstimator and InnerAverage on their own: any finite-sum compositional objective 1/n sum_i f(g_i)."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist

import compopt
from tests.helpers import features, near, of_0_3, run
from tests.pool import the_pool

N = 7


def log_u_of(ma, rows):
    """Return the committed log u as a vector."""
    return ma.read(torch.as_tensor(rows))["log_u"].reshape(len(rows), -1)[:, 0].double()


def test_extreme_logs():
    """The values of u are far outside the range of float32."""
    ma = compopt.MovingAverageEstimator(2, gamma=0.5)
    index = torch.arange(2)
    ma.update(torch.tensor([-1e4, 1e4]), index)
    ma.step()
    got = ma.update(torch.tensor([1e4, -1e4]), index)
    near(got, [1e4 - math.log(2)] * 2, 1e-6)


@pytest.mark.parametrize(
    "f, derivative",
    [(torch.log, lambda u: 1 / u), (torch.sqrt, lambda u: 0.5 * u**-0.5), (lambda u: u**2, lambda u: 2 * u)],
    ids=["log", "sqrt", "square"],
)
def test_compositional_loss(f, derivative):
    """The value is mean f(u), the gradient f'(u_i) / B times grad g_i, where u is the updated estimate."""
    ma = compopt.MovingAverageEstimator(N, gamma=0.4, eps=0.0)
    index = torch.tensor([1, 4, 6])
    first, second = torch.tensor([0.5, 2.0, 1.0]), torch.tensor([1.5, 0.3, 4.0])
    u = first.clone()
    for t, g in enumerate((first, second)):
        g = g.clone().requires_grad_()
        loss = compopt.compositional_loss(g, index, ma, f)
        assert loss.dim() == 0
        (2.5 * loss).backward()
        u = u if t == 0 else 0.6 * first + 0.4 * second
        near(loss, f(u.double()).mean(), 1e-6)
        near(g.grad, 2.5 * derivative(u.double()) / 3, 1e-5)
        assert ma.pending == 1
        ma.step()
        near(log_u_of(ma, [1, 4, 6]), u.double().log(), 1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "g, f, error",
    [
        (torch.ones(3), lambda u: 1 / 0, ZeroDivisionError),
        (torch.ones(3), torch.zeros_like, TypeError),
        (torch.ones(3), torch.sum, ValueError),
        (torch.ones(3), lambda u: u[:2], ValueError),
        (torch.ones(3), lambda u: 1.0, TypeError),
    ],
)
def test_an_outer_function_that_fails_deposits_nothing(g, f, error):
    average = compopt.MovingAverageEstimator(5)
    with pytest.raises(error), torch.inference_mode(f is torch.sum):
        compopt.compositional_loss(g, torch.arange(3), average, f)
    with pytest.raises(error):
        compopt.compositional_loss(g, torch.arange(3), average, f)
    assert average.pending == 0
    with pytest.raises(TypeError, match="floating-point"):
        compopt.compositional_loss(torch.ones(3, dtype=torch.int64), torch.arange(3), average, torch.log)


def test_a_view_without_negatives_has_no_share_of_the_mean():
    """Further candidates are negatives of view 1 only; sample 0 has no other negatives."""
    z1, z2 = torch.randn(2, 3, 4, dtype=torch.float64)
    extra = torch.randn(4, 4, dtype=torch.float64)
    keys = {"index": torch.tensor([0, 0, 1]), "labels": torch.tensor([5, 6, 5]), "negatives": extra}
    both = compopt.SogCLREstimator(3, tau=0.5, mode="unimodal", dtype=torch.float64)
    alone = compopt.DCLEstimator(tau=0.5, mode="unimodal", dtype=torch.float64)
    both(z1, z2, **keys), alone(z1, z2, **keys)
    torch.testing.assert_close(both._last.alpha[0], alone._last.alpha[0, :1].expand(2))


# -- inner values of any sign ------------------------------------------------------------------------------------------


def linear(**options):
    return compopt.losses.InnerAverage(6, gamma=0.3, dtype=torch.float64, **options)


@pytest.mark.parametrize("offload", [None, "cpu"])
def test_inner_values_of_any_sign_are_averaged_as_they_are(offload):
    ma, expected, choose = linear(offload=offload), {}, torch.Generator().manual_seed(0)
    for _ in range(12):
        g = torch.randn(4, generator=choose, dtype=torch.float64).mul(2).round()  # some are zero
        index = torch.randint(6, (4,), generator=choose)
        before = dict(expected)
        new = [
            0.7 * before[i] + 0.3 * x if i in before else x
            for i, x in zip(*map(list, (index.tolist(), g.tolist())), strict=True)
        ]
        torch.testing.assert_close(ma.update(g, index), torch.tensor(new, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        for i in set(index.tolist()):  # a sample that occurs twice gets the mean
            own = [x for j, x in zip(index.tolist(), new, strict=True) if j == i]
            expected[i] = sum(own) / len(own)
        ma.step()
    rows = ma.read(torch.tensor(sorted(expected)))
    torch.testing.assert_close(
        rows["u"][:, 0],
        torch.tensor([expected[i] for i in sorted(expected)], dtype=torch.float64),
        rtol=1e-12,
        atol=1e-12,
    )


def with_a_domain(state):
    """Return the state of a MovingAverageEstimator of 0.3 with ``domain="linear"``."""
    state = of_0_3(state)
    config, columns = state["config"], state["config"]["columns"]
    config |= {
        "columns": {"u": columns["log_u"], "count": columns["count"]},
        "options": {"normalizer": {"domain": "linear"}},
    }
    return state


def test_domains_do_not_mix():
    with pytest.raises(ValueError, match="domain must be"):
        compopt.losses.InnerAverage(6, domain="root")
    with pytest.raises(ValueError, match="use compopt.losses.InnerAverage"):  # the logarithm of a value below 0
        compopt.compositional_loss(-torch.ones(3), torch.arange(3), compopt.MovingAverageEstimator(6), torch.log)
    with pytest.raises(TypeError, match="normalizer must be"):
        compopt.ContrastiveEstimator(linear(), compopt.FixedTemperature(0.1))
    with pytest.raises(ValueError, match="options.domain differs: .*'linear', .*'log'"):
        linear(domain="log").load_state_dict(linear().state_dict())
    with pytest.raises(ValueError, match="options.domain differs: the checkpoint has 'linear'"):
        average = compopt.MovingAverageEstimator(6)
        average.load_state_dict(with_a_domain(average.state_dict()))
    again = linear()
    again.load_state_dict(linear().state_dict())


# -- vectors, arguments of f, the corrected estimator ------------------------------------------------------------------


def test_an_outer_function_of_vectors_with_values_of_each_sample():
    """F = mean of weight_i u_i1 / u_i2 with two averages per sample; -1 and 0 are ordinary values."""
    ma = linear(width=2)
    index, weight = torch.tensor([4, 1, 2]), torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    first = torch.tensor([[-1.0, 2.0], [0.0, 1.0], [3.0, 0.5]], dtype=torch.float64)
    near(ma.update(first, index), first, 1e-12)
    ma.step()
    g = torch.randn(3, 2, dtype=torch.float64).requires_grad_()
    u = (0.7 * first + 0.3 * g.detach()).requires_grad_()
    loss = compopt.compositional_loss(g, index, ma, lambda u, w: w * u[:, 0] / u[:, 1], args=(weight,))
    expected = (weight * u[:, 0] / u[:, 1]).mean()
    loss.backward(), expected.backward()
    near(loss, expected, 1e-12)
    near(g.grad, u.grad, 1e-12)  # the derivative with respect to u, passed to g
    ma.step()
    assert ma.read(index)["u"].shape == (3, 2) and ma.read(index)["count"].tolist() == [2, 2, 2]


@pytest.mark.parametrize("how", ["parameter", "function of a parameter", "args"])
@pytest.mark.parametrize("frozen", [False, True])
def test_parameters_inside_f_receive_their_gradient(how, frozen):
    """The derivative of the returned value with the averages held constant; g may require none."""
    ma, index = compopt.MovingAverageEstimator(6, gamma=0.3, dtype=torch.float64), torch.tensor([4, 1, 2])
    first, g, theta = torch.rand(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    ma.update(first.log(), index)
    ma.step()
    u, factor = (0.7 * first + 0.3 * g).requires_grad_(), theta.clone().requires_grad_()
    expected = (factor.exp() * u.square()).mean()
    expected.backward()
    g.requires_grad_(not frozen), theta.requires_grad_()
    weight = theta.exp() if how != "parameter" else None
    f, args = {
        "parameter": (lambda u: theta.exp() * u.square(), ()),
        "function of a parameter": (lambda u: weight * u.square(), ()),
        "args": (lambda u, w: w * u.square(), (weight,)),
    }[how]
    loss = compopt.compositional_loss(g, index, ma, f, args=args)
    loss.backward()
    near(loss, expected, 1e-12)
    near(theta.grad, factor.grad, 1e-12)
    if not frozen:
        near(g.grad, u.grad, 1e-12)
    with torch.no_grad():
        assert not compopt.compositional_loss(g, index, ma, f, args=args).requires_grad


def test_a_loss_without_anything_to_learn_has_no_graph():
    ma, index = linear(), torch.arange(3)
    assert not compopt.compositional_loss(torch.ones(3), index, ma, torch.square).requires_grad
    theta = torch.ones(3, requires_grad=True)
    with pytest.raises(TypeError, match="f must be differentiable: .* none that leads to u"):
        compopt.compositional_loss(torch.ones(3), index, ma, lambda u: theta * u.detach())


def inside_f(group):
    """Return the gradients of g / K, of a parameter inside f, and of a further argument / K."""
    ma, rank, ranks = linear(process_group=group), dist.get_rank(group), dist.get_world_size(group)
    own = slice(None) if ranks == 1 else (slice(0, 1), slice(1, None))[rank]
    g, w = (torch.arange(k, k + 3.0, dtype=torch.float64)[own].requires_grad_() for k in (1, 2))
    theta = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    f = lambda u, w: theta.square() * w * u.square()  # noqa: E731
    compopt.compositional_loss(g, torch.arange(3)[own], ma, f, args=(w,)).backward()
    return g.grad / ranks, theta.grad, w.grad / ranks


@pytest.mark.distributed
def test_parameters_inside_f_on_ranks():
    """Every rank receives the whole gradient of a parameter, and that of its own samples of g and args."""
    ((g, theta, w),) = the_pool().run(inside_f, 1)
    several = the_pool().run(inside_f, 2)
    for at, whole in ((0, g), (2, w)):
        near(torch.cat([answer[at] for answer in several]), whole, 1e-12)
    for answer in several:
        near(answer[1], theta, 1e-12)


def test_the_corrected_average_follows_a_moving_value():
    """If g grows by 1 per step, beta = 1 - gamma (STORM) gives no lag, the plain average one of (1 - gamma) / gamma."""
    plain, corrected = (compopt.losses.InnerAverage(2, gamma=0.25) for _ in range(2))
    index = torch.arange(2)
    for step in range(40):
        g = torch.tensor([1.0, -2.0]) + step
        a, b = plain.update(g, index), corrected.update(g, index, previous=g - 1)
        plain.step(), corrected.step()
    near(b, g, 1e-5)
    near(g - a, [3.0, 3.0], 1e-3)
    near(corrected.update(g + 1, index, previous=g, beta=0.0), 0.75 * g + 0.25 * (g + 1), 1e-5)


def test_the_correction_reaches_a_compositional_loss():
    ma, index = linear(), torch.arange(3)
    ma.update(torch.zeros(3, dtype=torch.float64), index)
    ma.step()
    g = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    u = 0.3 * g.detach() + 0.4 * (g.detach() - 0.5)
    half = torch.full((3,), 0.5, dtype=torch.float64)
    near(compopt.compositional_loss(g, index, ma, torch.square, previous=half, beta=0.4), u.square().mean(), 1e-12)


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"width": 3}, {"value": torch.ones(2)}, r"value must have shape \(B, 3\), got \(2,\)"),
        ({"width": 3}, {"value": torch.ones(2, 4)}, r"\(B, 3\) with width=3, got \(2, 4\)"),
        ({}, {"value": torch.ones(2, 1)}, r"value must have shape \(B,\)"),
        ({}, {"previous": torch.ones(3)}, "previous has 3 entries for a batch of 2"),
        ({}, {"beta": 0.5}, "factor of a correction"),
        ({"domain": "log"}, {"previous": torch.ones(2)}, r"use InnerAverage\(domain=.linear"),
    ],
)
def test_wrong_shapes_and_corrections_are_named(options, call, message):
    ma = compopt.losses.InnerAverage(4, **options)
    with pytest.raises(ValueError, match=message):
        ma.update(**{"value": torch.ones(2), "index": torch.arange(2), **call})
    assert ma.pending == 0


def test_averages_of_logarithms_are_those_of_the_part():
    """``domain="log"`` updates each value of a sample as a MovingAverageEstimator, outside of the range of floats."""
    columns, index = [compopt.MovingAverageEstimator(6, gamma=0.3) for _ in range(2)], torch.tensor([4, 1])
    both = compopt.losses.InnerAverage(6, gamma=0.3, width=2, domain="log")
    for log_g in torch.tensor([[[-1e4, 1.0], [0.0, -2.0]], [[1e4, -3.0], [5.0, 2.0]]]):
        expected = [column.update(log_g[:, k], index) for k, column in enumerate(columns)]
        assert torch.equal(both.update(log_g, index), torch.stack(expected, 1))
        both.step(), [column.step() for column in columns]
    with pytest.raises(ValueError, match="must be > 0"):
        compopt.compositional_loss(-torch.ones(2, 2), index, both, torch.log)


def test_several_values_per_sample():
    vectors = linear(width=2)
    with pytest.raises(ValueError, match="options.width differs: the checkpoint has 2, "):
        linear().load_state_dict(vectors.state_dict())
    with pytest.raises(ValueError, match="one value per sample"):
        compopt.compositional_loss(torch.ones(2, 2), torch.arange(2), vectors, torch.log)
    with pytest.raises(TypeError, match=r"args\[0\] must be a tensor"):
        compopt.compositional_loss(torch.ones(2, 2), torch.arange(2), vectors, torch.log, args=(3.0,))


@pytest.mark.parametrize(("other", "told"), [(0.1, False), (0.2, True)])
def test_loaded_averages_of_another_temperature_are_told(other, told):
    """One sample with another temperature is enough."""
    z1, z2 = features(8, 4, seed=0)
    index, tau = torch.arange(8), torch.full((8, 1), 0.1, dtype=torch.float64)
    est, again = (compopt.SogCLREstimator(10, tau=0.1, dtype=torch.float64) for _ in range(2))
    run(est, z1, z2, index)
    est.step()
    again.load_state_dict(est.state_dict())
    tau[-1] = other
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run(again, z1, z2, index, tau=tau)
    assert ["averaged at tau=0.1" in str(each.message) for each in found] == [True] * told


def test_compositional_loss_refuses_rows_of_two_directions_and_empty_batches():
    g, index = torch.rand(3) + 0.5, torch.arange(3)
    with pytest.raises(ValueError, match="direction"):
        compopt.compositional_loss(g, index, compopt.SogCLREstimator(4).normalizer, torch.square)
    u = compopt.MovingAverageEstimator(4)
    with pytest.raises(ValueError, match="empty"):
        compopt.compositional_loss(g[:0], index[:0], u, torch.square)
    u.step()
    assert u.t == 0


def test_the_reference_is_fixed_once_the_rows_have_values():
    est = compopt.SogCLREstimator(16)
    est.sample_groups[0]["reference"] = "positive"
    est(*torch.randn(2, 4, 3), torch.arange(4))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"reference is fixed at 'positive' after the first call.*'none'; build"):
            est.sample_groups[0]["reference"] = "none"
        est.step()
    est.sample_groups[0].update(reference="positive", gamma=0.5)
