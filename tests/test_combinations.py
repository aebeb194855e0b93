"""Every pair of options that can be combined equals a dense definition in float64, or is refused at once."""

import inspect
import math
from dataclasses import dataclass, fields
from typing import get_args

import pytest
import torch

import compopt
from compopt import PairPolicy
from compopt.temperatures.dual import Scope
from tests.helpers import call, features, generator, near
from tests.reference import PolicyReference
from tests.reference.pairs import anchors

KINDS = ("bimodal", "unimodal", "forward")
BATCH, DIM, TAU, GAMMA = 6, 4, 0.4, 0.6
ZERO = torch.zeros((), dtype=torch.float64)
LABELS, KEY = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 0, 0, 1, 1, 1])
G = generator(80)
EXTRA = torch.randn(BATCH, DIM, generator=G, dtype=torch.float64)
GUIDES = torch.randn(3, BATCH, 3, generator=G, dtype=torch.float64)  # of both views, and of further candidates
TAUS = 0.3 + 0.2 * torch.rand(BATCH, 1, generator=G, dtype=torch.float64)

# Options of a policy, arguments of a call and options of an estimator by name, each with what it needs besides.
POLICY = {
    "false_negatives": {"false_negatives": 0.1},
    "guided": {"false_negatives": 0.1, "guided": True},
    "spare_negatives": {"false_negatives": 0.1, "spare_negatives": True},
    "hardness": {"hardness": 1.5},
    "within": {"within": True},
}
CALL = {
    "index2": {"index2": torch.tensor([0, 1, 2, 2, 4, 5])},
    "labels": {"labels": LABELS},
    "tau": {"tau": TAUS},
    "extra": {"extra": EXTRA},
    "extra_index": {"extra": EXTRA, "extra_index": torch.tensor([0, 9, 3, 1, 5, 8])},
}
OPTIONS = {
    "normalize": {"normalize": False},
    "multiply_tau": {"multiply_tau": False},
    "chunk_size": {"chunk_size": 2},
}
FEATURES = {**POLICY, **CALL, **OPTIONS}
# Covered by other tests: names of keys, what a policy requires, parts, and what does not change results.
ELSEWHERE = {"z1", "z2", "index", "pairs"}
ELSEWHERE |= {"keys"}  # test_momentum: for memories only
ELSEWHERE |= {"normalizer", "temperature", "mode", "directions", "sample_groups", "backend"}
ELSEWHERE |= {"process_group", "offload", "offload_dir", "shard", "dtype"}


def test_every_option_is_here():
    named = inspect.signature(compopt.ContrastiveEstimator.feature_gradients).parameters.keys() - {"self"}
    options = inspect.signature(compopt.ContrastiveEstimator).parameters.keys()
    assert {field.name for field in fields(PairPolicy)} == set(POLICY)
    parts = (set(CALL) - {"extra", "extra_index"}) | {"negatives"}
    assert named | options == parts | set(OPTIONS) | ELSEWHERE


@dataclass
class Case:
    """A combination: options of the policy, arguments of the call, options of the estimator."""

    kind: str
    policy: dict
    given: dict
    options: dict

    @classmethod
    def of(cls, kind, *names):
        """Return the combination of some features."""
        policy, given, options = ({} for _ in range(3))
        for name in names:
            for group, target in ((POLICY, policy), (CALL, given), (OPTIONS, options)):
                target |= group.get(name, {})
        options |= {"directions": "forward"} if kind == "forward" else {"mode": kind}
        extra = "extra" in given
        if policy.get("guided"):
            given["guide"] = [*GUIDES[: 3 if extra and not policy.get("spare_negatives") else 2]]
        if policy.get("within"):
            given["within"] = (KEY, KEY.flip(0)) if extra else KEY
        return cls(kind, policy, given, options)

    def views(self, seed):
        """Return features of the modalities or views that require gradients."""
        return [z.requires_grad_() for z in features(BATCH, DIM, seed)]

    @property
    def normalize(self):
        return self.options.get("normalize", True)


def dense(case, z, tau):
    """Return ``(anchor, tau, log ghat)`` of every anchor, with the graph; ``None`` without negatives."""
    given, index = case.given, list(range(BATCH))
    keys = {name: given.get(name) for name in ("index2", "extra_index")} | {"group": given.get("labels")}
    keys = {name: None if key is None else key.tolist() for name, key in keys.items()}
    found = anchors(z, index, case.kind, case.normalize, **keys, extra=given.get("extra"))
    within = given.get("within")
    within = within if within is None or isinstance(within, tuple) else (within,)
    PolicyReference(**case.policy).apply(found, given.get("guide"), within, case.normalize)
    result = []
    for a in found:
        t = tau if tau.dim() == 0 else tau[a.position, min(a.direction, tau.shape[1] - 1)]
        if not a.negatives:
            result.append((a, t, None))
            continue
        s, b = torch.stack(a.negatives), torch.tensor(a.log_weights, dtype=torch.float64)
        log_g = ((s - a.positive) / t + b).logsumexp(0) - math.log(len(s))
        result.append((a, t, log_g))
    return result


def evaluated(est, case, z, **more):
    """Return the loss of a call."""
    return call(est, *z, **{"index": torch.arange(BATCH), **case.given, **more})


def same(loss, theirs, leaves):
    """Compare a value and its gradients."""
    near(loss, theirs, 1e-9, what="value")
    wanted = torch.autograd.grad(theirs, leaves, allow_unused=True)
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    for got, want in zip(found, wanted, strict=True):
        near(*(ZERO if x is None else x for x in (got, want)), 1e-8, atol=1e-10, what="gradient")


def follow_pair(kind, *names):
    """Compare a stateless estimator without the positive with the dense definition; return an error, or ``None``."""
    case = Case.of(kind, *names)
    z, extra = case.views(81), case.given.get("extra")
    tau = case.given.pop("tau", torch.tensor(TAU, dtype=torch.float64)).clone().requires_grad_()
    leaves = [*z, tau]
    if extra is not None:
        case.given["extra"] = extra.clone().requires_grad_()
        leaves.append(case.given["extra"])
    try:
        parts = compopt.BatchNormalizer(), compopt.FixedTemperature(TAU)
        est = compopt.ContrastiveEstimator(*parts, **case.options, pairs=PairPolicy(**case.policy))
        loss = evaluated(est, case, z, tau=tau)
    except (ValueError, TypeError) as error:
        return str(error)
    terms = []
    for _, t, log_g in dense(case, z, tau):
        terms.append(ZERO if log_g is None else t * log_g if est.multiply_tau else log_g)
    same(loss, torch.stack([torch.as_tensor(x, dtype=torch.float64) for x in terms]).mean(), leaves)
    return None


def refused(kind, *pair):
    """Return True for a pair of options that must be refused."""
    return kind == "unimodal" and "index2" in pair


@pytest.mark.covering()  # each first option daily in one kind
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", FEATURES)
def test_pairs_of_options(first, kind):
    names = list(FEATURES)
    for second in names[names.index(first) :]:
        error = follow_pair(kind, first, second)
        assert (error is not None) == refused(kind, first, second), (first, second, error)


# Normalizers with their log-normalizers, and those that a database entry with a reference stands for.
NORMALIZERS = {
    "batch": lambda: compopt.BatchNormalizer(include_positive=True),
    "average, none": lambda: compopt.MovingAverageEstimator(BATCH, GAMMA, "none"),
    "average, positive": lambda: compopt.MovingAverageEstimator(BATCH, GAMMA, "positive"),
    "network": lambda: compopt.NeuralNormalizer(DIM, 6, 0.2, 3, 3),
    "memory": lambda: compopt.MemoryNormalizer(DIM, 14),
    "chains": lambda: compopt.MCMCNegativeSampler(BATCH),
    "sigmoid": compopt.SigmoidNormalizer,
}


def test_every_normalizer_is_here():
    exported = {cls for cls in vars(compopt).values() if inspect.isclass(cls) and issubclass(cls, compopt.Normalizer)}
    assert exported - {compopt.Normalizer} == {type(build()) for build in NORMALIZERS.values()}


DUAL = {"rho": 0.0, "lr": 0.0, "tau_init": TAU, "tau_min": 0.1, "tau_max": 1.0, "max_grad": 1e9, "beta": 1.0}
TEMPERATURES = {
    "individual": lambda: compopt.TemperatureDual(BATCH, **DUAL),
    "global": lambda: compopt.TemperatureDual(None, **DUAL, mode="global"),
    "learned": lambda: compopt.FixedTemperature(TAU, learn=True, dtype=torch.float64),
    "tensor": lambda: compopt.FixedTemperature(torch.tensor(TAU, dtype=torch.float64, requires_grad=True)),
}


def mean_gradient(est, kind):
    """Return the derivative of the last call's objective with respect to a temperature that all anchors share."""
    if kind == "individual":
        return est.read(torch.arange(BATCH))["tau_exp_avg"].mean()
    if kind == "global":
        return est.temperature.state_dict()["state"]["exp_avg"]
    if kind == "learned":
        return est.temperature.log_inverse.grad / -TAU
    return est.temperature.tensor.grad


@pytest.mark.filterwarnings("ignore:the gradient of a learned temperature")
@pytest.mark.covering(all=True)
@pytest.mark.parametrize("mode", ["bimodal", "unimodal"])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_normalizer_with_every_temperature(name, mode):
    """All kinds follow the gradient of individual temperatures, which test_agreement compares with references."""
    found = {}
    for kind, temperature in TEMPERATURES.items():
        if name == "sigmoid" and kind in ("individual", "global"):
            with pytest.raises(ValueError, match="a SigmoidNormalizer lacks"):
                compopt.ContrastiveEstimator(NORMALIZERS[name](), temperature(), mode)
            continue
        est = compopt.ContrastiveEstimator(NORMALIZERS[name](), temperature(), mode, dtype=torch.float64)
        found[kind] = []
        for seed in (84, 85):
            for leaf in (getattr(est.temperature, name, None) for name in ("log_inverse", "tensor")):
                if leaf is not None:
                    leaf.grad = None
            est(*(z.requires_grad_() for z in features(BATCH, DIM, seed)), torch.arange(BATCH)).backward()
            est.step()
            found[kind].append(float(mean_gradient(est, kind)))
    assert all(gradient == pytest.approx(found["tensor"], rel=1e-9) for gradient in found.values()), found


def test_every_temperature_is_here():
    exported = {cls for cls in vars(compopt).values() if inspect.isclass(cls) and issubclass(cls, compopt.Temperature)}
    assert exported - {compopt.Temperature} == {type(build()) for build in TEMPERATURES.values()}
    assert set(get_args(Scope)) == {"individual", "global"}
