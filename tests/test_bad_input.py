"""Bad input raises an error of the right type that names argument, value and remedy, and leaves the state unchanged."""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

import compopt
from tests.database import BY_NAME, MODES
from tests.helpers import asked, bits, features, generator, group_key

N, B, D = 12, 5, 3
TAU, GAMMA = 0.2, 0.7

NAMES = tuple("infonce clip-learned sogclr sogclr-positive isogclr isogclr-adam batch-dual global-dual".split())
WITH_INDEX = NAMES[2:]  # the others have no n and accept any index
PRESETS = [(name, mode) for name in ("infonce", "sogclr", "isogclr", "global-dual") for mode in MODES]

# Words in an error message that tell the user what to do instead.
REMEDY = re.compile(
    r"\b(must|pass|use|give|set|choose|expected|one of|call|build|remove|rename|needs|known are|add|append|put)\b", re.I
)


# helpers ------------------------------------------------------------------------------------------


def make(name: str = "sogclr", mode: str = "bimodal", dtype=torch.float32):
    return BY_NAME[name].build(mode, N, dtype, TAU, GAMMA)


def batch(B: int = B, d: int = D, seed: int = 0, dtype=torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return *features(B, d, seed, dtype=dtype), torch.randperm(N, generator=generator(seed))[:B]


def used(name: str = "sogclr", mode: str = "bimodal"):
    """Return an estimator in the middle of a run: two batches committed, one deposited."""
    est = make(name, mode)
    for seed in range(3):
        if seed:
            est.step()
        z1, z2, index = batch(seed=seed)
        est(z1.requires_grad_(), z2.requires_grad_(), index).backward()
    return est


def fingerprint(x) -> object:
    """Return a value that is equal only for bit-identical contents."""
    if isinstance(x, Tensor):
        return (str(x.dtype), tuple(x.shape), bits(x) if x.numel() else b"")
    if isinstance(x, dict):
        return tuple((str(k), fingerprint(v)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return tuple(fingerprint(v) for v in x)
    return repr(x)


def state(est) -> object:
    """Return the content of a checkpoint, all hyper-parameters, the number of pending deposits, and the mode."""
    return fingerprint(est.state_dict()), fingerprint(est.sample_groups), est.pending, est.training


@contextmanager
def refused(error, *words: str, est=None, remedy: bool = True):
    """Assert that the block raises `error` with all words and a remedy in its message, and that `est` is unchanged."""
    before = state(est) if est is not None else None
    with pytest.raises(error) as caught:
        yield
    exact = error if isinstance(error, tuple) else (error,)
    assert type(caught.value) in exact, f"a subclass by accident? {caught.value!r}"
    message = str(caught.value)
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    assert not remedy or REMEDY.search(message), f"no remedy in: {message}"
    if est is not None:
        assert state(est) == before, f"the state moved although this was refused: {message}"


def number(value) -> str:
    """Return a regular expression for a value in a message."""
    return re.escape(str(value))


def still_works(est) -> None:
    """Assert that an estimator can be trained after it has refused a call."""
    z1, z2, index = batch(seed=9)
    assert torch.isfinite(est(z1, z2, index))
    est.step()
    assert est.pending == 0


# the call: features -------------------------------------------------------------------------------


@dataclass
class Call:
    """A call that must be refused."""

    what: str
    change: Callable  # (z1, z2, index) -> (z1, z2, index)
    error: type | tuple[type, ...]
    words: tuple[str, ...] = ()
    names: tuple[str, ...] = field(default=NAMES)

    def __str__(self):
        return self.what


def at(index: Tensor, value: int) -> Tensor:
    return torch.cat([index[:1], index.new_tensor([value]), index[2:]])


DEVICE = (ValueError, RuntimeError)  # torch raises RuntimeError for mixed devices

CALLS = [
    Call("features of 1 dimension", lambda a, b, i: (a[:, 0], b[:, 0], i), ValueError, ("z1", r"\(5,\)")),
    Call("features of 3 dimensions", lambda a, b, i: (a[None], b[None], i), ValueError, ("z1", r"\(1, 5, 3\)")),
    Call("other batch of z2", lambda a, b, i: (a, b[:3], i), ValueError, ("z2", r"\(5, 3\)", r"\(3, 3\)")),
    Call("other dimension of z2", lambda a, b, i: (a, b[:, :2], i), ValueError, ("z2", r"\(5, 3\)", r"\(5, 2\)")),
    Call("no features at all", lambda a, b, i: (a[:, :0], b[:, :0], i), ValueError, ("z1", r"\(5, 0\)")),
    Call("int64 features", lambda a, b, i: (a.long(), b.long(), i), TypeError, ("z1", "int64")),
    Call("bool features", lambda a, b, i: (a > 0, b > 0, i), TypeError, ("z1", "bool")),
    Call("numpy features", lambda a, b, i: (a.numpy(), b.numpy(), i), TypeError, ("z1", "ndarray")),
    Call("a half-precision z2", lambda a, b, i: (a, b.bfloat16(), i), TypeError, ("z1.float", "z2.float", "bfloat16")),
    Call("features None", lambda a, b, i: (None, b, i), TypeError, ("z1", "None")),
    Call("features on two devices", lambda a, b, i: (a, b.to("meta"), i), DEVICE, ("z2", "meta", "cpu")),
    Call("both on meta", lambda a, b, i: (a.to("meta"), b.to("meta"), i), DEVICE, ("z1|z2", "meta")),
    # index
    Call("index None", lambda a, b, i: (a, b, None), TypeError, ("index", "None|missing"), WITH_INDEX),
    Call("float index", lambda a, b, i: (a, b, i.float()), TypeError, ("index", "float32")),
    Call("bool index", lambda a, b, i: (a, b, i > 3), TypeError, ("index", "bool")),
    Call("index of 2 dimensions", lambda a, b, i: (a, b, i[:, None]), ValueError, ("index", r"\(5, 1\)")),
    Call("shorter index", lambda a, b, i: (a, b, i[:3]), ValueError, ("index", r"\(3,\)|\b3\b", r"\b5\b")),
    Call("index on meta", lambda a, b, i: (a, b, i.to("meta")), DEVICE, ("index", "meta")),
    Call("index = n", lambda a, b, i: (a, b, at(i, N)), IndexError, ("index", r"\b12\b", "n"), WITH_INDEX),
    Call("index -1", lambda a, b, i: (a, b, at(i, -1)), IndexError, ("index", "-1", r"\b12\b"), WITH_INDEX),
    Call("index 2^62", lambda a, b, i: (a, b, at(i, 2**62)), IndexError, (str(2**62),), WITH_INDEX),
    # distinct samples
    Call("one sample", lambda a, b, i: (a[:1], b[:1], i[:1]), ValueError, ("distinct", r"\b1\b", "drop_last=True")),
    Call("one sample five times", lambda a, b, i: (a, b, i.new_full((5,), 4)), ValueError, ("index is 4", "distinct")),
]


@pytest.mark.parametrize("name, mode", PRESETS)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_call(call, name, mode):
    if name not in call.names:
        pytest.skip("without n there is no range to leave")
    est = used(name, mode)
    with refused(call.error, *call.words, est=est):
        est(*call.change(*batch(seed=7)))
    still_works(est)


@pytest.mark.parametrize("index", [[0, 1], (0, 1), range(2), np.arange(2)], ids=["list", "tuple", "range", "array"])
def test_numbers_in_no_tensor_are_told_how_to_become_one(index):
    est, (z1, z2, _) = used(), batch(2)
    calls = [lambda: est(z1, z2, index), lambda: est(z1, z2, torch.arange(2), labels=index), lambda: est.read(index)]
    for name, call in zip(("index", "labels", "index"), calls, strict=True):
        with refused(TypeError, rf"pass torch\.as_tensor\({name}\)", est=est):
            call()


NAMES = [f"{i}.jpg" for i in range(B)]


@pytest.mark.parametrize("strings", [NAMES, tuple(NAMES), np.array(NAMES)], ids=["list", "tuple", "array"])
@pytest.mark.parametrize("name", ["index", "index2", "labels", "negatives[1]"])
def test_strings_are_told_how_to_become_numbers(name, strings):
    est, (z1, z2, index) = compopt.DCLEstimator(), batch()

    def pass_on(value):
        est(z1, z2, **{"index": index, **({"negatives": (z1, value)} if name == "negatives[1]" else {name: value})})

    what = rf"{re.escape(name)} must be a tensor of \d+ integers"
    with refused(TypeError, what, r"compopt\.data\.key_index\(", remedy=False):
        pass_on(strings)
    number = compopt.data.key_index(strings)  # as the message says
    pass_on(torch.tensor([number[string] for string in strings]))


Output = type("Output", (dict,), {"pooler_output": property(lambda self: self["pooler_output"])})  # of transformers


@pytest.mark.parametrize("name", ["z1", "z2", "negatives", "guide", "keys"])
def test_outputs_of_a_model_in_place_of_features(name):
    """``get_image_features`` of transformers 5 returns an object; ``*model(...)`` yields the names in the output."""
    est = compopt.MemoryEstimator(D, length=8, momentum=name == "keys")
    if name == "guide":
        est = compopt.DCLEstimator(pairs=compopt.PairPolicy(false_negatives=0.1, guided=True))
    z1, z2, index = batch()
    for wrong, words in (
        (Output(last_hidden_state=z1, pooler_output=z1), "got Output; pass its .pooler_output"),
        ({"image_embeds": z1, "text_embeds": z2}, "got dict; pass entries of it, which has image_embeds, text_embeds"),
        ("image_embeds", "got str, a name in the output of a model.*pass output.image_embeds"),
    ):
        value = wrong if name in ("z1", "z2", "negatives") else (wrong, wrong)
        with refused(TypeError, name, words, est=est):
            est(**asked(est, **{"z1": z1, "z2": z2, "index": index, name: value}))


def test_an_unpacked_output_and_an_index():
    est, (z1, _, index) = make(), batch()
    clip = dict.fromkeys(["logits_per_image", "text_embeds", "image_embeds", "text_model_output", "a", "b"], z1)
    with refused(TypeError, "got 7, a name in the output of a model", "pass output.image_embeds", est=est):
        est(*clip, index)


@pytest.mark.parametrize("name", ["cuda", "half", "double", "cpu", "zero_grad", "register_forward_hook", "modules"])
def test_methods_of_modules_are_told_what_an_estimator_has(name):
    for est in (make(), MA(N), compopt.losses.ListwiseLoss(N)):
        with refused(AttributeError, rf"no {name}\(\): est.to\(device\) moves it", r"as_module\(est\)", remedy=False):
            getattr(est, name)
        assert not hasattr(est, name) and not hasattr(est, "cuddle")
        for dtype in ((torch.float64,), ("cpu", torch.float64)):
            with refused(TypeError, "rows keep the dtype of the constructor, dtype=, got torch.float"):
                est.to(*dtype)
        assert est.to("cpu", non_blocking=True) is est


def test_positions_of_a_split_are_positions_in_the_whole():
    """Refuse positions in the whole data set, which the samples of a split keep, if n is the size of the split."""
    est = make()
    whole = compopt.data.Indexed([(i,) for i in range(2 * N)])
    part = torch.utils.data.Subset(whole, range(N, 2 * N))
    index = torch.tensor([part[i][-1] for i in range(B)])
    z1, z2, _ = batch()
    with refused(IndexError, rf"index {N + B - 1} is outside n={N}.*train_test_split.*the whole: give its n", est=est):
        est(z1, z2, index)
    numbered = compopt.data.Indexed(part)  # the other remedy: number the samples of the split
    est(z1, z2, torch.tensor([numbered[i][-1] for i in range(B)]))


# other actions that an estimator in the middle of a run refuses -------------------------------------


class Wrapper:
    """Wrapper like those of accelerate and DeepSpeed, but without an optimizer."""

    def __init__(self, inner=None):
        self.optimizer = self if inner == "itself" else inner


def call(**given):
    """Return an action that calls with a good batch and some other arguments."""
    return lambda est: est(**dict(zip(("z1", "z2", "index"), batch(seed=7), strict=True)) | given)


def edited(key, value):
    """Return an action that edits a hyper-parameter, or removes it."""

    def action(est):
        group = est.sample_groups[0]
        name = group_key(group, key) if key in {each.rpartition(".")[2] for each in group} else key
        if value is LOST:
            del group[name]
        else:
            group[name] = value

    return action


def loading(make_state):
    return lambda est: est.load_state_dict(make_state())


def other(**options):
    arguments = {"gamma": GAMMA, "tau": TAU, **options}
    return compopt.SogCLREstimator(arguments.pop("n", N), **arguments).state_dict()


LOST, KEY = object(), (KeyError, ValueError)
SGD = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
SCHEDULE, COSINE = compopt.schedules.Schedule, compopt.schedules.CosineGamma
NO_OPTIMIZERS = (
    *(None, 3, "adam", {"lr": 0.1}, torch.optim.SGD, torch.nn.Linear(2, 2)),
    *(Wrapper(), Wrapper(object()), Wrapper(Wrapper()), Wrapper("itself")),
)
# (estimator, action, error, words of the message)
ACTIONS = [
    ("sogclr", lambda est: est.read(None), TypeError, ("index", "None")),
    ("isogclr", lambda est: est.read([0, 1]), TypeError, ("index", "list")),
    ("sogclr", lambda est: est.read(torch.tensor([0.0])), TypeError, ("index", "float32")),
    ("sogclr", lambda est: est.read(torch.tensor([0, N])), IndexError, ("index", number(N))),
    ("sogclr", lambda est: est.read(torch.tensor([[0], [1]])), ValueError, ("index", r"\(2, 1\)")),
    ("sogclr", call(tau=torch.full((3,), 0.1)), ValueError, ("tau", r"\(3,\)")),
    ("sogclr", call(tau=torch.ones(B).long()), TypeError, ("tau", "int64")),
    ("sogclr", call(tau="0.1"), TypeError, ("tau", "0.1")),
    ("sogclr", call(tau=1e-300), ValueError, ("tau must be greater than 0 in float32",)),
    ("isogclr", call(tau=0.1), ValueError, ("tau",)),
    ("sogclr", call(z1=torch.zeros(B, D).to_sparse()), TypeError, ("z1 must be a dense tensor",)),
    ("sogclr", call(tau=torch.full((B,), 0.1).to_sparse()), TypeError, ("tau must be a dense tensor",)),
    # hyper-parameters during the run
    ("sogclr", edited("gamma", 0.0), ValueError, ("gamma",)),
    ("sogclr", edited("gamma", "0.9"), TypeError, ("gamma",)),
    ("sogclr", edited("eps", -1.0), ValueError, ("eps",)),
    ("isogclr", edited("rho", math.nan), ValueError, ("rho",)),
    ("isogclr", edited("lr", -1.0), ValueError, ("lr",)),
    *(("isogclr", edited("lr", large), ValueError, ("lr must be",)) for large in (1e300, 1 << 70, 1 << 2000)),
    ("isogclr", edited("tau_min", 100.0), ValueError, ("tau_min",)),
    ("isogclr", edited("tau_max", -1.0), ValueError, ("tau_max",)),
    ("isogclr", edited("max_grad", 0.0), ValueError, ("max_grad",)),
    ("isogclr", edited("beta", 2.0), ValueError, ("beta",)),
    ("batch-dual", edited("lr", None), TypeError, ("lr",)),
    ("global-dual", edited("rho", -2.0), ValueError, ("rho",)),
    ("infonce", edited("gama", 1), ValueError, ("no hyper-parameter 'gama'; known are include_positive, tau$",)),
    ("infonce", edited("n", 1), ValueError, ("no hyper-parameter 'n'; known are include_positive, tau$",)),
    ("sogclr", edited("gamma", LOST), TypeError, ("gamma",)),
    ("sogclr", edited("n", N + 1), ValueError, (rf"\b{N}\b", rf"\b{N + 1}\b")),
    *(("sogclr", edited("n", n), (TypeError, ValueError), ("^n (of|must)",)) for n in ("x", None, 12.0, np.ones(3))),
    # groups
    ("sogclr", lambda est: est.add_sample_group({"n": 0}), ValueError, ("n", r"\b0\b")),
    ("sogclr", lambda est: est.add_sample_group({"n": 4.0}), TypeError, ("n", "float")),
    ("sogclr", lambda est: est.add_sample_group({"gamma": 0.5}), ValueError, ("n",)),
    ("sogclr", lambda est: est.add_sample_group({"n": 4, "gamma": 1.5}), ValueError, ("gamma", "1.5")),
    ("sogclr", lambda est: est.add_sample_group({"n": 4, "gama": 0.5}), ValueError, ("gama", "gamma")),
    ("sogclr", lambda est: est.add_sample_group({"n": 4, 3: 0.5}), (TypeError, ValueError), ("3",)),
    *(("sogclr", lambda est, g=g: est.add_sample_group(g), TypeError, ("dict",)) for g in (None, 7.5, [("n", 4)])),
    # states
    ("sogclr", loading(lambda: other(n=N + 1)), ValueError, (r"\bn\b", rf"\b{N}\b", rf"\b{N + 1}\b")),
    ("sogclr", loading(lambda: other(mode="unimodal")), ValueError, ("bimodal", "unimodal")),
    ("sogclr", loading(lambda: other(dtype=torch.float64)), ValueError, ("float32", "float64")),
    ("sogclr", loading(lambda: make("isogclr").state_dict()), ValueError, ()),
    ("isogclr", loading(lambda: make("isogclr-adam").state_dict()), ValueError, ()),
    ("isogclr", loading(lambda: other()), ValueError, ()),
    ("infonce", loading(lambda: other()), ValueError, ()),
    ("sogclr", loading(lambda: other(n=[{"n": 5}, {"n": N - 5}])), ValueError, (r"\b5\b", rf"\b{N}\b")),
    ("sogclr", loading(lambda: torch.nn.Linear(2, 2).state_dict()), KEY, ()),
    *(("sogclr", loading(lambda junk=junk: junk), TypeError, ("dict",)) for junk in ([1, 2], 3, None)),
    *(("sogclr", loading(lambda junk=junk: junk), KEY, ()) for junk in ({}, {"version": 1})),
    # objects that are used with it
    *(("sogclr", lambda est, o=o: est.attach(o), TypeError, (f"got {type(o).__name__}",)) for o in NO_OPTIMIZERS),
    ("sogclr", lambda est: est.to("meta"), ValueError, ("device", "meta")),
    ("sogclr", lambda est: SCHEDULE(est, "gama", lambda t: 0.5), KEY, ("gama", "gamma")),
    ("sogclr", lambda est: SCHEDULE(est, "gamma", 0.5), TypeError, ("fn", "float")),
    ("sogclr", lambda est: SCHEDULE("est", "gamma", lambda t: 0.5), TypeError, ("est", "str")),
    ("sogclr", lambda est: COSINE(est, 0), ValueError, ("decay_steps", r"\b0\b")),
    ("sogclr", lambda est: COSINE(est, 10, gamma_min=1.1), ValueError, ("gamma_min", "1.1")),
    ("infonce", lambda est: COSINE(est, 10), KEY, ("gamma",)),
    (
        "sogclr",
        lambda est: compopt.diagnostics.normalizer_error(est, *features(N + 1, D, 0, dtype=torch.float32)),
        (ValueError, IndexError),
        (rf"\b{N}\b",),
    ),
]


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("case", range(len(ACTIONS)))
def test_action(case):
    name, action, error, words = ACTIONS[case]
    est = used(name)
    with refused(error, *words, est=est, remedy=False):
        action(est)
    still_works(est)


# attributes that are fixed at construction --------------------------------------------------------

FIXED = {
    "mode": ("unimodal", r"fixed at 'bimodal'.*build another estimator with mode='unimodal'"),
    "dtype": (torch.float64, r"fixed at torch\.float32.*build another estimator with dtype=torch\.float64"),
    "directions": ("forward", r"fixed at 'both'.*build another"),
    "normalize": (False, r"fixed at True.*build another"),
    "multiply_tau": (False, r"fixed at True.*build another"),
    "normalizer": (compopt.BatchNormalizer(True), r"fixed at MovingAverageEstimator.*with normalizer=BatchNormalizer"),
    "temperature": (compopt.FixedTemperature(0.5), r"fixed at FixedTemperature.*build another"),
    "n": (N + 1, ""),
    "sample_groups": ([{"n": N}], ""),
    "device": ("cuda", ""),
}


@pytest.mark.parametrize("name", FIXED)
def test_what_is_fixed_at_construction(name):
    value, words = FIXED[name]
    est = used()
    with refused(AttributeError, words, est=est, remedy=False):
        setattr(est, name, value)
    with pytest.raises(AttributeError):
        delattr(est, name)
    still_works(est)
    again = pickle.loads(pickle.dumps(est))  # copies are made in the same way
    assert (again.mode, again.directions, again.dtype) == (est.mode, est.directions, est.dtype)


# hyper-parameters ---------------------------------------------------------------------------------


@dataclass
class Bad:
    """A constructor call that must be refused; the message has `words`, the argument's name and its value."""

    make: Callable
    argument: str
    value: object
    error: type
    words: tuple[str, ...] = ()

    def __str__(self):
        return f"{self.make.__name__}({self.argument}={self.value!r})"


MA, DUAL = compopt.MovingAverageEstimator, compopt.TemperatureDual
SOG, ISOG, FAST, NCE = (getattr(compopt, f"{name}Estimator") for name in ("SogCLR", "ISogCLR", "FastCLIP", "InfoNCE"))
WITH_N = (MA, SOG, ISOG, FAST, DUAL)
WITH_GAMMA = (MA, SOG, ISOG)
WITH_DUAL = (DUAL, ISOG)

NOT_POSITIVE = (0.0, -0.1, math.nan, -math.inf)
NOT_A_NUMBER = ("0.5", [0.5], {})


def table() -> list[Bad]:
    rows = [Bad(c, "n", n, ValueError) for c in WITH_N for n in (0, -3)]
    rows += [Bad(c, "n", n, TypeError) for c in WITH_N for n in (2.5, "10", True)]
    rows += [Bad(c, "n", None, TypeError) for c in (MA, SOG, ISOG, FAST)]
    rows += [Bad(c, "gamma", g, ValueError) for c in WITH_GAMMA for g in (0.0, -0.1, 1.0001, 2, math.nan, math.inf)]
    rows += [Bad(c, "gamma", g, TypeError) for c in WITH_GAMMA for g in NOT_A_NUMBER]
    rows += [Bad(MA, "gamma", None, TypeError)]  # presets have a default for each mode
    rows += [Bad(c, "eps", e, ValueError) for c in (MA, SOG) for e in (-1e-9, math.nan, math.inf)]
    rows += [Bad(c, "eps", "0", TypeError) for c in (MA, SOG)]
    rows += [
        Bad(c, "tau", t, ValueError) for c in (SOG, NCE, compopt.FixedTemperature) for t in (*NOT_POSITIVE, math.inf)
    ]
    rows += [Bad(c, "tau", t, TypeError) for c in (SOG, NCE, compopt.FixedTemperature) for t in NOT_A_NUMBER]
    rows += [Bad(c, "reference", "postive", ValueError, ("positive", "none")) for c in WITH_GAMMA]
    for c in WITH_DUAL:
        rows += [Bad(c, "rho", r, ValueError) for r in (-0.1, math.nan, math.inf)]
        rows += [Bad(c, "lr", r, ValueError) for r in (-1e-3, math.nan, math.inf)]
        rows += [Bad(c, "max_grad", r, ValueError) for r in (0.0, -1.0, math.nan)]
        rows += [Bad(c, key, r, ValueError) for key in ("tau_init", "tau_min", "tau_max") for r in NOT_POSITIVE]
        rows += [Bad(c, key, "x", TypeError) for key in ("rho", "lr", "tau_init", "tau_min", "tau_max", "max_grad")]
        rows += [Bad(c, "beta", b, ValueError) for b in (-0.1, 1.5, math.nan)]
        rows += [Bad(c, "optimizer", "sgd", ValueError, ("momentum", "adam"))]
    rows += [Bad(DUAL, "betas", b, TypeError) for b in ((0.9,), 0.9, "ab", (0.9, None))]
    rows += [Bad(DUAL, "mode", "shared", ValueError, ("individual", "global"))]
    rows += [Bad(c, "parametrization", "exp", ValueError, ("linear", "log")) for c in (DUAL, FAST)]
    rows += [Bad(DUAL, "parametrization", "log", ValueError, ("global",))]
    rows += [Bad(c, "mode", "multimodal", ValueError, ("bimodal", "unimodal")) for c in (SOG, ISOG, FAST, NCE)]
    rows += [Bad(FAST, "version", v, ValueError, ("v0", "v3")) for v in ("v4", "3", "")]
    rows += [Bad(c, "chunk_size", s, ValueError) for c in (SOG, NCE) for s in (0, -1)]
    rows += [Bad(c, "chunk_size", s, TypeError) for c in (SOG, NCE) for s in (2.5, "64")]
    rows += [Bad(c, "dtype", torch.int64, ValueError) for c in (SOG, ISOG)]
    rows += [Bad(c, "dtype", "float32", TypeError) for c in (SOG, ISOG)]
    rows += [Bad(c, "taus", 0.1, TypeError) for c in (MA, SOG, ISOG, FAST, DUAL, NCE, compopt.FixedTemperature)]
    return rows


def positional(make) -> tuple:
    """Return the required arguments of the constructor other than the one under test."""
    return (N,) if make in WITH_N else (TAU,)


@pytest.mark.parametrize("bad", table(), ids=str)
def test_constructor(bad):
    arguments = () if bad.argument in ("n", "tau") and bad.make is not SOG else positional(bad.make)
    if bad.make is SOG and bad.argument == "n":
        arguments = ()
    words = [bad.argument, *bad.words]
    if bad.argument == "taus":  # Python's own message for an unknown keyword
        with pytest.raises(TypeError, match="unexpected keyword argument 'taus'"):
            bad.make(*arguments, taus=0.1)
        return
    if bad.error is ValueError:
        words.append(number(bad.value))
    with refused(bad.error, *words):
        bad.make(*arguments, **{bad.argument: bad.value})


FIXED_TAU, BATCH = compopt.FixedTemperature, compopt.BatchNormalizer
CONSTRUCTIONS = [
    *((lambda b=b: DUAL(N, optimizer="adam", betas=b), ValueError, ("betas",)) for b in ((-0.1, 0.9), (0.9, 1.0))),
    *((lambda m=m: m(N, tau_min=0.4, tau_max=0.2), ValueError, ("tau_min", "0.4", "tau_max")) for m in WITH_DUAL),
    *((lambda m=m: m(N, tau_init=0.9, tau_max=0.5), ValueError, ("tau_init", "0.9")) for m in WITH_DUAL),
    *((lambda m=m: m(N, tau_init=0.01, tau_min=0.1), ValueError, ("tau_init", "0.01")) for m in WITH_DUAL),
    *((lambda g=g: SOG([{"n": 5}, g]), ValueError, ("n",)) for g in ({}, {"n": 0}, {"gamma": 0.5})),
    (lambda: SOG([{"n": 5}, {"n": 4, "gama": 0.5}]), ValueError, ("gama", "gamma")),
    (lambda: SOG([{"n": 5}, None]), TypeError, ("dict",)),
    (lambda: DUAL(N, lr_switch=(0.03, 0.5)), ValueError, ("lr_switch", "global")),
    *(
        (lambda s=s: DUAL(N, mode="global", lr_switch=s), error, ("lr_switch",))
        for error, pairs in ((TypeError, (0.03, (0.03,), ("a", 1.0))), (ValueError, ((0.0, 1.0), (0.03, -1.0))))
        for s in pairs
    ),
    (lambda: SOG([]), ValueError, ("n|group",)),
    *((lambda p=p: compopt.ContrastiveEstimator(p, FIXED_TAU(TAU)), TypeError, ("normalizer",)) for p in (None, "x")),
    (lambda: compopt.ContrastiveEstimator(FIXED_TAU(TAU), FIXED_TAU(TAU)), TypeError, ("normalizer",)),
    *((lambda t=t: compopt.ContrastiveEstimator(BATCH(), t), TypeError, ("temperature",)) for t in (None, 0.07)),
    (lambda: compopt.ContrastiveEstimator(BATCH(), BATCH()), TypeError, ("temperature",)),
    (lambda: compopt.ContrastiveEstimator(MA(12), DUAL(13)), ValueError, (r"\b12\b", r"\b13\b")),
]


@pytest.mark.covering(all=True)
@pytest.mark.parametrize("case", range(len(CONSTRUCTIONS)))
def test_construction(case):
    build, error, words = CONSTRUCTIONS[case]
    with refused(error, *words):
        build()


@pytest.mark.parametrize("temperature", [0.07, DUAL(13)], ids=["a number", "another n"])
def test_a_refused_construction_leaves_the_components_free(temperature):
    average = MA(12)
    average.update(torch.zeros(3), torch.arange(3))
    average.step()
    with pytest.raises((TypeError, ValueError)):
        compopt.ContrastiveEstimator(average, temperature)
    assert average.read(torch.arange(3))["count"].tolist() == [1, 1, 1]
    est = compopt.ContrastiveEstimator(average, compopt.FixedTemperature(TAU), mode="unimodal")
    assert est.read(torch.arange(3))["count"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("tau", [0.0, -0.1, math.nan, math.inf])
def test_a_tensor_tau_that_is_not_positive(tau):
    with refused(ValueError, "tau", number(tau)):
        NCE(torch.tensor(tau))
    est = make("infonce")
    for value in (tau, torch.tensor(tau), torch.full((B,), tau), torch.full((B, 2), tau)):
        with refused(ValueError, "tau", number(tau), est=est):
            est(*batch(), tau=value)


# checkpoints --------------------------------------------------------------------------------------


def corruptions(x, path=()):
    """Yield copies of a nested state that each lack one key, with the path of that key."""
    if isinstance(x, dict):
        for key in x:
            yield (*path, key), {k: v for k, v in x.items() if k != key}
            for where, changed in corruptions(x[key], (*path, key)):
                yield where, {**x, key: changed}
    elif isinstance(x, list):
        for i, item in enumerate(x):
            for where, changed in corruptions(item, (*path, i)):
                yield where, [*x[:i], changed, *x[i + 1 :]]


@pytest.mark.parametrize("name", ["sogclr", "isogclr-adam", "global-dual"])
def test_load_state_dict_that_lacks_a_key(name):
    est = used(name)
    saved = used(name, "bimodal").state_dict()
    for where, changed in corruptions(saved):
        if "notes" in where:  # optional
            continue
        with refused((ValueError, KeyError), re.escape(str(where[-1])), est=est, remedy=False):
            est.load_state_dict(changed)
    still_works(est)


# moving average alone -----------------------------------------------------------------------------


# schedules and diagnostics ------------------------------------------------------------------------


# cases found by fuzzing -----------------------------------------------------------------------------


def test_none_is_a_default():
    est, (z1, z2, index) = make("isogclr"), batch()
    est.sample_groups[0]["rho"] = None
    est(z1, z2, index)
    assert est.sample_groups[0]["rho"] == 6.0


def test_feature_gradients_names_itself_where_arguments_do_not_fit():
    est, (z1, z2, index) = make(), batch()
    name = rf"{type(est).__name__}\.feature_gradients\(\): "
    for act, why in (
        (lambda: est.feature_gradients(), "missing a required argument: 'z1'"),
        (lambda: est.feature_gradients(z1, z2, index, margin=1), "got an unexpected keyword argument 'margin'"),
        (lambda: est.feature_gradients(z1, z2, index, z1=z1), "multiple values for argument 'z1'"),
    ):
        with pytest.raises(TypeError, match=name + why):
            act()


def test_a_third_output_of_the_model_is_recognised():
    with pytest.raises(TypeError, match="a scale that the model returns as a third output"):
        compopt.DCLEstimator()(*torch.randn(2, 4, 3), torch.tensor(14.3))


def test_a_prefetch_of_other_lengths_names_them():
    with pytest.raises(ValueError, match=r"index2.*3"):
        compopt.SogCLREstimator(9).prefetch(torch.arange(4), torch.arange(3))
