"""recipes/clip_webdataset.py: the example loop resumes where it stopped, and trains as the trainer does."""

import gc
import re
from pathlib import Path

import pytest
import torch

open_clip = pytest.importorskip("open_clip")

import compopt  # noqa: E402
from recipes import clip_trainer, clip_webdataset  # noqa: E402
from tests.open_clip.data import write_model, write_pairs  # noqa: E402
from tests.open_clip.test_clip_trainer import SIZES, rows, same, weights  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return write_pairs(folder / "shards", SIZES, corrupt={3}), write_model(folder)


def arguments(given, output, *more):
    small = ["--batch-size", "4", "--epochs", "2", "--shuffle", "5", "--workers", "0"]
    return ["--shards", str(given[0]), "--model", str(given[1]), "--output", str(output), *small, *more]


def train(given, output, *more):
    clip_webdataset.main(arguments(given, output, *more))


class Killed(Exception):
    pass


def killed(given, output, step, *more):
    """Train, and kill the run before an update."""
    original = clip_webdataset.Loop.update

    def update(self, batch):
        if self.step == step:
            raise Killed
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(clip_webdataset.Loop, "update", update)
        train(given, output, *more)
    gc.collect()  # frees what the run held of the folder


WAYS = {
    "plain": (),
    "workers": ("--workers", "2"),
    "cached": ("--batch-size", "8", "--micro-batch-size", "4"),
    "bf16": ("--bf16",),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_was_killed_ends_with_the_same_bits(given, tmp_path, way):
    """Kill a run within an epoch, and after one."""
    train(given, tmp_path / "whole", *WAYS[way])
    killed(given, tmp_path / "killed", 3, *WAYS[way], "--save-every", "2")
    assert (tmp_path / "killed" / "state-000000002.pt").exists()
    killed(given, tmp_path / "killed", 8, *WAYS[way], "--save-every", "100")
    train(given, tmp_path / "killed", *WAYS[way])
    for epoch in (1, 2):
        same(weights(tmp_path / "killed", epoch), weights(tmp_path / "whole", epoch))
        same(rows(tmp_path / "killed", epoch), rows(tmp_path / "whole", epoch))
    assert sorted(set(rows(tmp_path / "whole")["count"].tolist())) == [0, 2]  # one sample is corrupt
    train(given, tmp_path / "killed", *WAYS[way])  # nothing is left to do


@pytest.mark.parametrize("cache", [False, True])
def test_the_trainer_is_this_loop_to_the_bit(given, tmp_path, cache):
    ours = ("--batch-size", "8", "--micro-batch-size", "4") if cache else ()
    theirs = ("--accumulate", "2", "--gradient-cache") if cache else ()
    train(given, tmp_path / "loop", *ours, "--save-every", "3")
    clip_trainer.main(arguments(given, tmp_path / "trainer", *theirs, "--quiet"))
    same(weights(tmp_path / "loop"), weights(tmp_path / "trainer"))
    same(rows(tmp_path / "loop"), rows(tmp_path / "trainer"))
    model, _, _ = open_clip.create_model_and_transforms("micro", pretrained=str(tmp_path / "loop" / "epoch_2.pt"))
    same(model.state_dict(), weights(tmp_path / "loop"))


@pytest.mark.parametrize("program", ["loop", "trainer"])
@pytest.mark.filterwarnings("ignore:.*NaN")
def test_a_batch_of_nan_ends_the_run_and_nothing_is_saved_after_it(given, tmp_path, program, monkeypatch):
    """The states before it remain, and the run goes on from them."""
    main, more = (clip_webdataset.main, ()) if program == "loop" else (clip_trainer.main, ("--quiet", "--resume"))
    kind = clip_webdataset.Loop if program == "loop" else clip_trainer.Trainer
    original, command = kind.update, arguments(given, tmp_path / "run", "--save-every", "2", *more)

    def update(self, batch):
        (batch if program == "loop" else batch[0])[0].fill_(torch.nan if self.step == 4 else 1)
        return original(self, batch)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=r"step 6: the loss is nan, .* without saving"):
        patch.setattr(kind, "update", update)
        main(command)
    saved = [*(tmp_path / "run").glob("state-*.pt"), *(tmp_path / "run").glob("state/step-*")]
    assert int(max(path.stem for path in saved).split("-")[1]) == 4
    main(command)
    assert all(value.isfinite().all() for value in weights(tmp_path / "run").values())


def test_the_loop_imports_public_things_alone():
    text = Path(clip_webdataset.__file__).read_text()
    imported = re.findall(r"^(?:import|from) (\S+)", text, re.MULTILINE)
    ours = {name for name in imported if name.startswith(("compopt", "recipes"))}
    assert ours == {"compopt", "compopt.data", "recipes.shard_batches"}
    names = re.search(r"^from compopt.data import (.*)$", text, re.MULTILINE)[1].split(", ")
    assert set(names) <= set(compopt.data.__all__)
    assert set(re.findall(r"compopt\.(\w+)", text)) <= set(compopt.__all__)
