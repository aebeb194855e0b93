"""The neural normalizer: queue, restarts, optimizers, temperatures, ranks (against its reference: test_agreement)."""

import functools
import math

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import diagnostics
from tests.helpers import assert_same_bits, features, group_key, near, run, snapshot, whole
from tests.pool import the_pool
from tests.reference import FixedReference, NeuralReference, Reference, equation_12

D = 4


def network(**options):
    """Return an estimator with a small network and a fixed temperature."""
    tau = options.pop("tau", 0.1)
    mode = options.pop("mode", "bimodal")
    plain = {"learn_tau": False, "through_alpha": False}
    options = {"prototypes": 8, "lr": 0.1, "updates": 2, "restart_every": 3, **plain, **options}
    return compopt.NeuCLIPEstimator(D, tau=tau, mode=mode, dtype=torch.float64, **options)


def batch(seed, size=4, dtype=torch.float64):
    return *features(size, D, seed, dtype=dtype), torch.arange(size)


def extra(est):
    return est.normalizer.state_dict()["state"]


# loads ---------------------------------------------------------------------------------------------

OPTIMIZERS = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
SUMS = {"sum", "exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "step_size", "step"}


def trainable():
    """Return the optimizers of torch that a network accepts."""
    found = []
    for kind in OPTIMIZERS:
        try:
            found.append((kind, network(optimizer=kind, lr=0.01)))
        except TypeError:
            continue
    return found


def test_negative_sums_of_squares_are_refused():
    """The root of a negative sum would make the network NaN at the next step; signed averages may be negative."""
    sums = set()
    for kind, est in trainable():
        run(est, *batch(0))
        est.step()
        for name, value in extra(est).items():
            if not name.startswith("optimizer."):
                continue
            state, before = est.state_dict(), whole(est)
            state["parts"]["normalizer"]["state"][name] = torch.full_like(value, -1)
            if name.rpartition(".")[2] in SUMS:
                sums.add(name.rpartition(".")[2])
                with pytest.raises(ValueError, match=f"{name} of NeuralNormalizer must be .*>= 0, got -1"):
                    est.load_state_dict(state)
                assert whole(est) == before, kind
            elif name.rpartition(".")[2] in ("exp_avg", "prev", "ax"):
                est.load_state_dict(state)
                state["parts"]["normalizer"]["state"][name] = value
                est.load_state_dict(state)
    assert sums == SUMS - {"max_exp_avg_sq"}


# queue and restarts (when and how: test_agreement) -------------------------------------------------


def test_a_step_that_a_device_skips_leaves_the_network_as_it_was():
    """The ring buffer counts the skipped slots as filled; they receive features when it wraps around."""
    est = compopt.NeuCLIPEstimator(8, prototypes=32)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], fused=True)
    est.attach(optimizer)
    for t in range(7):
        before = extra(est)
        z1, z2 = features(8, 8, t, dtype=torch.float32)
        loss, *_ = run(est, z1, z2, torch.arange(8))
        optimizer.found_inf = torch.tensor(float(t in (0, 2)))
        optimizer.step()
        if t == 2:
            tensors = {name: value for name, value in before.items() if value.dim() > 1}
            assert_same_bits({name: extra(est)[name] for name in tensors}, tensors)
        assert torch.isfinite(loss)
    assert extra(est)["queue_active"].all()
    assert (extra(est)["prototypes"].norm(dim=2) > 0.1).all()
    assert extra(est)["optimizer.prototypes.sum"].max() < 1e9


def queues(group, mode, evaluations):
    """Fill a queue with 3 of 5 batches per step, each evaluated several times; return it, and its counters."""
    normalizer = compopt.NeuralNormalizer(D, prototypes=20, updates=0, restart_every=3)
    kind = {"directions": "forward"} if mode == "forward" else {"mode": mode}
    est = compopt.ContrastiveEstimator(normalizer, compopt.FixedTemperature(0.2), process_group=group, **kind)
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    for step in range(3):
        for again in range(evaluations):
            for part in range(2):
                own = slice(rank * 4 // ranks, (rank + 1) * 4 // ranks)
                index = torch.tensor([[0, 1, 2, 3], [4, 3, 5, 6]][part if again == 0 else 1 - part]) + 7 * step
                z = features(7, D, seed=step, dtype=torch.float32)
                z1, z2 = (side[index[own] - 7 * step] for side in z)
                run(est, z1, z2, index[own], **({"index2": index[own]} if again and mode == "bimodal" else {}))
        est.step()
    state = est.normalizer.state_dict()["state"]
    return state["queue"], state["queue_place"], state["queue_active"]


@pytest.mark.parametrize("mode", ["bimodal", "unimodal", "forward"])
def test_a_sample_keeps_its_slots_until_the_commit(mode):
    """Further evaluations, in any order, add no copies: the queue has each sample of a step once."""
    once, often, more = (queues(None, mode, count) for count in (1, 2, 9))
    for name, one, two, three in zip(("queue", "place", "active"), once, often, more, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three), name
    queue = once[0].flatten(0, 1)
    distinct = queue[queue.any(1)].unique(dim=0)
    assert len(distinct) == int(once[2].sum()) * len(once[0])
    for ranks in (2, 3):
        for other in the_pool().run(queues, ranks, mode, 2):
            for one, two in zip(once, other, strict=True):
                near(two, one, 1e-6, atol=1e-6)


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


def test_a_state_that_does_not_fit_the_optimizer_is_refused():
    est = network()
    run(est, *batch(0))
    est.step()
    state = est.state_dict()
    with pytest.raises(ValueError, match=r"optimizer differs.*Adagrad.*Adam"):
        network(optimizer=torch.optim.Adam).load_state_dict(state)
    del state["parts"]["normalizer"]["state"]["optimizer.prototypes.sum"]
    with pytest.raises(ValueError, match="entries"):
        network().load_state_dict(state)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"prototypes": 0}, ValueError, "prototypes"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"updates": -1}, ValueError, "updates"),
        ({"updates": 1.5}, TypeError, "updates"),
        ({"restart_every": 0}, ValueError, "restart_every"),
        ({"eps": -1.0}, ValueError, "eps"),
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


# numbers --------------------------------------------------------------------------------------------


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
    """With a full batch and a prototype per sample, the queue is the data set; the network is exact except for s_ii."""
    z1, z2 = features(40, D, 1)
    est = network(prototypes=40, updates=0, tau=0.3)
    run(est, z1, z2, torch.arange(40))
    est.step()
    bare = diagnostics.normalizer_error(est, z1, z2)
    assert bare < 2e-2  # the forty prototypes include an anchor's positive
    learned = network(prototypes=40, updates=300, tau=0.3, lr=0.02)
    run(learned, z1, z2, torch.arange(40))
    learned.step()
    assert diagnostics.normalizer_error(learned, z1, z2) < bare / 5


@pytest.mark.parametrize("through_alpha", [False, True])
@pytest.mark.parametrize("tau", [0.01, 0.001])
def test_weights_are_bounded_where_the_network_does_not_follow(tau, through_alpha):
    """Random features at small temperatures: the gradients have the size of DCL's, and the loss is finite."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(2, 64, 16, generator=g)
    est = compopt.NeuCLIPEstimator(16, tau=tau, prototypes=32, learn_tau=False, through_alpha=through_alpha)
    dcl = compopt.DCLEstimator(tau=tau)
    for _ in range(20):
        index = torch.randperm(64, generator=g)[:16]
        loss, g1, _ = run(est, *z[:, index], index)
        _, wanted, _ = run(dcl, *z[:, index], index)
        assert loss.isfinite() and g1.abs().max() < 60 * wanted.abs().max()
        assert (est._last.log_sum() - math.log(15) - est._last.alpha).max() < math.log(30) + 0.01
        est.step()


def test_used_alone_its_weights_are_bounded_too():
    network = compopt.NeuralNormalizer(D, 8)
    alpha = network.update(features(4, D, 0)[0], torch.full((4,), 200.0), 0.01)
    near(alpha, torch.full((4,), 200.0 - math.log(30)), 1e-6)


# the gradient through alpha ---------------------------------------------------------------------------


def trained(temperature, mode="bimodal", multiply_tau=True, eps=0.02):
    """Return an estimator trained on three batches of samples 0 to 7, its updates disabled, and its prototypes."""
    network = compopt.NeuralNormalizer(D, 8, lr=0.1, updates=3, restart_every=None, eps=eps, through_alpha=True)
    est = compopt.ContrastiveEstimator(network, temperature, mode, multiply_tau=multiply_tau, dtype=torch.float64)
    for seed in range(3):
        run(est, *batch(seed, 8))
        est.step()
    est.sample_groups[0][group_key(est.sample_groups[0], "updates")] = 0
    return est, extra(est)["prototypes"]


def derivatives(z1, z2, tau, weights, rho=0.0, eps=0.02):
    """Gradients of equation 12 with respect to both sides and to temperatures, one per anchor."""
    leaves = [x.detach().clone().requires_grad_() for x in (z1, z2, tau)]
    return torch.autograd.grad(equation_12(*leaves, weights, eps, rho), leaves)


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("shape", [(), (6,), (6, 2)])
def test_tau_of_the_call_gets_the_derivative_of_equation_12(shape, mode):
    est, weights = trained(compopt.FixedTemperature(0.1), mode)
    z1, z2, index = batch(9, 6)
    tau = (0.05 + 0.1 * torch.rand(shape, dtype=torch.float64)).requires_grad_()
    _, g1, g2 = run(est, z1, z2, index + 8, tau=tau)
    want1, want2, want = derivatives(z1, z2, tau[:, None] if len(shape) == 1 else tau, weights)
    for got, expected in ((g1, want1), (g2, want2), (tau.grad, want.reshape(shape))):
        near(got, expected, 1e-10)


# many ranks -----------------------------------------------------------------------------------------


def counting(group):
    """Return the all-reduces of a call and the shapes of this rank's prototypes and queue."""
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
    """One rank has an empty batch, or features without gradients; the other must not wait for it in a collective."""
    est = network(through_alpha=True, process_group=group)
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


def too_few(group):
    with pytest.raises(ValueError, match="prototypes=2.*3 ranks"):
        network(process_group=group, prototypes=2)


@pytest.mark.distributed
def test_fewer_prototypes_than_ranks_are_refused():
    the_pool().run(too_few, 3)


def test_a_queue_with_features_of_which_none_is_in_use_is_refused():
    """A mean over no prototypes would be NaN."""
    est = network()
    run(est, *batch(0))
    est.step()
    state, before = est.state_dict(), whole(est)
    state["parts"]["normalizer"]["state"]["queue_active"].fill_(False)
    with pytest.raises(ValueError, match="queue_active must be True for a slot"):
        est.load_state_dict(state)
    assert whole(est) == before


def test_a_checkpoint_of_a_removed_option_is_refused_with_its_name():
    est = network()
    state = est.state_dict()
    state["parts"]["normalizer"]["config"]["options"]["reset_optimizer"] = True
    with pytest.raises(ValueError, match="reset_optimizer differs: the checkpoint has True, this estimator has False"):
        est.load_state_dict(state)
