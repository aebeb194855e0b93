"""Checks for parts that are written outside of this library."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from compopt.contrastive import ContrastiveEstimator
from compopt.estimator.parts import Normalizer
from compopt.temperatures import FixedTemperature

Tensors = dict[str, Tensor]
Mode = Literal["bimodal", "unimodal"]


def check_normalizer(make: Callable[[], Normalizer], *, dim: int = 8, n: int = 32, mode: Mode = "bimodal") -> None:
    """Run the generic tests of a normalizer on small random batches, in one process.

    ===========  ==================================================================================================
    proposals    calls and steps raise no error: the ``Estimate`` has values of the right shapes for all columns
    gradients    loss, gradients and state are finite, also in float32 at the temperature 0.005
    deposits     calls in ``eval()`` or under ``torch.no_grad()`` change no later result
    commit       before ``step()`` a call changes nothing that ``eval()`` shows or ``state_dict()`` returns
    discard      after ``discard()`` everything is as if the call had not been made
    other rows   ``step()`` changes the rows of the batch only
    order        rows do not depend on the order of the calls before a ``step()``, up to rounding
    bad batches  a batch with a feature that is NaN changes no state, and its loss is not finite
    state dict   a new normalizer that loads the state, through a file, continues with the same numbers
    copies       copies by ``copy.deepcopy`` and ``pickle`` continue with the same numbers, and share no state
    float64      with ``dtype=torch.float64`` loss, gradients and rows have that precision, whatever the default dtype
    ===========  ==================================================================================================

    Rules about rows do not apply to a normalizer without columns. Other state may depend on the order of the calls.
    Normalizers with new random numbers in every call, such as :class:`~compopt.MCMCNegativeSampler`, cannot be checked.

    Args:
        make: function that returns a new normalizer, for ``n`` samples if it has rows; set seeds inside of it.
        dim, n: dimension of the features; number of samples, at least 8, of which a batch has a quarter.
        mode: mode of the estimator. Call the function once for each mode that the normalizer supports.

    Raises:
        AssertionError: a rule is broken; the message begins with the class and the name of the rule.

    Example:
        >>> import compopt
        >>> compopt.testing.check_normalizer(lambda: compopt.MovingAverageEstimator(n=32, gamma=0.5))
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of bad batches, and of calls without a commit
        for rule in (name for name in vars(_Rules) if not name.startswith("_")):
            try:
                getattr(_Rules(make, dim, n, mode), rule)()
            except Exception as error:  # any error of the normalizer
                name, reason = rule.replace("_", " "), f"{type(error).__name__}: {error}"
                reason = reason.removeprefix("AssertionError: ")
                raise AssertionError(f"{type(make()).__name__} breaks the rule {name!r}: {reason}") from error


class _Rules:
    """Rules, by their names and in their order. Each batch has a seed."""

    def __init__(self, make: Callable[[], Normalizer], dim: int, n: int, mode: Mode) -> None:
        self._make, self._dim, self._n, self._mode = make, dim, n, mode

    def _new(self, steps: int = 1, tau: float = 0.2, dtype: torch.dtype = torch.float32) -> ContrastiveEstimator:
        """Return a new estimator after some steps."""
        est = ContrastiveEstimator(self._make(), FixedTemperature(tau), mode=self._mode, dtype=dtype)
        self._steps(est, *range(steps))
        return est

    def _call(self, est: ContrastiveEstimator, seed: int, bad: bool = False) -> Tensors:
        """Return the loss and the gradients of a call."""
        draw = torch.Generator().manual_seed(seed)
        z1, z2 = torch.randn(2, self._n // 4, self._dim, generator=draw, dtype=torch.float64).to(est.dtype)
        z1[1, 0] = torch.nan if bad else z1[1, 0]
        loss = est(z1.requires_grad_(), z2.requires_grad_(), self._index(seed))
        of_z1, of_z2 = torch.autograd.grad(loss, (z1, z2)) if loss.requires_grad else (z1, z2)
        return {"the loss": loss.detach(), "the gradient of z1": of_z1, "the gradient of z2": of_z2}

    def _index(self, seed: int) -> Tensor:
        return torch.randperm(self._n, generator=torch.Generator().manual_seed(seed))[: self._n // 4]

    def _steps(self, est: ContrastiveEstimator, *seeds: int) -> Tensors:
        """Return the results of calls with a step after each, and the state after them."""
        results: Tensors = {}
        for seed in seeds:
            results |= {f"{name} of batch {seed}": value for name, value in self._call(est, seed).items()}
            est.step()
        return results | _state(est)

    def _rows(self, est: ContrastiveEstimator, index: Tensor | slice = slice(None)) -> Tensors:
        return est.read(torch.arange(self._n)[index]) if est.normalizer.columns(2, est.dtype) else {}

    def proposals(self) -> None:
        self._new(steps=2)

    def gradients(self) -> None:
        for tau in (0.2, 0.005):  # exp(1 / 0.005) is not finite in float32
            for name, value in self._steps(self._new(tau=tau), 2).items():
                _require(bool(value.isfinite().all()), f"{name} is not finite at tau={tau}")

    def deposits(self) -> None:
        est = self._new()
        self._call(est.eval(), 2)
        with torch.no_grad():
            self._call(est.train(), 3)
        est.step()
        _same(self._steps(self._new(), 4), self._steps(est, 4), "after calls in eval() and under no_grad()")

    def commit(self) -> None:
        est = self._new()
        before = _state(est) | self._call(est.eval(), 3)
        self._call(est.train(), 2)
        _same(before, _state(est) | self._call(est.eval(), 3), "in eval() or state_dict() after a call without step()")

    def discard(self) -> None:
        est = self._new()
        self._call(est, 2)
        est.discard()
        _same(self._steps(self._new(), 3, 4), self._steps(est, 3, 4), "after discard()")

    def other_rows(self) -> None:
        est = self._new(steps=2)
        others = torch.tensor(sorted({*range(self._n)} - {*self._index(3).tolist()}))
        before = self._rows(est, others)
        self._steps(est, 3)
        _same(before, self._rows(est, others), "outside of the batch of a step")

    def order(self) -> None:
        est, other = self._new(dtype=torch.float64), self._new(dtype=torch.float64)
        for seed, another in ((2, 4), (3, 2), (4, 3)):
            self._call(est, seed), self._call(other, another)
        est.step(), other.step()
        _same(self._rows(est), self._rows(other), "after the same calls in another order", 1e-12)

    def bad_batches(self) -> None:
        est = self._new()
        before = _state(est)
        _require(not self._call(est, 2, bad=True)["the loss"].isfinite(), "the loss of a batch with NaN is finite")
        est.step()
        _same(before, _state(est), "after a batch with NaN")

    def state_dict(self) -> None:
        est, other, file = self._new(steps=2), self._new(steps=0), io.BytesIO()
        torch.save(est.state_dict(), file)
        file.seek(0)
        other.load_state_dict(torch.load(file, weights_only=True))
        _same(self._steps(est, 3, 4), self._steps(other, 3, 4), "after load_state_dict()")

    def copies(self) -> None:
        est = self._new(steps=2)
        copies, before = [copy.deepcopy(est), pickle.loads(pickle.dumps(est))], _state(est)
        results = [self._steps(made, 3, 4) for made in copies]
        _same(before, _state(est), "after steps of copies")
        expected = self._steps(est, 3, 4)
        for result in results:
            _same(expected, result, "of a copy")

    def float64(self) -> None:
        default, found = torch.get_default_dtype(), []
        try:
            for dtype in (torch.float32, torch.float64):  # that of torch.tensor(0.5), and of quotients of integers
                torch.set_default_dtype(dtype)
                est = self._new(steps=3, dtype=torch.float64)
                found.append(self._call(est, 4) | self._rows(est))
        finally:
            torch.set_default_dtype(default)
        _same(found[0], found[1], "with torch.set_default_dtype(torch.float64)", 1e-12)
        for name, value in found[0].items():
            exact = not value.is_floating_point() or bool((value != value.float()).any())
            _require(exact, f"{name} has the precision of float32")


def _require(true: bool, message: str) -> None:
    if not true:
        raise AssertionError(message)


def _same(wanted: Tensors, got: Tensors, when: str, rtol: float = 0.0) -> None:
    _require(wanted.keys() == got.keys(), f"{sorted(wanted.keys() ^ got.keys())} differ {when}")
    for name, value in wanted.items():
        _require(torch.allclose(value, got[name], rtol, rtol), f"{name} differs {when}")


def _state(est: ContrastiveEstimator) -> Tensors:
    """Return copies of all tensors in the state, with their places."""
    found, rest = {}, list(est.state_dict().items())
    for place, value in rest:
        if isinstance(value, Tensor):
            found[place] = value.clone()
        elif isinstance(value, Mapping):
            rest += [(f"{place}.{name}", inner) for name, inner in value.items()]
    return found
