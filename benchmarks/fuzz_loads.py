"""Random damage to the states of everything that has a ``load_state_dict``: refused before a change, or taken whole.

The classes are found by introspection (:func:`owners`), and built from the names of their constructors' arguments. A
trial damages a state of one object and loads it into another one. Either the load raises a ``ValueError`` or
``TypeError`` and the pickled object is the same, to the byte, or the object is used afterwards, and must be finite.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import math
import pickle
import pkgutil
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import compopt
from compopt.estimator import Container, Estimator
from compopt.samplers.base import BankSampler
from compopt.stores.table import RowTable
from tests.helpers import whole

N, DIM, BATCH = 12, 4, 6
WRONG = ("another error", "changed", "not usable", "not finite")
# classes that another one of the list saves and loads
INSIDE = {Estimator, Container, RowTable, compopt.losses.rankings.ListLoss}


def owners() -> list[type]:
    """Return the concrete classes of the library that load a state by a method of the library."""
    found: dict[type, None] = {}
    for module in pkgutil.walk_packages(compopt.__path__, "compopt."):
        if module.name.endswith("__main__"):
            continue
        try:
            names = vars(importlib.import_module(module.name))
        except ImportError:  # an optional package
            continue
        for kind in names.values():
            if inspect.isclass(kind) and kind.__module__ == module.name and _loads(kind) and kind not in INSIDE:
                found[kind] = None
    return list(found)


def _loads(kind: type) -> bool:
    methods = (getattr(kind, name, None) for name in ("load_state_dict", "set_extra_state"))
    own = any(str(getattr(method, "__module__", "")).startswith("compopt") for method in methods)
    return own and not any(getattr(getattr(kind, name, None), "__isabstractmethod__", False) for name in dir(kind))


# -- objects in use ------------------------------------------------------------------------------------------------


def halved(t: int) -> float:
    """Return the value of a schedule."""
    return 1 / (1 + t)


class Masked(nn.Sequential):
    """Model with buffers, one of which is not finite."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM))
        self.register_buffer("mask", torch.full((2, 2), -math.inf).triu(1))


def arguments(folder: Path) -> dict[str, Any]:
    """Return the arguments of constructors by name."""
    given = {"n": N, "dim": DIM, "length": 8, "prototypes": 8, "batch_size": 4, "candidates": 8, "keep": 3}
    given |= {"decay_steps": 9, "decay": 0.9}
    given |= {"key": "gamma", "fn": halved, "name": "rows"}
    return given | {"blocking": True, "updates": 2, "learn": True, "lr": 0.1}


def build(kind: type, folder: Path) -> Any:
    """Return a new object of a class; a part is returned inside of an estimator."""
    wanted = inspect.signature(kind).parameters
    if kind is compopt.ContrastiveEstimator:
        return kind(compopt.MovingAverageEstimator(N), compopt.TemperatureDual(N, rho=0.4))
    given = arguments(folder)
    own = {name: given[name] for name in wanted if name in given}
    if "est" in wanted:
        scored = kind is compopt.samplers.ScoredSampler
        own["est"] = build(compopt.ScoreKeeper, folder) if scored else compopt.SogCLREstimator(N)
        own |= {"share": 0.3} if scored else {}
    if "model" in wanted:
        own["model"] = Masked()
    if "neural" in wanted:
        own["neural"] = compopt.NeuralNormalizer(DIM, 8, updates=2)
    if kind is compopt.losses.RobustLoss:
        del own["n"]
    made = kind(**own)
    if hasattr(made, "locate"):
        made.locate([], folder)
    if isinstance(made, compopt.Normalizer):
        return compopt.ContrastiveEstimator(made, compopt.FixedTemperature(0.2))
    if isinstance(made, compopt.Temperature):
        return compopt.ContrastiveEstimator(compopt.BatchNormalizer(), made)
    if isinstance(made, compopt.ScoreKeeper):
        made.est = compopt.DCLEstimator()  # which use() calls
        made.attach(made.est)
    return made


def target(kind: type, made: Any) -> Any:
    """Return the object of class ``kind`` whose state is loaded: the object that was built, or a part of it."""
    return made if isinstance(made, kind) else next(part for part in vars(made).values() if isinstance(part, kind))


def use(made: Any, seed: int) -> list[Tensor]:
    """Use an object as a training loop does; return tensors that must be finite."""
    draws = torch.Generator().manual_seed(seed)
    z = torch.randn(2, BATCH, DIM, generator=draws)
    index = torch.randperm(N, generator=draws)[:BATCH]
    if isinstance(made, compopt.ContrastiveEstimator):
        anchors = z.requires_grad_()
        losses = [made(*anchors, index)]
        losses[0].backward()
        made.step()
        return [*losses, anchors.grad, *numbers(made)]
    if isinstance(made, compopt.losses.InnerAverage):
        averages = made.update(z[0, :, 0], index)
        made.step()
        return [averages, *numbers(made)]
    if isinstance(made, compopt.ScoreKeeper):
        return [*use(made.est, seed), *numbers(made)]
    if isinstance(made, Estimator):  # a loss
        scores, labels = z[0, :, 0].requires_grad_(), torch.arange(BATCH) % 2
        ranking = "relevance" in inspect.signature(type(made).__call__).parameters
        shaped = (x.view(2, -1) for x in (scores, labels, index)) if ranking else (scores, labels, index)
        one = isinstance(made, compopt.losses.RobustLoss)
        loss = made(scores) if one else made(*shaped)
        loss.backward()
        made.step()
        return [loss, scores.grad, *numbers(made)]
    if isinstance(made, BankSampler | compopt.samplers.FeatureBank):
        rows = getattr(made, "bank", made).rows
        z = z if rows is None else z[..., : rows.shape[2]]  # a loaded bank may have another dimension
    if isinstance(made, BankSampler):
        made.refresh(lambda index: tuple(z[:, index % BATCH]))
        for batch in made:
            made.observe(torch.tensor(batch), *z[:, torch.tensor(batch) % BATCH])
        assert len(list(made)) == len(made)
        return floats(made.state_dict()["bank"])
    if isinstance(made, compopt.samplers.FeatureBank):
        made.write(index, made.rounded(*z))
        return list(made.read(index))
    if isinstance(made, compopt.samplers.ScoredSampler):
        assert list(made), "no samples"
        return use(made.est, seed)
    if isinstance(made, compopt.MomentumEncoder):
        made.update()
        return [made(z[0])]
    if isinstance(made, compopt.schedules.Schedule):
        made.step()
        return use(made.est, seed)
    return use(getattr(made, "est", None) or made._est, seed)  # adapters


def numbers(est: Estimator) -> list[Tensor]:
    """Return the state of an estimator."""
    state = est.state_dict()
    objects = state.get("parts", {"": state}).values()
    rows = est.read(torch.arange(N)) if any(own["rows"] for own in objects) else {}
    return floats([*(own["state"] for own in objects), rows])


def floats(state: Any) -> list[Tensor]:
    """Return the floating-point tensors of a state."""
    if isinstance(state, Mapping | list):
        values = state.values() if isinstance(state, Mapping) else state
        return [found for value in values for found in floats(value)]
    return [state] if isinstance(state, Tensor) and state.is_floating_point() else []


# -- damage --------------------------------------------------------------------------------------------------------

NUMBERS = (-1, 0, 1, 2, 99, -3, 1.5, math.nan, math.inf, -math.inf, 1e4, -1e4, 10**30, True, None, "x")
OTHERS = (*NUMBERS, (), [], {}, b"x", torch.tensor(math.nan), torch.zeros(3), torch.device("cpu"))


def leaves(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all entries of a state, at every depth."""
    if path:
        yield path
    for key in state if isinstance(state, Mapping) else range(len(state)) if isinstance(state, list) else ():
        yield from leaves(state[key], (*path, key))


def damaged(value: Any, rng: random.Random) -> Any:
    """Return another value, with the type of the value more often than not."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta and rng.random() < 0.85:
        return rng.choice([element, element, element, throughout, shape, dtype, layout])(value, rng)
    if isinstance(value, bytes) and value:
        at = rng.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]
    if isinstance(value, Mapping) and value and rng.random() < 0.7:
        key = rng.choice(list(value))
        changed = {**value, rng.choice(["other", 7]): value[key]}
        if rng.random() < 0.7:
            del changed[key]
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        return value[:-1] if rng.random() < 0.5 else [*value, value[0]]
    if type(value) is int and rng.random() < 0.7:
        return value + rng.choice([-1, 1, 1000, 1 << 40, 1 << 62])
    return rng.choice(OTHERS)


def _number(like: Tensor, rng: random.Random) -> Any:
    if like.dtype == torch.bool:
        return rng.random() < 0.5
    if not (like.is_floating_point() or like.is_complex()):
        info = torch.iinfo(like.dtype)
        return rng.choice([-1, 0, 1, N - 1, N, 1000, info.min, info.max])
    large = min(1e30, torch.finfo(like.dtype).max)
    return rng.choice([math.nan, math.inf, -math.inf, -1e-3, -1.0, 0.0, 1.0, 50.0, -50.0, large, -large])


def element(value: Tensor, rng: random.Random) -> Tensor:
    changed = value.clone()
    if changed.numel():
        changed.view(-1)[rng.randrange(changed.numel())] = _number(value, rng)
    return changed


def throughout(value: Tensor, rng: random.Random) -> Tensor:
    return torch.full_like(value, _number(value, rng))


def shape(value: Tensor, rng: random.Random) -> Tensor:
    changes: list[Callable[[Tensor], Tensor]] = [
        lambda x: x[None],
        lambda x: x.flatten(),
        lambda x: x.T if x.dim() else x,
    ]
    changes += [
        lambda x: x[:-1] if x.dim() else x,
        lambda x: x[..., :1] if x.dim() else x,
        lambda x: x[:0] if x.dim() else x,
    ]
    return rng.choice(changes)(value)


def dtype(value: Tensor, rng: random.Random) -> Tensor:
    names = ("float64", "float32", "bfloat16", "int64", "int32", "uint8", "bool", "complex64")
    return value.to(getattr(torch, rng.choice(names)))


def layout(value: Tensor, rng: random.Random) -> Tensor:
    """Return a tensor without values, a sparse one, or one with a graph."""
    graph = lambda x: x.double().requires_grad_() * 1  # noqa: E731
    return rng.choice([lambda x: x.to("meta"), lambda x: x.to_sparse() if x.dim() else x, graph])(value)


# -- trials --------------------------------------------------------------------------------------------------------


@functools.cache
def prepared(kind: type, folder: Path) -> tuple[bytes, Any]:
    """Return a pickled object of this class in use, and the state of another one."""
    first, second = build(kind, folder), build(kind, folder)
    for seed in range(3):
        use(first, seed), use(second, 10 + seed)
    if hasattr(second, "locate"):  # accelerate calls these
        second.save([], [], folder)
    state = target(kind, second).state_dict()
    return pickle.dumps(first), copy.deepcopy(state)


def trial(kind: type, folder: Path, rng: random.Random) -> tuple[str, str]:
    """Damage a state at one or two places and load it; return the outcome and a description."""
    blob, state = prepared(kind, folder)
    state, changes = copy.deepcopy(state), []
    for _ in range(rng.choice([1, 1, 1, 2])):
        *path, last = rng.choice([*leaves(state)])
        owner = functools.reduce(lambda at, key: at[key], path, state)
        owner[last] = damaged(owner[last], rng)
        changes.append(f"{'.'.join(map(str, (*path, last)))} = {str(owner[last])[:300]}")
    if rng.random() < 0.01:
        state, changes = rng.choice([None, 5, [], {}]), ["another object"]
    made = pickle.loads(blob)
    documented = (ValueError, TypeError, FileNotFoundError, *([RuntimeError] if isinstance(made, nn.Module) else []))
    about, before = "; ".join(changes), whole(made)
    try:
        target(kind, made).load_state_dict(state)
    except documented as error:
        return ("refused" if whole(made) == before else "changed"), f"{about}: {error}"
    except Exception as error:
        return "another error", f"{about}: {type(error).__name__}: {error}"
    try:
        found = [x for seed in range(2) for x in use(made, seed)]
    except Exception as error:
        return "not usable", f"{about}: {type(error).__name__}: {error}"
    return ("loaded" if all(bool(x.isfinite().all()) for x in found) else "not finite"), about


def loads(seed: int, count: int, only: int | None = None) -> dict[str, Any]:
    """Damage states of every class in turn, and return counts of the outcomes and the findings."""
    started, kinds, findings = time.perf_counter(), owners(), []
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(count) if only is None else [only]:
            kind = kinds[number % len(kinds)]
            outcome, text = trial(kind, Path(folder), random.Random(f"{seed}.{number}"))
            counts.setdefault(kind.__name__, Counter()).update(["trials", outcome])
            if outcome in WRONG:
                findings.append([number, kind.__name__, outcome, text])
    spent = round(time.perf_counter() - started, 1)
    by_class = {name: dict(counts[name]) for name in sorted(counts)}
    return {"seed": seed, "trials": count, "counts": by_class, "findings": findings, "seconds": spent}
