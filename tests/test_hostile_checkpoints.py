"""Untrusted checkpoints: no code in them is run, and no memory is allocated for sizes that they claim."""

import hashlib
import json
import os
import pickle
import shutil
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

import compopt
from compopt import files
from compopt.checkpoint import manifest
from tests.helpers import assert_same_bits, batches, features, run, snapshot

N = 23


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(manifest, "PIECE_ROWS", 10)


def trained(seed=70, build=compopt.ISogCLREstimator, **options):
    est = build(N, gamma=0.6, **options)
    for batch in batches(N, 3, seed=seed, dtype=torch.float32):
        run(est, *batch)
        est.step()
    return est


def refused(path, match, est=None):
    est = est or trained(seed=3)
    before, t = snapshot(est, N), est.t
    with pytest.raises((ValueError, TypeError), match=match):
        compopt.load(est, path)
    assert_same_bits(before, snapshot(est, N))
    assert est.t == t


def edit(path, change):
    """Change a manifest and its checksum, as an attacker who knows the format."""
    content = json.loads((path / "manifest.json").read_text())
    content = change(content) or content
    content["crc32"] = manifest.body_crc(content)
    (path / "manifest.json").write_text(json.dumps(content, indent=1))


# code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["state", "rows", "manifest"])
def test_a_pickle_in_the_place_of_a_file_is_not_run(name, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "boom"),)

    path = compopt.save(trained(), tmp_path / "c")
    bomb = pickle.dumps(Bomb())
    file = next(path.rglob(f"{name}*"))
    file.write_bytes(bomb)
    if name != "manifest":

        def vouch(content):
            entry = next(f for f in content["files"] if path / f["name"] == file)
            entry.update(bytes=len(bomb), checksum=hashlib.sha256(bomb).hexdigest())

        edit(path, vouch)
    refused(path, file.name)
    assert not (tmp_path / "boom").exists()
    pickle.loads(bomb)
    assert (tmp_path / "boom").exists()


# values -------------------------------------------------------------------------------------------

BAD_NUMBERS = [-1, 1.0, "1", True, None, 10**18, 10**30]


KEYS = ("version", "t", "checksum", "bytes", "first", "stride", "rows")
ABSURD = [(key, value) for key in KEYS for value in BAD_NUMBERS]


@pytest.mark.covering()
@pytest.mark.parametrize("key, value", ABSURD, ids=str)
def test_absurd_numbers(key, value, tmp_path):
    def change(content):
        file = content["files"][0]
        if key in file:
            file[key] = value
        else:
            content[key] = value

    path = compopt.save(trained(), tmp_path)
    edit(path, change)
    refused(tmp_path, rf"(?s)checkpoint-.*(manifest\.json|rows-).*{value}")


KINDS = ("config", "sample_groups", "files", "save_id", "data_fingerprint", "rows", "file", "group")
FALSE = [("data_fingerprint", value) for value in (None, "x", [])]  # not compared with an estimator without one
OF_KINDS = [(key, value) for key in KINDS for value in (5, "x", [], None) if (key, value) not in FALSE]


@pytest.mark.covering()
@pytest.mark.parametrize("key, value", OF_KINDS, ids=str)
def test_values_of_another_kind(key, value, tmp_path):
    def change(content):
        if key == "rows":
            content["files"][0]["rows"] = value
        elif key == "file":
            content["files"].append(value)
        elif key == "group":
            content["parts"]["normalizer"]["sample_groups"] = [value]
        elif key == "sample_groups":
            content["parts"]["normalizer"][key] = value
        else:
            content[key] = value

    edit(compopt.save(trained(), tmp_path), change)
    refused(tmp_path, r"manifest\.json|rows-")


CONFIGS = [
    ({"n": [10**15]}, "1000000000000000.*23"),
    ({"n": [-23]}, "-23"),
    ({"n": [23.5]}, "23.5"),
    ({"n": 23}, "n of normalizer is 23"),
    ({"mode": None}, "mode differs"),
    ({"columns": {"log_u": [10**9, "torch.float32"]}}, "1000000000"),
    ({"columns": 5}, "columns differs"),
    ({"method": []}, "method differs"),
    ({"other": 1}, "other differs"),
]


def place_of(content, values):
    """Return the configuration that has these entries: that of a part, or of the container."""
    return content["config"] if {"mode", "method"} & set(values) else content["parts"]["normalizer"]["config"]


@pytest.mark.parametrize("values, match", CONFIGS, ids=[match for _, match in CONFIGS])
def test_absurd_configurations(values, match, tmp_path):
    edit(compopt.save(trained(), tmp_path), lambda c: place_of(c, values).update(values))
    refused(tmp_path, rf"manifest\.json.*{match}")


GROUPS = [{"n": 10**15}, {"n": True}, {"gamma": float("nan")}, {"gamma": "0.5"}, {"lr": 10**30}, {"other": 1}]


@pytest.mark.parametrize("values", GROUPS, ids=str)
def test_absurd_groups(values, tmp_path):
    edit(compopt.save(trained(), tmp_path), lambda c: c["parts"]["normalizer"]["sample_groups"][0].update(values))
    refused(tmp_path, r"manifest\.json")


NAMES = ["../x.safetensors", "/etc/passwd", "a/b/c.safetensors", "..", ".", "", ".hidden.safetensors"]
NAMES += [
    "a\\b.safetensors",
    "a\0.safetensors",
    "x" * 5000 + ".safetensors",
    "rows.txt",
    "C:x.safetensors",
    "rows\n.safetensors",
]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name[:20]))
def test_names_that_leave_the_directory(name, tmp_path):
    path = compopt.save(trained(), tmp_path / "c")
    shutil.copy(next(path.rglob("rows-*")), tmp_path / "c" / "x.safetensors")
    edit(path, lambda c: c["files"][0].update(name=name))
    refused(path, r"manifest\.json.*name of an entry of files of it is")


def test_a_file_that_is_listed_twice(tmp_path):
    edit(compopt.save(trained(), tmp_path), lambda c: c["files"].append(c["files"][0]))
    refused(tmp_path, "a file is there twice")


def test_a_pipe_is_not_waited_for(tmp_path):
    path = compopt.save(trained(), tmp_path)
    file = next(path.rglob("rows-*"))
    file.unlink()
    os.mkfifo(file)
    refused(tmp_path, f"{file.name} is missing")


# text ---------------------------------------------------------------------------------------------

TEXTS = {
    "deep": ("[" * 10**6, "recursion"),
    "deep inside": ('{"version": 3, "files": ' + '{"a":' * 10**5 + "1" + "}" * 10**5 + "}", "recursion"),
    "not an object": ("[1, 2]", "list"),
    "digits": ('{"version": ' + "9" * 10**6 + "}", "digits"),
    "not text": (b"\xff\xfe\x00", "codec"),
    "empty": ("", "Expecting value"),
}


@pytest.mark.parametrize("text, match", TEXTS.values(), ids=TEXTS)
def test_texts_that_are_no_manifest(text, match, tmp_path):
    path = compopt.save(trained(), tmp_path)
    (path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(tmp_path, rf"manifest\.json is damaged.*{match}")
    copy = shutil.copytree(path, tmp_path / "renamed")  # identified by its manifest instead of its name
    refused(copy, rf"manifest\.json is damaged.*{match}")


def test_a_manifest_too_long_to_be_read_is_not_written(tmp_path, monkeypatch):
    compopt.save(trained(), tmp_path)
    monkeypatch.setattr(manifest, "_MOST", 100)
    with pytest.raises(ValueError, match=r"manifest\.json.* bytes.*: too many sample groups"):
        compopt.save(trained(), tmp_path)
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    compopt.load(trained(), tmp_path)


# tensors ------------------------------------------------------------------------------------------


def replace(path, name, tensors):
    """Replace a file, with its size and checksum in the manifest, and return its name; the first that is so called."""
    file = sorted(file for file in path.rglob("*.safetensors") if f"/{name}" in str(file))[0]

    def vouch(content):
        entry = next(f for f in content["files"] if path / f["name"] == file)
        file.unlink()
        if isinstance(tensors, bytes):
            file.write_bytes(tensors)
        else:
            save_file(tensors, file)
        entry.update(bytes=file.stat().st_size, checksum=files.checksum(file))

    edit(path, vouch)
    return file.name


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop("log_u"),
        lambda t: t.update(other=t["log_u"].clone()),
        lambda t: t.update(log_u=t["log_u"][:-1].clone()),
        lambda t: t.update(log_u=t["log_u"][:, :1].clone()),
        lambda t: t.update(log_u=t["log_u"].double()),
        lambda t: t.update(log_u=t["log_u"].view(torch.int32)),
        lambda t: t.update(log_u=torch.zeros(())),
        lambda t: t.update(log_u=t["log_u"].T.contiguous()),
        lambda t: t.update(count=t["count"].float()),
        lambda t: t.pop(manifest.SPANS),
        lambda t: t.update({manifest.SPANS: t[manifest.SPANS].int()}),
        lambda t: t.update({manifest.SPANS: t[manifest.SPANS].flatten()}),
        lambda t: t.clear(),
    ],
)
def test_other_columns(change, tmp_path):
    path = compopt.save(trained(), tmp_path)
    tensors = load_file(sorted(path.rglob("rows-*"))[0])
    change(tensors)
    refused(tmp_path, f"{replace(path, 'rows-', tensors)}: column")


@pytest.mark.parametrize("name, shape", [("temperature.log_inverse_tau", (10**6,)), ("other.x", (1,)), ("x", (1,))])
def test_other_state(name, shape, tmp_path):
    path = compopt.save(trained(), tmp_path)
    tensors = {**load_file(path / "normalizer" / "state.safetensors"), name: torch.zeros(shape)}
    refused(tmp_path, replace(path, "state", tensors))


NUMBERS = {
    "before the first": ([[-5, 5]], "rows -5 to 5 after row 0"),
    "beyond the last": ([[0, 5], [5, 10**12]], "rows 5 to 1000000000000 after row 5.*which has 23.*n=23"),
    "descending": ([[5, 10], [0, 5]], "rows 0 to 5 after row 10"),
    "twice": ([[0, 5], [4, 9]], "rows 4 to 9 after row 5"),
    "empty": ([[0, 9], [10, 10], [10, 11]], "rows 10 to 10 after row 9"),
    "too few": ([[0, 3]], "number of rows is 3"),
    "extreme": ([[-(2**63), 2**63 - 1]], "rows -9223372036854775808 to"),
}


@pytest.mark.parametrize("spans, match", NUMBERS.values(), ids=NUMBERS)
def test_absurd_row_numbers(spans, match, tmp_path):
    path = compopt.save(trained(), tmp_path)
    tensors = {**load_file(sorted(path.rglob("rows-*"))[0]), manifest.SPANS: torch.tensor(spans)}
    refused(tmp_path, f"{replace(path, 'rows-', tensors)}.*{match}")


def put(tensors, name, value):
    tensors[name].view(-1)[0] = value


@pytest.mark.parametrize(
    "name, value, match",
    [("log_u", float("nan"), "finite, row 0 has"), ("tau", -0.1, "> 0, row 0"), ("count", -1, ">= 0, row 0")],
)
def test_rows_that_no_run_writes(name, value, match, tmp_path):
    """Files with matching checksums are checked in the same way as in load_state_dict."""
    est = compopt.ISogCLREstimator(N)
    run(est, *features(N, 4, 5, dtype=torch.float32), torch.arange(N))
    est.step()
    path = compopt.save(est, tmp_path)
    file = next(file for file in sorted(path.rglob("rows-*")) if name in load_file(file))
    tensors = load_file(file)
    put(tensors, name, value)
    refused(
        tmp_path,
        f"{replace(path, str(file.relative_to(path)), tensors)}: column '{name}' of the checkpoint must be .*{match}",
        est,
    )


HEADERS = {
    "of 2^63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "of 100 MB": struct.pack("<Q", 10**8) + b"{}",
    "longer than the file": struct.pack("<Q", 1000) + b"{}",
    "cut": b"\1\0",
    "no JSON": struct.pack("<Q", 4) + b"abcd",
    "a tensor of 2^60": (lambda h: struct.pack("<Q", len(h)) + h)(
        b'{"tau":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}'
    ),
    "a negative shape": (lambda h: struct.pack("<Q", len(h)) + h)(
        b'{"tau":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}' + b" " * 16
    ),
}


@pytest.mark.parametrize("name", ["rows-", "state"])
@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_headers(content, name, tmp_path):
    path = compopt.save(trained(), tmp_path)
    refused(tmp_path, f"{replace(path, name, content)} is damaged")


def test_a_text_with_the_same_content_is_not_the_same(tmp_path):
    """Refuse another notation of a number, a space, and a duplicate key, which do not change the checksum."""
    path = compopt.save(trained(), tmp_path)
    file = path / "manifest.json"
    text = file.read_text()
    for old, new in (('"t": 3', '"t":  3'), ('"t": 3', '"t": 5,\n "t": 3'), ("0.01", "1e-2"), ("\n", "\n\n")):
        assert old in text
        file.write_text(text.replace(old, new, 1))
        refused(tmp_path, "the file was modified")
    file.write_text(text)
    compopt.load(trained(seed=3), tmp_path)


# memory -------------------------------------------------------------------------------------------
