"""state_dict and load_state_dict: complete, independent copies, bit-identical, and strict about mismatches."""

import math

import pytest
import torch
from torch import Tensor

import compopt
from compopt.stores import table
from tests.database import STATEFUL
from tests.helpers import assert_same_bits, batches, bits, make, run, snapshot, tensors_of, through_a_file, train

N = 13


@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_state_dict_is_a_snapshot(info):
    """Further training does not change the dict, and loading does not share its tensors."""
    est, _ = make(info, "bimodal", N, gamma=0.6)
    train(est, batches(N, 3, seed=71))
    before = snapshot(est, N)
    state = est.state_dict()
    train(est, batches(N, 3, seed=72))
    est.load_state_dict(state)
    assert_same_bits(before, snapshot(est, N))
    train(est, batches(N, 3, seed=72))
    est.load_state_dict(state)  # loading has not shared the dict's own tensors
    assert_same_bits(before, snapshot(est, N))


@pytest.mark.parametrize("info", STATEFUL, ids=str)
def test_loading_forgets_the_deposits_that_wait(info):
    est, _ = make(info, "bimodal", N, gamma=0.6)
    state = est.state_dict()
    clean = snapshot(est, N)
    run(est, *batches(N, 1, seed=73)[0])
    est.load_state_dict(state)
    est.step()
    assert_same_bits(clean, snapshot(est, N))


def test_the_learned_temperature_travels():
    est = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    parameter = list(est.parameters())[0]
    with torch.no_grad():
        parameter.add_(0.5)
    other = compopt.InfoNCEEstimator(tau=0.07, learn_tau=True, multiply_tau=False)
    own = list(other.parameters())[0]
    other.load_state_dict(through_a_file(est.state_dict()))
    assert list(other.parameters())[0] is own, "an optimizer holds this very tensor"
    assert bits(own) == bits(parameter)


@pytest.mark.parametrize("saved, own", [([12], [12, 5]), ([12, 5], [12]), ([12, 5], [12, 6])], ids=str)
def test_groups_that_differ_say_how_to_get_there(saved, own, tmp_path):
    writer, reader = (compopt.SogCLREstimator([{"n": n} for n in sizes]) for sizes in (saved, own))
    compopt.save(writer, tmp_path)
    for attempt in (lambda: reader.load_state_dict(writer.state_dict()), lambda: compopt.load(reader, tmp_path)):
        with pytest.raises(ValueError, match=r"n differs: the checkpoint has \[.* with n=\[.*add_sample_group"):
            attempt()
        added = r", add_sample_group for each of \[5\]" if len(saved) > 1 else ""
        with pytest.raises(ValueError, match=rf"n differs: the checkpoint has \[.* with n=12{added}, load, and append"):
            attempt()


@pytest.mark.parametrize("option", [{"n": 80}, {"momentum": True}], ids=str)
def test_options_that_differ_say_which_arguments_to_use(option):
    usual = {"dim": 4, "n": 64, "batch_size": 8}
    state = compopt.recommended(**usual).state_dict()
    with pytest.raises(
        ValueError, match=r"differs: .*the arguments of the run that saved it \(for compopt.recommended"
    ):
        compopt.recommended(**usual | option).load_state_dict(state)


def test_the_remedies_for_other_groups_work():
    writer = compopt.SogCLREstimator(12)
    short = compopt.SogCLREstimator(12)
    writer.add_sample_group({"n": 5})
    short.add_sample_group({"n": 5})
    short.load_state_dict(writer.state_dict())
    assert short.n == 17


# tensors of the caller -------------------------------------------------------------------------------


class Counter(compopt.Temperature):
    """A user-defined part with state of several dtypes, which keeps the tensors that it receives."""

    def __init__(self):
        super().__init__(None, {})
        self.state = {"sum": torch.zeros(2), "calls": torch.zeros((), dtype=torch.int64)}

    def check(self, group):
        pass

    def temperatures(self, rows, hyper, training):
        if training:
            before = self.working_state(True)
            self.deposit_state(sum=before["sum"] + 0.5)
        return 0.1

    def restore_state(self, state):
        self.state = dict(state)


def test_integer_state_is_deposited():
    part = Counter()
    part.deposit_state(calls=torch.tensor(3))
    assert part.working_state(True)["calls"] == 3


def own_part():
    return compopt.ContrastiveEstimator(compopt.MovingAverageEstimator(N), Counter())


KEEPERS = {
    "memory": lambda: compopt.MemoryEstimator(4, 32),
    "global-dual": lambda: compopt.ContrastiveEstimator(
        compopt.BatchNormalizer(), compopt.TemperatureDual(N, rho=0.4, tau_init=0.2, mode="global")
    ),
    "fastclip": lambda: compopt.FastCLIPEstimator(N, rho=0.4),
    "emc2": lambda: compopt.EMC2Estimator(N, seed=7),
    "neuclip": lambda: compopt.NeuCLIPEstimator(4, N, prototypes=8),
    "learned": lambda: compopt.InfoNCEEstimator(learn_tau=True),
    "own": own_part,
}


def kept(name, seed=84):
    est = KEEPERS[name]()
    train(est, batches(N, 3, seed=seed, dtype=torch.float32))
    return est


def overwrite(file):
    """Overwrite the bytes of a file in place, as a run that overwrites its last.pt."""
    with open(file, "r+b") as opened:
        opened.write(b"\x3f" * file.stat().st_size)


@pytest.mark.parametrize("name", KEEPERS)
def test_a_file_that_is_overwritten_after_loading_changes_nothing(name, tmp_path):
    est, other, third = kept(name), KEEPERS[name](), KEEPERS[name]()
    torch.save(est.state_dict(), tmp_path / "last.pt")
    other.load_state_dict(torch.load(tmp_path / "last.pt", mmap=True, weights_only=True))
    path = compopt.save(est, tmp_path / "run")
    compopt.load(third, path)
    for file in (tmp_path / "last.pt", *path.rglob("*.safetensors")):
        overwrite(file)
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    assert_same_bits(snapshot(est, N), snapshot(third, N))


@pytest.mark.parametrize("name", KEEPERS)
def test_loading_copies(name):
    est, other = kept(name), KEEPERS[name]()
    state = est.state_dict()
    with torch.inference_mode():  # tensors made here could not be changed outside
        other.load_state_dict(state)
    for value in tensors_of(state).values():
        value.fill_(1)
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    more = batches(N, 2, seed=85, dtype=torch.float32)
    assert train(est, more) == train(other, more)


# invalid entries -------------------------------------------------------------------------------------


def at(path, change):
    """Return a function that replaces one entry of a state."""

    def changed(state):
        state = dict(state)
        if len(path) == 1:
            state[path[0]] = change(state.get(path[0]))
        else:
            state[path[0]] = at(path[1:], change)(state[path[0]])
        return state

    return changed


def put(value, place=0):
    """Return a function that changes one element of a tensor."""

    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[place] = value
        return tensor

    return change


OF = ("parts", "normalizer")
ROWS, MEMORY, NETWORK = (*OF, "rows"), (*OF, "state"), (*OF, "state")
DUAL, TAUS = ("parts", "temperature", "state"), ("parts", "temperature", "rows")
IMPOSSIBLE = {
    # rows without values, or of another type
    "rows on the meta device": ("fastclip", at((*ROWS, "log_u"), lambda x: x.to("meta")), ValueError, "'log_u'.*meta"),
    "sparse rows": ("fastclip", at((*ROWS, "log_u"), lambda x: x.to_sparse()), ValueError, "'log_u'.*dense"),
    "rows of float64": ("fastclip", at((*ROWS, "log_u"), lambda x: x.double()), ValueError, "float64.*float32"),
    "a column that is a list": ("fastclip", at((*ROWS, "log_u"), Tensor.tolist), TypeError, "'log_u'.*list"),
    "an unknown column": ("fastclip", at((*ROWS, "other"), lambda x: torch.zeros(N, 2)), ValueError, "'other'"),
    # values of rows
    "NaN rows": ("fastclip", at((*ROWS, "log_u"), put(math.nan, 7)), ValueError, "'log_u'.*finite, row 3 has.*nan"),
    "a negative count": ("fastclip", at((*ROWS, "count"), put(-1)), ValueError, "'count'.*>= 0, row 0 has"),
    "a chain outside": ("emc2", at((*ROWS, "chain"), put(10**12, 4)), ValueError, "'chain'.*<= 12, row 2.*10{12}"),
    "tau = 0 in a row": ("isogclr", at((*TAUS, "tau"), put(0.0)), ValueError, "'tau'.*finite and > 0, row 0"),
    "a negative mean of squares": ("isogclr", at((*TAUS, "tau_exp_avg_sq"), put(-1e-3)), ValueError, "exp_avg_sq"),
    # state that is not rows: type, dtype, layout
    "keys of float32": ("memory", at((*MEMORY, "keys"), Tensor.float), ValueError, "keys.*float32.*int64"),
    "a queue of integers": ("memory", at((*MEMORY, "queue"), Tensor.int), ValueError, "queue.*int32.*float32"),
    "a sparse queue": ("memory", at((*MEMORY, "queue"), Tensor.to_sparse), ValueError, "queue.*dense"),
    "a queue that is None": ("memory", at((*MEMORY, "queue"), lambda x: None), TypeError, "queue.*NoneType"),
    "a queue with NaN": ("memory", at((*MEMORY, "queue"), put(math.nan)), ValueError, "queue.*finite.*, got nan"),
    "places of float32": ("neuclip", at((*NETWORK, "queue_place"), Tensor.float), ValueError, "queue_place.*float32"),
    "a place outside": ("neuclip", at((*NETWORK, "queue_place"), put(8)), ValueError, "queue_place.*got 8"),
    "prototypes of NaN": ("neuclip", at((*NETWORK, "prototypes"), put(math.nan)), ValueError, "prototypes.*finite"),
    "half sums": (
        "neuclip",
        at((*NETWORK, "optimizer.prototypes.sum"), Tensor.half),
        ValueError,
        "optimizer.prototypes.sum.*float16",
    ),
    "a global tau of 0": ("fastclip", at((*DUAL, "tau"), put(0.0)), ValueError, "tau.*> 0, got 0"),
    "negative updates": ("global-dual", at((*DUAL, "updates"), put(-1.0)), ValueError, "updates"),
    "a learned tau of NaN": ("learned", at((*DUAL, "log_inverse"), put(math.nan)), ValueError, "log_inverse"),
    "own state that is no tensor": ("own", at((*DUAL, "calls"), int), TypeError, "calls.*Counter.*int"),
    # other entries
    "state that is None": ("memory", at(MEMORY, lambda x: None), TypeError, "state.*dict"),
    "an unknown part": ("memory", at(("parts", "other"), lambda x: {}), ValueError, "'other'"),
    "t of 2^70": ("fastclip", at(("t",), lambda t: 2**70), ValueError, f"t of.*{2**70}"),
    "t below 0": ("fastclip", at(("t",), lambda t: -1), ValueError, "t of.*-1"),
    "version 0": ("fastclip", at(("version",), lambda v: 0), ValueError, "version.*0"),
    "entries that are none": ("neuclip", at((*OF, "entries"), lambda v: []), ValueError, "has the entries"),
    **{
        f"{key} is None": ("fastclip", at((key,), lambda x: None), (TypeError, ValueError), f"{key}.*None")
        for key in ("version", "config", "parts", "t")
    },
    **{
        f"{key} of a part is None": (
            "fastclip",
            at((*OF, key), lambda x: None),
            (TypeError, ValueError),
            f"{key}.*None",
        )
        for key in ("version", "config", "sample_groups", "rows", "state", "t")
    },
}
KEEPERS["isogclr"] = lambda: compopt.ISogCLREstimator(N, rho=0.4, tau_init=0.2, optimizer="adam")


@pytest.mark.parametrize("what", IMPOSSIBLE)
def test_what_no_run_writes_is_refused_and_changes_nothing(what):
    name, change, error, match = IMPOSSIBLE[what]
    state = change(kept(name).state_dict())
    est = kept(name, seed=86)
    run(est, *batches(N, 1, seed=87, dtype=torch.float32)[0])
    before, progress = snapshot(est, N), (est.t, est.pending)
    with pytest.raises(error, match=match) as caught:
        est.load_state_dict(state)
    assert type(caught.value) in (TypeError, ValueError)
    assert_same_bits(before, snapshot(est, N))
    assert (est.t, est.pending) == progress


def test_state_that_was_just_made_loads():
    """Rows that were never visited are zeros, also for temperatures; t may be an integer tensor."""
    for build in KEEPERS.values():
        state = build().state_dict()
        build().load_state_dict({**state, "t": torch.tensor(state["t"])})


@pytest.mark.parametrize("value", [math.nan, -1.0])
def test_rows_that_were_never_visited_are_checked_as_well(value):
    state = compopt.ISogCLREstimator(N).state_dict()
    state["parts"]["temperature"]["rows"]["tau"][5] = value
    with pytest.raises(ValueError, match="'tau'.*row 5"):
        compopt.ISogCLREstimator(N).load_state_dict(state)


def test_rows_are_checked_in_blocks(monkeypatch):
    monkeypatch.setattr(table, "BLOCK_ROWS", 5)
    est = kept("fastclip")
    state = est.state_dict()
    est.load_state_dict(state)
    state["parts"]["normalizer"]["rows"]["log_u"][11, 1] = math.nan
    with pytest.raises(ValueError, match="row 11 has"):
        est.load_state_dict(state)
