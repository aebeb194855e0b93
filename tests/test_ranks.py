"""K ranks with B/K samples each equal one rank with B: losses, gradients after the average over ranks, state."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import compopt
from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, features, make, near
from tests.launching import run_code
from tests.pool import the_pool

pytestmark = pytest.mark.distributed
N, BATCH = 23, 12
# sizes of the local batches: equal, unequal, one empty
SPLITS = {
    1: [[12]],
    2: [[6, 6], [11, 1], [0, 12]],
    3: [[4, 4, 4], [5, 0, 7]],
    4: [[3, 3, 3, 3], [1, 5, 0, 6], [3, 3, 3, 3]],
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
# products of other shapes sum in another order, so that float32 values of s / tau differ by about 1e-7 / tau
TAU = {torch.float64: 0.07, torch.float32: 0.2}


def close(actual, expected, dtype, what=""):
    """Compare to 1e-12 (fp64) or 1e-6 (fp32); small entries relative to the largest, for the rounding of s / tau."""
    rtol = TOLERANCE[dtype]
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    near(actual, expected, rtol, atol=rtol * min(1.0, 5 * largest), what=what)


def sizes_of(ranks, step):
    """Return the local batch sizes of a step; every step splits the batch differently."""
    return SPLITS[ranks][step % len(SPLITS[ranks])]


def own_part(group, step):
    """Return this rank's slice of the global batch."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sizes = sizes_of(ranks, step)
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def build(name, mode, dtype, group, options):
    """Return the database's estimator for a process group, or for this process alone if group is None."""
    est, _ = make(BY_NAME[name], mode, N, dtype, TAU[dtype], 0.6, process_group=group, **options)
    return est


def steps(est, info, data, part, window):
    """Train; return (loss, g1, g2, tau gradient) of every step, and the state."""
    trace = []
    for step, (z1, z2, index) in enumerate(data):
        own = part(step)
        z1, z2 = (z[own].clone().requires_grad_() for z in (z1, z2))
        leaf = info.tau_leaf(est) if info.tau_leaf else None
        if leaf is not None:
            leaf.grad = None
        loss = est(z1, z2, index[own])
        loss.backward()
        trace.append((loss.detach(), z1.grad, z2.grad, None if leaf is None else leaf.grad.clone()))
        if step % window == window - 1:
            est.step()
    state = est.read(torch.arange(N)) if info.has_rows else {}
    if info.global_tau:
        state["global tau"] = est.temperature.tau.clone()
    return trace, state


def on_ranks(group, name, mode, dtype, data, options, window):
    """Return the trace and the state of one rank."""
    est = build(name, mode, dtype, group, options)
    return steps(est, BY_NAME[name], data, lambda step: own_part(group, step), window)


@functools.cache
def on_one_rank(name, mode, dtype, window, count, repeats):
    """Return data, and the trace and state of one rank with the whole batch; the cached result must not be modified."""
    data = batches(N, count, batch=BATCH, dim=4, seed=31, repeats=repeats, dtype=dtype)
    est = build(name, mode, dtype, None, {})
    return data, *steps(est, BY_NAME[name], data, lambda step: slice(0, BATCH), window)


def compare(ranks, name, mode, dtype, options=None, window=1, count=5, repeats=True):
    """Run one configuration on K ranks and on one."""
    data, whole, state = on_one_rank(name, mode, dtype, window, count, repeats)
    answers = the_pool().run(on_ranks, ranks, name, mode, dtype, data, options or {}, window)
    rtol = TOLERANCE[dtype]
    for step, (loss, g1, g2, leaf) in enumerate(whole):
        parts = [trace[step] for trace, _ in answers]
        for part in parts:
            near(part[0], loss, rtol, atol=rtol, what=f"loss of step {step}")
            if leaf is not None:
                near(part[3], leaf, rtol, atol=rtol, what="tau gradient")  # a difference of sums of order one
        for at, want in ((1, g1), (2, g2)):
            close(torch.cat([part[at] for part in parts]) / ranks, want, dtype, f"gradient {at} of step {step}")
    for _, own in answers:
        assert own.keys() == state.keys()
        for key, want in state.items():
            seen = state["count"] > 0 if "count" in state and key != "global tau" else ...
            near(own[key][seen], want[seen], rtol, atol=10 * rtol, what=f"{key} after all steps")


@pytest.mark.covering()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_many_ranks_equal_one(info, mode, ranks, dtype):
    compare(ranks, info.name, mode, dtype)


STATEFUL = [info for info in DATABASE if info.has_state]
# one entry for each set of columns; apart from these, methods do not depend on where rows are stored
DAILY = {(info.columns, bool(info.network)): info.name for info in reversed(STATEFUL)}.values()


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "info", [pytest.param(info, marks=[pytest.mark.full] * (info.name not in DAILY)) for info in STATEFUL], ids=str
)
def test_shards_equal_the_whole(info, mode):
    compare(3, info.name, mode, torch.float64, {"shard": True}, window=2)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "infonce"])
def test_distinct_samples_and_chunks(name, ranks):
    compare(ranks, name, "bimodal", torch.float64, repeats=False)
    compare(ranks, name, "unimodal", torch.float64, {"chunk_size": 2}, repeats=False)
    compare(ranks, name, "bimodal", torch.float64, {"chunk_size": 1})


# -- keys, temperatures, other estimators ------------------------------------------------------------


def with_keys(group, data, options):
    """Call with index2, labels and tau per sample; return losses, gradients and rows."""
    tau, index2, labels = data[0][3:]
    est = compopt.ContrastiveEstimator(
        compopt.MovingAverageEstimator(N, gamma=0.7), compopt.FixedTemperature(), process_group=group, **options,
        dtype=torch.float64,
    )  # fmt: skip
    result = []
    for step in range(3):
        own = own_part(group, step)
        z1, z2, index = (x[own] for x in data[0][:3])
        z1, z2, own_tau = (x.clone().requires_grad_() for x in (z1, z2, tau[own]))
        loss = est(z1, z2, index, index2=index2[own], labels=labels[own], tau=own_tau)
        loss.backward()
        est.step()
        result.append((loss.detach(), z1.grad, z2.grad, own_tau.grad))
    return result, est.read(torch.arange(N))


@functools.cache
def keys_on_one_rank(shape):
    """Return data, and the results of one rank."""
    z1, z2, index = batches(N, 2, batch=BATCH, dim=4, seed=41)[1]
    tau = 0.1 + 0.2 * torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    data = [(z1, z2, index, tau, (index * 7 + 3) % N, torch.arange(BATCH) // 2)]
    return data, the_pool().run(with_keys, 1, data, {})[0]


@pytest.mark.parametrize("shape", [(BATCH,), (BATCH, 2)])
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_index2_group_and_tau_per_sample(ranks, shard, shape):
    data, est_data = keys_on_one_rank(shape)
    answers = the_pool().run(with_keys, ranks, data, {"shard": shard})
    for step, want in enumerate(est_data[0]):
        parts = [trace[step] for trace, _ in answers]
        near(parts[0][0], want[0], 1e-12, what="loss")
        for at in (1, 2, 3):
            near(torch.cat([part[at] for part in parts]) / ranks, want[at], 1e-12, what=f"gradient {at}")
    for _, state in answers:
        for key in state:
            near(state[key], est_data[1][key], 1e-12, atol=1e-12, what=key)


# -- through DDP -------------------------------------------------------------------------------------


def encoder(dtype):
    """Return two towers with the same weights on every rank."""
    torch.manual_seed(0)
    return torch.nn.ModuleList([torch.nn.Linear(7, 4), torch.nn.Linear(6, 4)]).to(dtype)


class Towers(torch.nn.Module):
    """Both encoders in one forward, as DDP requires."""

    def __init__(self, dtype):
        super().__init__()
        self.towers = encoder(dtype)

    def forward(self, x, y):
        return self.towers[0](x), self.towers[1](y)


def through_ddp(group, name, mode, dtype, x, y, index, ddp):
    """Take three optimizer steps; return losses and the encoder's gradients of each, and its final weights."""
    model = Towers(dtype)
    inner = model
    if ddp:
        model = DistributedDataParallel(model, process_group=group)
    est = build(name, mode, dtype, group, {})
    optimizer = torch.optim.SGD([*model.parameters(), *est.parameters()], lr=0.05)
    est.attach(optimizer)
    trace = []
    for step in range(3):
        own = own_part(group, step)
        optimizer.zero_grad()
        loss = est(*model(x[step][own], y[step][own]), index[step][own])
        loss.backward()
        trace.append((loss.detach(), [p.grad.clone() for p in inner.parameters()]))
        optimizer.step()
    return trace, [p.detach().clone() for p in inner.parameters()]


PRESETS = "infonce clip-learned sogclr isogclr isogclr-adam global-dual-adam neural-through-alpha".split()


@functools.cache
def trained_on_one_rank(name, mode, dtype):
    """Return the arguments of a training run, and the results of one rank."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(3, BATCH, d, generator=generator, dtype=torch.float64).to(dtype) for d in (7, 6))
    args = (name, mode, dtype, x, y, torch.randint(0, N, (3, BATCH), generator=generator))
    return args, the_pool().run(through_ddp, 1, *args, False)[0]


@pytest.mark.covering()
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PRESETS)
def test_the_encoder_s_gradients_after_ddp(name, mode, ranks, dtype):
    args, (whole, weights) = trained_on_one_rank(name, mode, dtype)
    for trace, own in the_pool().run(through_ddp, ranks, *args, True):
        for (loss, gradients), (want_loss, want) in zip(trace, whole, strict=True):
            near(loss, want_loss, TOLERANCE[dtype], atol=TOLERANCE[dtype], what="loss")
            for a, b in zip(gradients, want, strict=True):
                close(a, b, dtype, "gradient")
        for a, b in zip(own, weights, strict=True):
            near(a, b, TOLERANCE[dtype], what="weights")


def graph_on_one_rank(group, kind, frozen):
    rank = dist.get_rank(group)
    est = getattr(compopt, kind)(
        0.1, **({"learn_tau": True} if kind == "InfoNCEEstimator" else {}), process_group=group
    )
    est.eval()
    for parameter in est.parameters():
        parameter.requires_grad_(not frozen or rank == 1)
    z1, z2 = features(4, 8, rank, dtype=torch.float32)
    wanted = "the ranks differ in a gradient for the temperature"
    with torch.set_grad_enabled(frozen or rank == 1), pytest.raises(ValueError, match=wanted):
        est(z1, z2, torch.arange(4) + 4 * rank)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["InfoNCEEstimator", "SigLIPEstimator"])
def test_ranks_with_and_without_a_gradient_of_the_temperature_are_refused(kind, frozen):
    """They would exchange messages of different lengths, which ends the process."""
    the_pool().run(graph_on_one_rank, 2, kind, frozen)


def inside_join(group):
    """Return the error of a call inside Join; with enable=False there is none."""
    own, said = torch.arange(4) + 4 * dist.get_rank(group), []
    model = DistributedDataParallel(torch.nn.Linear(3, 3), process_group=group)
    est = compopt.SogCLREstimator(N, process_group=group)
    for kind in (Join, lambda models: Join(models, enable=False)):
        try:
            with kind([model]):
                est(*model(torch.ones(2, 4, 3)).unbind(), own)
        except RuntimeError as error:
            said.append(str(error))
        est = compopt.SogCLREstimator(N, process_group=group)
    return said


def test_join_of_torch_is_refused():
    for (said,) in the_pool().run(inside_join, 2):
        assert said.startswith("an estimator cannot be called inside torch's Join") and "drop_last=True" in said


GROUPS = """
import sys
from datetime import timedelta
import torch.distributed as dist
from compopt.distributed.ranks import Ranks, _timeout
store = {"init_method": f"file://{sys.argv[1]}", "rank": 0, "world_size": 1}
dist.init_process_group("gloo", timeout=timedelta(seconds=77), **store)
for group in (None, dist.new_group([0], timedelta(seconds=17))):
    print(_timeout(Ranks(group)._form_host_group(None)))
"""


def test_groups_for_messages_and_threads_have_the_timeout_of_their_group(tmp_path):
    assert run_code(GROUPS, tmp_path / "store").stdout.split() == ["0:01:17", "0:00:17"]


@pytest.mark.parametrize("kind", ["SogCLREstimator", "InfoNCEEstimator"])
def test_an_estimator_from_before_the_process_group_is_refused(kind):
    """It would train on this rank's samples alone. A second rank is simulated, since no call reaches it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    est = getattr(compopt, kind)(**({"n": N} if kind == "SogCLREstimator" else {}))
    z1, z2 = torch.randn(2, 4, 3)
    est(z1, z2, torch.arange(4))
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="was built before torch.distributed was initialised with 2 ranks"):
            est(z1, z2, torch.arange(4))
    finally:
        dist.destroy_process_group()
