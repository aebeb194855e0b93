"""A stopped and resumed run equals an uninterrupted one."""

import resource
import shutil

import pytest

from compopt.integrations.open_clip.rows import RowCheckpoints
from tests.open_clip import tiny

SOGCLR = "--estimator sogclr --gamma 0.5"


def run(ours, folder, data, name="run", stop_before=None, **changed):
    theirs = tiny.arguments(folder, name, train_data=data, **{"epochs": 3, "save_frequency": 1, **changed})
    return tiny.train(ours.split(), theirs, stop_before=stop_before)


def stopped(ours, folder, data, after=2, **changed):
    """Kill a run when ``after`` epochs are completed."""
    with pytest.raises(tiny.Stopped):
        run(ours, folder, data, stop_before=after, **changed)


@pytest.mark.parametrize(
    "ours",
    [SOGCLR, "--estimator fastclip-v3 --rho 1", "--estimator neuclip --prototypes 16 --updates 2", "--estimator clip"],
)
def test_resume(tmp_path, data, ours):
    """Compare weights and rows bit for bit, resumed from the folder's newest checkpoint and from a path."""
    whole = run(ours, tmp_path, data, "whole")
    stopped(ours, tmp_path, data)
    latest = run(ours, tmp_path, data, resume="latest")
    path = tmp_path / "logs" / "run" / "checkpoints" / "epoch_2.pt"
    elsewhere = run(ours, tmp_path, data, "elsewhere", resume=path)
    for other in (latest, elsewhere):
        assert other.updates == 2
        tiny.assert_alike(other.weights, whole.weights, 0)
        assert str(other.est) == str(whole.est)
        if whole.est.n is not None:
            tiny.assert_alike(other.rows(), whole.rows(), 0)
    kinds = ["pt"] if ours.endswith("clip") else ["compopt", "pt"]  # no rows, or a folder beside each file
    assert tiny.files(tmp_path) == [f"epoch_{epoch}.{kind}" for epoch in (1, 2, 3) for kind in kinds]
    assert not {"rows", "compopt", "estimator"} & tiny.checkpoint(tmp_path).keys()
    assert not list((tmp_path / "logs").rglob("*.compopt/**/*.pt"))


def test_no_checkpoints_no_rows(tmp_path, data, monkeypatch):
    monkeypatch.chdir(tmp_path)  # open_clip makes a folder of that name
    run(SOGCLR, tmp_path, data, logs="none", epochs=1)
    assert not list(tmp_path.rglob("*.compopt"))


def test_rows_go_with_their_file(tmp_path, data):
    run(SOGCLR, tmp_path, data, delete_previous_checkpoint=True)
    assert tiny.files(tmp_path) == ["epoch_3.compopt", "epoch_3.pt"]


def test_the_most_recent_checkpoint_has_rows(tmp_path, data):
    """`epoch_latest.pt` contains the number of its epoch."""
    options = {"save_frequency": 0, "save_most_recent": True}
    whole = run(SOGCLR, tmp_path, data, "whole", **options)
    stopped(SOGCLR, tmp_path, data, **options)
    assert tiny.files(tmp_path) == ["epoch_2.compopt", "epoch_latest.pt"]
    resumed = run(SOGCLR, tmp_path, data, resume="latest", **options)
    tiny.assert_alike(resumed.rows(), whole.rows(), 0)
    assert tiny.files(tmp_path) == ["epoch_3.compopt", "epoch_3.pt", "epoch_latest.pt"]


def test_killed_between_rows_and_file(tmp_path, data):
    """Rows are written first; rows without a file are rewritten."""
    stopped(SOGCLR, tmp_path, data)
    folder = tmp_path / "logs" / "run" / "checkpoints"
    (folder / "epoch_2.pt").unlink()
    run(SOGCLR, tmp_path, data, resume="latest")
    assert tiny.files(tmp_path) == sorted(f"epoch_{k}.{kind}" for k in (1, 2, 3) for kind in ("pt", "compopt"))


def refused(folder, data, match, ours=SOGCLR, kind=ValueError, **changed):
    """Assert that a resume raises an error before any update."""
    watch = []
    theirs = tiny.arguments(folder, train_data=data, epochs=3, save_frequency=1, resume="latest", **changed)
    with pytest.raises(kind, match=match):
        tiny.train(ours.split(), theirs, prepare=lambda *_: watch.append(1))
    assert not watch


def test_rows_that_do_not_fit_are_refused(tmp_path, data):
    stopped(SOGCLR, tmp_path, data)
    folder = tmp_path / "logs" / "run" / "checkpoints"
    other = tmp_path / "other"
    other.mkdir()
    text = tiny.write_csv(other).read_text().splitlines()
    (other / "data.csv").write_text("\n".join([text[0], *reversed(text[1:])]))
    refused(tmp_path, other / "data.csv", "do not fit this run. .*fingerprint 'positions in a file of 16 samples")
    refused(tmp_path, data, "do not fit this run. .*method", ours="--estimator isogclr --rho 1")
    (saved,) = (folder / "epoch_2.compopt").glob("checkpoint-*")
    (saved / "manifest.json").unlink()
    refused(tmp_path, data, "do not fit this run. .*no complete checkpoint")
    shutil.rmtree(folder / "epoch_2.compopt")
    refused(tmp_path, data, "no rows beside it, .*epoch_2.compopt is missing; .*--pretrained .*epoch_2.pt instead")


@pytest.mark.parametrize("what", ["rows", "file"])
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, data, monkeypatch, what):
    """An unfinished file of open_clip has to be removed; the previous file is kept, with its rows."""
    whole = run(SOGCLR, tmp_path, data, "whole")
    original = RowCheckpoints.save

    def save(self, epoch):
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        if epoch == 2:  # longer files cannot be written
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000 if what == "file" else 10, limit[1]))
        try:
            original(self, epoch)
        finally:
            if what == "rows":
                resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with monkeypatch.context() as patch, pytest.raises((OSError, RuntimeError)):
            patch.setattr(RowCheckpoints, "save", save)
            run(SOGCLR, tmp_path, data, delete_previous_checkpoint=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    unfinished = tmp_path / "logs" / "run" / "checkpoints" / "epoch_2.pt"
    assert unfinished.exists() == (what == "file")
    unfinished.unlink(missing_ok=True)
    resumed = run(SOGCLR, tmp_path, data, resume="latest")
    assert resumed.updates == 4
    tiny.assert_alike(resumed.weights, whole.weights, 0)
    tiny.assert_alike(resumed.rows(), whole.rows(), 0)


def test_other_options_than_the_checkpoints_are_said(tmp_path, data, caplog):
    stopped(SOGCLR, tmp_path, data)
    watch = run("--estimator sogclr --gamma 0.7", tmp_path, data, resume="latest")
    assert watch.est.sample_groups[0]["gamma"] == 0.5
    assert any("'gamma': (0.7, 0.5)" in message for message in caplog.messages)
