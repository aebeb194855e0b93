"""The recipes: a run that is stopped and resumed in the middle of an epoch is bit-identical to an uninterrupted one."""

import re
from pathlib import Path

import pytest
import torch

import compopt
from benchmarks import report
from recipes import experiment, glyphs, launch, minimal
from recipes import tasks as tasks_module
from recipes.engine import Config, Control, Run
from recipes.methods import BIMODAL, METHODS, PUBLISHED, UNIMODAL, build, build_schedule, title_of
from recipes.tasks import GlyphFaces, GlyphNames


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    data = glyphs.load(tmp_path_factory.mktemp("glyphs"))
    return {"bimodal": GlyphNames(data, split_seed=0, limit=320), "unimodal": GlyphFaces(data, split_seed=0)}


SLOW = ("clip", "isogclr", "neuclip", "emc2", "emc2-dataset")


@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
def test_the_settings_of_a_paper_are_used_and_can_be_overridden(mode, capsys):
    root = experiment.parser("recipes.train", "", mode, epochs=2, output="runs")
    (names,) = [action.choices for action in root._actions if action.dest == "settings"]
    assert names and set(names) <= set(PUBLISHED)
    for name in names:
        found = compopt.presets.settings(*name.split(":"))
        assert found.get("mode", "bimodal") == mode
        args = experiment.parse(root, ["--settings", name], mode)
        others = ("warmup_epochs", "warmup_steps", "gamma_decay")
        training = {key: value for key, value in found.training.items() if key in vars(args) and key not in others}
        assert training.items() <= vars(args).items()
        options = args.methods[name]
        assert {key: value for key, value in found.items() if key != "mode"}.items() <= options.items()
        est = build(name, 100, mode, options)
        assert est.mode == mode and type(est).__name__.lower().startswith(name.partition(":")[0].partition("-")[0])
        schedule = build_schedule(est, options, 600)
        assert (schedule is not None) == name.startswith("fastclip")
        if schedule is not None:
            assert schedule.gamma_min == found.schedule.get("gamma_min", 0.2)
            assert schedule.decay_steps == (200 if name.endswith("laion") else 300)
        again = experiment.parse(root, ["--settings", name, "--batch-size", "8", "--lr", "0.25"], mode)
        assert (again.batch_size, again.lr) == (8, 0.25)
    assert experiment._warmup(args, 1000) <= args.epochs
    other = next(name for name in PUBLISHED if name not in names)
    with pytest.raises(SystemExit):
        experiment.parse(root, ["--settings", other], mode)
    assert f"{other} is {UNIMODAL if mode == BIMODAL else BIMODAL}, for recipes.train_" in capsys.readouterr().err


def config(task, method, batches):
    epochs = 3 if task.mode == "bimodal" else 1
    options = METHODS[method].options(task.mode, {})
    return Config(method, options, batch_size=32, epochs=epochs, seed=3, data="test", batches=batches or {})


def bits(value):
    """Return a nested state in a form that compares bit for bit."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape), value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(entry) for key, entry in value.items() if key not in ("seconds", "history")}
    return [bits(entry) for entry in value] if isinstance(value, list | tuple) else value


def state(run):
    """Return everything that the rest of a run depends on."""
    parts = {name: getattr(run, name).state_dict() for name in ("model", "est", "optimizer", "scheduler", "batches")}
    schedule = run.gamma_schedule
    return {**parts, "gamma": None if schedule is None else schedule.state_dict(), "loss": run.loss_sum}


def train(task, method, steps, batches=None, **control):
    run = Run(task, config(task, method, batches), Control(eval_every=0, max_steps=steps, **control))
    return run.train()


@pytest.mark.covering()
@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize(
    "method",
    [
        "recommended",
        *(pytest.param(method, marks=pytest.mark.slow) for method in ("sogclr", "fastclip-v3", *SLOW)),
    ],
)
def test_resume_in_the_middle_of_an_epoch(tasks, mode, method, tmp_path):
    task, last, stop = tasks[mode], 14, 7  # bimodal: ten steps an epoch
    whole = train(task, method, last)
    checkpoint = tmp_path / "checkpoints"
    train(task, method, stop, checkpoint=checkpoint)
    resumed = train(task, method, last, checkpoint=checkpoint, resume=True)
    assert bits(state(resumed)) == bits(state(whole))
    assert resumed.step == last


def test_the_second_face_differs_from_the_first_one(tasks):
    task, index = tasks["unimodal"], torch.arange(500)
    sources = task.sources(index, torch.Generator().manual_seed(0))
    assert sources.shape == (2, 500) and (sources[1] != sources[0]).all()
    place = sources - task.first[index]
    assert (place >= 0).all() and (place < task.count[index]).all()


def test_the_demo_compares_methods_that_exist_and_begins_with_the_recommended_one():
    makefile = (Path(__file__).parents[1] / "Makefile").read_text()
    methods = re.search(r"^DEMO_METHODS \?= (.+)$", makefile, re.M).group(1).split()
    assert methods[0] == "recommended" and set(methods) <= set(METHODS)


def test_a_title_names_the_options_that_are_not_the_defaults():
    assert title_of("neuclip", METHODS["neuclip"].options("bimodal", {"prototypes": 256})) == "NeuCLIP, prototypes 256"
    assert title_of("fastclip-v3", METHODS["fastclip-v3"].options("bimodal")) == "FastCLIP v3"


@pytest.mark.parametrize("batch_size, kind", [(64, compopt.MemoryEstimator), (1024, compopt.InfoNCEEstimator)])
def test_recommended_depends_on_the_batch_size_of_the_run(batch_size, kind):
    assert isinstance(build("recommended", 4096, "bimodal", {"group": 0}, batch_size=batch_size), kind)


@pytest.mark.covering()
@pytest.mark.parametrize(
    "batches",
    [
        {"kind": "spectral", "cluster_group": 3},
        pytest.param({"kind": "ordered", "candidates": 12, "keep": 4}, marks=pytest.mark.slow),
    ],
    ids=["spectral", "ordered"],
)
@pytest.mark.parametrize("prefetch", [False, True])
def test_chosen_batches_resume_in_the_middle_of_an_epoch(tasks, batches, prefetch, tmp_path):
    task, last, stop = tasks["bimodal"], 28, 22  # ten steps until every sample has features
    whole = train(task, "sogclr", last, batches)
    assert whole.batches.sampler.bank.filled and whole.batches.sampler.epoch > 1
    checkpoint = tmp_path / "checkpoints"
    train(task, "sogclr", stop, batches, checkpoint=checkpoint, prefetch=prefetch)
    resumed = train(task, "sogclr", last, batches, checkpoint=checkpoint, resume=True, prefetch=prefetch)
    assert bits(state(resumed)) == bits(state(whole))


def test_compressed_records(tmp_path):
    path = tmp_path / "records.jsonl.gz"
    for number in range(3):
        assert report.read_runs(path) == [{"run": n} for n in range(number)]
        report.append_run(path, {"run": number})
    assert path.read_bytes()[:2] == b"\x1f\x8b"


def test_records_survive_a_kill(tmp_path):
    path = tmp_path / "runs" / "records.jsonl"
    assert report.read_runs(path) == []
    for number in range(2):
        report.append_run(path, {"run": number})
    path.write_bytes(path.read_bytes()[:-5])  # killed during a write
    assert report.read_runs(path) == [{"run": 0}]
    report.append_run(path, {"run": 2})
    assert report.read_runs(path) == [{"run": 0}, {"run": 2}]


def test_a_checkpoint_of_another_run_is_refused(tasks, tmp_path):
    task, checkpoint = tasks["bimodal"], tmp_path / "checkpoints"
    train(task, "sogclr", 2, checkpoint=checkpoint)
    with pytest.raises(ValueError, match="method"):
        train(task, "isogclr", 4, checkpoint=checkpoint, resume=True)


def test_a_loss_of_nan_ends_the_run_before_its_checkpoint(tasks, tmp_path):
    run = Run(tasks["bimodal"], config(tasks["bimodal"], "sogclr", None), Control(max_steps=4, checkpoint=tmp_path))
    next(run.model.parameters()).data.fill_(torch.nan)
    with pytest.warns(UserWarning, match="NaN"), pytest.raises(SystemExit, match=r"step 4: the mean loss .* is nan"):
        run.train()
    assert not list(tmp_path.iterdir())


def test_a_lock_that_a_killed_compilation_has_left_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    launch.check_locks()
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    with open(lock, "w"):  # a compilation in progress
        launch.check_locks()
    with pytest.raises(SystemExit, match=f"no process of this machine holds.*rm {lock}$"):
        launch.check_locks()


def test_weights_of_nan_are_not_saved(tmp_path):
    model = torch.nn.Linear(2, 2)
    minimal.save(tmp_path, 1, compopt.InfoNCEEstimator(), {"model": model})
    before = (tmp_path / "last.pt").read_bytes()
    model.weight.data[0, 0] = torch.nan
    with pytest.raises(SystemExit, match="weights are not finite"):
        minimal.save(tmp_path, 2, compopt.InfoNCEEstimator(), {"model": model})
    assert (tmp_path / "last.pt").read_bytes() == before


def test_retrieval_in_chunks_is_that_of_the_whole_matrix(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    images, captions = torch.randn(50, 8, generator=draw), torch.randn(12, 8, generator=draw)
    right = torch.arange(50) % 12
    similarity = torch.nn.functional.normalize(images, dim=1) @ torch.nn.functional.normalize(captions, dim=1).T
    monkeypatch.setattr(tasks_module, "QUERIES", 7)
    found = tasks_module.retrieval(images, captions, right)
    assert torch.equal(found.caption_of_image, similarity.argmax(1))
    assert torch.equal(found.image_of_caption, similarity.argmax(0))
