"""save and load: complete, elastic, atomic, and strict about damage."""

import copy
import json
import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import compopt
from compopt import files
from compopt.checkpoint import loading, manifest
from tests.database import DATABASE, MODES
from tests.helpers import assert_same_bits, batches, make, run, snapshot, through_a_file, train
from tests.pool import the_pool

N = 23


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Use small blocks, so that a few rows fill several of them."""
    monkeypatch.setattr(manifest, "PIECE_ROWS", 5)


def sogclr(n=N, **options):
    """Return a SogCLR estimator with the hyper-parameters of these tests."""
    return compopt.SogCLREstimator(n, gamma=0.6, tau=0.1, **options)


def trained(steps=3, seed=70, **options):
    """Return an estimator with trained rows."""
    est = sogclr(**options)
    train(est, batches(N, steps, seed=seed, dtype=torch.float32))
    return est


@pytest.mark.covering()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mode", [*MODES, "forward"])
@pytest.mark.parametrize("info", DATABASE, ids=str)
def test_resume_is_bitwise(info, mode, dtype, tmp_path):
    """Resume from a directory, and from a state_dict saved by torch.save."""

    def build():
        return make(info, mode, N, dtype=dtype, gamma=0.6)[0]

    data, whole, resumed, other = batches(N, 8, seed=70, dtype=dtype), build(), build(), build()
    first = train(whole, data[:4])
    path, state = compopt.save(whole, tmp_path), through_a_file(whole.state_dict())
    at_half = snapshot(whole, N)
    rest = train(whole, data[4:])
    for est in (resumed, other):
        run(est, *data[0])  # a pending deposit, which load drops
    assert compopt.load(resumed, tmp_path) == path
    other.load_state_dict(state)
    for est in (resumed, other):
        assert est.t == whole.t // 2 and est.pending == 0
        assert_same_bits(at_half, snapshot(est, N))
        assert train(est, data[4:]) == rest
        assert_same_bits(snapshot(whole, N), snapshot(est, N))
    assert train(build(), data[:4]) == first  # a second run is bit-identical to the first
    if info.has_state:
        assert train(build(), data[4:]) != rest, "the state matters here"


PLACEMENTS = [{}, {"offload": "cpu"}, {"offload": "disk"}]


@pytest.mark.parametrize("writer, reader", [(PLACEMENTS[i], PLACEMENTS[i - 1]) for i in range(3)])
def test_any_placement_reads_any_other(writer, reader, tmp_path):
    def placed(options, name):
        return {**options, "offload_dir": tmp_path / name} if options.get("offload") == "disk" else options

    est = trained(**placed(writer, "a"))
    compopt.save(est, tmp_path / "c")
    other = trained(seed=99, **placed(reader, "b"))  # rows to be overwritten
    compopt.load(other, tmp_path / "c")
    assert_same_bits(snapshot(est, N), snapshot(other, N))
    state = sogclr()
    state.load_state_dict(other.state_dict())
    assert_same_bits(snapshot(est, N), snapshot(state, N))


# -- ranks -------------------------------------------------------------------------------------------


def on_ranks(group, action, directory, options):
    """Train and save, or load; return the columns and the number of commits."""
    manifest.PIECE_ROWS = 5
    rank = torch.distributed.get_rank(group)
    if options.get("offload") == "disk":
        options = {**options, "offload_dir": os.path.join(directory, f"rows-{action}")}
    est = sogclr(process_group=group, **options)
    if action == "save":
        for z1, z2, index in batches(N, 4, batch=8, seed=8, dtype=torch.float32):
            own = slice(rank, 8, torch.distributed.get_world_size(group))
            run(est, z1[own], z2[own], index[own])
            est.step()
        compopt.save(est, os.path.join(directory, "c"))
    else:
        compopt.load(est, os.path.join(directory, "c"))
    return snapshot(est, N), est.t


LAYOUTS = [{}, {"shard": True}, {"offload": "disk"}]


@pytest.mark.distributed
@pytest.mark.parametrize(
    "options", [pytest.param(LAYOUTS[0], marks=pytest.mark.slow), *LAYOUTS[1:]], ids=["whole", "shard", "disk"]
)
def test_saved_by_four_ranks_loaded_by_any_number(options, tmp_path):
    saved = the_pool().run(on_ranks, 4, "save", str(tmp_path), options)
    for state, _ in saved:
        assert_same_bits(saved[0][0], state)
    for ranks in (1, 2, 3, 4):
        for other in LAYOUTS:
            for state, t in the_pool().run(on_ranks, ranks, "load", str(tmp_path), other):
                assert t == 4
                assert_same_bits(saved[0][0], state)
        shutil.rmtree(tmp_path / "rows-load")
    alone = sogclr(offload="cpu")
    compopt.load(alone, tmp_path / "c")
    assert_same_bits(saved[0][0], snapshot(alone, N))


def damage_seen_by_all(group, directory):
    """Return the error of this rank; every rank must raise, not only the one that checks the damaged file."""
    est = sogclr(process_group=group)
    try:
        compopt.load(est, directory)
    except (ValueError, RuntimeError) as error:
        return str(error), int(est.read(torch.arange(N))["count"].sum())
    return "loaded", -1


@pytest.mark.distributed
def test_damage_is_refused_by_every_rank(tmp_path):
    path = compopt.save(trained(), tmp_path)
    file = sorted(path.rglob("rows-*"))[2]
    file.write_bytes(file.read_bytes()[:-3])
    for message, rows in the_pool().run(damage_seen_by_all, 3, str(tmp_path)):
        assert file.name in message and rows == 0


def loaded_without_memory_on_one_rank(group, directory):
    """Fail on one rank while restoring the state that is not rows, which is restored last; return the error."""
    est = sogclr(process_group=group)
    if torch.distributed.get_rank(group):
        est.normalizer.restore_state = lambda state: torch.empty(1 << 60)
    with pytest.raises(RuntimeError) as raised:
        compopt.load(est, directory)
    return str(raised.value)


@pytest.mark.distributed
def test_a_rank_that_fails_at_the_end_of_a_load_fails_it_on_all_ranks(tmp_path):
    compopt.save(trained(), tmp_path)
    other, own = the_pool().run(loaded_without_memory_on_one_rank, 2, str(tmp_path))
    assert own in other and other.startswith("rank 1 failed: ")


def loaded_while_pruned(group, directory, newer, options):
    """Replace the checkpoint by a newer one when rank 1 opens its rows: both ranks must load the newer one."""
    manifest.PIECE_ROWS = 5
    rank, opened, left = torch.distributed.get_rank(group), loading._open, [1]

    def go_on(path, *more):
        if rank == 1 and left and "rows-" in path.name:
            left.clear()
            os.rename(newer, os.path.join(directory, os.path.basename(newer)))
            for old in manifest.outdated(Path(directory), 1):
                shutil.rmtree(old.path)
        return opened(path, *more)

    est = sogclr(process_group=group, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_check_rows", lambda *_: None)  # rows are read while they are written
        patch.setattr(loading, "_open", go_on)
        compopt.load(est, directory)
    return snapshot(est, N), est.t


@pytest.mark.distributed
@pytest.mark.parametrize("options", [{}, {"shard": True}], ids=["whole", "shard"])
def test_ranks_load_the_newest_beside_a_run_that_prunes(options, tmp_path):
    newest = trained(steps=4)
    compopt.save(newest, tmp_path / "newer")
    newer = compopt.save(newest, tmp_path / "newer")
    compopt.save(trained(), tmp_path / "c")
    for state, t in the_pool().run(loaded_while_pruned, 2, str(tmp_path / "c"), str(newer), options):
        assert t == 4
        assert_same_bits(snapshot(newest, N), state)


# -- damage ------------------------------------------------------------------------------------------


def refused(tmp_path, match):
    """Assert that load raises an error that matches and leaves the estimator unchanged."""
    est = trained(seed=3)
    before, t = snapshot(est, N), est.t
    with pytest.raises(ValueError, match=match):
        compopt.load(est, tmp_path)
    assert_same_bits(before, snapshot(est, N))
    assert est.t == t


@pytest.mark.parametrize("keep", [None, 0.0, 0.3, 0.999])
@pytest.mark.parametrize("which", [0, 2, -1])
def test_a_truncated_or_missing_file(which, keep, tmp_path):
    file = sorted(compopt.save(trained(), tmp_path).rglob("*.safetensors"))[which]
    content = file.read_bytes()
    file.unlink()
    if keep is not None:
        file.write_bytes(content[: int(keep * len(content))])
    refused(tmp_path, file.name)


def test_any_flipped_bit(tmp_path):
    path = compopt.save(trained(), tmp_path)
    generator = random.Random(0)
    for file in sorted(path.rglob("*.safetensors")):
        content = file.read_bytes()
        for position in {0, 8, len(content) - 1, *(generator.randrange(len(content)) for _ in range(4))}:
            damaged = bytearray(content)
            damaged[position] ^= 1 << generator.randrange(8)
            file.write_bytes(damaged)
            refused(tmp_path, file.name)
        file.write_bytes(content)
    compopt.load(sogclr(), tmp_path)


def edit(path, change, consistent=True):
    """Change a manifest; consistent: update its checksum as well."""
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    if consistent:
        content["crc32"] = manifest.body_crc(content)
    (path / "manifest.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    "change, match",
    [
        (lambda c: c.update(version=99), "version 99.*update compopt"),
        (lambda c: c.update(t=7), "t=7"),
        (lambda c: c.update(save_id="00000000"), "00000000"),
        (lambda c: c.pop("config"), "lacks config"),
        (lambda c: c["files"].pop(), "state"),
        (lambda c: c["files"][0].update(first=1), "of rank 1 of 1"),
        (lambda c: c["files"][0].update(stride=2), "of rank 0 of 1|rows 10"),
        (lambda c: c["files"][0].update(rows=-5), "column.*-5"),
        (lambda c: c["files"][0].update(rows=1), "bytes for 1 rows|column"),
        (lambda c: c["files"][0].update(rows=10**12), "column.*1000000000000"),
        (lambda c: c["files"][0].update(rows="ab"), "damaged"),
        (lambda c: c["files"][0].update(spans=[[0, 5]]), "damaged.*spans"),
        (lambda c: c["files"][0].pop("checksum"), "damaged"),
        (lambda c: c["parts"]["normalizer"]["config"].update(n=[24]), r"n differs.*24.*23"),
        (lambda c: c["config"].update(mode="unimodal"), "mode differs"),
        (lambda c: c["parts"]["normalizer"]["config"].update(dtype="torch.float64"), "dtype differs"),
        (lambda c: c["config"]["method"].update(normalizer="Other"), "method.normalizer differs"),
    ],
)
def test_a_damaged_manifest(change, match, tmp_path):
    edit(compopt.save(trained(), tmp_path), change)
    refused(tmp_path, match)


def test_a_flipped_hyper_parameter_in_the_manifest(tmp_path):
    edit(
        compopt.save(trained(), tmp_path),
        lambda c: c["parts"]["normalizer"]["sample_groups"][0].update(gamma=0.7),
        consistent=False,
    )
    refused(tmp_path, r"manifest\.json is damaged.*its checksum is wrong")


# -- several checkpoints -----------------------------------------------------------------------------


def test_the_last_k_are_kept_and_any_can_be_chosen(tmp_path):
    est, states = sogclr(), {}
    for z1, z2, index in batches(N, 5, seed=2, dtype=torch.float32):
        run(est, z1, z2, index)
        est.step()
        compopt.save(est, tmp_path, keep=3)
        states[est.t] = snapshot(est, N)
    assert [c.t for c in manifest.checkpoints(tmp_path)] == [3, 4, 5]
    for t, state in list(states.items())[2:]:
        again = sogclr()
        compopt.load(again, tmp_path, t=t)
        assert again.t == t
        assert_same_bits(state, snapshot(again, N))
    with pytest.raises(FileNotFoundError, match=r"t=2.*\[3, 4, 5\]"):
        compopt.load(sogclr(), tmp_path, t=2)
    compopt.save(again, tmp_path / "other", keep=1)


def prune_beside(monkeypatch, owner, name, action, times=1):
    """Run ``action`` before the first calls of a function that a load makes, as another process would."""
    real, left = getattr(owner, name), [times]

    def called(*args, **options):
        if left[0]:
            left[0] -= 1
            monkeypatch.setattr(owner, name, real)
            action()
            monkeypatch.setattr(owner, name, called)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, called)


@pytest.mark.parametrize(
    "owner, name",
    [(manifest, "read"), (files, "checksum"), (loading, "_read_state"), (loading, "_read_rows"), (loading, "_open")],
    ids=["manifest", "files", "state", "rows", "file"],
)
def test_a_load_beside_a_run_that_prunes_takes_the_newest(owner, name, tmp_path, monkeypatch):
    est = trained()
    compopt.save(est, tmp_path, keep=1)

    def go_on():
        train(est, batches(N, 1, seed=est.t, dtype=torch.float32))
        compopt.save(est, tmp_path, keep=1)

    prune_beside(monkeypatch, owner, name, go_on, times=3)
    other = trained(seed=9)
    run(other, *batches(N, 1, seed=3, dtype=torch.float32)[0])
    path = compopt.load(other, tmp_path)
    monkeypatch.undo()
    assert other.t == est.t == 6 and other.pending == 0
    assert manifest.checkpoint_at(path).t == est.t
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def test_a_load_ends_beside_a_run_that_prunes_without_end(tmp_path, monkeypatch):
    est, other = trained(), sogclr()
    compopt.save(est, tmp_path, keep=1)
    prune_beside(monkeypatch, manifest, "read", lambda: compopt.save(est, tmp_path, keep=1), times=1000)
    with pytest.raises(FileNotFoundError, match="checkpoint-"):
        compopt.load(other, tmp_path)


def test_a_pruned_checkpoint_that_was_named_is_not_replaced(tmp_path, monkeypatch):
    est, other = trained(), sogclr()
    path = compopt.save(est, tmp_path, keep=1)
    prune_beside(monkeypatch, manifest, "read", lambda: compopt.save(est, tmp_path, keep=1))
    with pytest.raises(FileNotFoundError, match=path.name):
        compopt.load(other, path)


def test_a_listing_beside_a_run_that_prunes_is_made_again(tmp_path, monkeypatch):
    est, other = trained(), sogclr()
    compopt.save(est, tmp_path, keep=1)
    listed = manifest.checkpoints

    def checkpoints(directory):
        found = listed(directory)
        monkeypatch.setattr(manifest, "checkpoints", listed)
        compopt.save(est, tmp_path, keep=1)
        return found

    monkeypatch.setattr(manifest, "checkpoints", checkpoints)
    compopt.load(other, tmp_path)
    assert_same_bits(snapshot(est, N), snapshot(other, N))


def test_newest_is_the_latest_saved_not_the_largest_t(tmp_path):
    compopt.save(trained(steps=5), tmp_path)
    path = compopt.save(trained(steps=2, seed=4), tmp_path)
    est = sogclr()
    assert compopt.load(est, tmp_path) == path and est.t == 2


def test_unfinished_saves_are_ignored_then_removed(tmp_path):
    path = compopt.save(trained(), tmp_path)
    unfinished = tmp_path / "checkpoint-00000002-t9-00000000"
    shutil.copytree(path, unfinished)
    (unfinished / "manifest.json").unlink()
    foreign = tmp_path / "notes"
    foreign.mkdir()
    assert compopt.load(sogclr(), tmp_path) == path
    with pytest.raises(FileNotFoundError, match="not finished"):
        compopt.load(sogclr(), unfinished)
    compopt.save(trained(), tmp_path)
    assert not unfinished.exists() and foreign.exists() and path.exists()


def test_nothing_to_load(tmp_path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        compopt.load(sogclr(), tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        compopt.load(sogclr(), tmp_path)
    with pytest.raises(TypeError, match="t must be"):
        compopt.load(sogclr(), tmp_path, t="newest")
    with pytest.raises(ValueError, match="keep"):
        compopt.save(sogclr(), tmp_path, keep=0)


@pytest.mark.parametrize("operation", ["os.fsync", "shutil.rmtree"])
def test_a_failure_at_any_file_operation_leaves_the_old_or_the_new(operation, tmp_path, monkeypatch):
    """Fail at the k-th operation for every k, as if killed there."""
    old = trained()
    new = trained(seed=9, steps=4)
    states = {3: snapshot(old, N), 4: snapshot(new, N)}
    module, name = operation.rsplit(".", 1)
    target = {"os": os, "shutil": shutil}[module]
    original, calls = getattr(target, name), [0]
    outcomes = set()
    for k in range(1, 200):
        root = tmp_path / f"{k}"
        compopt.save(copy.deepcopy(old), root, keep=1)
        calls[0] = 0

        def fail(*args, k=k, **options):
            calls[0] += 1
            if calls[0] == k:
                raise OSError(f"operation {k}")
            return original(*args, **options)

        monkeypatch.setattr(target, name, fail)
        try:
            compopt.save(new, root, keep=1)
            failed = False
        except OSError:
            failed = True
        monkeypatch.setattr(target, name, original)
        again = sogclr()
        compopt.load(again, root)
        outcomes.add(again.t)
        assert_same_bits(states[again.t], snapshot(again, N))
        assert failed or again.t == 4
        compopt.save(new, root, keep=1)  # the run continues
        assert [c.complete for c in manifest.checkpoints(root)] == [True]
        if not failed:
            break
    assert k > 1 and 4 in outcomes


@pytest.mark.parametrize(
    "est, words",
    [
        (torch.nn.Linear(2, 2), r"got Linear; models go into torch\.save"),
        (compopt.as_module(compopt.SogCLREstimator(4)), r"got StatefulEstimatorModule; pass its estimator, \.est"),
        ("run", "got str"),
    ],
    ids=["model", "module", "swapped"],
)
def test_what_is_no_estimator(est, words, tmp_path):
    for act in (compopt.save, compopt.load):
        with pytest.raises(TypeError, match=f"est must be an estimator of compopt, {words}"):
            act(est, tmp_path)


def test_what_is_no_path():
    for act in (compopt.save, compopt.load):
        with pytest.raises(TypeError, match=r"directory must be a path, got b'run' of type bytes; pass os"):
            act(sogclr(), b"run")
        for url in ("s3://bucket/run", Path("s3://bucket/run"), "simplecache::memory://run"):
            with pytest.raises(ValueError, match="is a URL; pass a local directory"):
                act(sogclr(), url)


def test_hooks_run(tmp_path):
    est, seen = trained(), []
    est.register_state_dict_pre_hook(lambda e: seen.append("save"))
    est.register_load_state_dict_post_hook(lambda e: seen.append("loaded"))
    compopt.save(est, tmp_path)
    compopt.load(est, tmp_path)
    assert seen == ["save", "loaded"]


def test_sample_groups_travel(tmp_path):
    est = compopt.ISogCLREstimator([{"n": 10, "gamma": 0.3}, {"n": 13}], rho=1.0, tau_init=0.07)
    est.sample_groups[1]["gamma"] = 0.123456789
    compopt.save(est, tmp_path)
    other = compopt.ISogCLREstimator([{"n": 10}, {"n": 13}])
    groups = other.sample_groups
    compopt.load(other, tmp_path)
    assert other.sample_groups == est.sample_groups
    assert isinstance(groups[0]["betas"], tuple)


# unchanged estimators, and paths of checkpoints ------------------------------------------------------


def test_what_could_not_be_loaded_is_not_saved(tmp_path):
    est = compopt.InfoNCEEstimator(tau=0.1, learn_tau=True, multiply_tau=False)
    compopt.save(est, tmp_path)
    est.temperature.log_inverse.data.fill_(torch.nan)
    with pytest.raises(ValueError):
        compopt.save(est, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    compopt.load(est, tmp_path)


def test_versions_of_a_method_are_told_apart(tmp_path):
    written = compopt.FastCLIPEstimator(N, version="v0")
    compopt.save(written, tmp_path)
    for read in (
        compopt.FastCLIPEstimator(N, version="v3"),
        compopt.FastCLIPEstimator(N, version="v0", normalize=False),
    ):
        with pytest.raises(ValueError, match="options"):
            compopt.load(read, tmp_path)
        with pytest.raises(ValueError, match="options"):
            read.load_state_dict(written.state_dict())


def test_a_checkpoint_is_found_by_any_of_its_names(tmp_path, monkeypatch):
    est = trained()
    made = compopt.save(est, tmp_path / "run")
    (tmp_path / "latest").symlink_to(made)
    shutil.copytree(made, tmp_path / "best")
    monkeypatch.chdir(made)
    for name in (made, tmp_path / "latest", tmp_path / "best", "."):
        other = sogclr()
        compopt.load(other, name)
        assert_same_bits(snapshot(other, N), snapshot(est, N))
    for name in (made, tmp_path / "latest", tmp_path / "best", "."):
        with pytest.raises(ValueError, match="itself a checkpoint"):
            compopt.save(est, name)


def test_links_to_other_runs_are_never_pruned(tmp_path):
    est = trained()
    precious = compopt.save(est, tmp_path / "old")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / precious.name).symlink_to(precious)
    for _ in range(4):
        compopt.save(est, tmp_path / "new", keep=1)
    compopt.load(sogclr(), precious)


def test_numbers_of_numpy_and_moved_working_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    est = compopt.SogCLREstimator(N, gamma=np.float32(0.5), offload="disk", offload_dir="rows")
    train(est, batches(N, 2, seed=1, dtype=torch.float32))
    compopt.save(est, tmp_path / "c")
    monkeypatch.chdir("/")
    compopt.load(est, tmp_path / "c", t=np.int64(2))
    est.add_sample_group({"n": 3})
    assert est.n == N + 3 and est.read(torch.arange(N + 3))["count"].sum() > 0


# -- hyper-parameters and owners -----------------------------------------------------------------------


def test_an_edit_to_an_equal_number_of_numpy_is_saved(tmp_path):
    """A call does not detect the edit, and JSON cannot store a NumPy number."""
    est = sogclr()
    for save in (lambda: compopt.save(est, tmp_path), est.state_dict):
        est.sample_groups[0]["gamma"] = 0.5
        run(est, *batches(N, 1, seed=1, dtype=torch.float32)[0])
        est.sample_groups[0]["gamma"] = np.float32(0.5)
        saved = save()
    assert type(saved["parts"]["normalizer"]["sample_groups"][0]["gamma"]) is float
    compopt.load(sogclr(), tmp_path)


def test_a_directory_is_of_one_estimator(tmp_path):
    est = trained()
    path = compopt.save(est, tmp_path)
    for other in (compopt.SogCLREstimator(N + 1), compopt.ISogCLREstimator(N), sogclr(normalize=False)):
        with pytest.raises(ValueError, match="checkpoints of another estimator"):
            compopt.save(other, tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    est.add_sample_group({"n": 4})
    compopt.save(est, tmp_path)
    del est
    compopt.save(trained(), tmp_path)  # as after returning to the first checkpoint


def test_two_estimators_of_one_process_do_not_share_a_directory(tmp_path):
    """With equal configurations a load could not tell which estimator's rows it reads."""
    a, b = trained(seed=1), trained(seed=2)
    rows = snapshot(a, N)
    path = compopt.save(a, tmp_path)
    for save in (lambda: compopt.save(b, tmp_path), lambda: compopt.save(b, tmp_path, blocking=False)):
        with pytest.raises(RuntimeError, match=rf"{tmp_path}.*another SogCLREstimator.*save into another directory"):
            save()
    assert list(tmp_path.iterdir()) == [path]
    compopt.load(a, tmp_path)
    assert_same_bits(rows, snapshot(a, N))
    compopt.save(b, tmp_path / "b")
    compopt.save(a, tmp_path)


def test_a_run_goes_on_in_its_directory_with_another_estimator(tmp_path):
    a = trained()
    compopt.save(a, tmp_path)
    beside = sogclr()
    compopt.load(beside, tmp_path)  # for example to evaluate it
    compopt.save(a, tmp_path)
    with pytest.raises(RuntimeError, match=r"call compopt\.load first"):  # the directory has a newer checkpoint
        compopt.save(beside, tmp_path)
    compopt.load(beside, compopt.save(a, tmp_path))
    compopt.save(beside, tmp_path)
    with pytest.raises(RuntimeError, match="another SogCLREstimator"):
        compopt.save(a, tmp_path)
    compopt.load(a, tmp_path)
    compopt.save(a, tmp_path)
    shutil.rmtree(tmp_path)
    compopt.save(beside, tmp_path)  # no rows of another estimator are left


def interrupted(folders):
    """Train and save as a cell of a notebook, which is interrupted; return the traceback, as the interpreter does."""
    try:
        est = trained(seed=1)
        for folder in folders:
            compopt.save(est, folder)
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        return error.__traceback__


@pytest.mark.parametrize("blocking", [True, False])
def test_an_interrupted_run_keeps_no_directory(blocking, tmp_path):
    """The cell runs again with the same folders, of which a Trainer has one per save."""
    folders = [tmp_path / "checkpoint-3", tmp_path / "checkpoint-6"]
    last_traceback = interrupted(folders)
    est = trained(seed=2)
    with pytest.warns(UserWarning, match="checkpoint-3 has .* another .* an earlier run.*compopt.load") as seen:
        for folder in folders:
            saved = compopt.save(est, folder, blocking=blocking)
            saved if blocking else saved.wait()
    assert len(seen) == 1 and seen[0].filename == __file__
    again = sogclr()
    compopt.load(again, folders[0])
    assert_same_bits(snapshot(again, N), snapshot(est, N))
    first = last_traceback.tb_frame.f_locals["est"]
    for folder in folders:  # it is in use after all
        with pytest.raises(RuntimeError, match=r"another SogCLREstimator.*save into another directory.*or remove them"):
            compopt.save(first, folder)
        shutil.rmtree(folder)
    compopt.save(first, folders[0])
    with pytest.raises(RuntimeError, match="another SogCLREstimator"):
        compopt.save(est, folders[0])


def test_an_estimator_that_is_gone_keeps_no_directory(tmp_path):
    est = trained()
    est.itself = est  # only garbage collection frees it
    compopt.save(est, tmp_path)
    del est
    compopt.save(trained(seed=3), tmp_path)


def test_a_checkpoint_that_was_completed_stays_whatever_fails_after_it(tmp_path, monkeypatch):
    """Its manifest exists, so it may have been loaded already."""
    est, write = sogclr(), manifest.write

    def write_and_fail(*given):
        write(*given)
        raise OSError("the folder cannot be synchronised")

    monkeypatch.setattr(manifest, "write", write_and_fail)
    train(est, batches(N, 2, seed=3))
    with pytest.raises(OSError, match="synchronised"):
        compopt.save(est, tmp_path)
    loaded = sogclr()
    compopt.load(loaded, tmp_path)
    assert_same_bits(snapshot(loaded, N), snapshot(est, N))


def test_a_whole_estimator_with_deposits_can_be_saved_by_torch(tmp_path):
    est = compopt.SogCLREstimator(N)
    run(est, *batches(N, 1, dtype=torch.float32)[0])
    torch.save(est, tmp_path / "est.pt")
    other = torch.load(tmp_path / "est.pt", weights_only=False)
    for each in (est, other):
        assert each.pending == 1 and each.metrics["new_rows"] > 0
        each.step()
    assert_same_bits(snapshot(other, N), snapshot(est, N))
