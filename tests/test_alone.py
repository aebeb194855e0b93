"""Each of the four objects used alone, and a user-defined one: the contract, float64 references, several ranks.

For objects that an estimator holds see tests/test_objects.py.
"""

import copy
import functools
import math
import pickle
import tempfile
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt.estimator import Column, Estimator
from tests.devices import DEVICE
from tests.helpers import assert_same_bits, bits, generator, near, tensors_of
from tests.pool import the_pool
from tests.reference import AloneAverage, AloneChains, AloneDual, AloneGlobalDual, AloneNetwork
from tests.test_ranks import own_part

N, BATCH, POOL, DIM = 23, 12, 7, 4
PLACEMENTS = [{}, {"offload": "cpu"}, {"offload": "disk"}, {"shard": True}]
NAMES = ["memory", "cpu", "disk", "shard"]
_folders = []


@pytest.fixture(autouse=True)
def _folder_for_tables(tmp_path):
    _folders.append(tmp_path)
    yield
    _folders.pop()


class Total(Estimator):
    """Sum per sample, as an example of a user-defined estimator."""

    def __init__(self, n, scale=1.0, **placement):
        super().__init__(n, {"scale": scale}, **placement)

    def check(self, group):
        if group["scale"] <= 0:
            raise ValueError(f"scale must be above 0, got {group['scale']}; give 1.0 for none")

    def columns(self, directions, dtype):
        return [Column("total", directions, dtype)]

    def add(self, x, index):
        batch = self._read({"index": self._index(index, len(x))}, {"x": x})
        hyper = self._hyper(batch)
        total = batch.of().columns["total"] + batch.values["x"][:, None] * hyper("scale")
        if batch.depositing:
            self._deposit(batch, {"total": total})
        return total[batch.own, 0]


@dataclass
class Kind:
    """One object: its constructor, its call on a batch, and two values of a hyper-parameter."""

    name: str
    build: object
    call: object
    key: str
    values: tuple
    has_rows: bool = True
    groups: list = field(default_factory=lambda: [{"n": N}])

    def make(self, n=None, dtype=torch.float64, **options):
        if options.get("offload") == "disk" and "offload_dir" not in options:
            options["offload_dir"] = tempfile.mkdtemp(dir=_folders[-1])
        return self.build(self.groups if n is None else n, dtype=dtype, **options)

    def __str__(self):
        return self.name


def dual(n, mode="individual", **options):
    bounds = {"lr": 0.05, "tau_init": 0.3, "tau_min": 0.1, "tau_max": 0.6, "max_grad": 1.5}
    return compopt.TemperatureDual(n, mode=mode, **{**bounds, **options})


def network(n, **options):
    options = {"prototypes": 9, "updates": 2, "lr": 0.1, "restart_every": 2, "seed": 3, **options}
    return compopt.NeuralNormalizer(DIM, n=None if n == [{"n": N}] else n, **options)


def move_network(u, d):
    return u.update(d["anchors"], d["log_g"], d["tau"], d["features"])


def move_temperature(u, d):
    return u.update(d["gradient"], d["index"])


def adam(n, **options):
    return dual(n, optimizer="adam", **options)


def average(n, **options):
    return compopt.MovingAverageEstimator(n, **{"gamma": 0.6, **options})


def chains(n, **options):
    return compopt.MCMCNegativeSampler(n, **{"burn_in": 0.3, **options})


def one_for_all(n, **options):
    return adam(None if n == [{"n": N}] else n, mode="global", **options)


KINDS = [
    Kind("average", average, lambda u, d: u.update(d["log_g"], d["index"]), "gamma", (0.3, 0.9)),
    Kind("momentum", dual, move_temperature, "lr", (0.02, 0.1)),
    Kind("adam", adam, move_temperature, "betas", ((0.5, 0.9), (0.8, 0.99))),
    Kind("chains", chains, lambda u, d: u.sample(d["scores"], d["index"], d["candidates"]), "burn_in", (0, 0.7)),
    Kind("own", Total, lambda u, d: u.add(d["gradient"], d["index"]), "scale", (0.5, 2.0)),
    Kind("global", one_for_all, lambda u, d: u.update(d["gradient"]), "lr", (0.02, 0.1), False),
    Kind("network", network, move_network, "lr", (0.02, 0.1), False),
]


def positives(d):
    return (d["gradient"] > -0.2).to(torch.int64)


def call_pairs(u, d):
    return u(d["log_g"], positives(d), d["index"])


def call_lists(u, d):
    scores = d["scores"][:, :3]  # each row is a query, whose first item may be relevant
    relevance = torch.nn.functional.pad(2 * positives(d)[:, None], (0, 2))
    return u(scores, relevance, d["index"][:, None].expand(scores.shape))


L = compopt.losses


def averaged(kind):
    return lambda n, **o: kind(n, **{"gamma": 0.6, **o})


def move_vector(u, d):
    return u.update(d["scores"][:, :3], d["index"], d["scores"][:, 3:6], beta=0.2)


LOSSES = [  # together they cover all code paths of losses; tests/test_losses.py has all of them
    Kind("vector", lambda n, **o: averaged(L.InnerAverage)(n, width=3, **o), move_vector, "gamma", (0.3, 0.9)),
    Kind("two way", averaged(L.TwoWayPartialAUCLoss), call_pairs, "tau", (0.5, 2.0)),
    Kind("ndcg", averaged(L.NDCGLoss), call_lists, "margin", (0.5, 2.0)),
]
OBJECTS = list(KINDS)
KINDS += LOSSES
BY_NAME = {kind.name: kind for kind in KINDS}
WITH_ROWS = [kind for kind in KINDS if kind.has_rows]
every = pytest.mark.parametrize("kind", KINDS, ids=str)
with_rows = pytest.mark.parametrize("kind", WITH_ROWS, ids=str)
everywhere = pytest.mark.parametrize("placement", PLACEMENTS, ids=NAMES)
in_memory_and_on_disk = pytest.mark.parametrize("placement", PLACEMENTS[::2], ids=NAMES[::2])


@functools.cache
def data(steps=6, seed=0, repeats=True):
    """Return batches for all objects; they must not be modified."""
    g, found = generator(seed), []
    for step in range(steps):
        index = torch.randperm(N, generator=g)[:BATCH]
        if repeats and step % 2:
            index[-1] = index[0]
            index[2] = index[0] if step % 4 == 3 else index[2]

        def normal(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        found.append(
            {
                "index": index,
                "log_g": normal(BATCH),
                "gradient": normal(BATCH),
                "tau": 0.3 + torch.rand(BATCH, generator=g, dtype=torch.float64),
                "anchors": normal(BATCH, DIM),
                "features": normal(2, DIM),
                "scores": normal(BATCH, POOL),
                "candidates": torch.randperm(N, generator=g)[:POOL],
            }
        )
    return found


def part_of(d, own):
    """Return one rank's part of a batch."""
    return {name: value if name in ("candidates", "features") else value[own] for name, value in d.items()}


def state(u):
    """Return all committed state by name."""
    return {name.lstrip("."): value for name, value in tensors_of(u.state_dict()).items()}


def train(u, kind, batches, window=1):
    """Return the outputs of some calls, with a commit after each window."""
    found = []
    for step, d in enumerate(batches):
        found.append(kind.call(u, d))
        if step % window == window - 1:
            u.step()
    return found


def same(a, b):
    assert [bits(x) for x in a] == [bits(x) for x in b]


# -- the contract ------------------------------------------------------------------------------------


@every
def test_only_training_with_gradients_deposits(kind):
    u, d = kind.make(), data()
    assert isinstance(u, Estimator) and u.training
    kind.call(u, d[0])
    u.step()
    before = state(u)
    with torch.no_grad():
        a = kind.call(u, d[1])
    assert u.eval() is u and not u.training
    b = kind.call(u, d[1])
    same([a], [b])
    assert u.pending == 0
    u.step()
    assert u.t == 1 and u.train() is u
    kind.call(u, d[1])
    assert u.pending == 1
    u.discard()
    u.step()
    assert (u.t, u.pending) == (1, 0)
    assert_same_bits(state(u), before)
    c = kind.call(u, d[1])
    kind.call(u, d[2])
    assert (u.t, u.pending) == (1, 2)
    assert_same_bits(state(u), before)  # the deposits are not committed yet
    u.step()
    same([a], [c])
    assert (u.t, u.pending) == (2, 0)
    changed = state(u)
    assert any(bits(changed[name]) != bits(before[name]) for name in before)


@pytest.mark.parametrize("placement", PLACEMENTS[1:], ids=NAMES[1:])
@every
def test_every_placement_has_the_bits_of_memory(kind, placement):
    u, other = kind.make(), kind.make(**placement)
    same(train(u, kind, data(), 2), train(other, kind, data(), 2))
    assert_same_bits(state(u), state(other))


@in_memory_and_on_disk
@every
def test_a_resumed_run_goes_on_to_the_bit(kind, placement, tmp_path):
    u, d = kind.make(**placement), data()
    train(u, kind, d[:2])
    others = [kind.make(**placement), kind.make(), kind.make()]
    kind.call(others[0], d[3])  # a pending deposit, which a load drops
    others[0].load_state_dict(copy.deepcopy(u.state_dict()))
    compopt.load(others[1], compopt.save(u, tmp_path / "files"))
    torch.save(u.state_dict(), tmp_path / "plain.pt")
    others[2].load_state_dict(torch.load(tmp_path / "plain.pt", weights_only=True))
    expected = train(u, kind, d[2:])
    for other in others:
        assert (other.t, other.pending) == (2, 0)
        same(train(other, kind, d[2:]), expected)
        assert_same_bits(state(other), state(u))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, lambda u: pickle.loads(pickle.dumps(u))])
@every
def test_copies_are_deep_and_keep_deposits(kind, duplicate):
    u, d, called = kind.make(), data(), []
    u.register_step_post_hook(lambda *_: called.append(1))
    kind.call(u, d[0])
    u.step()
    kind.call(u, d[1])
    u.sample_groups[0][kind.key] = kind.values[0]
    other = duplicate(u)
    assert type(other) is type(u) and (other.t, other.pending) == (1, 1)
    assert other.sample_groups == u.sample_groups and repr(other) == repr(u)
    before = state(u)
    other.step()
    kind.call(other, d[2])
    other.step()
    assert len(called) == 1 and u.t == 1  # hooks are not copied
    assert_same_bits(state(u), before)
    u.step()
    kind.call(u, d[2])
    u.step()
    assert_same_bits(state(u), state(other))


@pytest.mark.parametrize("kind", [kind for kind in [*OBJECTS, LOSSES[0]] if kind.has_rows], ids=str)
def test_groups_have_their_own_hyper_parameters_and_grow(kind):
    low, high = kind.values
    d = data(repeats=False)
    u = kind.make([{"n": 8, kind.key: low}, {"n": N - 8, kind.key: high}])
    ends = [kind.make(**{kind.key: value}) for value in kind.values]
    for step in d[:3]:
        both = kind.call(u, step)
        parts = [kind.call(end, step) for end in ends]
        first = step["index"] < 8
        for at, part in ((first, parts[0]), (~first, parts[1])):
            near(both[at], part[at], 1e-12)
        for each in (u, *ends):
            each.step()
    assert [group["n"] for group in u.sample_groups] == [8, N - 8]
    before = u.read(torch.arange(N))
    u.add_sample_group({"n": 5, kind.key: low})
    assert u.n == N + 5 and u.sample_groups[2][kind.key] == low
    assert_same_bits(u.read(torch.arange(N)), before)
    assert u.read(torch.tensor([N + 4]))["count"].item() == 0
    kind.call(u, {**d[3], "index": torch.arange(N - 7, N + 5)})
    u.step()
    assert u.read(torch.tensor([N + 4]))["count"].item() == 1
    other = kind.make([dict(group) for group in u.sample_groups])
    other.load_state_dict(u.state_dict())
    assert_same_bits(state(other), state(u))


@every
def test_an_edit_counts_and_a_bad_one_is_refused(kind):
    u, edited = kind.make(**{kind.key: kind.values[0]}), kind.make()
    edited.sample_groups[0][kind.key] = kind.values[0]
    same(train(u, kind, data()), train(edited, kind, data()))
    (group,) = edited.sample_groups
    with pytest.raises(ValueError, match=kind.key):
        group[kind.key] = -1.0 if kind.key != "betas" else (2.0, 0.5)
    with pytest.raises(ValueError, match="colour"):
        group["colour"] = 1
    with pytest.raises(TypeError, match="cannot be removed"):
        del group[kind.key]
    assert group[kind.key] == kind.values[0]


@everywhere
@with_rows
def test_prefetched_rows_are_the_rows(kind, placement):
    u, other, d = kind.make(**placement), kind.make(), data()
    expected = train(other, kind, d)
    u.prefetch(d[0]["index"])
    found = []
    for step, batch in enumerate(d):
        if step + 1 < len(d):
            u.prefetch(d[step + 1]["index"])
        found.append(kind.call(u, batch))
        u.step()
    same(found, expected)
    loader = u.prefetch([(batch["index"], batch) for batch in d], index=0)
    assert [index.tolist() for index, _ in loader] == [batch["index"].tolist() for batch in d]
    with pytest.raises(IndexError, match=f"n={N}"):
        u.prefetch(torch.tensor([N]))


@pytest.mark.accelerator
@pytest.mark.skipif(DEVICE is None, reason="no accelerator")
@pytest.mark.parametrize("placement", PLACEMENTS[:2], ids=NAMES[:2])
@every
def test_on_an_accelerator(kind, placement):
    u, other = kind.make(dtype=torch.float32), kind.make(dtype=torch.float32, **placement)
    # after a bad batch a network's own counters advance on the accelerator, but not on the CPU
    for step, d in enumerate(with_bad_values(data()) if kind.has_rows else data()):
        d = {name: x.float() if x.is_floating_point() else x for name, x in d.items()}
        there = {name: x.to(DEVICE) if step == 3 or name not in ("index", "candidates") else x for name, x in d.items()}
        if kind.has_rows and step != 3:
            other.prefetch(there["index"])
        want, got = kind.call(u, d), kind.call(other, there)
        assert got.device.type == DEVICE.type
        near(got.cpu().nan_to_num(), want.nan_to_num(), 1e-4, atol=1e-5)
        if step % 2:
            u.step(), other.step()
    assert other.device.type == ("cpu" if placement and kind.has_rows else DEVICE.type)
    found = state(other)
    for name, want in state(u).items():
        near(found[name].cpu(), want, 1e-4, atol=1e-5, what=name)
    assert other.to("cpu").device.type == "cpu"
    kind.call(other, {name: x.float() if x.is_floating_point() else x for name, x in data()[0].items()})


# -- wrong input -------------------------------------------------------------------------------------

I, G, M = torch.arange(3), torch.zeros(3), torch.zeros(3, 2)  # noqa: E741
WRONG = [
    ("average", (None, I), TypeError, "log_g must be a floating-point tensor"),
    ("average", (torch.arange(3), I), TypeError, "log_g .*int64"),
    ("average", (G.to("meta"), I), ValueError, "log_g is on the meta device"),
    ("average", (G, [0, 1, 2]), TypeError, "index must be a tensor"),
    ("average", (G, I[:2]), ValueError, "index has 2 entries for a batch of 3"),
    ("average", (G, G), TypeError, "index .*float32"),
    ("average", (G, I + N), IndexError, f"index {N + 2} is outside n={N}"),
    ("average", (G, I - 1), IndexError, f"index -1 is outside n={N}"),
    ("momentum", (I, I), TypeError, "gradient .*int64"),
    ("momentum", (M, I), ValueError, r"gradient must have shape \(B,\) or \(B, 1\), got \(3, 2\)"),
    ("momentum", (G, None), TypeError, "index is None; pass data-set positions"),
    ("global", (G[:0],), ValueError, "gradient is empty"),
    ("chains", (G, I, I), ValueError, r"scores must have shape \(B, M\), got \(3,\)"),
    ("chains", (M, I + N, I[:2]), IndexError, f"n={N}"),
    ("chains", (M, I, I), ValueError, "candidates has 3 entries for scores of 2 candidates"),
    ("chains", (M, I, [0, 1]), TypeError, "candidates must be a tensor"),
    ("chains", (M, I, torch.tensor([1, 1])), ValueError, "occur once each"),
    ("chains", (M, I, torch.tensor([-1, 1])), ValueError, "positions >= 0"),
    ("network", (torch.ones(3, 5), G, 1.0), ValueError, r"anchors must have 4 columns.* got \(3, 5\)"),
    ("network", (torch.ones(3, 4), G[:2], 1.0), ValueError, "log_g has 2 entries for 3 anchors"),
    ("network", (torch.ones(3, 4), G, 0.0), ValueError, "tau must be .*0"),
    ("network", (torch.ones(3, 4), G, torch.ones(2)), ValueError, r"tau must be 0-d, \(3,\)"),
    ("network", (torch.ones(3, 4), G, torch.tensor([1.0, 0.0, 1.0])), ValueError, "tau must be greater than 0"),
    ("network", (torch.ones(3, 4), G, 1.0, I), TypeError, "candidates must be a floating-point"),
    ("network", (torch.ones(3, 4), G, 1.0, torch.ones(2, 4).double()), ValueError, "candidates .*float64.*float32"),
]  # fmt: skip


@pytest.mark.parametrize("name, arguments, error, message", WRONG)
def test_wrong_input_is_named_and_changes_nothing(name, arguments, error, message):
    kind = BY_NAME[name]
    u = kind.make()
    train(u, kind, data()[:1])
    before = state(u)
    with pytest.raises(error, match=message):
        (u.sample if name == "chains" else u.update)(*arguments)
    assert (u.t, u.pending) == (1, 0)
    assert_same_bits(state(u), before)


def test_other_methods_refuse_wrong_input():
    u, tau, net = (BY_NAME[name].make() for name in ("average", "momentum", "network"))
    with pytest.raises(IndexError, match=f"n={N}"):
        tau.value(torch.tensor([N]))
    with pytest.raises(TypeError, match="index is None"):
        tau.value()
    with pytest.raises(TypeError, match="index"):
        u.read([1])
    with pytest.raises(ValueError, match="tau"):
        net.predict(torch.ones(3, DIM), -1.0)
    with pytest.raises(ValueError, match="4 columns"):
        net.predict(torch.ones(3, 5), 1.0)
    with pytest.raises(AttributeError, match="rows"):
        _ = tau.tau
    for each in (u, tau):
        with pytest.raises(RuntimeError, match="torch.func"):
            torch.func.grad(lambda x, each=each: each.update(x, I).sum())(torch.zeros(3))


# -- float64 references ------------------------------------------------------------------------------

GROUPS = [{"n": 9}, {"n": N - 9}]


def with_bad_values(batches):
    """Return batches with non-finite values, in windows of their own and together with others."""
    found = [dict(batch) for batch in batches]
    for name in ("log_g", "gradient", "scores"):
        for step, bad in ((1, torch.nan), (4, torch.inf)):
            found[step][name] = found[step][name].clone()
            found[step][name][3] = bad
    return found


def follow(u, ref, batches, call, twin, window=2):
    """Assert that the outputs of every call and the rows after every commit equal the reference's to 1e-12."""
    for step, d in enumerate(batches):
        got, want = call(u, d), torch.tensor(twin(ref, d), dtype=torch.float64)
        assert got.dtype == torch.float64 and got.shape == want.shape
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite)
        near(got.where(finite, 0.0), want.where(finite, 0.0), 1e-12, atol=1e-12)
        if step == 3:  # a window that is not committed
            u.discard(), ref.discard()
        elif step % window == window - 1:
            u.step(), ref.step()
            compare_rows(u, ref)
    assert u.t == ref.steps


def compare_rows(u, ref):
    rows = u.read(torch.arange(N))
    count = [ref.visits(i, 0) for i in range(N)]
    assert rows.pop("count").tolist() == count
    for i in (i for i in range(N) if count[i]):
        want = ref.read(i)
        assert want.keys() == rows.keys()
        for name in rows:
            near(rows[name][i], want[name], 1e-12, atol=1e-12, what=name)


@pytest.mark.parametrize("eps", [0.0, 0.2])
@pytest.mark.parametrize("window", [1, 2])
def test_the_average_equals_its_reference(window, eps):
    groups = [{"n": 9, "gamma": 0.3, "eps": eps}, {"n": N - 9, "gamma": 1.0, "eps": 0.1}]
    u = BY_NAME["average"].make(groups)
    call = lambda who, d: who.update(d["log_g"], d["index"])  # noqa: E731
    follow(u, AloneAverage(groups), with_bad_values(data(12)), call, call, window)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("window", [1, 2])
def test_the_dual_equals_its_reference(window, optimizer):
    """Test clipping, projection to both bounds, and Adam's bias correction by each row's own visits."""
    common = {"tau_min": 0.1, "tau_max": 0.6, "max_grad": 0.8, "beta": 0.7, "betas": (0.8, 0.95)}
    groups = [{"n": 9, "lr": 0.5, "tau_init": 0.3, **common}, {"n": N - 9, "lr": 0.02, "tau_init": 0.11, **common}]
    u, ref = dual(groups, optimizer=optimizer, dtype=torch.float64), AloneDual(groups, optimizer)
    call = lambda who, d: who.update(d["gradient"], d["index"])  # noqa: E731
    index = torch.arange(N)
    near(u.value(index), ref.value(index), 1e-12)
    follow(u, ref, with_bad_values(data(12)), call, call, window)
    near(u.value(index), ref.value(index), 1e-12)
    seen = u.read(index)["tau"]
    assert seen.min() == 0.1 and seen.max() == 0.6  # both bounds were reached
    column = u.update(data()[0]["gradient"][:, None], data()[0]["index"])
    assert column.shape == (BATCH, 1)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_the_global_dual_equals_its_reference(optimizer):
    h = {"lr": 0.1, "tau_init": 0.3, "tau_min": 0.2, "tau_max": 0.6, "max_grad": 0.2, "beta": 0.7, "betas": (0.8, 0.95)}
    u, ref = dual(None, mode="global", optimizer=optimizer, **{k: h[k] for k in h}), AloneGlobalDual(h, optimizer)
    for step, d in enumerate(with_bad_values(data(12))):
        want = ref.update(d["gradient"])
        got = u.update(d["gradient"])
        assert got.shape == () and math.isnan(got) == math.isnan(want)
        near(got.nan_to_num(), 0.0 if math.isnan(want) else want, 1e-12)
        if step % 3 == 2:
            (u.discard(), ref.discard()) if step == 5 else (u.step(), ref.step())
            near(u.tau, ref.temperature.tau, 1e-12)
            near(u.value(), ref.temperature.tau, 1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"eps": 0.3}, {"updates": 5, "lr": 0.5}, {"restart_every": None}, {"updates": 0}],
    ids=["plain", "eps", "several updates", "no restarts", "queue"],
)
def test_the_network_equals_autograd(options):
    """Test with and without candidates, and restarts at multiples of restart_every and when the queue is first full."""
    settings = {"lr": 0.2, "updates": 1, "restart_every": 3, "eps": 0.0, "seed": 5, **options}
    u = compopt.NeuralNormalizer(DIM, prototypes=9, dtype=torch.float64, **settings)
    ref = AloneNetwork(DIM, 9, **settings)
    held_out = data(1, seed=9)[0]
    for step, d in enumerate(data(14)):
        near(u.predict(held_out["anchors"], held_out["tau"]), ref.predict(held_out["anchors"], held_out["tau"]), 1e-12)
        candidates = None if step in (0, 1, 9) else d["features"]
        arguments = (d["anchors"], d["log_g"], d["tau"], candidates)
        near(u.update(*arguments), ref.update(*arguments), 1e-12)
        if step == 6:  # a call with another number of candidates continues the pending copy
            more = (d["anchors"][:5], d["log_g"][:5], d["tau"][:5], d["anchors"])
            near(u.update(*more), ref.update(*more), 1e-12)
        (u.discard(), ref.discard()) if step == 4 else (u.step(), ref.step())
    assert u.t == ref.t == 13


@pytest.mark.parametrize("proposals", ["pool", "sweep"])
@pytest.mark.parametrize("window", [1, 2])
def test_chains_equal_their_reference(window, proposals):
    groups = [{"n": 9, "burn_in": 0.3}, {"n": N - 9, "burn_in": 2}]
    u = compopt.MCMCNegativeSampler(groups, proposals=proposals, seed=11, dtype=torch.float64)
    batches = with_bad_values(data(14))
    for d in batches[5:9]:  # some candidates are excluded, and one chain has none left
        d["scores"] = d["scores"].masked_fill(d["scores"] < -0.7, -torch.inf)
        d["scores"][1] = -torch.inf
    call = lambda who, d: who.sample(d["scores"], d["index"], d["candidates"])  # noqa: E731
    follow(u, AloneChains(groups, proposals, seed=11), batches, call, call, window)


# -- several ranks -----------------------------------------------------------------------------------


def alone_on_ranks(group, name, options, window):
    """Return outputs and state of one rank; its candidates for a network are its share of the batch's."""
    kind = BY_NAME[name]
    u, found = kind.make(process_group=group, **options), []
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    for step, d in enumerate(with_bad_values(data(6))):
        own = part_of(d, own_part(group, step))
        own["features"] = d["features"][rank::ranks]
        if kind.has_rows and step % 2:
            u.prefetch(own["index"])
        found.append(kind.call(u, own))
        if step % window == window - 1:
            u.step()
    if kind.name in ("momentum", "adam") and "shard" not in options and options.get("offload") != "disk" and rank == 0:
        u.value(torch.tensor([0]))  # called by one rank only
    looked = u.read(torch.tensor([rank, 5])) if kind.has_rows else None
    return found, state(u), looked, u.value(torch.tensor([rank, 3])) if "tau" in (looked or {}) else None


def compare_alone(kind, ranks, options, window):
    found, whole, *_ = the_pool().run(alone_on_ranks, 1, kind.name, {}, window)[0]
    answers = the_pool().run(alone_on_ranks, ranks, kind.name, options, window)
    for step, want in enumerate(found):
        parts = [answer[0][step] for answer in answers]
        got = parts[0] if want.dim() == 0 else torch.cat(parts)
        finite = want.isfinite()
        assert torch.equal(got.isfinite(), finite)
        near(got.where(finite, 0.0), want.where(finite, 0.0), 1e-12, atol=1e-12)
    for rank, (_, own, looked, tau) in enumerate(answers):
        assert own.keys() == whole.keys()
        for name, want in whole.items():
            near(own[name], want, 1e-12, atol=1e-12, what=name)
        if kind.has_rows:
            assert looked["count"].tolist() == whole["count"][[rank, 5]].flatten().tolist()
        if tau is not None:
            near(tau, torch.where(whole["count"] > 0, whole["tau"], 0.3)[[rank, 3], 0], 1e-12)


@pytest.mark.distributed
@pytest.mark.covering()
@pytest.mark.parametrize("ranks", [2, 3])
@every
def test_many_ranks_equal_one(kind, ranks):
    compare_alone(kind, ranks, {}, 1)


@pytest.mark.distributed
@pytest.mark.covering()
@pytest.mark.parametrize("options", [*PLACEMENTS[1:], {"shard": True, "offload": "cpu"}], ids=[*NAMES[1:], "shard-cpu"])
@with_rows
def test_many_ranks_equal_one_in_other_placements(kind, options, tmp_path):
    folder = {"offload_dir": str(tmp_path)} if options.get("offload") == "disk" else {}
    compare_alone(kind, 3 if "shard" in options else 2, {**options, **folder}, 2)


def loaded_in_another_order(group):
    """Load the entries of a network's state in an order that differs between ranks; compare the states."""
    u = BY_NAME["network"].make(process_group=group)
    train(u, BY_NAME["network"], data()[:2])
    saved = u.state_dict()
    entries = saved["state"]
    order = sorted(entries, reverse=bool(dist.get_rank(group)))
    u.load_state_dict({**saved, "extra": {"normalizer": {name: entries[name] for name in order}}})
    return all(torch.equal(value, entries[name]) for name, value in u.state_dict()["state"].items())


@pytest.mark.distributed
def test_ranks_may_load_entries_in_other_orders():
    """Split tensors are joined by name, since safetensors gives each process its own order."""
    assert the_pool().run(loaded_in_another_order, 2) == [True, True]
