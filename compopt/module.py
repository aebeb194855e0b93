"""Wrapper module of an estimator: parameters, state, mode and device become part of the model."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from compopt import checks
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator


class EstimatorModule(nn.Module):
    """Result of :func:`as_module`; ``module(...)`` is ``est(...)``.

    Attributes:
        est: the estimator, for all other methods: ``attach``, ``read``, ``prefetch``, ``metrics``, ...

    Raises:
        TypeError: the learned parameters of a part are not those of its attribute ``learnable``.
    """

    def __init__(self, est: Estimator) -> None:
        mode = est.training
        self.est = est  # first, since Module.__init__ assigns training
        super().__init__()
        self.training = mode
        for name, each in self.est._objects().items():
            if each.learnable is not None:
                self.add_module(name or "learnable", each.learnable)
        if {id(p) for p in est.parameters()} != {id(p) for p in self.parameters()}:
            raise TypeError(
                "a part of this estimator yields parameters from learned() that are not in its attribute learnable; "
                "keep them in that module, where wrappers such as FSDP2 replace them"
            )

    @property
    def training(self) -> bool:
        """Mode of the estimator; frameworks assign it, as ``train()`` does."""
        return self.est.training

    @training.setter
    def training(self, mode: bool) -> None:
        self.est.train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the estimator; raise a ``TypeError`` if the estimator is not callable."""
        if not callable(self.est):
            raise TypeError(f"{type(self.est).__name__} has no call; use its methods, as module.est")
        return self.est(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change devices only: rows and learned temperatures keep their dtype under ``half()`` and ``double()``."""

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return new if new.dtype == tensor.dtype else tensor.to(new.device)

        super()._apply(moved, recurse)
        after = fn(torch.empty(0, device=self.est.device)).device
        if after != self.est.device:
            self.est.to(after)
        return self

    def extra_repr(self) -> str:
        return f"{type(self.est).__name__}, n={self.est.n}"


class _ExtraState(dict[str, Any]):
    """State inside the ``state_dict()`` of a model; code that takes it for a tensor, as averages do, gets an error."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name}: an estimator's state in state_dict() is a dict, not a tensor; average model.parameters(), as "
            f"torch.optim.swa_utils.AveragedModel does, or use compopt.as_module(est, state=False)"
        )

    def __mul__(self, other: Any) -> Any:
        return self.mul

    __rmul__ = __mul__

    def __deepcopy__(self, memo: dict[int, Any]) -> _ExtraState:
        return _ExtraState(copy.deepcopy(dict(self), memo))

    def __reduce__(self) -> Any:  # a type that torch.load(weights_only=True) accepts
        return OrderedDict, (), None, None, iter(self.items())


class StatefulEstimatorModule(EstimatorModule):
    """Module with the state of the estimator in its ``state_dict()``."""

    def get_extra_state(self) -> dict[str, Any]:
        """Return the estimator's ``state_dict()`` without the parameters of the module."""
        state = self.est.state_dict()
        for name, each in self.est._objects().items():
            own = (state["parts"][name] if name else state)["state"]
            for parameter in each._learned_by_name():
                own.pop(parameter)
        return _ExtraState(state)

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`get_extra_state`; the module's parameters are loaded separately."""
        before = [(parameter, parameter.detach().clone()) for parameter in self.parameters()]
        self.est.load_state_dict(self._with_parameters(state) if any(True for _ in self.parameters()) else state)
        with torch.no_grad():
            for parameter, value in before:
                parameter.copy_(value)

    def _with_parameters(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state with parameters, which :meth:`load_state_dict` of the estimator requires."""
        state = states.upgraded(self.est, state)

        def completed(each: Estimator, state: Any) -> Any:
            if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
                return state  # refused by the load
            # finite values, so that a run with NaN parameters can load an earlier state
            own = {name: value.detach().nan_to_num(0, 0, 0) for name, value in each._learned_by_name().items()}
            return {**state, "state": {**own, **state["state"]}}

        objects = self.est._objects()
        if "" in objects:
            return completed(self.est, state)
        parts = state.get("parts")
        if not isinstance(parts, Mapping):
            return state
        return {**state, "parts": {name: completed(objects[name], x) for name, x in parts.items() if name in objects}}


def as_module(est: Estimator, state: bool = True) -> EstimatorModule:
    """Wrap an estimator in a module that can be called, moved and saved with a model.

    Example:
        >>> import torch, compopt
        >>> model = torch.nn.Module()
        >>> est = compopt.InfoNCEEstimator(tau=0.1, learn_tau=True, multiply_tau=False)
        >>> model.loss = compopt.as_module(est)  # then self.loss(z1, z2, index)
        >>> [name for name, _ in model.named_parameters()]
        ['loss.temperature.log_inverse']
        >>> model.eval().loss.est.training
        False

    A learned temperature of the estimator is among ``model.parameters()`` (as ``loss.temperature.log_inverse``; exclude
    it from weight decay), the state of the estimator is in ``model.state_dict()``, and ``model.train()``,
    ``model.eval()`` and ``model.to(device)`` apply to the estimator. The estimator can still be used directly. Copies
    of the module have estimators of their own, attached to no optimizer. ``half()``, ``bfloat16()`` and ``double()`` do
    not change dtypes of the estimator.

    *Large tables.* ``state_dict()`` and ``deepcopy`` copy all rows. With ``state=False`` the ``state_dict()`` of the
    module contains the parameters only; save the rest with :func:`compopt.save`.

    *safetensors* stores tensors only, so that ``save_pretrained``, ``accelerator.save_model`` and the Trainer of
    transformers cannot save the state of a module: use ``state=False``, and save the estimator with
    ``est.attach(optimizer, checkpoint=True)``, :func:`compopt.save` or the callback of that framework.

    *Averages of weights.* Average ``model.parameters()``, as ``torch.optim.swa_utils.AveragedModel`` does. A loop over
    ``model.state_dict().items()`` would also reach the state of the estimator, which is not a tensor.

    *DDP.* Call the module inside the wrapped model's ``forward``. ``state_dict()`` may be called on one rank. Omit
    ``device_ids``: DDP would move ``index`` to the device, and the call would have to wait for it.

    *FSDP2* does not shard scalars. Every rank has the whole gradient of a learned temperature: call
    ``fully_shard(model, ignored_params=set(model.loss.parameters()))`` and put it into a parameter group of its own.
    *DeepSpeed* does not support scalar parameters: keep an estimator with a learned temperature outside the model.

    *torch.compile* compiles the code before and after the call; the call itself is not part of the graph.

    Args:
        est: the estimator; it may be in use already.
        state: include the state of the estimator in ``state_dict()`` and ``load_state_dict()`` of the module.

    Returns:
        The module; ``module.est`` is the estimator. Nothing is communicated.

    Raises:
        TypeError: ``est`` is not an estimator, or ``state`` is not a bool.
        ValueError: ``state=True`` and the ranks store different parts of the state, while ``state_dict()`` of a module
            is usually called on one rank.
    """
    if not isinstance(est, Estimator):
        raise TypeError(f"est must be an estimator, got {type(est).__name__}")
    checks.flag("state", state)
    if not state:
        return EstimatorModule(est)
    if est.split:
        raise ValueError(
            "the state of this estimator is on all ranks together, and state_dict() of a module is called on one; use "
            "as_module(est, state=False), and compopt.save(est, directory) on every rank"
        )
    return StatefulEstimatorModule(est)
