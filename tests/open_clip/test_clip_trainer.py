"""recipes/clip_trainer.py: an interrupted run ends like an uninterrupted one, for every way of starting it."""

import contextlib
import errno
import json
import math
import re
import resource
import signal
import subprocess
import sys
import time

import pytest

open_clip = pytest.importorskip("open_clip")

import compopt  # noqa: E402
from recipes import clip_trainer as recipe  # noqa: E402
from tests.launching import environment  # noqa: E402
from tests.open_clip.data import (  # noqa: E402
    SIZES,
    N,
    arguments,
    rows,
    same,
    weights,
    write_model,
    write_pairs,
)

LEARN = ("--epochs", "30", "--lr", "0.003", "--batch-size", "8")  # enough to distinguish some pairs


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given")
    open_clip.add_model_config(model := write_model(folder))
    return write_pairs(folder / "shards", SIZES), model


def train(given, output, *more, **options):
    try:
        recipe.main(arguments(given, output, *more, **options))
    except SystemExit as end:
        assert not end.code, end.code


WAYS = {
    "plain": (),
    "workers": ("--workers", "2"),
    "accumulated": ("--accumulate", "2"),
    "cached": ("--accumulate", "2", "--gradient-cache"),
    "disk": ("--offload", "disk", "--prefetch"),
    "clipped": ("--grad-checkpointing", "--grad-clip", "1.0"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_that_was_stopped_within_an_epoch_ends_with_the_same_bits(given, tmp_path, way):
    train(given, tmp_path / "whole", *WAYS[way])
    train(given, tmp_path / "stopped", *WAYS[way], "--max-steps", "3")
    assert not list((tmp_path / "stopped").glob("*.pt"))
    train(given, tmp_path / "stopped", *WAYS[way], "--resume")
    for epoch in (1, 2):
        same(weights(tmp_path / "stopped", epoch), weights(tmp_path / "whole", epoch))
        same(rows(tmp_path / "stopped", epoch), rows(tmp_path / "whole", epoch))
    assert set(rows(tmp_path / "whole")["count"].tolist()) == {2}  # every sample once in each epoch


@pytest.mark.parametrize("cache", [(), ("--accumulate", "2", "--gradient-cache")])
def test_the_model_may_learn_its_own_temperature(given, tmp_path, cache):
    train(given, tmp_path, "--learn-scale", "--epochs", "1", *cache, estimator="infonce")
    assert abs(weights(tmp_path, 1)["logit_scale"].item() - math.log(1 / 0.07)) > 1e-4


@pytest.mark.parametrize("estimator", sorted(recipe.METHODS))
def test_every_estimator(given, tmp_path, estimator):
    few = {"neuclip": ["prototypes=8", "restart_every=4"]}.get(estimator, [])
    train(given, tmp_path, "--epochs", "1", "--set", *few, estimator=estimator)
    assert all(value.isfinite().all() for value in weights(tmp_path, 1).values())


def test_what_is_recommended_is_of_the_batch_that_a_call_has(given, tmp_path):
    def built(*more):
        args = recipe.parse(arguments(given, tmp_path, *more, estimator="recommended"))
        return type(recipe.build_estimator(args, {}, 10_000, 16)).__name__

    size = ("--batch-size", "256", "--accumulate", "4")
    assert built(*size) == "MemoryEstimator" and built(*size, "--gradient-cache") == "InfoNCEEstimator"
    train(given, tmp_path, "--max-steps", "1", estimator="recommended")
    assert json.loads((tmp_path / "run.json").read_text())["estimator"] == ["recommended", {}, "MemoryEstimator"]


def hugging_face_tower(folder):
    """Write a text tower and its tokenizer to files; return their configuration."""
    transformers = pytest.importorskip("transformers")
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green"]))
    transformers.BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    transformers.BertModel(transformers.BertConfig(vocab_size=7, **size)).save_pretrained(folder)
    return {"hf_model_name": str(folder), "hf_tokenizer_name": str(folder), "hf_pooler_type": "mean_pooler"}


TIMM = {"timm_model_name": "test_vit", "timm_model_pretrained": False, "image_size": 16}
TEXT = {"context_length": 8, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1}
KINDS = {  # one of each kind among open_clip's configurations, reduced
    "timm": {"vision_cfg": {**TIMM, "timm_pool": "token", "timm_proj": "linear"}},
    "custom text": {"custom_text": True},
    "custom text, EVA": {"custom_text": True, "vision_cfg": {**TIMM, "timm_pool": "token", "timm_proj": None}},
    "custom text, PE": {"custom_text": True, "text_cfg": {**TEXT, "pool_type": "last", "proj_bias": True}},
    "Hugging Face": {"text_cfg": hugging_face_tower},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model(given, tmp_path, kind):
    """Most models have no ``text_projection``, but the memory needs the dimension."""
    changes = dict(KINDS[kind])
    if callable(changes.get("text_cfg")):
        changes["text_cfg"] = {**changes["text_cfg"](tmp_path), "context_length": 8}
    changes["embed_dim"] = 64 if changes.get("vision_cfg", {}).get("timm_proj", "") is None else 16
    model = write_model(tmp_path, f"micro-{len(kind)}", **changes)
    train((given[0], model), tmp_path / "out", "--epochs", "1", "--max-steps", "3", estimator="memory")
    assert json.loads((tmp_path / "out" / "run.json").read_text())["model"]["embed_dim"] == changes["embed_dim"]


def test_models_that_another_loss_trains_are_refused_before_they_are_built(given, tmp_path):
    for name, said in ("coca_ViT-L-14", "is a CoCa"), ("ViT-gopt-16-SigLIP2-384", "logit_bias"), ("ViT-X", "no such"):
        with pytest.raises(SystemExit, match=f"--model {name}.*{said}"):
            recipe.main(arguments(given, tmp_path, "--model", name))


def test_open_clip_loads_the_checkpoint(given, tmp_path):
    train(given, tmp_path, "--epochs", "1", "--set", "tau=0.05", "gamma=0.8")
    model, _, _ = open_clip.create_model_and_transforms("micro", pretrained=str(tmp_path / "epoch_1.pt"))
    same(model.state_dict(), weights(tmp_path, 1))
    assert model.logit_scale.exp().item() == pytest.approx(20)


def test_bad_samples_are_left_out_and_counted(given, tmp_path, capsys):
    shards = write_pairs(tmp_path / "shards", SIZES, corrupt={3, 20}, captionless={31})
    train((shards, given[1]), tmp_path / "out", "--epochs", "1")
    assert "3 samples of process 0 could not be decoded or had no caption" in capsys.readouterr().out
    count = rows(tmp_path / "out", 1)["count"]
    assert [row for row in range(40) if count[row] == 0] == [3, 20, 31]


def test_metrics_reach_the_console(given, tmp_path, capsys):
    train(given, tmp_path, "--log-every", "5", "--epochs", "1", "--set", "tau=0.05")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    said = [dict(re.findall(r"(?:^|, |: )([\w ]+?) (\S+?)(?=,|$)", line)) for line in lines]
    assert [line.split(":")[0] for line in lines] == ["step 5", "step 10"]
    names = {"loss", "InfoNCE", "tau_median", "effective_negatives", "lr", "gradient_norm"}
    names |= {"data_seconds", "step_seconds", "data_seconds_slowest", "slowest_rank"}
    assert names <= said[-1].keys() and "samples/s" in lines[-1]
    assert float(said[-1]["tau_median"]) == pytest.approx(0.05) and 1 <= float(said[-1]["effective_negatives"]) <= 3


def test_a_tracker_that_is_not_there_is_named(given, tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "get_available_trackers", list)
    with pytest.raises(SystemExit, match="--log-with wandb: .* pip install wandb"):
        recipe.main(arguments(given, tmp_path, "--log-with", "wandb"))


@pytest.mark.parametrize(
    "change, said",
    [
        (("--estimator", "dcl"), "another run: estimator"),
        (("--set", "gamma=0.5"), "another run: estimator"),
        (("--index", "keys:60"), "another run: index"),
        (("--seed", "1"), "another run: seed"),
    ],
)
def test_resuming_another_run_is_refused(given, tmp_path, change, said):
    train(given, tmp_path, "--max-steps", "1")
    with pytest.raises(SystemExit, match=said):
        recipe.main(arguments(given, tmp_path, "--resume", *change))
    with pytest.raises(SystemExit, match="another run: model"):
        wider = write_model(tmp_path, "wider", embed_dim=8)
        recipe.main(arguments((given[0], wider), tmp_path, "--resume"))


@pytest.mark.parametrize(
    "more, said",
    [
        (("--set", "rho=1"), "sogclr takes gamma, tau, reference, eps, .*, and not rho"),
        (("--set", "offload=cpu"), "and not offload"),
        (("--estimator", "isogclr", "--set", "rho=0.1", "--learn-scale"), "learns temperatures of its own"),
        (("--val-shards", "nowhere*.tar"), "--val-shards: no shards at nowhere"),
        (("--shards", "s3://bucket/{0..3}.tar"), "--sizes: shards at URLs need a saved ShardIndex"),
        (("--sizes", "nowhere.json"), "--sizes nowhere.json: no such file"),
    ],
)
def test_bad_arguments(given, tmp_path, more, said):
    with pytest.raises((SystemExit, ValueError), match=said):
        recipe.main(arguments(given, tmp_path, *more))


def test_options_are_names_with_values(given, tmp_path, capsys):
    options = dict(recipe.parse(arguments(given, tmp_path, "--set", "gamma=0.5", "a=b=c", "path=/x")).set)
    assert options == {"gamma": 0.5, "a": "b=c", "path": "/x"}
    with pytest.raises(SystemExit):
        recipe.parse(arguments(given, tmp_path, "--set", "gamma"))
    assert "'gamma' is not NAME=VALUE" in capsys.readouterr().err


def test_bad_data(given, tmp_path):
    for n in (10, 39):  # the largest key is 39, the last sample of the last shard
        with pytest.raises(ValueError, match=f"key '0000000[23]9' of 00003.tar is outside 0 .. {n - 1}; give KeyIndex"):
            recipe.main(arguments(given, tmp_path, "--index", f"keys:{n}"))
    with pytest.raises(FileNotFoundError, match="--index nowhere.json: no such file"):
        recipe.main(arguments(given, tmp_path, "--index", "nowhere.json"))
    with pytest.raises(ValueError, match="keys:N with N above the largest key"):
        recipe.main(arguments(given, tmp_path, "--index", "keys:abc"))
    with pytest.raises(FileNotFoundError, match="no shards"):
        recipe.main(arguments((tmp_path / "none*.tar", given[1]), tmp_path))
    with pytest.raises(ValueError, match="40 samples are too few for a batch of 50"):
        recipe.main(arguments(given, tmp_path, "--batch-size", "50"))
    assert not (tmp_path / "run.json").exists()  # none of them began to train


def half(shard):
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])


@pytest.mark.parametrize(
    "damage, kind, said",
    [
        (half, ValueError, "00001.tar has .* bytes, and .* when the index was built: it was replaced"),
        (lambda shard: write_pairs(shard.parent, [9, 99, 7, 11]), ValueError, "00001.tar has .* bytes, and"),
        (lambda shard: shard.rename(shard.with_name("9.tar")), ValueError, "If it was renamed, give it its old name"),
        (lambda shard: shard.unlink(), SystemExit, r"shards and samples \[4, 40\] instead of \[3, 27\]"),
    ],
)
def test_shards_that_changed_before_a_resume(given, tmp_path, damage, kind, said):
    """Changed shards raise before training; with the original shards the run resumes."""
    shards = write_pairs(tmp_path / "shards", SIZES)
    train((shards, given[1]), tmp_path / "out", "--max-steps", "3")
    damage(shards / "00001.tar")
    with pytest.raises(kind, match=said):
        recipe.main(arguments((shards, given[1]), tmp_path / "out", "--resume"))
    (shards / "9.tar").unlink(missing_ok=True)
    write_pairs(shards, SIZES)
    train((shards, given[1]), tmp_path / "out", "--resume", "--epochs", "1")
    assert set(rows(tmp_path / "out", 1)["count"].tolist()) == {1}


@pytest.mark.parametrize("bad", [{"corrupt": range(N)}, {"captionless": range(N)}])
@pytest.mark.parametrize("flag", ["--shards", "--val-shards"])
def test_shards_of_which_nothing_can_be_decoded(given, tmp_path, flag, bad):
    """The error is raised after the first samples."""
    shards = write_pairs(tmp_path / "shards", SIZES, **bad)
    with pytest.raises(SystemExit, match=f"{flag}: none of the first 16 samples of .* can be decoded; a sample has a"):
        recipe.main(arguments(given, tmp_path / "out", flag, str(shards)))


def test_held_out_pairs_that_cannot_be_decoded_are_left_out_and_counted(given, tmp_path, capsys):
    held_out = write_pairs(tmp_path / "held_out", [260, 20], corrupt=[*range(3, 256), 270])
    train(given, tmp_path / "out", "--epochs", "1", "--val-shards", str(held_out))
    assert "val/lost 254" in capsys.readouterr().out
    with pytest.raises(FileNotFoundError, match="1 of 3 shards are missing or empty"):
        recipe.main(arguments(given, tmp_path / "again", "--val-shards", str(held_out / "{00000..00002}.tar")))


def test_a_folder_holds_one_run(given, tmp_path, capsys):
    train(given, tmp_path, "--max-steps", "1", "--resume")
    assert f"no state in {tmp_path}: the run begins anew" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="holds a run: add --resume, or give another folder"):
        recipe.main(arguments(given, tmp_path))


def test_rows_on_a_disk_of_their_own(given, tmp_path):
    """The disk has a folder for each output; only the rows that a killed run of this output left are removed."""
    options = ("--offload", "disk", "--offload-dir", str(tmp_path / "disk"))
    for output in ("one", "other"):
        train(given, tmp_path / output, *options, "--max-steps", "1")
        assert not (tmp_path / output / "rows").exists()
    one, other = sorted((tmp_path / "disk").iterdir())
    assert one.name.startswith("one-") and other.name.startswith("other-")
    (tmp_path / "one" / "state" / "latest").unlink()
    (one / "left").touch()
    (other / "left").touch()
    train(given, tmp_path / "one", *options, "--resume")
    assert not (one / "left").exists() and (other / "left").exists()
    assert set(rows(tmp_path / "one")["count"].tolist()) == {2}


def test_folders_of_rows_that_cannot_be(given, tmp_path, monkeypatch):
    with pytest.raises(SystemExit, match="--offload-dir: .* needs --offload disk"):
        recipe.main(arguments(given, tmp_path, "--offload-dir", str(tmp_path)))
    monkeypatch.setattr(recipe.launch, "from_all", lambda value: ["node-0", "node-1"])
    with pytest.raises(SystemExit, match="--offload disk on several nodes: .* with --offload-dir"):
        recipe.main(arguments(given, tmp_path, "--offload", "disk"))


def test_accumulation_may_change_where_an_update_keeps_its_samples(given, tmp_path):
    train(given, tmp_path, "--max-steps", "3")
    for more in ("--accumulate", "2"), ("--accumulate", "2", "--batch-size", "1"):
        with pytest.raises(SystemExit, match="another run: accumulate 1 instead of 2, samples of an update 4 instead"):
            recipe.main(arguments(given, tmp_path, "--resume", *more))
    train(given, tmp_path, "--resume", "--accumulate", "2", "--batch-size", "2")
    assert set(rows(tmp_path)["count"].tolist()) == {2}
    est = compopt.SogCLREstimator(N)
    compopt.load(est, tmp_path / "epoch_2.compopt")
    assert est.t == 20  # windows start at the position of the state


# -- a full disk -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_up_to(size):
    """Prevent longer files from being written, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def failing(owner, name):
    """Let a function fail because the disk is full."""

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, full)
        yield


@pytest.fixture(scope="module")
def whole(given, tmp_path_factory):
    train(given, output := tmp_path_factory.mktemp("whole"))
    return weights(output), rows(output)


FULL = {
    "model": (recipe.checkpoints.States, "save", lambda: files_up_to(1_000_000)),
    "optimizer": (recipe.checkpoints.States, "save", lambda: files_up_to(5_000_000)),
    "rows of a state": (recipe.checkpoints.States, "save", lambda: failing(recipe.integration, "save")),
    "pointer": (recipe.checkpoints.States, "_complete", lambda: failing(recipe.checkpoints.os, "fsync")),
    "exported rows": (recipe.Trainer, "_link_rows", lambda: failing(recipe.shutil, "copytree")),
    "exported model": (recipe.Trainer, "_export", lambda: files_up_to(1_000_000)),
}


@pytest.mark.parametrize("what", FULL)
def test_a_full_disk_leaves_the_state_before_from_which_the_run_goes_on(given, whole, tmp_path, monkeypatch, what):
    owner, name, full = FULL[what]
    original, calls = getattr(owner, name), []

    def second_time(*args):
        calls.append(name)
        with full() if len(calls) == 2 else contextlib.nullcontext():
            return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, second_time)
        with pytest.raises(RuntimeError, match=r"could not be written \(.* MB are free there\): .* --resume goes on"):
            recipe.main(arguments(given, tmp_path, "--save-every", "4"))
    assert len(calls) == 2 and not list(tmp_path.glob("*.partial"))
    train(given, tmp_path, "--save-every", "4", "--resume")
    same(weights(tmp_path), whole[0])
    same(rows(tmp_path), whole[1])


def test_a_learned_scale_stays_below_a_hundred(given, tmp_path):
    train(given, tmp_path, "--lr", "3.0", "--warmup", "0.01", estimator="clip")
    assert weights(tmp_path)["logit_scale"].item() <= math.log(100) + 1e-6


# -- several processes, each way of starting them ----------------------------------------------------------------------


def launch(processes, given, output, *more, module="recipes.clip_trainer", arguments=arguments):
    return started(processes, module, *arguments(given, output, *more))


def started(processes, module, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--standalone", "-m", module, *arguments]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=400)
    assert run.returncode == 0, run.stderr[-3000:]
    return run


@pytest.mark.launch
@pytest.mark.parametrize("way", ["ddp", "bf16", "fsdp2", "zero1", "zero2", "zero3"])
def test_two_processes(given, tmp_path, way, request):
    more = ["--shard", "--offload", "cpu", "--prefetch", "--batch-size", "2"]
    if way in ("bf16", "zero2"):
        more += ["--precision", "bf16", "--accumulate", "2", "--gradient-cache"]
    if way.startswith("zero"):
        request.getfixturevalue("deepspeed_compiled")
        more += ["--deepspeed-config", f"recipes/deepspeed/{way}.json"]
    module = "tests.open_clip.fsdp" if way == "fsdp2" else "recipes.clip_trainer"
    runs = [("whole",), ("stopped", "--max-steps", "7"), ("stopped", "--resume")]
    runs = [arguments(given, tmp_path / name, *more, *options) for name, *options in runs]
    started(2, "tests.several", module, json.dumps(runs))
    same(weights(tmp_path / "stopped"), weights(tmp_path / "whole"))
    same(rows(tmp_path / "stopped"), rows(tmp_path / "whole"))
    assert set(rows(tmp_path / "whole")["count"].tolist()) == {2}
    open_clip.create_model_and_transforms("micro", pretrained=str(tmp_path / "whole" / "epoch_2.pt"))


@pytest.mark.launch
def test_a_run_that_is_killed_within_an_epoch_ends_with_the_same_bits(given, tmp_path):
    """The process is killed after the first complete state, and while it may be writing another one."""
    more = ("--epochs", "3", "--save-every", "2")
    command = [sys.executable, "-m", "recipes.clip_trainer", *arguments(given, tmp_path / "killed", *more)]
    with subprocess.Popen(command, env=environment()) as run:
        while not (pointer := tmp_path / "killed" / "state" / "latest").exists():
            assert run.poll() is None
            time.sleep(0.001)
        run.kill()
    assert run.returncode == -signal.SIGKILL and not (tmp_path / "killed" / "epoch_1.pt").exists()
    assert pointer.read_text().endswith("epoch-0000")
    train(given, tmp_path / "killed", *more, "--resume")
    train(given, tmp_path / "whole", *more)
    same(weights(tmp_path / "killed", 3), weights(tmp_path / "whole", 3))
    same(rows(tmp_path / "killed", 3), rows(tmp_path / "whole", 3))


@pytest.mark.launch
def test_one_process_takes_up_what_two_have_left(given, tmp_path):
    launch(2, given, tmp_path, "--batch-size", "2", "--max-steps", "13")
    train(given, tmp_path, "--resume")
    assert set(rows(tmp_path)["count"].tolist()) == {2}


# -- evaluated by others -----------------------------------------------------------------------------------------------


def test_clip_benchmark_measures_the_same_recall(given, tmp_path, capsys):
    """clip-benchmark loads the checkpoint itself and reads a local webdataset."""
    from clip_benchmark.cli import main

    train(given, tmp_path, "--val-shards", str(given[0]), *LEARN, estimator="dcl")
    said = capsys.readouterr().out
    ours = [float(re.findall(rf"val/{name} (\S+)", said)[-1]) for name in ("image_to_text", "text_to_image")]
    root = tmp_path / "benchmark"
    (root / "test").mkdir(parents=True)
    (root / "dataset_type.txt").write_text("retrieval")
    (root / "test" / "nshards.txt").write_text(str(len(SIZES)))
    for number, shard in enumerate(sorted(given[0].glob("*.tar"))):
        (root / "test" / f"{number}.tar").write_bytes(shard.read_bytes())
    found = ["--dataset_root", str(root), *"--dataset wds/retrieval --task zeroshot_retrieval --recall_k 1".split()]
    model = ["--model", "micro", "--pretrained", str(tmp_path / "epoch_30.pt"), "--no_amp", "--num_workers", "0"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["clip_benchmark", "eval", *model, *found, "--output", str(tmp_path / "found.json")])
        main()
    metrics = json.loads((tmp_path / "found.json").read_text())["metrics"]
    theirs = [metrics[f"{name}_recall@1"] for name in ("text_retrieval", "image_retrieval")]
    assert theirs == pytest.approx(ours, abs=1e-3) and min(ours) > 2 / N
