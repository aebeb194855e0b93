"""Checks for normalizers and losses that are written outside of this library."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from compopt.checks import Mode
from compopt.contrastive import ContrastiveEstimator
from compopt.distributed.collectives import HANDOVER
from compopt.estimator.parts import Normalizer
from compopt.temperatures import FixedTemperature

Tensors = dict[str, Tensor]


def check_normalizer(make: Callable[[], Normalizer], *, dim: int = 8, n: int = 32, mode: Mode = "bimodal") -> None:
    """Run the generic tests of a normalizer on small random batches, in one process.

    Example:
        >>> import compopt
        >>> compopt.testing.check_normalizer(lambda: compopt.MovingAverageEstimator(n=32, gamma=0.5))

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


# -- losses on several ranks ------------------------------------------------------------------------------------------

Call = Callable[[Any, Tensor, Tensor, Tensor], Tensor]
STEP = 1e-5  # of the difference quotient, in float64


@dataclass(frozen=True)
class DistributedResult:
    """Comparison of a loss on several ranks with the same loss on one process with the whole batch.

    Example:
        >>> from compopt.testing import DistributedResult
        >>> print(DistributedResult(2, 0.0, 0.5, 0.5, 0.0, 0.1, 0.0, "the gradient differs"))
        2 ranks: the gradient differs; errors: value 0.0e+00, gradient 5.0e-01, state 0.0e+00

    Errors are relative to the largest value of the one process.

    Attributes:
        world_size: number of ranks.
        value: error of the mean over ranks of the loss.
        gradient: error of the mean over ranks of the gradients of shared parameters, as DDP reduces them.
        factor: number by which the gradient of one process must be multiplied to come closest to that mean.
        rest: error of the gradient that this factor does not explain.
        derivative: error of the gradient against difference quotients of the loss on these ranks.
        state: error of ``state_dict()``; NaN without one.
        message: explanation of the errors; ``""`` if there are none.
    """

    world_size: int
    value: float
    gradient: float
    factor: float
    rest: float
    derivative: float
    state: float
    message: str

    def __str__(self) -> str:
        errors = f"value {self.value:.1e}, gradient {self.gradient:.1e}, state {self.state:.1e}"
        return f"{self.world_size} ranks: {self.message or 'as one process'}; errors: {errors}"


def check_distributed(
    loss: nn.Module | Callable[[], Any],
    world_sizes: Sequence[int] = (1, 2, 3),
    *,
    call: Call | None = None,
    samples: int = 12,
    dim: int = 8,
    tolerance: float = 1e-6,
    timeout: float = 60.0,
) -> list[DistributedResult]:
    r"""Compare any loss of two sets of features on several ranks with one process that has the whole batch.

    Example:
        >>> import compopt
        >>> compopt.testing.check_distributed(compopt.DCLEstimator, (2,))[0].message  # doctest: +SKIP
        ''

    Two linear encoders with shared parameters and random inputs, in float64, produce the features. Each rank computes
    the loss of its part of the batch. The gradients of the parameters are averaged over the ranks, as
    ``DistributedDataParallel`` does. The loss is called twice, with ``step()`` after each call if it has that method.

    The message of a result names what differs: the value; a gradient that is a multiple, such as :math:`K` or
    :math:`1/K`, of the right one; a gradient that is not the derivative of the value on these ranks, which is the case
    if gathered features carry no gradient; the state.

    Args:
        loss: function without arguments, or class, that returns the loss, called on each rank after the process group
            was created; or a module, which is copied. It must be importable, since the ranks are started with
            ``spawn``: not a lambda, and in a script below ``if __name__ == "__main__"``.
        world_sizes: numbers of ranks, which must divide ``samples``.
        call: function that calls the loss, ``call(loss, z1, z2, index)``. ``None``: ``loss(z1, z2, index)`` for an
            estimator, ``loss(z1, z2)`` for everything else.
        samples, dim: size of the batch of all ranks; dimension of the features.
        tolerance: largest error, relative. NeuCLIP needs 1e-4, since the updates of its network amplify the rounding of
            float32, or ``dtype=torch.float64``.
        timeout: seconds after which a rank that waits in a collective operation gives up.

    Returns:
        One result for each world size; print it, or require that its ``message`` is empty.

    Communicates: in new processes on this machine, with gloo.

    Raises:
        Exception: the error of a rank, raised by ``torch.multiprocessing``.
        ValueError: a world size does not divide ``samples``.
        TypeError: ``loss`` or ``call`` is a lambda or a local function.
    """
    odd = [size for size in world_sizes if size < 1 or samples % size]
    if odd:
        raise ValueError(f"world_sizes must divide samples={samples}, got {odd}")
    _check_importable("loss", loss)
    _check_importable("call", call)
    given = (loss, call, samples, dim, timeout)
    (whole,) = _on_ranks(1, False, *given)
    return [_compared(size, whole, _on_ranks(size, True, *given), tolerance) for size in world_sizes]


def _check_importable(name: str, value: Any) -> None:
    """Refuse what a new process cannot import; other errors of pickle are left to the start of the processes."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError) as error:
        raise TypeError(
            f"{name} cannot be sent to the ranks, which are new processes: {error}; define it at the top level of a "
            f"module, not as a lambda or inside a function"
        ) from error
    except (RuntimeError, TypeError):  # such as locks, which only a process that starts may receive
        pass


def _on_ranks(size: int, grouped: bool, *given: Any) -> list[dict[str, Any]]:
    """Return the results of all ranks, of new processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_on_rank, (size, grouped, folder, *given), nprocs=size, start_method="spawn")
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=True) for rank in range(size)]


def _on_rank(
    rank: int, size: int, grouped: bool, folder: str, loss: Any, call: Call | None, samples: int, dim: int, wait: float
) -> None:
    torch.set_num_threads(1)
    if grouped:
        store = dist.FileStore(str(Path(folder) / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=wait))
    draw = torch.Generator().manual_seed(0)
    inputs, weights, direction = (
        torch.randn(2, *shape, generator=draw, dtype=torch.float64) for shape in ((samples, 5), (5, dim), (5, dim))
    )
    own = slice(rank * samples // size, (rank + 1) * samples // size)

    def new() -> Any:
        return copy.deepcopy(loss) if isinstance(loss, nn.Module) else loss()

    def value(made: Any, weight: Tensor) -> Tensor:
        z1, z2 = (inputs[:, own] @ weight).unbind()
        index = torch.arange(samples)[own]
        if call is not None:
            return call(made, z1, z2, index)
        return made(z1, z2, index) if isinstance(made, ContrastiveEstimator) else made(z1, z2)

    def mean(x: Tensor) -> Tensor:
        if grouped:
            dist.all_reduce(x)
        return x / size

    made, found = new(), {}
    for name in ("first", "second"):  # the second call reads what the first has stored
        leaf = weights.clone().requires_grad_()
        current = value(made, leaf)
        current.backward()
        gradient = torch.zeros_like(weights) if leaf.grad is None else leaf.grad
        found[name] = {"value": mean(current.detach().double().clone()), "gradient": mean(gradient)}
        if hasattr(made, "step"):
            made.step()
    state = _tensors(made.state_dict()) if hasattr(made, "state_dict") else {}
    sides = [mean(value(new(), weights + sign * STEP * direction).detach().double().clone()) for sign in (1, -1)]
    slope = (sides[0] - sides[1]) / (2 * STEP)
    torch.save({**found, "state": state, "slope": slope, "direction": direction}, Path(folder) / f"{rank}.pt")
    if grouped:
        dist.destroy_process_group()
        time.sleep(HANDOVER)  # a thread that still releases a tensor of the loss would abort the exit


def _compared(size: int, whole: dict[str, Any], ranks: list[dict[str, Any]], tolerance: float) -> DistributedResult:
    def error(part: str) -> float:
        return max(_error(each[call][part], whole[call][part]) for each in ranks for call in ("first", "second"))

    right, got = whole["first"]["gradient"], ranks[0]["first"]["gradient"]
    factor = float((got * right).sum() / right.square().sum())
    along, slope = float((got * ranks[0]["direction"]).sum()), float(ranks[0]["slope"])
    state = max((_error(value, whole["state"][name]) for name, value in ranks[0]["state"].items()), default=torch.nan)
    numbers = {
        "value": error("value"),
        "gradient": error("gradient"),
        "factor": factor,
        "rest": _error(got, factor * right),
        "derivative": abs(along - slope) / max(abs(slope), 1e-12),
        "state": state,
    }
    return DistributedResult(size, **numbers, message="; ".join(_messages(size, tolerance, **numbers)))


def _messages(
    size: int, most: float, value: float, gradient: float, factor: float, rest: float, derivative: float, state: float
) -> list[str]:
    """Return what differs, and the usual reason."""
    found = ["the value differs"] if value > most else []
    if gradient > most and rest <= most:
        known = next((name for name, k in ((" (K)", size), (" (1 / K)", 1 / size)) if abs(factor / k - 1) < 1e-6), "")
        found += [f"the gradient is {factor:.3g} times that of one process{known}"]
    elif gradient > most and value <= most and derivative > 1e-4:
        found += ["the gradient is not the derivative of the value: gathered features carry no gradient"]
    elif gradient > most:
        found += ["the gradient differs"]
    return found + (["the state differs"] if state > most else [])


def _error(got: Tensor, right: Tensor) -> float:
    if got.shape != right.shape:
        return float("inf")
    gap = (got.double() - right.double()).abs().max().item() if got.numel() else 0.0
    return gap / max(right.double().abs().max().item() if right.numel() else 0.0, 1e-12)


def _require(true: bool, message: str) -> None:
    if not true:
        raise AssertionError(message)


def _same(wanted: Tensors, got: Tensors, when: str, rtol: float = 0.0) -> None:
    _require(wanted.keys() == got.keys(), f"{sorted(wanted.keys() ^ got.keys())} differ {when}")
    for name, value in wanted.items():
        _require(torch.allclose(value, got[name], rtol, rtol), f"{name} differs {when}")


def _state(est: ContrastiveEstimator) -> Tensors:
    return _tensors(est.state_dict())


def _tensors(state: Mapping[str, Any]) -> Tensors:
    """Return copies of all tensors in a state, with their places."""
    found, rest = {}, list(state.items())
    for place, value in rest:
        if isinstance(value, Tensor):
            found[place] = value.clone()
        elif isinstance(value, Mapping):
            rest += [(f"{place}.{name}", inner) for name, inner in value.items()]
    return found
