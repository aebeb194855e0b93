"""Every pair of options that can be combined equals a dense definition in float64, or is refused at once."""

import inspect
import math
from dataclasses import dataclass, fields

import pytest
import torch

import compopt
from compopt import PairPolicy
from tests.helpers import features, generator, near
from tests.reference import PolicyReference
from tests.reference.pairs import anchors

KINDS = ("bimodal", "unimodal", "forward")
BATCH, DIM, TAU = 6, 4, 0.4
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
    "spare_extra": {"false_negatives": 0.1, "spare_extra": True},
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
ELSEWHERE = {"z1", "z2", "index", "pairs", "guide", "within"}
ELSEWHERE |= {"encode", "momentum_features"}  # test_mcmc, test_momentum: for samplers and memories only
ELSEWHERE |= {"normalizer", "temperature", "mode", "directions", "sample_groups", "backend"}
ELSEWHERE |= {"process_group", "offload", "offload_dir", "shard", "dtype"}


def test_every_option_is_here():
    call = inspect.signature(compopt.ContrastiveEstimator.feature_gradients).parameters.keys() - {"self"}
    options = inspect.signature(compopt.ContrastiveEstimator).parameters.keys()
    assert {field.name for field in fields(PairPolicy)} == set(POLICY)
    assert call | options == set(CALL) | set(OPTIONS) | ELSEWHERE


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
            given["guide"] = [*GUIDES[: 3 if extra and not policy.get("spare_extra") else 2]]
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
    return est(*z, **{"index": torch.arange(BATCH), **case.given, **more})


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


@pytest.mark.parametrize("option", POLICY)
@pytest.mark.parametrize("normalizer", [lambda: compopt.MCMCNegativeSampler(BATCH), compopt.SigmoidNormalizer])
def test_normalizers_that_refuse_every_policy(normalizer, option):
    policy, case = PairPolicy(**POLICY[option]), Case.of("bimodal", option)
    with pytest.raises(ValueError):
        compopt.ContrastiveEstimator(normalizer(), compopt.FixedTemperature(TAU), pairs=policy)
    est = compopt.ContrastiveEstimator(normalizer(), compopt.FixedTemperature(TAU))
    with pytest.raises(ValueError):
        evaluated(est, case, case.views(82), pairs=policy)
