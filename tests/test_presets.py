"""Presets are compositions: each equals the reference built from DESIGN section 3."""

import math
import warnings
from inspect import signature
from pathlib import Path

import pytest
import torch

import compopt
from compopt.presets.published import SETTINGS
from tests.database import BY_NAME
from tests.helpers import batches, group_key, near, run
from tests.reference import DualReference, FixedReference, GlobalDualReference, MovingAverageReference, Reference
from tests.test_agreement import follow

# Batches of six cannot reach rho = 6; that warning has its own test.
pytestmark = pytest.mark.filterwarnings("ignore")
N = 13
DEFAULTS = {
    "bimodal": {
        **{"gamma": 0.9, "lr": 0.01},
        **{"tau_init": 0.01, "tau_min": 0.005, "tau_max": 1.0, "rho": 6.0, "max_grad": 5.0},
    },
    "unimodal": {
        **{"gamma": 0.8, "lr": 0.03},
        **{"tau_init": 0.7, "tau_min": 0.05, "tau_max": 1.0, "rho": 0.3, "max_grad": 3.0},
    },
}


@pytest.mark.parametrize("mode, beta", [("bimodal", 0.9), ("unimodal", 0.5)])
def test_isogclr_defaults_by_mode(mode, beta):
    est = compopt.ISogCLREstimator(N, mode=mode, dtype=torch.float64)
    assert {key: est.sample_groups[0][key] for key in DEFAULTS[mode]} == DEFAULTS[mode]
    group = {"n": N, **DEFAULTS[mode]}
    ref = Reference([group], MovingAverageReference("positive"), DualReference("momentum", beta), mode)
    follow(BY_NAME["isogclr"], est, ref, N, batches(N, 8, seed=1))


@pytest.mark.parametrize("mode, gamma, tau", [("bimodal", 0.9, 0.07), ("unimodal", 0.8, 0.1)])
def test_defaults_by_mode(mode, gamma, tau):
    """A given value, also in a group, takes precedence over the default."""
    group = compopt.SogCLREstimator(N, mode=mode).sample_groups[0]
    assert (group["gamma"], group["tau"]) == (gamma, tau)
    given, rest = compopt.SogCLREstimator([{"n": 4, "gamma": 0.3}, {"n": 5}], tau=0.2, mode=mode).sample_groups
    assert (given["gamma"], rest["gamma"], rest["tau"]) == (0.3, gamma, 0.2)
    for preset in (compopt.InfoNCEEstimator, compopt.DCLEstimator):
        assert preset(mode=mode).sample_groups[0]["tau"] == tau
        assert preset(mode=mode, learn_tau=True).temperature.constants() == [pytest.approx(tau)]


AUTHORS = {"parametrization": "log", "lr_switch": (0.03, 1 / 3)}


def fastclip(version):
    """Return the estimator in float64 with gamma = 0.6, and the hyper-parameters of the preset."""
    est = compopt.FastCLIPEstimator(N, version=version, dtype=torch.float64)
    group = est.sample_groups[0]
    group[group_key(group, "gamma")] = 0.6
    names = ("tau",) if version == "v1" else ("rho", "lr", "tau_init", "tau_min", "tau_max", "max_grad")
    return est, {"n": N, "gamma": 0.6, **{name: group[group_key(group, name)] for name in names}}


@pytest.mark.parametrize(
    "version, info, twin",
    [
        ("v1", "sogclr-positive", lambda group: FixedReference()),
        ("v2", "isogclr-adam", lambda group: DualReference("adam")),
        ("v3", "global-dual", lambda group: GlobalDualReference(group["tau_init"], "adam", **AUTHORS)),
    ],
)
def test_fastclip_is_its_twin(version, info, twin):
    """v1 has a constant temperature, v2 individual temperatures, v3 a learned global temperature."""
    est, group = fastclip(version)
    ref = Reference([group], MovingAverageReference("positive", 1e-14), twin(group))
    follow(BY_NAME[info], est, ref, N, batches(N, 6, seed=3))
    assert ("tau" in est.read(torch.arange(2))) == (version == "v2")
    if version == "v3":
        assert est.temperature.tau.dim() == 0 and float(est.temperature.tau) != group["tau_init"]


def test_fastclip_v0_learns_a_global_tau_and_does_not_multiply():
    """The value is mean alpha, tau is learned, and the features' gradient has the weights w / tau."""
    est, group = fastclip("v0")
    tau = group["tau_init"]
    beside = FixedReference()
    average = MovingAverageReference("positive", 1e-14)
    ref = Reference([{"n": N, "gamma": 0.6, "tau": tau}], average, beside, multiply_tau=False)
    z1, z2, index = batches(N, 1, seed=4)[0]
    for got, want in zip(run(est, z1, z2, index), ref.forward(z1, z2, index), strict=True):
        near(got, want)
    est.step()
    assert (float(est.temperature.tau) < tau) == (ref.tau_grad > 0) and float(est.temperature.tau) != tau
    with pytest.raises(ValueError, match="v7"):
        compopt.FastCLIPEstimator(N, version="v7")


def adamw(z1, z2, rho, lr, steps):
    """Yield tau after each step of FastCLIP's rule: clamped AdamW on log(1/tau), a third of the rate at tau <= 0.03."""
    theta = torch.tensor(0.07, dtype=torch.float64).reciprocal().log().requires_grad_()
    optimizer = torch.optim.AdamW([theta], lr=lr, weight_decay=0.0)
    s = z1 @ z2.T
    h, off = s - s.diag()[:, None], ~torch.eye(len(s), dtype=torch.bool)
    for _ in range(steps):
        optimizer.param_groups[0]["lr"] = lr / 3 if (-theta).exp() <= 0.03 else lr
        optimizer.zero_grad()
        tau, loss = (-theta).exp(), 0.0
        for own in (h, (s.T - s.diag()[:, None])):
            loss = loss + (tau * ((own[off].view(len(s), -1) / tau).exp().mean(1).log() + rho)).mean() / 2
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            theta.clamp_(0, math.log(100))
        yield (-theta).exp().item()


@pytest.mark.parametrize(
    "rho, lr, last, linear",
    [
        # the authors' rate for CC3M; a linear step is 1/tau times as long
        pytest.param(0.4, 2e-4, 0.0758, 0.134, marks=pytest.mark.slow),
        (6.0, 2e-2, 0.01, 0.01),  # below 0.03, down to the bound
    ],
)
def test_a_logarithm_moves_as_by_adamw(rho, lr, last, linear):
    """Compare 400 steps on one batch with FastCLIP's code; with gamma = 1 the averages are the batch's own."""
    g = torch.Generator().manual_seed(0)
    z1, z2 = torch.nn.functional.normalize(torch.randn(2, 64, 16, generator=g, dtype=torch.float64), dim=2)
    est, other = (
        compopt.FastCLIPEstimator(64, rho=rho, lr=lr, eps=0.0, parametrization=form, dtype=torch.float64)
        for form in ("log", "linear")
    )
    passed = []
    for want in adamw(z1, z2, rho, lr, 400):
        for each in (est, other):
            each(z1, z2, torch.arange(64))
            each.step()
        passed.append(est.temperature.tau.item())
        assert passed[-1] == pytest.approx(want, rel=1e-9)
    assert passed[-1] == pytest.approx(last, abs=3e-4)
    assert other.temperature.tau.item() == pytest.approx(linear, abs=1e-3)
    assert (min(passed) < 0.03) == (last == 0.01)  # the reduced rate was used


def test_rho_beyond_reach_is_warned_about_once():
    """With rho >= log|N_i| the constraint can never bind (G is never negative), which is warned about once."""
    est = compopt.ISogCLREstimator(N, rho=6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for z1, z2, index in batches(N, 4, seed=7, dtype=torch.float32):
            run(est, z1, z2, index)
            est.step()
    assert len([w for w in caught if "rho" in str(w.message)]) == 1
    reachable = compopt.ISogCLREstimator(N, rho=1.0)  # log 5 = 1.6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(reachable, *batches(N, 1, seed=7, dtype=torch.float32)[0])


def test_recommended():
    """Recommend 128 samples at tau = 0.07, a quarter of a small data set, and InfoNCE for large batches."""
    est = compopt.recommended(8)
    assert isinstance(est, compopt.MemoryEstimator)
    assert est.normalizer.length == 128 and est.sample_groups[0]["tau"] == 0.07
    assert compopt.recommended(8, n=100, mode="unimodal").normalizer.length == 25
    assert isinstance(compopt.recommended(8, batch_size=1023), compopt.MemoryEstimator)
    for options in ({"batch_size": 16, "directions": "forward"}, {"batch_size": 1024}):
        assert isinstance(compopt.recommended(8, **options), compopt.InfoNCEEstimator)
        assert isinstance(compopt.recommended(8, candidates=None, **options), compopt.DCLEstimator)
    assert est.normalizer.candidates == 1000 and compopt.recommended(8, candidates=None).normalizer.candidates is None
    with pytest.raises(ValueError, match="batch_size"):
        compopt.recommended(8, batch_size=0)
    with pytest.raises(ValueError, match="mode"):
        compopt.recommended(8, mode="both")


@pytest.mark.parametrize("options", [{}, {"momentum": True}, {"batch_size": 2048}, {"directions": "forward"}])
def test_recommended_takes_a_temperature_and_no_factor(options):
    est = compopt.recommended(8, tau=0.2, multiply_tau=False, **options)
    assert est.sample_groups[0]["tau"] == 0.2 and est.multiply_tau is False


# settings ---------------------------------------------------------------------------------------------

PAGES = {"osgd": "minibatch", "spectral": "minibatch"}
PRESETS = {"sogclr": "SogCLR", "isogclr": "ISogCLR", "fastclip": "FastCLIP", "neuclip": "NeuCLIP", "emc2": "EMC2"}
SAMPLERS = {"osgd": "OrderedBatchSampler", "spectral": "SpectralBatchSampler"}
EVERY = [(name, scale) for name, scales in SETTINGS.items() for scale in scales]


@pytest.mark.parametrize("name, scale", EVERY)
def test_settings_build_what_they_are_for(name, scale):
    values, kind = compopt.presets.settings(name, scale), name.partition("-")[0]
    if name in SAMPLERS:
        getattr(compopt.samplers, SAMPLERS[name])(6400, **values)
        return
    size = {"dim": 4} if name == "neuclip" else {"n": 10}
    est = getattr(compopt, PRESETS[kind] + "Estimator")(**size, **values)
    group = est.sample_groups[0]
    taken = {key: group[group_key(group, key)] for key in ("gamma", "rho", "burn_in") if key in values}
    assert taken == {key: values[key] for key in taken} and est.mode == values.get("mode", "bimodal")
    if values.schedule:
        compopt.schedules.CosineGamma(est, 10, **values.schedule)


def test_defaults_are_the_published_values_that_their_pages_name():
    defaults = {name: each.default for name, each in signature(compopt.NeuCLIPEstimator).parameters.items()}
    network = {**SETTINGS["neuclip"]["cc3m"], "learn_tau": False}  # measured: the preset's docstring says why
    assert {name: defaults[name] for name in network} == network
    for mode, scale in (("unimodal", "imagenet"), ("bimodal", "imagenet-pairs")):
        (group,) = compopt.SogCLREstimator(10, mode=mode).sample_groups
        published = SETTINGS["sogclr"][scale]
        assert {name: group[name] for name in published if name != "mode"}.items() <= published.items()


TRAINING = {"optimizer", "batch_size", "lr", "weight_decay", "warmup_epochs", "warmup_steps", "epochs", "samples"}
TRAINING |= {"gamma_decay"}  # of FastCLIP


@pytest.mark.parametrize("name, scale", EVERY)
def test_settings_name_the_training_of_the_paper(name, scale):
    training = compopt.presets.settings(name, scale).training
    assert training.keys() <= TRAINING and not {"warmup_epochs", "warmup_steps"} <= training.keys()
    assert ("gamma_decay" in training) == bool(compopt.presets.settings(name, scale).schedule)
    if "libauc" not in scale and (name, scale) != ("fastclip-v3", "laion"):  # whose training no paper states
        assert training["optimizer"] in ("adam", "adamw", "lars") and training["batch_size"] > 0
    if name in SAMPLERS:
        assert training["batch_size"] == compopt.presets.settings(name, scale)["batch_size"]


def test_settings_refuse_unknown_names_and_are_copies():
    with pytest.raises(ValueError, match="'fastclip-v3'.*'fastclip'"):
        compopt.presets.settings("fastclip")
    with pytest.raises(ValueError, match="'laion'.*'imagenet'"):
        compopt.presets.settings("fastclip-v3", "imagenet")
    first = compopt.presets.settings("fastclip-v3")
    first["rho"] = first.schedule["gamma_min"] = 1.0
    first.training["lr"] = 1.0
    again = compopt.presets.settings("fastclip-v3", "cc3m")
    assert (again["rho"], again.schedule, again.training["lr"]) == (6.5, {"gamma_min": 0.2}, 1e-3)


def row(name, scale):
    """Return a line of the table on the paper's page."""
    values = SETTINGS[name][scale]
    number = lambda value: f"{value:.4g}" if isinstance(value, float) else repr(value)  # noqa: E731
    said = ", ".join(f"{key}={number(value)}" for key, value in values.items())
    schedule = ", ".join(f"{key}={value}" for key, value in values.schedule.items())
    return f'| `"{name}", "{scale}"` | `{said}` | {f"`{schedule}`" if schedule else ""} | {values.source} |'


def test_the_tables_of_the_papers_are_the_settings():
    pages = Path(__file__).parent.parent / "docs" / "papers"
    for page in pages.glob("*.md"):
        wanted = [row(*at) for at in EVERY if PAGES.get(at[0], at[0].partition("-")[0]) == page.stem]
        found = [line for line in page.read_text().splitlines() if line.startswith('| `"')]
        assert found == wanted, "\n".join([page.name, *wanted])


@pytest.mark.parametrize("options", [{"tau": 14.3}, {"tau": torch.tensor(14.3)}, {}], ids=["number", "tensor", "call"])
@pytest.mark.parametrize(("normalize", "value"), [(True, 14.3), (False, 14.3), (True, 1.0)])
def test_a_logit_scale_in_place_of_a_temperature_is_warned_about_once(options, normalize, value):
    given = {key: value * torch.ones(()) if isinstance(tau, torch.Tensor) else value for key, tau in options.items()}
    est = compopt.DCLEstimator(**given, normalize=normalize)
    z1, z2 = torch.randn(2, 8, 8)
    told = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            est(z1, z2, torch.arange(8), **({} if options else {"tau": value}))
        told.append(["logit scale" in str(warning.message) for warning in found])
    assert told == [[True] * (normalize and value > 5), []]


def test_recommended_counts_the_positive_among_candidates():
    for options, kind in (
        ({"batch_size": 16}, compopt.MemoryEstimator),
        ({"batch_size": 16, "directions": "forward"}, compopt.InfoNCEEstimator),
        ({"batch_size": 2048}, compopt.InfoNCEEstimator),
        ({"batch_size": 16, "momentum": True}, compopt.MemoryEstimator),
    ):
        est = compopt.recommended(8, candidates=500, **options)
        assert type(est) is kind and est.normalizer.candidates == 500 and "candidates: 500" in repr(est)
    with pytest.raises(ValueError, match="candidates"):
        compopt.recommended(8, candidates=0)


@pytest.mark.parametrize(
    ("batch", "mode", "told"), [(2, "bimodal", 1), (4, "bimodal", 1), (5, "bimodal", 0), (3, "unimodal", 0)]
)
def test_dcl_warns_once_of_few_negatives(batch, mode, told):
    est, other = compopt.DCLEstimator(mode=mode), compopt.InfoNCEEstimator(mode=mode)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            est(*torch.randn(2, batch, 8))
            other(*torch.randn(2, batch, 8))
    assert ["negatives per anchor" in str(each.message) for each in found] == [True] * told


def test_a_temperature_per_anchor_belongs_to_the_call():
    with pytest.raises(ValueError, match=r"tau must be a number or a 0-d tensor, got shape \(3,\)"):
        compopt.FixedTemperature(torch.ones(3))
