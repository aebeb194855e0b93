"""The options of ContrastiveEstimator: declared once, shown by every preset, which rejects any other option."""

import inspect

import pytest

import compopt
from compopt.presets.options import CommonOptions, Options

PRESETS = [
    (compopt.DCLEstimator, {}),
    (compopt.EMC2Estimator, {"n": 9}),
    (compopt.FastCLIPEstimator, {"n": 9, "rho": 0.1}),
    (compopt.InfoNCEEstimator, {}),
    (compopt.ISogCLREstimator, {"n": 9}),
    (compopt.NeuCLIPEstimator, {"dim": 4, "prototypes": 8}),
    (compopt.MemoryEstimator, {"dim": 4, "length": 8}),
    (compopt.SigLIPEstimator, {}),
    (compopt.SogCLREstimator, {"n": 9}),
]
PARTS = {"self", "normalizer", "temperature", "sample_groups"}


def test_type_checkers_see_what_the_base_class_takes():
    """The TypedDicts for type checkers, which cannot be derived from the signature, list the same names."""
    taken = inspect.signature(compopt.ContrastiveEstimator.__init__).parameters
    assert set(Options.__annotations__) == set(taken) - PARTS
    assert set(CommonOptions.__annotations__) == set(Options.__annotations__) - {"multiply_tau"}


@pytest.mark.parametrize("preset, given", PRESETS, ids=lambda x: getattr(x, "__name__", ""))
def test_every_option_is_shown_with_its_default_and_any_other_refused(preset, given):
    base = inspect.signature(compopt.ContrastiveEstimator).parameters
    shown = inspect.signature(preset).parameters
    expected = CommonOptions if preset in (compopt.FastCLIPEstimator, compopt.SigLIPEstimator) else Options
    assert all(shown[name].default == base[name].default for name in expected.__annotations__)
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    unexpected = rf"{preset.__name__}.. got an unexpected keyword argument 'chunksize'; it takes .*chunk_size"
    with pytest.raises(TypeError, match=unexpected):
        preset(**given, chunksize=4)
    est = preset(**given, chunk_size=4, normalize=False)
    assert est.chunk_size == 4 and est.normalize is False
    with pytest.raises(ValueError, match="offload must be None, .cpu. or .disk., got .ram."):
        preset(**given, offload="ram")


def test_every_preset_is_here():
    subclasses = set(compopt.ContrastiveEstimator.__subclasses__())
    assert {cls for cls in subclasses if cls.__module__.startswith("compopt.")} == {preset for preset, _ in PRESETS}
