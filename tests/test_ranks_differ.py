"""Ranks that differ: every argument of a constructor or a call is compared between ranks, or listed with a reason."""

import functools
import inspect

import pytest
import torch
import torch.distributed as dist

import compopt
from compopt import losses
from tests import test_losses
from tests.helpers import features
from tests.pool import the_pool

pytestmark = pytest.mark.distributed
N, B = 30, 6  # samples; batch of each rank
# arguments of constructors that may differ between ranks
PLACEMENT = {
    "process_group": "ranks of different groups exchange no messages",
    "offload": "the same rows in another memory",
    "offload_dir": "a folder of the rank's own machine",
    "chunk_size": "the same sums with less memory; a rank may have less of it",
    "backend": "the same sums by another kernel; a rank may lack Triton",
}
# arguments of calls that may differ: why, and what of them is compared nevertheless
OF_THE_SAMPLES = dict.fromkeys(
    ("z1", "z2", "index", "index2", "labels", "negatives", "pairs of a call")
    + ("keys", "log_g", "previous", "g", "args", "gradient", "anchors of a network")
    + ("value", "scores", "candidates", "losses", "relevance", "items"),
    "values of the rank's own samples; all ranks or none pass them, with the same dtype and shape per sample",
)
FUNCTIONS = {
    "f": "a function, which has no value to compare",
    "encode": "a function, which has no value to compare; all ranks or none pass it",
    "estimator": "an object, whose configuration and hyper-parameters are compared",
}

# two values of every argument of a constructor, and of every hyper-parameter
VALUES = {
    "include_positive": (False, True),
    "tau": (0.2, 0.3),
    "learn_tau": (False, True),
    "mode": ("bimodal", "unimodal"),
    "directions": ("both", "forward"),
    "normalize": (True, False),
    "multiply_tau": (True, False),
    "shard": (False, True),
    "dtype": (torch.float32, torch.float64),
    "sample_groups": ([{"n": N, "gamma": 0.5}], [{"n": N, "gamma": 0.75}]),
    "pairs": (None, compopt.PairPolicy(false_negatives=0.5)),
    "normalizer": (lambda: compopt.MovingAverageEstimator(N), lambda: compopt.MCMCNegativeSampler(N)),
    "temperature": (lambda: compopt.FixedTemperature(0.2), lambda: compopt.TemperatureDual(N, rho=0.1)),
    "n": (N, N + 1),
    "burn_in": (0.5, 0.25),
    "proposals": ("pool", "sweep"),
    "seed": (0, 1),
    "draws": (3, 4),
    "version": ("v1", "v3"),
    "gamma": (0.75, 0.5),
    "rho": (0.125, 0.25),
    "lr": (0.125, 0.25),
    "tau_lr": (0.125, 0.25),
    "tau_init": (0.25, 0.3),
    "tau_min": (0.01, 0.02),
    "tau_max": (0.5, 0.75),
    "max_grad": (1.5, 2.5),
    "beta": (0.75, 0.5),
    "betas": ((0.5, 0.75), (0.25, 0.75)),
    "reference": ("none", "positive"),
    "eps": (0.0, 0.125),
    "parametrization": ("linear", "log"),
    "lr_switch": ((0.5, 0.1), (0.5, 1.0)),
    "dim": (4, 5),
    "candidates": (9, 8),
    "length": (8, 9),
    "momentum": (False, True),
    "prototypes": (8, 9),
    "updates": (1, 2),
    "restart_every": (3, 4),
    "through_alpha": (False, True),
    "bias": (-2.0, -1.0),
    "learn": (False, True),
    "domain": ("linear", "log"),
    "width": (1, 2),
    "rate": (0.5, 0.25),
    "rank": (False, True),
    "max_fpr": (0.5, 0.25),
    "min_tpr": (0.5, 0.25),
    "margin": (1.0, 0.5),
    "tau_positive": (1.0, 0.5),
}
ADAGRAD = functools.partial(torch.optim.Adagrad, lr_decay=0.25)
OF_A_CLASS = {
    (compopt.TemperatureDual, "mode"): ("individual", "global"),
    (compopt.NeuralNormalizer, "optimizer"): (torch.optim.Adagrad, ADAGRAD),
    (compopt.NeuCLIPEstimator, "optimizer"): (torch.optim.Adagrad, ADAGRAD),
    (compopt.TemperatureDual, "optimizer"): ("momentum", "adam"),
    (compopt.ISogCLREstimator, "optimizer"): ("momentum", "adam"),
}
# what the message shows if it is not the values themselves
SHOWN = {
    "learn_tau": "sample_groups[0].tau by rank [0.07, none]",
    "directions": "options.directions by rank [none, 'forward']",
    "pairs": "options.pairs by rank [none, 'PairPolicy(false_negatives=0.5)']",
    "normalizer": "method.normalizer by rank ['MovingAverageEstimator', 'MCMCNegativeSampler']",
    "temperature": "method.temperature by rank ['FixedTemperature', 'TemperatureDual']",
    "sample_groups": "sample_groups[0].gamma by rank [0.5, 0.75]",
    "version": "method.temperature by rank ['FixedTemperature', 'TemperatureDual']",
    "momentum": "options.momentum by rank [none, True]",
    "learn": "by rank [",
    "domain": "columns.log_u",
    "width": "the feature dimension, or the numbers per sample of a compositional loss: by rank [1, 2]",
    "rank": "columns.rank[0] by rank [none, 2]",
    (compopt.NeuralNormalizer, "optimizer"): "optimizer.lr_decay by rank [0, 0.25]",
    (compopt.NeuCLIPEstimator, "optimizer"): "optimizer.lr_decay by rank [0, 0.25]",
    (compopt.TemperatureDual, "mode"): "columns.tau",
    (compopt.NeuCLIPEstimator, "learn_tau"): "method.temperature by rank ['FixedTemperature', 'TemperatureDual']",
    (compopt.SigLIPEstimator, "tau"): "tau[0] by rank [0.19999998807907104, 0.29999998211860657]",
    (compopt.FixedTemperature, "dtype"): "torch.float32', '",
    (compopt.SigmoidNormalizer, "dtype"): "torch.float32', '",
}
REQUIRED = {
    "n": N,
    "dim": 4,
    "normalizer": lambda: compopt.MovingAverageEstimator(N),
    "temperature": lambda: compopt.FixedTemperature(),
}
# further arguments with which an argument has an effect
BESIDE = {
    "draws": {"proposals": "dataset"},
    "parametrization": {"mode": "global"},
    "lr_switch": {"mode": "global"},
    (compopt.FixedTemperature, "dtype"): {"learn": True},
    (compopt.SigmoidNormalizer, "dtype"): {"learn": True},
    (compopt.FastCLIPEstimator, "parametrization"): {},
}
OF_A_DUAL = ("rho", "tau_lr", "tau_min", "tau_max", "max_grad", "betas", "parametrization")
BESIDE |= {(compopt.NeuCLIPEstimator, name): {"learn_tau": True} for name in OF_A_DUAL}
REFUSED = {(compopt.EMC2Estimator, "pairs"), (compopt.SigLIPEstimator, "pairs")}  # at construction
ALONE = (compopt.MovingAverageEstimator, losses.InnerAverage, compopt.TemperatureDual)
ALONE += (compopt.NeuralNormalizer, compopt.MCMCNegativeSampler)
ABSTRACT = {compopt.Estimator, compopt.Normalizer, compopt.Temperature, losses.CompositionalLoss, losses.PairLoss}
EVERY = [getattr(module, name) for module in (compopt, losses) for name in module.__all__]
KINDS = [kind for kind in EVERY if isinstance(kind, type) and issubclass(kind, compopt.Estimator)]
KINDS = [kind for kind in KINDS if kind not in ABSTRACT]


def given_by(table, kind, name, default=None):
    return table.get((kind, name), table.get(name, default))


def made(value):
    """Build a fresh object, of which the table has the function that makes it."""
    return value() if inspect.isfunction(value) else value


def build(kind, group, alone=False, **given):
    """Return the object with the required arguments and these, as part of an estimator unless it can be used alone."""
    parameters = inspect.signature(kind).parameters
    required = {name: value for name, value in REQUIRED.items() if name in parameters}
    if kind in (losses.RobustLoss, compopt.NeuralNormalizer, compopt.NeuCLIPEstimator):
        required.pop("n")
    arguments = {name: made(value) for name, value in {**required, **given}.items()}
    in_group = {"process_group": group}
    if alone or "chunk_size" in parameters or issubclass(kind, losses.CompositionalLoss):
        return kind(**arguments, **in_group)
    part, batch, tau = kind(**arguments), compopt.BatchNormalizer(), compopt.FixedTemperature(0.2)
    if isinstance(part, compopt.ScoreKeeper):
        est = compopt.DCLEstimator(**in_group)
        part.attach(est)
        return est
    own = (part, tau) if isinstance(part, compopt.Normalizer) else (batch, part)
    plain = not isinstance(part, compopt.SigmoidNormalizer)
    return compopt.ContrastiveEstimator(*own, multiply_tau=plain, **in_group)


def call(obj, rank):
    """Call the object as it requires, on the samples of this rank."""
    index = torch.arange(B) + B * rank
    if type(obj) in test_losses.CASES_BY_KIND:
        given = test_losses.batch(test_losses.CASES_BY_KIND[type(obj)], rank)
        return obj(*given[: len(given) - (isinstance(obj, losses.RobustLoss) and obj.n is None)])
    dim = getattr(getattr(obj, "normalizer", obj), "dim", 4)
    z1, z2 = features(B, dim, rank, dtype=torch.float32)
    if isinstance(obj, compopt.MovingAverageEstimator):
        return obj.update(z1[:, 0], index)
    if isinstance(obj, losses.InnerAverage):
        return obj.update(z1[:, 0] if obj.width == 1 else z1[:, :2], index)
    if isinstance(obj, compopt.TemperatureDual):
        return obj.update(z1[:, 0], None if obj.mode == "global" else index)
    if isinstance(obj, compopt.NeuralNormalizer):
        return obj.update(z1, z1[:, 0], 0.2, z2)
    if isinstance(obj, compopt.MCMCNegativeSampler):
        return obj.sample(z1, index, torch.arange(dim))
    more = {}
    if getattr(obj.normalizer, "momentum", False):
        more["keys"] = (z1, z2)
    if getattr(obj.normalizer, "draws", None):
        obj.normalizer.encode = lambda missing: (torch.ones(len(missing), dim), torch.ones(len(missing), dim))
    return obj(z1, z2, index, **more)


def refusal(act):
    """Return the message with which a call is refused, or that none was."""
    try:
        act()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "accepted"


def constructed(group, kind):
    """Return, by argument, the message of a call of objects that were built with another value on every rank."""
    found, rank = {}, dist.get_rank(group)
    for name in inspect.signature(kind).parameters:
        if name in PLACEMENT or name in FUNCTIONS or (kind, name) in REFUSED:
            continue
        value = given_by(OF_A_CLASS, kind, name) or VALUES[name]
        alone = kind in ALONE and name not in ("draws", "proposals", "seed")
        obj = build(kind, group, alone, **given_by(BESIDE, kind, name, {}), **{name: value[rank]})
        found[name] = refusal(lambda obj=obj: call(obj, rank))
    return found


def edited(group, kind):
    """Return, by hyper-parameter, the message of a call after it was edited on rank 1."""
    found, rank = {}, dist.get_rank(group)
    obj = build(kind, group, kind in ALONE)
    call(obj, rank)
    obj.step()
    own = obj.sample_groups[0]
    for key in own:
        before, name = own[key], key.rpartition(".")[2]
        if name in ("n", "reference"):  # fixed after the first call
            continue
        if rank:
            own[key] = next(value for value in VALUES[name] if value != before)
        found[name] = before, next(value for value in VALUES[name] if value != before), refusal(lambda: call(obj, rank))
        own[key] = before
    call(obj, rank)
    return found


def check_shown(kind, name, one, other, messages):
    wanted = given_by(SHOWN, kind, name)
    for message in messages:
        assert message.startswith("the ranks differ in "), (kind, name, message)
        for text in (repr(one), repr(other)) if wanted is None else (wanted,):
            assert text in message, (kind, name, message)


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_arguments_of_constructors(kind):
    answers = the_pool().run(constructed, 2, kind)
    for name in answers[0]:
        one, other = given_by(OF_A_CLASS, kind, name) or VALUES[name]
        check_shown(kind, name, one, other, [answer[name] for answer in answers])


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_hyper_parameters_that_one_rank_edits(kind):
    answers = the_pool().run(edited, 2, kind)
    for name, (one, other, _) in answers[0].items():
        for answer in answers:
            assert f"{name} by rank [{one!r}, {other!r}]" in answer[name][2], (name, answer[name])


# calls ------------------------------------------------------------------------------------------------------------

I = torch.arange(B)  # noqa: E741
ONES = torch.ones(B)
Z = features(B, 4, 0, dtype=torch.float32)
BOTH = {"z1": Z[0], "z2": Z[1], "index": I}
GUIDED = compopt.PairPolicy(guided=True, false_negatives=0.1)
BOUND = [GUIDED.bind(guide=guide) for guide in (Z, (ONES[:, None],) * 2)]
MEAN = {"g": ONES, "index": I, "f": torch.square}
KEYS = "all ranks must pass the same arguments"
GIVEN = "= (0: none, 1: given): by rank [0, 1]"
DTYPE = "the features' dtype: by rank [4, 8]"


def composed(estimator, **given):
    return compopt.compositional_loss(estimator=estimator, **given)


def wide(given, *names):
    return {name: given[name].double() for name in names}


def operation(kind, method="__call__", **options):
    """Return how to build an object, and its method."""
    return functools.partial(build, kind, alone=True, **options), method


AVERAGE, INNER = (operation(kind, "update") for kind in ALONE[:2])
DUAL, NETWORK = operation(compopt.TemperatureDual, "update"), operation(compopt.NeuralNormalizer, "update")
PREDICTION, CHAINS = (
    operation(compopt.NeuralNormalizer, "predict"),
    operation(compopt.MCMCNegativeSampler, "sample"),
)
COMPOSED, INNER_LOSS = ((make, composed) for make, _ in (AVERAGE, INNER))
LEARNING = {"anchors": Z[0], "log_g": ONES, "tau": 0.2}
# by signature: argument -> operation, arguments on both ranks, on rank 0, on rank 1, what the message shows
DIFFERENT = {
    compopt.ContrastiveEstimator.__call__: {
        "z1": (operation(compopt.DCLEstimator), BOTH, {}, wide(BOTH, "z1", "z2"), DTYPE),
        "z2": (operation(compopt.DCLEstimator), BOTH, {}, wide(BOTH, "z1", "z2"), DTYPE),
        "index": (operation(compopt.MemoryEstimator), {"z1": Z[0], "z2": Z[1]}, {}, {"index": I}, "index" + GIVEN),
        "index2": (operation(compopt.SogCLREstimator), BOTH, {}, {"index2": I}, KEYS),
        "labels": (operation(compopt.DCLEstimator), BOTH, {}, {"labels": I}, KEYS),
        "tau": (operation(compopt.DCLEstimator), BOTH, {"tau": 0.2}, {"tau": 0.3}, "of tau=: by rank [0.2, 0.3]"),
        "negatives": (operation(compopt.DCLEstimator), BOTH, {"negatives": Z[0]}, {"negatives": (Z[0], I)}, "[1, 2]"),
        "pairs": (
            operation(compopt.DCLEstimator), BOTH, {"pairs": BOUND[0]}, {"pairs": BOUND[1]},
            "dimensions.guide1 by rank [torch.Size([4]), torch.Size([1])]",
        ),
        "keys": (operation(compopt.MemoryEstimator), BOTH, {}, {"keys": Z}, GIVEN),
    },
    compopt.compositional_loss: {
        "g": (COMPOSED, MEAN, {}, wide(MEAN, "g"), DTYPE),
        "args": (COMPOSED, MEAN | {"f": torch.mul}, {"args": (ONES,)}, {"args": (ONES.int(),)}, "0 by rank ['torch.f"),
        "previous": (
            INNER_LOSS, MEAN | {"f": lambda u, *args: u}, {"previous": ONES}, {"args": (ONES,)},
            "previous by rank ['torch.float32 [1]', none]; 0 by rank [none, 'torch.float32 []']",
        ),
        "beta": (
            INNER_LOSS, {**MEAN, "previous": ONES}, {"beta": 0.5}, {"beta": 0.75}, "of beta=: by rank [0.5, 0.75]"
        ),
    },
    compopt.MovingAverageEstimator.update: {
        "log_g": (AVERAGE, {"index": I}, {"log_g": ONES}, {"log_g": ONES.double()}, DTYPE),
    },
    losses.InnerAverage.update: {
        "value": (INNER, {"index": I}, {"value": ONES}, {"value": ONES.double()}, DTYPE),
        "previous": (INNER, {"value": ONES, "index": I}, {}, {"previous": ONES}, "by rank [1, 2]"),
        "beta": (INNER, {"value": ONES, "index": I, "previous": ONES}, {}, {"beta": 0.5}, "[None, 0.5]"),
    },
    compopt.TemperatureDual.update: {
        "gradient": (DUAL, {"index": I}, {"gradient": ONES}, {"gradient": ONES.double()}, DTYPE),
    },
    compopt.NeuralNormalizer.update: {
        "anchors": (NETWORK, LEARNING, {}, wide(LEARNING, "anchors"), DTYPE),
        "log_g": (NETWORK, LEARNING, {}, wide(LEARNING, "log_g"), "log_g by rank ['torch.float32 []', 'torch.float64"),
        "tau": (NETWORK, LEARNING, {"tau": 0.25}, {}, "of tau=: by rank [0.25, 0.2]"),
        "candidates": (NETWORK, LEARNING, {}, {"candidates": Z[1]}, "by rank [0, 1]"),
    },
    compopt.NeuralNormalizer.predict: {
        "anchors": (PREDICTION, {"tau": 0.2}, {"anchors": Z[0]}, {"anchors": Z[0].double()}, DTYPE),
        "tau": (PREDICTION, {"anchors": Z[0]}, {"tau": 0.25}, {"tau": 0.2}, "of tau=: by rank [0.25, 0.2]"),
    },
    compopt.MCMCNegativeSampler.sample: {
        "scores": (
            CHAINS, {"index": I, "candidates": I[:4]}, {"scores": Z[0]}, {"scores": Z[0].double()}, DTYPE
        ),
    },
    losses.RobustLoss.__call__: {
        "losses": (operation(losses.RobustLoss), {}, {"losses": ONES}, {"losses": ONES.double()}, DTYPE),
    },
    losses.PairLoss.__call__: {
        "scores": (
            operation(losses.PartialAUCLoss), {"labels": I > 2, "index": I}, {"scores": ONES},
            {"scores": ONES.double()}, DTYPE,
        ),
    },
    losses.NDCGLoss.__call__: {
        "scores": (
            operation(losses.NDCGLoss), {"relevance": I[None], "index": I[None]}, {"scores": ONES[None]},
            {"scores": ONES[None].double()}, DTYPE,
        ),
    },
}  # fmt: skip


def named(function):
    """Return the names of the arguments of a function, without the rest of its positional arguments."""
    arguments = inspect.signature(function).parameters.values()
    return [each.name for each in arguments if each.kind is not each.VAR_POSITIONAL]


def test_every_argument_of_a_call_is_here():
    for function, table in DIFFERENT.items():
        arguments = {*named(function)} - {"self"}
        assert arguments <= {*table, *OF_THE_SAMPLES, *FUNCTIONS}, function
        assert not set(table) - arguments
    assert named(compopt.ContrastiveEstimator.feature_gradients) == named(compopt.ContrastiveEstimator.__call__)
    operations = {"__call__", "update", "predict", "sample"}
    for kind in KINDS:
        found = {vars(each)[name] for each in kind.__mro__ for name in operations & {*vars(each)}}
        assert found <= {*DIFFERENT}, kind


def called(group, function):
    """Return, by argument, the message of a call in which it differs."""
    found, rank = {}, dist.get_rank(group)
    for name, ((make, method), given, *own, _) in DIFFERENT[function].items():
        obj = make(group=group)
        act = functools.partial(method, obj) if callable(method) else getattr(obj, method)
        found[name] = refusal(functools.partial(act, **{**given, **own[rank]}))
    return found


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("function", DIFFERENT, ids=lambda function: function.__qualname__)
def test_arguments_of_calls(function):
    answers = the_pool().run(called, 2, function)
    for name, (*_, shown) in DIFFERENT[function].items():
        for rank, answer in enumerate(answers):
            told = shown or ("rank 1 refused its arguments", f"{name} is missing")[rank]
            assert told in answer[name], (name, answer[name])


def shared(group, make):
    """Change a number that all samples share on rank 1, after the first commit; return the message of the next call."""
    rank, est = dist.get_rank(group), make(group)
    number = next(iter(est.parameters()), getattr(est.temperature, "tensor", None))
    call(est, rank)
    est.step()
    with torch.no_grad():
        number.add_(0.25 * rank)
        message = refusal(lambda: call(est, rank))
        number.sub_(0.25 * rank)
    call(est, rank)
    return message


def fixed(group):
    return build(compopt.FixedTemperature, group, tau=torch.tensor(0.5))


def clip(group):
    return build(compopt.InfoNCEEstimator, group, learn_tau=True, tau=1.0)


def sigmoid(group):
    """Its first parameter is the bias."""
    return build(compopt.SigmoidNormalizer, group, learn=True, bias=0.5)


@pytest.mark.parametrize("make, value", [(fixed, 0.5), (clip, 0.0), (sigmoid, 0.5)])
def test_a_shared_number_that_one_rank_changes_later(make, value):
    for message in the_pool().run(shared, 2, make):
        assert message.startswith("the ranks differ in learned parameters, or tau; ")
        assert f"by rank ['{value} torch.float32', '{value + 0.25} torch.float32']" in message.replace("-0.0", "0.0")
