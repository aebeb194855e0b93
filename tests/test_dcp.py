"""torch.distributed.checkpoint: estimators as a whole and in parts, resharding, comparison, checks."""

import os
import shutil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import compopt
from compopt.stores import table
from tests.database import BY_NAME, MODES
from tests.helpers import assert_same_bits, batches, bits, leaves, make, rows_of, run, snapshot
from tests.pool import the_pool

if torch.__version__ < (2, 5):
    pytest.skip("compopt.integrations.dcp needs torch 2.5", allow_module_level=True)
from compopt.integrations.dcp import Stateful

N = 23
EACH = "siglip-learned sogclr isogclr-adam global-dual-log-adam neural-adam neural-dual memory-dual emc2-dual".split()
KINDS = {"whole": lambda est: est, "parts": Stateful}
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::FutureWarning:torch")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use several blocks for a few rows."""
    monkeypatch.setattr(table, "BLOCK_ROWS", 5)


def train(est, data):
    for batch in data:
        run(est, *batch)
        est.step()


def trained(steps=3, seed=70, **options):
    est = compopt.ISogCLREstimator(N, gamma=0.6, **options)
    train(est, batches(N, steps, seed=seed, dtype=torch.float32))
    return est


# one process --------------------------------------------------------------------------------------


@pytest.mark.covering()
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EACH)
def test_every_kind_of_state_goes_on_bit_for_bit(name, mode, tmp_path):
    data = batches(N, 4, seed=3)
    est, other = (make(BY_NAME[name], mode, N, gamma=0.6)[0] for _ in range(2))
    train(est, data[:2])
    dcp.save({"compopt": Stateful(est)}, checkpoint_id=tmp_path)
    run(other, *data[0])  # a pending deposit, which load drops
    dcp.load({"compopt": Stateful(other)}, checkpoint_id=tmp_path)
    assert (other.t, other.pending) == (est.t, 0)
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    for batch in data[2:]:
        assert [bits(x) for x in run(est, *batch)] == [bits(x) for x in run(other, *batch)]
        est.step(), other.step()
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def names(est):
    return {name: set(own["state"]) for name, own in leaves(est.state_dict()).items()}


@pytest.mark.parametrize("name", EACH)
def test_a_bare_estimator_goes_on_or_is_refused(name, tmp_path):
    """dcp reads only entries that the estimator has; an optimizer that has not stepped has no sums yet."""
    data = batches(N, 3, seed=3)
    est, other = (make(BY_NAME[name], "bimodal", N, gamma=0.6)[0] for _ in range(2))
    train(est, data[:2])
    dcp.save({"compopt": est}, checkpoint_id=tmp_path)
    if names(est) != names(other):
        before = snapshot(other, N)
        with pytest.raises(ValueError, match=r"optimizer\..*were read; .*compopt\.integrations\.dcp\.Stateful"):
            dcp.load({"compopt": other}, checkpoint_id=tmp_path)
        assert_same_bits(before, snapshot(other, N))
        train(other, data[:1])  # after a step the entries exist
    dcp.load({"compopt": other}, checkpoint_id=tmp_path)
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    assert [bits(x) for x in run(est, *data[2])] == [bits(x) for x in run(other, *data[2])]


def test_rows_are_columns_in_the_format_of_dcp(tmp_path):
    """Other tools can read the rows: one tensor per column, in the order of the rows."""
    est = trained()
    dcp.save({"compopt": Stateful(est)}, checkpoint_id=tmp_path)
    rows = {
        f"compopt.rows.{name}.{column}": value
        for name, own in leaves(est.state_dict()).items()
        for column, value in own["rows"].items()
    }
    columns = {name: torch.zeros_like(value) for name, value in rows.items()}
    dcp.load(columns, checkpoint_id=tmp_path)
    assert_same_bits(rows, columns)


# refused checkpoints ------------------------------------------------------------------------------


def refused(est, path, match, error=ValueError, kind=Stateful):
    before, t = snapshot(est, N), est.t
    with pytest.raises(error, match=match):
        dcp.load({"compopt": kind(est)}, checkpoint_id=path)
    assert_same_bits(before, snapshot(est, N))
    assert est.t == t


OTHERS = [
    (lambda: compopt.ISogCLREstimator(N, dtype=torch.float64), ValueError, "dtype.*float32.*float64"),
    (lambda: compopt.SogCLREstimator(N), ValueError, "method.temperature.*TemperatureDual.*FixedTemperature"),
    (lambda: compopt.ISogCLREstimator(N, multiply_tau=False), ValueError, "options.multiply_tau.*True.*False"),
    (lambda: compopt.ISogCLREstimator(N + 1), CheckpointException, r"\[23, 2\].*\[24, 2\].*compopt\.rows"),
    (lambda: compopt.ISogCLREstimator(N, mode="unimodal"), CheckpointException, r"\[23, 2\].*\[23, 1\]"),
    (lambda: compopt.EMC2Estimator(N), CheckpointException, "Missing key.*compopt.rows"),
]


@pytest.mark.parametrize("other, error, match", OTHERS, ids=[match for _, _, match in OTHERS])
def test_another_configuration(other, error, match, tmp_path):
    dcp.save({"compopt": Stateful(trained())}, checkpoint_id=tmp_path / "parts")
    refused(other(), tmp_path / "parts", f"(?s){match}", error)
    dcp.save({"compopt": trained()}, checkpoint_id=tmp_path / "whole")  # dcp may raise first for a missing key
    refused(other(), tmp_path / "whole", None, (ValueError, CheckpointException), KINDS["whole"])


def test_rows_of_other_data(tmp_path):
    est, other = trained(), trained(seed=4)
    est.data_fingerprint, other.data_fingerprint = "one", "two"
    dcp.save({"compopt": Stateful(est)}, checkpoint_id=tmp_path)
    refused(other, tmp_path, "'one'.*'two'")
    other.data_fingerprint = None
    dcp.load({"compopt": Stateful(other)}, checkpoint_id=tmp_path)


@pytest.mark.parametrize("name", ["log_u", "tau", "count"])
@pytest.mark.parametrize("bit", (0, 28, 63))
def test_a_flipped_bit_of_a_column(name, bit, tmp_path):
    est = trained()
    dcp.save({"compopt": Stateful(est)}, checkpoint_id=tmp_path)
    column = bits(rows_of(est.state_dict())[name])
    (file,) = tmp_path.glob("*.distcp")
    content = bytearray(file.read_bytes())
    at = content.index(column) + 8 * (bit % N)  # in some row
    content[at + bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    refused(trained(seed=4), tmp_path, rf"column '\w+\.{name}' is damaged")


def test_a_flipped_bit_of_the_rest(tmp_path):
    dcp.save({"compopt": Stateful(trained())}, checkpoint_id=tmp_path)
    (file,) = tmp_path.glob("*.distcp")
    content = file.read_bytes()
    assert content.count(b'gamma\\": 0.6') == 1
    file.write_bytes(content.replace(b'gamma\\": 0.6', b'gamma\\": 0.7'))
    refused(trained(seed=4), tmp_path, "'rest' of the estimator's state is damaged")


def test_two_rows_that_changed_places():
    """Raise for a column with two permuted rows: each value is correct but in the wrong row."""
    est, other = trained(), trained(seed=4)
    state, before = Stateful(est).state_dict(), snapshot(other, N)
    a, b = torch.nonzero(state["rows"]["normalizer.count"].amax(1))[:2, 0].tolist()
    column = state["rows"]["normalizer.log_u"]
    column[[a, b]] = column[[b, a]]
    with pytest.raises(ValueError, match="'normalizer.log_u' is damaged"):
        Stateful(other).load_state_dict(state)
    assert_same_bits(before, snapshot(other, N))


# several ranks ------------------------------------------------------------------------------------


def build(group, directory, action, options):
    table.BLOCK_ROWS = 5
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": os.path.join(directory, f"rows-{action}")}
    return compopt.ISogCLREstimator(N, gamma=0.6, process_group=group, **options)


def train_on_ranks(est, group, seed):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for z1, z2, index in batches(N, 4, batch=8, seed=seed, dtype=torch.float32):
        own = slice(rank, 8, size)
        run(est, z1[own], z2[own], index[own])
        est.step()


def on_ranks(group, action, directory, options, kind):
    est = build(group, directory, action, options)
    states, path = {"compopt": KINDS[kind](est)}, os.path.join(directory, kind)
    if action == "save":
        train_on_ranks(est, group, 8)
        dcp.save(states, checkpoint_id=path, process_group=group)
    else:
        dcp.load(states, checkpoint_id=path, process_group=group)
    return snapshot(est, N), est.t


LAYOUTS = [{}, {"shard": True}, {"offload": "disk"}]


@pytest.mark.distributed
@pytest.mark.covering()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", LAYOUTS, ids=["whole", "shard", "disk"])
def test_saved_by_two_ranks_loaded_by_any_number(options, kind, tmp_path):
    saved = the_pool().run(on_ranks, 2, "save", str(tmp_path), options, kind)
    for ranks in (1, 2, 3):
        for other in LAYOUTS:
            for state, t in the_pool().run(on_ranks, ranks, "load", str(tmp_path), other, kind):
                assert t == 4
                assert_same_bits(saved[0][0], state)
            shutil.rmtree(tmp_path / "rows-load", ignore_errors=True)
    alone = compopt.ISogCLREstimator(N, offload="cpu")
    dcp.load({"compopt": KINDS[kind](alone)}, checkpoint_id=tmp_path / kind)
    assert_same_bits(saved[0][0], snapshot(alone, N))


def save_beside_training(group, directory, options):
    """Save over a separate group during training; return the states at the call, at the end, and after a load."""
    apart = dist.new_group(backend="gloo")
    est = build(group, directory, "save", options)
    train_on_ranks(est, group, 8)
    at_call = snapshot(est, N)
    saving = dcp.async_save({"compopt": Stateful(est)}, checkpoint_id=directory, process_group=apart)
    train_on_ranks(est, group, 9)
    getattr(saving, "upload_completion", saving).result()
    at_end = snapshot(est, N)
    dcp.load({"compopt": Stateful(est)}, checkpoint_id=directory, process_group=group)
    return at_call, at_end, snapshot(est, N), est.t


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="whole", marks=pytest.mark.full),
        pytest.param({"shard": True}, id="shard", marks=pytest.mark.slow),
    ],
)
def test_async_save_keeps_the_state_of_its_call(options, tmp_path):
    for at_call, at_end, loaded, t in the_pool(2).run(save_beside_training, 2, str(tmp_path), options):
        assert t == 4 and not torch.equal(at_call["log_u"], at_end["log_u"])
        assert_same_bits(at_call, loaded)
