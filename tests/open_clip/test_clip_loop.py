"""recipes/clip_webdataset.py: the loop to copy goes on where it was left, and trains as the trainer does."""

import re
from pathlib import Path

import pytest

open_clip = pytest.importorskip("open_clip")

import compopt  # noqa: E402
from recipes import clip_trainer, clip_webdataset  # noqa: E402
from tests.open_clip.data import write_model, write_pairs  # noqa: E402
from tests.open_clip.test_clip_trainer import SIZES, N, launch, rows, same, weights  # noqa: E402


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    return write_pairs(folder / "shards", SIZES, corrupt={3}), write_model(folder)


def arguments(given, output, *more):
    small = ["--batch-size", "4", "--epochs", "2", "--shuffle", "5", "--workers", "0"]
    return ["--shards", str(given[0]), "--model", str(given[1]), "--output", str(output), *small, *more]


def train(given, output, *more):
    clip_webdataset.main(arguments(given, output, *more))


WAYS = {"plain": (), "workers": ("--workers", "2"), "cached": ("--accumulate", "2"), "bf16": ("--precision", "bf16")}


@pytest.mark.parametrize("way", WAYS)
def test_a_loop_that_was_stopped_within_an_epoch_ends_with_the_same_bits(given, tmp_path, way):
    train(given, tmp_path / "whole", *WAYS[way])
    train(given, tmp_path / "stopped", *WAYS[way], "--max-steps", "3")
    train(given, tmp_path / "stopped", *WAYS[way], "--resume")
    for epoch in (1, 2):
        same(weights(tmp_path / "stopped", epoch), weights(tmp_path / "whole", epoch))
        same(rows(tmp_path / "stopped", epoch), rows(tmp_path / "whole", epoch))
    assert sorted(set(rows(tmp_path / "whole")["count"].tolist())) == [0, 2]  # one sample is corrupt


@pytest.mark.parametrize("cache", [False, True])
def test_the_trainer_is_this_loop_to_the_bit(given, tmp_path, cache):
    accumulate = ("--accumulate", "2") if cache else ()
    train(given, tmp_path / "loop", *accumulate, "--gamma", "0.8", "--save-every", "3")
    more = (*accumulate, *(["--gradient-cache"] if cache else []), "--set", "gamma=0.8")
    clip_trainer.main(arguments(given, tmp_path / "trainer", *more, "--quiet"))
    same(weights(tmp_path / "loop"), weights(tmp_path / "trainer"))
    same(rows(tmp_path / "loop"), rows(tmp_path / "trainer"))
    model, _, _ = open_clip.create_model_and_transforms("micro", pretrained=str(tmp_path / "loop" / "epoch_2.pt"))
    same(model.state_dict(), weights(tmp_path / "loop"))


def test_the_loop_imports_public_things_alone():
    text = Path(clip_webdataset.__file__).read_text()
    imported = re.findall(r"^(?:import|from) (\S+)", text, re.MULTILINE)
    assert {name for name in imported if name.startswith(("compopt", "recipes"))} == {"compopt", "compopt.data"}
    names = re.search(r"^from compopt.data import (.*)$", text, re.MULTILINE)[1].split(", ")
    assert set(names) <= set(compopt.data.__all__)
    assert set(re.findall(r"compopt\.(\w+)", text)) <= set(compopt.__all__)


@pytest.mark.launch
def test_two_processes_of_the_loop(given, tmp_path):
    def run(output, *more):
        launch(2, given, output, *more, module="recipes.clip_webdataset", arguments=arguments)

    more = ("--batch-size", "2", "--accumulate", "2")
    run(tmp_path / "whole", *more)
    run(tmp_path / "stopped", *more, "--max-steps", "3")
    run(tmp_path / "stopped", *more, "--resume")
    same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    same(rows(tmp_path / "stopped"), rows(tmp_path / "whole"))
    run(tmp_path / "moved", *more, "--max-steps", "3")
    train(given, tmp_path / "moved", "--batch-size", "8", "--resume")  # one process goes on
    for folder in ("whole", "moved"):  # one sample is corrupt; a batch of two with it is replaced by another
        assert N - 2 <= int((rows(tmp_path / folder)["count"] >= 2).sum()) <= N - 1
