"""Copies of a run in a store: made during training, retried after failures, and sufficient to resume from."""

import contextlib
import json
import signal
import uuid

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

pytest.importorskip("open_clip")

from recipes import clip_trainer as recipe
from recipes import uploads
from tests.open_clip.test_clip_trainer import arguments, given, rows, same, train, weights, whole  # noqa: F401


@pytest.fixture
def url():
    root = f"memory://{uuid.uuid4().hex}"
    yield f"{root}/run"
    with contextlib.suppress(FileNotFoundError):
        fsspec.filesystem("memory").rm(root.removeprefix("memory:/"), recursive=True)


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(uploads.Uploads.__init__, "__defaults__", ((0.0, 0.0),))


def names(url, folder=""):
    """Return the files in a folder of the store."""
    store, path = fsspec.url_to_fs(f"{url}/{folder}".rstrip("/"))
    return {file[len(path) + 1 :].split("/")[0] for file in store.find(path)}


def states(folder):
    return sorted(path.name for path in (folder / "state").iterdir() if path.is_dir())


def test_the_newest_states_stay_here_and_in_the_store(given, tmp_path, url):  # noqa: F811
    train(given, tmp_path, "--save-every", "2", "--keep", "3", "--upload", url)
    assert states(tmp_path) == [f"step-{step:09d}-epoch-000{step // 20 + 1}" for step in (16, 18, 20)]
    there = names(url, "state")
    assert "step-000000020-epoch-0002" in there and len(there) <= 3
    exported = {f"epoch_{epoch}.{kind}" for epoch in (1, 2) for kind in ("pt", "compopt")}
    assert names(url) == {*exported, "state", "run.json", "shards.json"}
    (checkpoint,) = (tmp_path / "epoch_2.compopt").iterdir()
    same_file = next(checkpoint.rglob("rows-*")).stat()
    assert same_file.st_nlink > 1  # rows of the state, not written twice


def test_a_run_goes_on_elsewhere_from_the_store(given, tmp_path, url, whole):  # noqa: F811
    train(given, tmp_path / "here", "--save-every", "2", "--max-steps", "13", "--upload", url)
    train(given, tmp_path / "there", "--resume", url)
    same(weights(tmp_path / "there"), whole[0])
    same(rows(tmp_path / "there"), whole[1])
    train(given, tmp_path / "here", "--resume", url)  # its own state is equally new
    same(weights(tmp_path / "here"), whole[0])
    with pytest.raises(SystemExit, match="run.json is of another run: seed"):
        recipe.main(arguments(given, tmp_path / "other", "--resume", url, "--seed", "1"))


def test_a_store_that_is_gone_is_told_at_the_end(given, tmp_path, url, whole, monkeypatch):  # noqa: F811
    def put_file(self, *args, **kwargs):
        raise ConnectionError("no route to host")

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    with pytest.raises(SystemExit, match="--upload: the store lacks .*epoch_1.pt .*no route to host.*are complete"):
        recipe.main(arguments(given, tmp_path, "--upload", url))
    same(weights(tmp_path), whole[0])
    assert json.loads((tmp_path / "run.json").read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_ends_the_run(given, tmp_path, whole, monkeypatch, number):  # noqa: F811
    original = recipe.Trainer.update

    def update(self, window):
        if self.step == 6:
            signal.raise_signal(number)
        return original(self, window)

    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(recipe.Trainer, "update", update)
        recipe.main(arguments(given, tmp_path, "--workers", "1"))
    assert end.value.code == recipe.STOPPED
    assert states(tmp_path) == ["step-000000008-epoch-0000"]
    train(given, tmp_path, "--resume")
    assert set(rows(tmp_path)["count"].tolist()) == {2}
    assert signal.getsignal(number) == signal.SIG_DFL
