"""Errors before training starts, which name the flag."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import open_clip
import pytest

from compopt import presets
from compopt.integrations import open_clip as ours_of
from compopt.integrations.open_clip import options
from tests.open_clip import tiny

REBUILT = hasattr(open_clip, "create_task")


def refused(match, folder, ours="--estimator dcl", kind=ValueError, **theirs):
    watch = []
    theirs = tiny.arguments(folder, **{"dataset_type": "synthetic", "train_num_samples": 16, **theirs})
    with pytest.raises(kind, match=match):
        tiny.train(ours.split(), theirs, prepare=lambda *_: watch.append(1))
    assert not watch


@pytest.mark.parametrize(
    "match, theirs",
    [
        ("--siglip: a sigmoid", {"siglip": True}),
        ("--distill-model: a teacher", {"distill_model": "ViT-tiny", "distill_pretrained": "x"}),
        ("--model coca_ViT-B-32: its loss is generative too", {"model": "coca_ViT-B-32"}),
        pytest.param(
            *("--horovod: ranks are torch.distributed's", {"horovod": True}),
            marks=pytest.mark.skipif(REBUILT, reason="this open_clip has no such flag"),
        ),
        pytest.param(
            *("--torchcompile-strategy step: commits", {"torchcompile": True, "torchcompile_strategy": "step"}),
            marks=pytest.mark.skipif(not REBUILT, reason="this open_clip has no such flag"),
        ),
    ],
)
def test_flags_of_open_clip(tmp_path, match, theirs):
    refused(match, tmp_path, **theirs)


def test_patches_without_index(tmp_path):
    args = SimpleNamespace(
        **{"model": "ViT", "distill_model": None, "distill_pretrained": None, "siglip": False, "use_naflex": True}
    )
    ours_of.check_flags(args, indexed=False)
    with pytest.raises(ValueError, match="--use-naflex: its batches keep patches and texts only"):
        ours_of.check_flags(args, indexed=True)


def test_a_bias(tmp_path):
    """Reject a bias, as models for the sigmoid loss have it."""
    config = json.loads((Path(tiny.__file__).parent / "ViT-tiny.json").read_text())
    (tmp_path / "ViT-biased.json").write_text(json.dumps({**config, "init_logit_bias": -10}))
    open_clip.add_model_config(tmp_path)
    refused("--model ViT-biased: it has a logit_bias", tmp_path, model="ViT-biased")


def test_index(tmp_path):
    tars = {"dataset_type": "webdataset", "train_data": tiny.write_tars(tmp_path)}
    refused("--index: a stream of shards needs one", tmp_path, "--estimator sogclr", name="a", **tars)
    refused("--index: a stream of shards needs one", tmp_path, "--estimator dcl --index positions", name="b", **tars)
    refused("--index: rows of this data set are positions", tmp_path, "--estimator sogclr --index keys:16", name="c")
    with pytest.raises(ValueError, match="--index keys:many: keys:N with N above"):
        ours_of.Run(options.Flags("sogclr", {}, "keys:many"), None)


@pytest.mark.parametrize(
    "match, ours",
    [
        ("--learn-tau: .*use --tau model instead", "--estimator infonce --learn-tau"),
        ("--tau model: fastclip-v3 .* learns temperatures of its own", "--estimator fastclip-v3 --tau model"),
        ("gamma .*in \\(0, 1\\]", "--estimator sogclr --gamma 2"),
        ("rho", "--estimator isogclr --rho -1"),
    ],
)
def test_options_of_estimators(tmp_path, match, ours):
    refused(match, tmp_path, ours)


@pytest.mark.parametrize(
    "message, ours",
    [
        ("invalid choice: 'adam'", "--estimator adam"),
        ("--tau 0.1: not known here. isogclr takes .*--tau-init", "--estimator isogclr --tau 0.1"),
        ("--gamma: 'much' is no float", "--estimator sogclr --gamma much"),
        ("--learn-tau: 'always' is no bool or global", "--estimator neuclip --learn-tau always"),
        ("--batch-size=8: not known here. .*open_clip's own flags come after --", "--estimator dcl --batch-size=8"),
        ("--updates: '0.5' is no int", "--estimator neuclip --updates 0.5"),
        ("--dtype: 'half' is no float32 or float64", "--estimator sogclr --dtype half"),
        ("arguments are required: --estimator", "--index keys:4"),
    ],
)
def test_the_command(capsys, message, ours):
    with pytest.raises(SystemExit) as exit:
        ours_of.main([*ours.split(), "--", "--siglip"])
    assert exit.value.code == 2
    assert re.search(message, capsys.readouterr().err.replace("argument ", ""))


def test_help_lists_the_options_of_the_estimator(capsys):
    for words, shown in ((["--help"], "sogclr"), (["--estimator", "sogclr", "--help"], "--gamma float")):
        with pytest.raises(SystemExit) as exit:
            ours_of.main(words)
        assert exit.value.code == 0 and shown in capsys.readouterr().out


def test_words_become_values():
    given = options.parse_flags(
        "--estimator neuclip --learn-tau individual --restart-every none --betas 0.8 0.9".split()
    ).given
    assert given == {"learn_tau": "individual", "restart_every": None, "betas": (0.8, 0.9)}
    assert options.parse_flags("--estimator neuclip --learn-tau true".split()).given == {"learn_tau": True}
    assert options.parse_flags("--estimator emc2 --burn-in 3 --no-normalize".split()).given == {
        "burn_in": 3,
        "normalize": False,
    }
    assert isinstance(options.parse_flags("--estimator emc2 --burn-in 0.5".split()).given["burn_in"], float)


def test_every_preset_has_a_name():
    known = set(presets.__all__) - {"settings", "SigLIPEstimator"}  # open_clip trains SigLIP itself: --siglip
    assert {method.preset.__name__ for method in options.METHODS.values()} == known
    rows = {name for name, method in options.METHODS.items() if method.has_rows}
    assert rows == {"sogclr", "isogclr", "emc2", *(f"fastclip-v{k}" for k in range(4))}


def test_an_open_clip_that_is_not_known():
    """The error lists the names that an unknown open_clip lacks."""

    def train_one_epoch(trainer): ...

    names = dict.fromkeys(("main", "parse_args", "create_model_and_transforms"), print)
    with pytest.raises(RuntimeError, match="neither form .* lacks get_data, create_loss, model of train_one_epoch"):
        ours_of.is_rebuilt(SimpleNamespace(train_one_epoch=train_one_epoch, **names))
    names = dict.fromkeys((*names, "get_data", "train_one_epoch", "create_task"), lambda: None)
    with pytest.raises(RuntimeError, match="lacks state of train_one_epoch, data of train_one_epoch"):
        ours_of.is_rebuilt(SimpleNamespace(**names))


def test_names_are_open_clips_own_again(tmp_path):
    import open_clip_train.main as trainer

    before = dict(vars(trainer))
    refused("--siglip", tmp_path, siglip=True)
    assert dict(vars(trainer)) == before


def test_importable_without_open_clip():
    code = "import sys; sys.modules['open_clip'] = sys.modules['open_clip_train'] = None\n"
    code += "import compopt.integrations.open_clip.__main__"
    subprocess.run([sys.executable, "-c", code], check=True)
