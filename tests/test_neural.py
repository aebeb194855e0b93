"""The neural normalizer: queue, restarts, optimizers, temperatures, ranks (against its twin: test_agreement)."""

import functools
import math
import warnings

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import diagnostics, files
from compopt.normalizers import networks, training
from tests.helpers import assert_same_bits, features, near, run, snapshot
from tests.pool import the_pool
from tests.reference import FixedReference, NeuralReference, Reference

D = 4


def network(**options):
    """A small network x a fixed temperature."""
    tau = options.pop("tau", 0.1)
    mode = options.pop("mode", "bimodal")
    options = {"prototypes": 8, "lr": 0.1, "updates": 2, "restart_every": 3, **options}
    return compopt.NeuCLIPEstimator(D, tau=tau, mode=mode, dtype=torch.float64, **options)


def batch(seed, size=4, dtype=torch.float64):
    return *features(size, D, seed, dtype=dtype), torch.arange(size)


def unit(z):
    return torch.nn.functional.normalize(z, dim=1)


def extra(est):
    return est.state_dict()["extra"]["normalizer"]


# queue and restarts ---------------------------------------------------------------------------------


def test_the_queue_holds_the_newest_features_of_the_other_modality():
    est = network(updates=0)
    seen = []
    for seed in range(4):
        z1, z2, index = batch(seed)
        seen.append((unit(z1), unit(z2)))
        run(est, z1, z2, index)
        est.step()
    queue = extra(est)["queue"]
    for direction in (0, 1):
        newest = torch.cat([pair[1 - direction] for pair in seen[-2:]])
        assert {tuple(row.tolist()) for row in queue[direction]} == {tuple(row.tolist()) for row in newest}


def test_a_batch_larger_than_the_queue_leaves_its_last_samples():
    est = network(prototypes=3, updates=0)
    z1, z2, index = batch(0, 7)
    run(est, z1, z2, index)
    est.step()
    near(extra(est)["prototypes"][0], unit(z2)[-3:], 1e-15)
    near(extra(est)["prototypes"][1], unit(z1)[-3:], 1e-15)


def test_when_prototypes_restart():
    """At t = 0, when the queue first fills (t = 1), and at every third commit."""
    est = network()
    restarted = []
    for t in range(9):
        z1, z2, index = batch(t)
        run(est, z1, z2, index)
        est.step()
        state = extra(est)
        with torch.no_grad():
            moved = (state["prototypes"] - state["queue"])[:, : int(state["queue_active"].sum())].abs().amax()
        restarted.append(bool(moved < 0.35))  # two steps of at most 0.1 from the features, or many more
    assert restarted[0] and restarted[1] and restarted[3] and restarted[6]


def test_only_filled_slots_are_prototypes():
    """With four features in a queue of eight, alpha is the mean over four."""
    est = network(updates=0)
    z1, z2, index = batch(0)
    est.eval()
    loss = est(z1, z2, index)
    a, b = unit(z1), unit(z2)
    s = a @ b.T
    positive = s.diagonal()
    alpha = [torch.logsumexp((x - positive[:, None]) / 0.1, dim=1) - math.log(4.0) for x in (s, s.T)]
    near(loss, 0.1 * torch.stack(alpha).mean(), 1e-12)


def test_a_window_restarts_once():
    """Accumulated batches continue the pending network; only the first of a window restarts it."""
    est, twin = network(restart_every=1), network(restart_every=1, updates=0)
    for each in (est, twin):
        for seed in range(2):
            run(each, *batch(seed))
    est.step()
    twin.step()
    assert est.t == 1
    assert not torch.equal(extra(est)["prototypes"], extra(twin)["prototypes"])
    assert_same_bits({"q": extra(est)["queue"]}, {"q": extra(twin)["queue"]})


def test_a_discarded_batch_never_was():
    est, twin = network(), network()
    for seed in range(2):
        for each in (est, twin):
            run(each, *batch(seed))
            each.step()
    run(est, *batch(7))
    est.discard()
    assert_same_bits(snapshot(est, 1), snapshot(twin, 1))


def test_found_inf_on_the_device_keeps_the_state_but_for_the_host_s_counters():
    est = network()
    run(est, *batch(0))
    est.step()
    before = extra(est)
    run(est, *batch(1))
    est.normalizer.commit_state(torch.tensor(1.0))
    after = extra(est)
    for name in ("prototypes", "queue", "queue_active", "optimizer.prototypes.sum"):
        assert torch.equal(before[name], after[name]), name
    run(est, *batch(2))  # the slots that were skipped are filled when the ring comes round again
    est.step()
    loss, *_ = run(est, *batch(3))
    assert torch.isfinite(loss)


def test_cleared_sums_move_every_coordinate_by_the_learning_rate():
    """Why reset_optimizer is off: AdaGrad's first step has the length lr in every coordinate."""
    errors = {}
    for reset in (False, True):
        est = network(lr=1.0, updates=1, restart_every=5, reset_optimizer=reset, prototypes=64)
        z1, z2 = features(64, D, 0)
        for _ in range(6):  # the last call restarts
            run(est, z1, z2, torch.arange(64))
            est.step()
        errors[reset] = float(diagnostics.normalizer_error(est, z1, z2))
    assert errors[True] > 2 * errors[False], errors


def test_a_batch_that_cannot_be_used_leaves_its_restart_to_the_next():
    est = network(restart_every=3, updates=0)
    for seed in range(3):
        run(est, *batch(seed))
        est.step()
    z1, z2, index = batch(3)  # t = 3: a restart is due
    with pytest.warns(UserWarning, match="NaN"):
        est(z1 * float("nan"), z2, index)
    est.step()
    assert est.t == 4 and not torch.equal(extra(est)["prototypes"], extra(est)["queue"])
    run(est, *batch(4))
    est.step()
    assert torch.equal(extra(est)["prototypes"], extra(est)["queue"])


def test_slots_of_a_skipped_window_are_filled_before_they_count():
    """A device skips the first window; the ring counts it as filled all the same."""
    est = compopt.NeuCLIPEstimator(8, prototypes=32)
    for t in range(6):
        z1, z2 = features(8, 8, t, dtype=torch.float32)
        est(z1, z2, torch.arange(8))
        if t == 0:
            est.normalizer.commit_state(torch.tensor(1.0))
            est._engine.t, est._engine.pending = 1, 0
        else:
            est.step()
    assert extra(est)["queue_active"].all()
    assert (extra(est)["prototypes"].norm(dim=2) > 0.1).all()
    assert extra(est)["optimizer.prototypes.sum"].max() < 1e9


@pytest.mark.parametrize("tau", [0.005, 0.01])
def test_close_negatives_and_a_small_temperature_keep_the_state_finite(tau):
    """exp of a gap of a hundred; its square would leave float32."""
    est = compopt.NeuCLIPEstimator(64, tau=tau, prototypes=32)
    for t in range(6):
        z1, z2 = features(32, 64, t, spread=0.3, dtype=torch.float32)
        if t == 2:
            z1[1], z2[1] = z1[0] + 0.02 * z1[1], z2[0] + 0.02 * z2[1]
        loss, g1, _ = run(est, z1, z2, torch.arange(32))
        est.step()
        assert torch.isfinite(loss) and torch.isfinite(g1).all()
    assert all(value.isfinite().all() for value in extra(est).values())


@pytest.mark.parametrize("normalize", [True, False])
def test_a_feature_without_length_is_no_direction(normalize):
    est = compopt.ContrastiveEstimator(
        compopt.NeuralNormalizer(8, 32, through_alpha=True), compopt.FixedTemperature(0.3), normalize=normalize
    )
    for t in range(3):
        z1, z2 = features(16, 8, t, dtype=torch.float32)
        z1[0] = z2[0] = 0.0
        loss, g1, g2 = run(est, z1, z2, torch.arange(16))
        est.step()
        assert torch.isfinite(loss) and torch.isfinite(g1).all() and torch.isfinite(g2).all()
    assert not normalize or extra(est)["optimizer.prototypes.sum"].max() < 1e9


def test_a_warning_that_is_an_error_proposes_nothing():
    est = network(learn_tau=True, rho=9.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="rho"):
            run(est, *batch(0))
    assert est.pending == 0 and not est.normalizer.has_pending_state


# optimizers, temperatures, arguments ----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True),
        torch.optim.RMSprop,
        torch.optim.AdamW,
        functools.partial(torch.optim.Adagrad, initial_accumulator_value=0.1, weight_decay=0.01),
        torch.optim.NAdam,
    ],
)
def test_any_torch_optimizer_and_its_state_across_a_resume(make, tmp_path):
    est, twin = network(optimizer=make), network(optimizer=make)
    ref = Reference(
        [{"n": 4, "tau": 0.1}],
        NeuralReference(D, 8, lr=0.1, updates=2, restart_every=3, optimizer=make),
        FixedReference(),
    )
    for seed in range(3):
        loss, *_ = run(est, *batch(seed))
        near(loss, ref.forward(*batch(seed))[0], 1e-7)  # NAdam keeps a product in float32
        est.step()
        ref.step()
    compopt.save(est, tmp_path)
    compopt.load(twin, tmp_path)
    for seed in range(3, 6):
        assert torch.equal(run(est, *batch(seed))[0], run(twin, *batch(seed))[0])
        est.step()
        twin.step()
    assert_same_bits(snapshot(est, 1), snapshot(twin, 1))


def test_the_state_of_another_optimizer_is_refused():
    est, other = network(optimizer=torch.optim.Adam), network()
    run(est, *batch(0))
    est.step()
    with pytest.raises(ValueError, match=r"optimizer differs.*Adam.*Adagrad"):
        other.load_state_dict(est.state_dict())


def test_part_of_an_optimizer_s_state_is_refused():
    est = network()
    run(est, *batch(0))
    est.step()
    state = est.state_dict()
    del state["extra"]["normalizer"]["optimizer.prototypes.sum"]
    with pytest.raises(ValueError, match="entries"):
        network().load_state_dict(state)


def test_a_learning_rate_changed_in_the_group_is_used():
    est, frozen = network(), network(updates=0)
    est.sample_groups[0]["lr"] = 0.0
    near(run(est, *batch(0))[0], run(frozen, *batch(0))[0], 1e-14)


def test_beside_a_dual_its_keys_are_prefixed():
    est = network(learn_tau=True, rho=0.5)
    assert est.sample_groups[0]["normalizer.lr"] == 0.1
    assert "temperature.lr" in est.sample_groups[0]


@pytest.mark.parametrize("learn_tau, shape", [(True, ()), ("global", ()), ("individual", (4, 2))])
def test_learned_temperatures_move(learn_tau, shape):
    est = network(learn_tau=learn_tau, n=20, rho=0.5, tau_lr=0.01)
    run(est, *batch(0))
    est.step()
    tau = est.read(torch.arange(4))["tau"] if shape else est.temperature.tau
    assert tau.shape == shape and (tau != 0.1).all()


def test_groups_have_their_own_temperatures():
    est = compopt.NeuCLIPEstimator(D, n=[{"n": 4, "tau": 0.2}, {"n": 4}], tau=0.1, prototypes=8)
    assert [group["tau"] for group in est.sample_groups] == [0.2, 0.1]
    assert est.n == 8
    with pytest.raises(IndexError):
        est(*features(4, D, 0), torch.arange(6, 10))


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"prototypes": 0}, ValueError, "prototypes"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"updates": -1}, ValueError, "updates"),
        ({"updates": 1.5}, TypeError, "updates"),
        ({"restart_every": 0}, ValueError, "restart_every"),
        ({"eps": -1.0}, ValueError, "eps"),
        ({"objective": "joint"}, ValueError, "unified"),
        ({"architecture": "cnn"}, ValueError, "prototype"),
        ({"optimizer": lambda tensors, lr: None}, TypeError, "torch.optim.Optimizer"),
        ({"optimizer": None}, TypeError, "optimizer=None"),
        ({"optimizer": torch.optim.LBFGS}, TypeError, "closure"),
        pytest.param(
            {"optimizer": getattr(torch.optim, "Adafactor", None)},
            TypeError,
            "row_var",
            marks=pytest.mark.skipif(torch.__version__ < (2, 5), reason="Adafactor needs torch 2.5"),
        ),
        ({"through_alpha": 1}, TypeError, "through_alpha"),
        ({"learn_tau": "all"}, ValueError, "learn_tau"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        network(**options)


def test_features_of_another_dimension_are_refused_and_leave_no_trace():
    est = network()
    before = snapshot(est, 1)
    with pytest.raises(ValueError, match="dim is 4.*5 dimensions"):
        est(*features(4, 5, 0), torch.arange(4))
    assert est.pending == 0
    assert_same_bits(before, snapshot(est, 1))


def test_a_network_belongs_to_one_estimator():
    shared = compopt.NeuralNormalizer(D)
    compopt.ResidualNormalizer(shared, 10)
    compopt.ContrastiveEstimator(shared, compopt.FixedTemperature(0.1))
    with pytest.raises(ValueError, match="already part"):
        compopt.ResidualNormalizer(shared, 10)
    with pytest.raises(TypeError, match="NeuralNormalizer"):
        compopt.ResidualNormalizer(compopt.BatchNormalizer(), 10)
    with pytest.raises(ValueError, match="n of the network"):
        compopt.ResidualNormalizer(compopt.NeuralNormalizer(D, n=10), 10)


# numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("tau", [0.005, 0.02])
def test_a_small_temperature(tau, mode):
    """One step; after more, gradients that cancel to rounding steer the network."""
    est = network(tau=tau, mode=mode, updates=1, prototypes=6)
    ref = Reference(
        [{"n": 6, "tau": tau}], NeuralReference(D, 6, lr=0.1, updates=1, restart_every=3), FixedReference(), mode
    )
    z1, z2, index = batch(3, 6)
    for got, want in zip(run(est, z1, z2, index), ref.forward(z1, z2, index), strict=True):
        near(got, want, 1e-9)


def test_half_precision_features_meet_a_float32_network():
    est = compopt.NeuCLIPEstimator(D, prototypes=8, updates=2, lr=0.1)
    z1, z2, index = batch(0, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, g1, _ = run(est, z1, z2, index)
    twin = compopt.NeuCLIPEstimator(D, prototypes=8, updates=2, lr=0.1)
    want, *_ = run(twin, z1.float(), z2.float(), index)
    assert loss.dtype == torch.float32 and g1.dtype == torch.bfloat16
    near(loss, want, 1e-6)
    assert all(value.dtype == torch.float32 for name, value in extra(est).items() if value.dim() == 3)


def test_the_exact_normalizers_are_learned_where_the_network_can_express_them():
    """As many prototypes as samples, the full batch: the queue is the data set, and the network exact but for s_ii."""
    z1, z2 = features(40, D, 1)
    est = network(prototypes=40, updates=0, tau=0.3)
    run(est, z1, z2, torch.arange(40))
    est.step()
    bare = diagnostics.normalizer_error(est, z1, z2)
    assert bare < 2e-2  # an anchor's own positive is one of the forty
    learned = network(prototypes=40, updates=300, tau=0.3, lr=0.02)
    run(learned, z1, z2, torch.arange(40))
    learned.step()
    assert diagnostics.normalizer_error(learned, z1, z2) < bare / 5


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_unnormalised_features_take_cosines_for_the_network(mode):
    """Scaling the features of an estimator that does not normalise leaves the network's cosines as they are."""
    one, two = network(normalize=False, mode=mode), network(normalize=False, mode=mode)
    z1, z2, index = batch(0)
    run(one, unit(z1), unit(z2), index)
    run(two, 3 * unit(z1), 3 * unit(z2), index)
    one.step()
    two.step()
    near(extra(one)["queue"], extra(two)["queue"], 1e-14)


# many ranks -----------------------------------------------------------------------------------------


def counting(group):
    """How many collectives a call makes, and how many prototypes a rank multiplies with."""
    calls = []
    original = dist.all_reduce

    def all_reduce(tensor, *args, **kwargs):
        calls.append((tensor.numel(), tensor.dtype))
        return original(tensor, *args, **kwargs)

    est = network(process_group=group, updates=5, prototypes=10)
    own = slice(2 * dist.get_rank(group), 2 * dist.get_rank(group) + 2)
    z1, z2, index = batch(0, 6)
    est(z1[own], z2[own], index[own])
    est.step()
    dist.all_reduce = all_reduce
    try:
        est(z1[own], z2[own], index[own])
    finally:
        dist.all_reduce = original
    return calls, tuple(est.normalizer.state["prototypes"].shape), tuple(est.normalizer.state["queue"].shape)


@pytest.mark.distributed
def test_each_rank_holds_its_part_and_sends_a_few_doubles_per_update():
    answers = the_pool().run(counting, 3)
    shapes = [shape for _, shape, _ in answers]
    assert sorted(shape[1] for shape in shapes) == [3, 3, 4]
    for calls, shape, queue in answers:
        assert shape == queue
        assert calls == [(2 * 6, torch.float64)] * (5 + 1)


def saved_by(group, folder):
    est = network(process_group=group, prototypes=10)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for seed in range(4):
        z1, z2, index = batch(seed, 12)
        own = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
        est(z1[own], z2[own], index[own])
        est.step()
    compopt.save(est, folder)
    return snapshot(est, 1)


def loaded_by(group, folder):
    est = network(process_group=group, prototypes=10)
    compopt.load(est, folder)
    return snapshot(est, 1), tuple(est.normalizer.state["prototypes"].shape)


@pytest.mark.distributed
@pytest.mark.parametrize("writers, readers", [(3, 2), (2, 4), (4, 1)])
def test_checkpoints_fit_any_number_of_ranks(writers, readers, tmp_path):
    written = the_pool().run(saved_by, writers, str(tmp_path))
    for other in written[1:]:
        assert_same_bits(written[0], other)
    for state, shape in the_pool().run(loaded_by, readers, str(tmp_path)):
        assert_same_bits(state, written[0])
        assert shape[1] in (10 // readers, -(-10 // readers))


def uneven(group, kind):
    """One rank brings nothing, or nothing that learns; the others must not wait for it in a collective."""
    est = compopt.ResidualEstimator(D, prototypes=8, process_group=group, dtype=torch.float64)
    rank = dist.get_rank(group)
    z1, z2, index = batch(0, 6)
    losses = []
    for _ in range(3):
        own = slice(0, 6) if rank == 0 else slice(6, 6)
        if kind == "frozen":
            own = slice(3 * rank, 3 * rank + 3)
        a, b = (z[own].clone().requires_grad_(kind == "empty" or rank == 0) for z in (z1, z2))
        loss = est(a, b, index[own])
        if loss.requires_grad:
            loss.backward()
        est.step()
        losses.append(loss.detach())
    return torch.stack(losses)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["empty", "frozen"])
def test_no_rank_waits_for_one_without_gradients(kind):
    first, second = the_pool().run(uneven, 2, kind)
    assert torch.equal(first, second)


def failing_disk(group, folder):
    """The rows of one rank cannot be written."""
    est = compopt.ResidualEstimator(D, 20, prototypes=8, process_group=group, dtype=torch.float64)
    original = files.write_file

    def broken(*args):
        raise OSError("disk full")

    if dist.get_rank(group) == 0:
        files.write_file = broken
    try:
        compopt.save(est, folder)
    except (OSError, RuntimeError) as error:
        return str(error)
    finally:
        files.write_file = original
    return "saved"


@pytest.mark.distributed
def test_a_disk_that_fails_on_one_rank_is_told_to_all(tmp_path):
    for message in the_pool().run(failing_disk, 2, str(tmp_path)):
        assert "disk full" in message or "rank 0" in message


def asked_alone(group):
    """Each rank asks for the error of other features, at its own time."""
    est = network(process_group=group, prototypes=10)
    rank = dist.get_rank(group)
    z1, z2, index = batch(0, 12)
    own = slice(6 * rank, 6 * rank + 6)
    est(z1[own], z2[own], index[own])
    est.step()
    return [diagnostics.normalizer_error(est, *features(20, D, seed)) for seed in (rank, 5)]


@pytest.mark.distributed
def test_every_rank_may_judge_its_own_features():
    first, second = the_pool().run(asked_alone, 2)
    assert torch.equal(first[1], second[1]) and not torch.equal(first[0], second[0])


@pytest.mark.distributed
def test_fewer_prototypes_than_ranks_are_refused():
    for message in the_pool().run(too_few, 3):
        assert "prototypes=2" in message and "3 ranks" in message


def too_few(group):
    """What building it says."""
    try:
        network(process_group=group, prototypes=2)
    except ValueError as error:
        return str(error)
    return ""


# the perceptron -------------------------------------------------------------------------------------


def test_the_perceptron_is_written_like_torch_s():
    """Log-partitions and gradients of the hand-written network against autograd."""
    kind = networks.Perceptron(2, D, 7, compopt.SogCLREstimator(4)._engine.ranks)
    parameters = [p.requires_grad_() for p in kind.initial(torch.float64, 0)]
    e, scale = torch.randn(2, 5, D, dtype=torch.float64), torch.full((2, 5), 3.0, dtype=torch.float64)
    w, c, v, b = parameters
    expected = ((e @ w.mT + c[:, None]).relu() @ v[..., None])[..., 0] + b
    weight = torch.randn(2, 5, dtype=torch.float64)
    gradients = torch.autograd.grad((expected * scale * weight).sum(), parameters)
    sweep = kind.sweep(e, scale, torch.ones(0, dtype=torch.bool), True)
    with torch.no_grad():
        near(sweep.predict(parameters), expected * scale, 1e-12)
        for got, want in zip(sweep.gradients(weight), gradients, strict=True):
            near(got, want, 1e-12)


@pytest.mark.parametrize("tau", [0.05, 0.04])
def test_no_gap_is_above_what_the_host_knows(tau, monkeypatch):
    """All prototypes opposite to all features: the largest gap there is, which the limit of exponents must meet."""
    seen = []

    def spy(gap, most):
        seen.append((gap.max().item(), most))
        return training.unified_slope(gap, most)

    monkeypatch.setitem(training.OBJECTIVES, "unified", training.Slope(spy, True))
    est = compopt.NeuCLIPEstimator(dim=2, prototypes=4, updates=1, lr=0.0, restart_every=None, tau=tau)
    z = torch.tensor([[-1.0, 0.0]]).repeat(4, 1)
    for sign in (1, -1):  # the first batch becomes the prototypes
        est(sign * z, sign * z, torch.arange(4))
        est.step()
    gap, most = seen[-1]
    assert most == 2 / tau
    assert gap == pytest.approx(most, rel=1e-6)
    limited = training.unified_slope(torch.tensor([gap]), most).item()
    assert limited == pytest.approx(math.expm1(40.0), rel=1e-5)
