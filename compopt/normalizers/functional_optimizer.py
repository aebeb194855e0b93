"""Any ``torch.optim`` optimizer as a pure rule: tensors and state in, new tensors and state out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

PREFIX = "optimizer."
# Optimizers put their step counters on the default device, where that is not told otherwise; they belong on the host.
_HOST = torch.device("cpu")


class FunctionalOptimizer:
    """An optimizer whose state lives with its owner, so that steps can be taken back.

    State tensors are named ``optimizer.<parameter>.<key>``.

    Args:
        make: called with a list of tensors and ``lr=``.

    Raises:
        TypeError: ``make`` does not return a ``torch.optim.Optimizer``, or one that keeps something else than tensors
            of the parameters' shapes and numbers in tensors, or changes its own options, or needs more than gradients.
    """

    def __init__(self, make: Callable[..., torch.optim.Optimizer]) -> None:
        self.make = make
        self._optimizer: torch.optim.Optimizer | None = None
        self._device = ""
        self._initial: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._absent: list[str] = []
        try:
            with _HOST:
                self._try()
        except Exception as error:
            raise TypeError(
                f"optimizer={make!r} cannot train a network: {error}; give a class such as torch.optim.Adagrad, "
                f"Adam or SGD, or functools.partial of one"
            ) from error

    def _try(self) -> None:
        """Two steps on a small tensor show what an optimizer keeps."""
        tensor = torch.zeros(2, 3, 4, dtype=torch.float32)
        trial = self._made([tensor], "cpu")
        self.name = type(trial).__name__
        # what an optimizer makes before its first step, as AdaGrad does
        self._initial = {key: value.clone() for key, value in trial.state.get(tensor, {}).items()}
        options = {key: value for key, value in trial.param_groups[0].items() if key != "params"}
        for _ in range(2):
            tensor.grad = torch.ones_like(tensor)
            trial.step()
        if {key: value for key, value in trial.param_groups[0].items() if key != "params"} != options:
            raise TypeError("it keeps state among its options")
        for key, value in trial.state[tensor].items():
            if value is None:  # such as the buffer of a momentum that is off
                self._absent.append(key)
                continue
            if not isinstance(value, Tensor) or value.shape not in (tensor.shape, ()):
                raise TypeError(f"its state {key!r} is neither a 0-d tensor nor one of the parameter's shape")
            self._kept[key] = value

    @staticmethod
    def owns(name: str) -> bool:
        """Whether an entry of the owner's state is the optimizer's."""
        return name.startswith(PREFIX)

    def expected(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State tensors after a step, by name, on the meta device.

        Args:
            parameters: for shapes and dtype.
            state: what was saved. A counter may be of float32 or float64: it has the default dtype of the run.
        """
        found = {}
        for name, parameter in parameters.items():
            for key, value in self._kept.items():
                full = f"{PREFIX}{name}.{key}"
                if value.dim():
                    dtype = parameter.dtype if value.is_floating_point() else value.dtype
                    found[full] = parameter.new_empty(parameter.shape, dtype=dtype, device="meta")
                    continue
                saved = state[full].dtype if full in state else value.dtype
                both = {saved, value.dtype} <= {torch.float32, torch.float64}
                found[full] = value.new_empty((), dtype=saved if both else value.dtype, device="meta")
        return found

    def initial(self, name: str, like: Tensor) -> Tensor:
        """A state tensor before the first step."""
        value = self._initial.get(name.split(".", 2)[2])
        return torch.full_like(like, 0 if value is None else value.flatten()[0].item())

    def start(self, parameters: Mapping[str, Tensor], state: Mapping[str, Tensor], lr: float) -> OptimizerSteps:
        """Begin steps on copies of ``parameters``, from (a copy of) ``state``."""
        device = next(iter(parameters.values())).device.type
        if self._optimizer is None or self._device != device:
            with _HOST:
                self._optimizer = self._made([torch.zeros(1, dtype=torch.float32, device=device)], device)
            self._device = device
        copies = {name: value.clone() for name, value in parameters.items()}
        states = {name: self._state_of(name, value, state) for name, value in copies.items()}
        return OptimizerSteps(self._optimizer, copies, states, lr)

    def _state_of(self, name: str, parameter: Tensor, state: Mapping[str, Tensor]) -> dict[str, Any]:
        prefix = f"{PREFIX}{name}."
        own = {key.removeprefix(prefix): value.clone() for key, value in state.items() if key.startswith(prefix)}
        if own:
            return {**dict.fromkeys(self._absent), **own}
        return {
            key: self.initial(f"{prefix}{key}", parameter) if value.dim() else value.clone()
            for key, value in self._initial.items()
        }

    def _made(self, tensors: list[Tensor], device: str) -> torch.optim.Optimizer:
        # torch fuses AdaGrad on the CPU only, and only if asked to
        options: dict[str, Any] = {"fused": True} if self.make is torch.optim.Adagrad and device == "cpu" else {}
        made = self.make(tensors, lr=1.0, **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise TypeError(f"it makes no torch.optim.Optimizer but an object of type {type(made).__name__}")
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_optimizer": None}  # it holds nothing between batches


class OptimizerSteps:
    """Some steps of an optimizer on tensors of its owner's.

    Attributes:
        parameters: changed in place by every step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, Tensor],
        states: Mapping[str, dict[str, Any]],
        lr: float,
    ) -> None:
        self._optimizer, self._names = optimizer, list(parameters)
        self.parameters = list(parameters.values())
        optimizer.state.clear()
        optimizer.param_groups[0].update(params=self.parameters, lr=lr)
        for parameter, state in zip(self.parameters, states.values(), strict=True):
            if state:
                optimizer.state[parameter] = state

    def step(self, gradients: Sequence[Tensor]) -> None:
        """One step along these gradients."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient
        with nullcontext() if self._optimizer.state else _HOST:
            self._optimizer.step()

    def finish(self) -> dict[str, Tensor]:
        """Parameters and optimizer state by name; the optimizer forgets them."""
        result = dict(zip(self._names, self.parameters, strict=True))
        for name, parameter in zip(self._names, self.parameters, strict=True):
            parameter.grad = None
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    result[f"{PREFIX}{name}.{key}"] = value
        self._optimizer.state.clear()
        self._optimizer.param_groups[0]["params"] = []
        return result
