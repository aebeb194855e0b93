"""recipes/uploads.py: states in the store are complete, and missing files are reported."""

import threading
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem

from recipes import checkpoints, uploads


@pytest.fixture
def run(tmp_path):
    """Return the local folder of a run, and its store."""
    (tmp_path / "run" / "state").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text("{}")
    return tmp_path / "run", tmp_path / "store"


def uploading(run, keep=2, waits=()):
    folder, store = run
    return uploads.Uploads(f"file://{store}", folder, [folder / "run.json"], keep, waits)


def state(run, step):
    path = run[0] / "state" / f"step-{step}"
    (path / "rows").mkdir(parents=True)
    (path / "rows" / "a").write_text(f"rows of {step}")
    (path / "model").write_text(f"model of {step}")
    (path / uploads.COMPLETE).touch()
    return path


def there(run):
    return sorted(str(path.relative_to(run[1])) for path in run[1].rglob("*") if path.is_file())


def test_the_newest_states_stay_in_the_store(run):
    made = uploading(run)
    for step in (1, 2, 3):
        made.put(state(run, step), [])
        assert made.finish() == {}
    files = ["complete", "model", "rows/a"]
    assert there(run) == ["run.json", *(f"state/step-{step}/{name}" for step in (2, 3) for name in files)]
    made.put(run[0] / "state" / "step-2", [])  # a run that restarted from before the newest state
    assert made.finish() == {} and {name[:12] for name in there(run)} == {"run.json", "state/step-2"}


class Store:
    """A store that fails, or waits, at some files."""

    def __init__(self, monkeypatch, at):
        self.at, self.copied, self.reached, self.go_on = at, [], threading.Event(), threading.Event()
        original = LocalFileSystem.put_file

        def put_file(system, source, *args, **kwargs):
            self.copied.append(Path(source).name)
            self.at(self, Path(source))
            return original(system, source, *args, **kwargs)

        monkeypatch.setattr(LocalFileSystem, "put_file", put_file)


def test_a_state_that_is_read_is_held_and_one_that_waits_is_left_out_for_a_newer_one(run, monkeypatch):
    def wait(store, source):
        if source.read_text() == "model of 1":
            store.reached.set()
            assert store.go_on.wait(60)

    store, made = Store(monkeypatch, wait), uploading(run)
    first, second, third = (state(run, step) for step in (1, 2, 3))
    made.put(first, [])
    assert store.reached.wait(60)
    made.put(second, [])
    made.put(third, [])
    assert made.holds(first) and not made.holds(second)
    store.go_on.set()
    assert made.finish() == {} and not made.holds(first)
    assert {name[:12] for name in there(run)} == {"run.json", "state/step-1", "state/step-3"}


def test_what_fails_is_tried_again_at_once_and_with_the_next_state(run, monkeypatch, capsys):
    failing = [3]  # how often

    def fail(store, source):
        if source.name == "epoch_1.pt" and failing[0]:
            failing[0] -= 1
            raise ConnectionError("no route to host")

    store, made = Store(monkeypatch, fail), uploading(run, waits=(0.0, 0.0))
    (model := run[0] / "epoch_1.pt").write_text("weights")
    made.put(state(run, 1), [model])
    assert made.finish().keys() == {model} and "no route to host" in made.finish()[model]
    assert f"file://{run[1]}/epoch_1.pt: " in made.finish()[model]
    assert store.copied.count("epoch_1.pt") == 3 and "epoch_1.pt is not in the store" in capsys.readouterr().out
    made.put(state(run, 2), [])
    assert made.finish() == {} and "epoch_1.pt" in there(run)


def test_the_newest_complete_state_is_fetched_if_it_is_newer(run, tmp_path):
    made = uploading(run, keep=3)
    for step in (1, 2, 3):
        made.put(state(run, step), [])
        made.finish()
    (run[1] / "state" / "step-3" / uploads.COMPLETE).unlink()  # its upload was interrupted
    elsewhere = tmp_path / "elsewhere" / "state"
    checkpoints.fetch(f"file://{run[1]}", elsewhere)
    assert checkpoints.latest(elsewhere) == elsewhere / "step-2"
    assert (elsewhere / "step-2" / "rows" / "a").read_text() == "rows of 2"
    assert (elsewhere.parent / "run.json").exists() and not (elsewhere / "step-1").exists()
    checkpoints.point(run[0] / "state", "step-3")
    checkpoints.fetch(f"file://{run[1]}", run[0] / "state")
    assert checkpoints.latest(run[0] / "state").name == "step-3"
    checkpoints.fetch(f"file://{tmp_path}/nothing", nowhere := tmp_path / "nowhere" / "state")
    assert checkpoints.latest(nowhere) is None


def test_a_run_that_must_end_does_not_try_again(run, monkeypatch):
    def fail(store, file):
        raise OSError("unreachable")

    store = Store(monkeypatch, fail)
    made = uploading(run, waits=(60.0, 60.0))
    made.put(state(run, 1), [])
    (path,) = made.finish(hurry=True)
    assert path.name == "step-1" and len(store.copied) <= 2


def test_a_state_that_is_uploaded_anew_is_incomplete_until_it_is_whole(run, monkeypatch):
    made = uploading(run)
    made.put(state(run, 1), [])
    made.finish()
    monkeypatch.setattr(LocalFileSystem, "put_file", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("full")))
    made.put(run[0] / "state" / "step-1", [])
    assert made.finish() and not [name for name in there(run) if name.endswith(uploads.COMPLETE)]


def test_files_of_a_state_that_failed_do_not_stay_in_the_store(run, monkeypatch):
    def fail(store, file):
        if "step-1" in str(file) and file.name == "model":
            raise OSError("full")

    Store(monkeypatch, fail)
    made = uploading(run)
    for step in (1, 2):
        made.put(state(run, step), [])
        made.finish()
    assert {name[:12] for name in there(run)} == {"run.json", "state/step-2"}
