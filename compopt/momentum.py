"""Momentum copy of a model, as the encoder of the features that a memory stores."""

from __future__ import annotations

import copy
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from compopt import checks
from compopt.checks.values import bounded, mapping, tensors
from compopt.estimator.base import Estimator

SHARDED, ENGINE = "set_requires_gradient_sync", "set_gradient_accumulation_boundary"  # of FSDP2, of DeepSpeed
FSDP1, COMPILED = "_fsdp_wrapped_module", "_orig_mod"
SHARD = "to_local"  # of a DTensor
CALLS_BEFORE_WARNING = 256  # calls without an update


class MomentumEncoder:
    r"""Moving average of a model's weights; its features are the ``keys=`` of a call.

    Example:
        >>> import torch, compopt
        >>> model = torch.nn.Linear(8, 4)
        >>> encoder = compopt.MomentumEncoder(model)
        >>> est = compopt.recommended(dim=4, batch_size=16, momentum=True)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> handles = est.attach(optimizer), encoder.attach(est)
        >>> x1, x2 = torch.randn(2, 16, 8)
        >>> loss = est(model(x1), model(x2), torch.arange(16), keys=(encoder(x1), encoder(x2)))
        >>> loss.backward()
        >>> optimizer.step()  # commits, and updates the copy
        >>> torch.equal(encoder.module.weight, model.weight)
        False

    .. math:: \theta_k \leftarrow m\, \theta_k + (1 - m)\, \theta

    The copy starts from the weights that the model has at construction. Parameters that do not require a gradient then,
    such as those below a low-rank adapter, are shared with the model and use no memory; FSDP2 duplicates them. Buffers
    are copied at each update. For parameters in half precision an average in float32 is stored in addition to the copy,
    since steps of size ``1 - m`` would be lost to rounding.

    The copy is in the mode, training or evaluation, of the model at construction: in training mode dropout is active,
    and batch normalisation uses the statistics of the batch. Change the mode with ``encoder.module.eval()``.

    Args:
        model: the model, or one of two towers, each with an encoder of its own. With DDP create the encoder from
            ``ddp.module`` after wrapping, since wrapping broadcasts the weights of rank 0. With FSDP2 create it before
            sharding, since a sharded model cannot be copied, and apply ``fully_shard`` to ``encoder.module`` as to the
            model. ``torch.compile`` requires nothing more. ``encoder.module`` must be on the device of the model.
        decay: ``m``, in [0, 1). It is an attribute that may be changed during training.

    Attributes:
        module: the copy.

    ``copy.deepcopy(encoder)`` also copies the model that it follows; copy both together, ``copy.deepcopy((model,
    encoder))``. Copies are not attached.

    State: the parameters of the copy that are not shared, and its persistent buffers, see :meth:`state_dict`.

    Cost: a forward pass without a graph in each step, about a third of a forward and backward pass, and a second
    copy of the trained weights. Communicates nothing, except the forward pass of a copy under FSDP2.

    Raises:
        TypeError: ``model`` is not a module, or ``decay`` is not a number.
        ValueError: ``decay`` is outside [0, 1), the model is already wrapped or cannot be copied, or parameters are
            not initialised. See also :meth:`update`.

    Warns:
        UserWarning: at the 256th call, if there was no update before; or at construction, if the ``forward`` of a
            module was replaced by a function, which a copy shares.

    References:
        He et al., MoCo, CVPR 2020, eq. 2.
    """

    def __init__(self, model: nn.Module, decay: float = 0.99) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        checks.decay("decay", decay)
        _check_plain(model)
        self.decay, self._model = decay, model
        frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
        try:
            self.module = copy.deepcopy(model, memo=dict(frozen)).requires_grad_(False)
        except Exception as error:  # deepcopy() has no class of its own for errors
            raise ValueError(
                f"the model cannot be copied ({error}); make the copy before the first forward pass, and without "
                f"attributes that hold results of one (torch.nn.utils.weight_norm does: use its parametrization)"
            ) from error
        self._shared = {name for name, p in self.module.named_parameters() if id(p) in frozen}
        self._averages: dict[str, Tensor] = {}  # in float32, of parameters in half precision
        self._versions: dict[str, int] = {}  # of these parameters, after the last update or load
        self._handle: RemovableHandle | None = None
        self._calls = 0.0  # before the first update
        self._unused = True  # until it is called, updated or loaded

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the copy without a graph. The first call compares the weights and waits for the device."""
        if self._unused and not torch.compiler.is_compiling():
            self._check_begin()
        self._calls += 1
        if self._calls == CALLS_BEFORE_WARNING:
            warnings.warn(
                f"the copy of a MomentumEncoder was called {CALLS_BEFORE_WARNING} times and never updated: it does "
                f"not follow the model; call encoder.attach(est), or encoder.update() after each optimizer step",
                stacklevel=3,
            )
        return self.module(*args, **kwargs)

    def attach(self, est: Estimator) -> RemovableHandle:
        """Run :meth:`update` after each commit of an estimator (see :meth:`~compopt.Estimator.attach`).

        A skipped optimizer step commits nothing and does not move the copy. Exception: with fused AMP on an accelerator
        the host does not read the flag of a skipped step, and the copy moves towards the unchanged weights. Attaching
        again replaces the previous hook. The estimator does not keep the encoder alive. Copies of the estimator have no
        hooks. If several optimizers update the model, attach the estimator to the one that steps last: a commit, and
        with it the update, follows the first step of an attached optimizer.

        Returns:
            A handle with a method ``remove()``, which removes the hook.

        Raises:
            TypeError: ``est`` is not an estimator.
            ValueError: ``est`` has neither rows nor other state, and therefore no commits.
        """
        if not isinstance(est, Estimator):
            raise TypeError(
                f"est must be an estimator, whose commits the copy follows, got {type(est).__name__}; without one call "
                f"encoder.update() after each optimizer step"
            )
        if not est._commits():
            raise ValueError(
                f"{type(est).__name__} has no state, so that it has no commits that the copy could follow; call "
                f"encoder.update() after each optimizer step"
            )
        if self._handle is not None:
            self._handle.remove()
        encoder = ref(self)

        def follow(*_: Any) -> None:
            alive = encoder()
            if alive is not None:
                alive.update()

        self._handle = est.register_step_post_hook(follow)
        return self._handle

    def _check_begin(self) -> None:
        """Warn if the weights of the model have changed since construction, without an update or load of the copy."""
        self._unused = False
        if any(hasattr(module, SHARDED) for module in self.module.modules()):
            return  # parameters may be gathered at this point; sharding does not replace weights
        if not all(torch.allclose(own, other, 0, 0, equal_nan=True) for _, own, other in self._averaged_parameters()):
            warnings.warn(
                "the weights of the model have changed since its MomentumEncoder was made, which has had no update: "
                "they were loaded, trained, or replaced by those of rank 0 when DistributedDataParallel wrapped the "
                "model. Make the copy afterwards (of ddp.module), or load its state too",
                stacklevel=4,
            )

    @torch.no_grad()
    def update(self) -> None:
        """Move the copy towards the model.

        Raises:
            ValueError: the parameters of the model differ from those of the copy in number, shape, dtype, device or
                sharding, or the buffers in number; a shared parameter was replaced, or requires a gradient now;
                ``decay`` is outside [0, 1). Nothing is changed in these cases.
        """
        checks.decay("decay", self.decay)
        self._unused = False
        self._calls = -math.inf
        for module in (*self._model.modules(), *self.module.modules()):
            if hasattr(module, SHARDED):
                module.reshard()  # type: ignore[operator]  # gathered parameters are copies
        averaged, buffers = self._averaged_parameters(), self._paired("buffers")  # both may raise
        alike: dict[object, list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
        for name, own, other in averaged:
            average = self._average(name, own)
            alike[type(own), own.device, own.dtype].append((own, average, other.to(average.dtype)))
        for owns, averages, values in (zip(*group, strict=True) for group in alike.values()):
            torch._foreach_lerp_(averages, values, 1 - self.decay)
            for own, average in zip(owns, averages, strict=True):
                if average is not own:
                    own.copy_(average)  # one by one: DTensor does not implement _foreach_copy_
        self._note_versions(averaged)
        for name, own, other in buffers:
            if own.shape == other.shape:
                own.copy_(other)
            else:  # a table of positions, for example, that grows with the inputs
                owner, _, key = name.rpartition(".")
                setattr(self.module.get_submodule(owner), key, other.clone())

    def _paired(self, kind: str) -> list[tuple[str, Tensor, Tensor]]:
        """Return the ``"parameters"`` or ``"buffers"`` of the copy by name, each paired with that of the model."""
        own, others = list(getattr(self.module, f"named_{kind}")()), list(getattr(self._model, kind)())
        if len(own) != len(others):
            raise ValueError(
                f"the model has {len(others)} {kind} and its copy {len(own)}; make a new MomentumEncoder where layers "
                f"or buffers were added, removed or tied"
            )
        return [(name, mine, other) for (name, mine), other in zip(own, others, strict=True)]

    def _averaged_parameters(self) -> list[tuple[str, Tensor, Tensor]]:
        """Return the parameters of the copy that are not shared, each paired with that of the model."""
        found = self._paired("parameters")
        for name, p, q in found:
            if (type(p), p.shape, p.device, p.dtype) != (type(q), q.shape, q.device, q.dtype):
                raise ValueError(
                    f"{name} is {_describe(p)} in the copy and {_describe(q)} in the model; move, cast or "
                    f"fully_shard encoder.module in the same way (ZeRO stage 3 is not supported)"
                )
            if name in self._shared and p is not q and not hasattr(p, SHARD):
                raise ValueError(
                    f"{name}, which is shared with the copy, was replaced in the model; load weights without "
                    f"assign=True, or make a new MomentumEncoder afterwards"
                )
            if p is q and q.requires_grad:
                raise ValueError(
                    f"{name} required no gradient when the copy was made, is shared with it, and requires one now; "
                    f"make a new MomentumEncoder after a change of what is trained"
                )
        return [(name, p, q) for name, p, q in found if p is not q]

    def _average(self, name: str, own: Tensor) -> Tensor:
        """Return the tensor to average: the parameter itself, or its average in float32."""
        if own.dtype.itemsize >= 4:
            self._averages.pop(name, None)  # it may have been cast
            return own
        known = self._averages.get(name)
        if known is None or (name in self._versions and self._versions[name] != own._version):  # loaded by the user
            known = own
        with torch.inference_mode(False), torch.no_grad():  # inference tensors could not be updated later
            self._averages[name] = known = known.to(own.device, torch.float32)
        return known

    def _note_versions(self, averaged: Sequence[tuple[str, Tensor, Tensor]]) -> None:
        """Record the versions of parameters in half precision, by which later writes to them are recognised."""
        self._versions = {n: own._version for n, own, _ in averaged if n in self._averages and not hasattr(own, SHARD)}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__}, decay={self.decay})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the hook, which cannot be pickled, and the versions, which a copy does not have."""
        return {**self.__dict__, "_handle": None, "_versions": {}}

    def state_dict(self) -> dict[str, Any]:
        """Return averages and buffers by name, ``{"parameters": ..., "buffers": ...}``.

        As in ``nn.Module.state_dict()``, the tensors are not copied; under FSDP2 they are this rank's shards. Averages
        of parameters in half precision are float32. Shared parameters and non-persistent buffers are not included.
        """
        averaged = self._averaged_parameters()
        parameters = {_eager(name): self._average(name, own.detach()) for name, own, _ in averaged}
        self._note_versions(averaged)
        modules = self.module.named_modules()  # a module's own state_dict() may have other names
        derived = {f"{at}.{key}".lstrip(".") for at, module in modules for key in module._non_persistent_buffers_set}
        buffers = {_eager(name): own for name, own in self.module.named_buffers() if name not in derived}
        return {"parameters": parameters, "buffers": buffers}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the result of :meth:`state_dict` of an encoder for the same architecture.

        Raises:
            TypeError: an entry is not a tensor, or a mapping of tensors.
            ValueError: a name is missing or unknown, a shape differs, a parameter or a buffer that is finite in the
                copy is not, numbers are of another kind, or a tensor is whole and the copy sharded, or the reverse.
                Nothing is changed in these cases.
        """
        mapping("state_dict", state_dict)
        current = self.state_dict()
        if set(state_dict) != set(current):
            raise ValueError(
                f"the state of a MomentumEncoder has {sorted(current)}, got {sorted(map(str, state_dict))}"
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for kind, own in current.items():
            mapping(kind, state_dict[kind])
            given = {_eager(str(name)): value for name, value in state_dict[kind].items()}
            # values that are not finite in the copy, such as the -inf of a mask, may be so in the state
            small = {name for name, value in own.items() if value.is_floating_point() and value.element_size() == 1}
            whole = {name: value for name, value in own.items() if not hasattr(value, SHARD) and name not in small}
            finite = [name for name, value in whole.items() if kind == "parameters" or value.isfinite().all()]
            tensors(f"MomentumEncoder.{kind}", given, own, cast=True)
            bounded(f"MomentumEncoder.{kind}", given, dict.fromkeys(finite, ""))
            for name, value in own.items():
                if hasattr(value, SHARD) and not hasattr(given[name], SHARD):
                    raise ValueError(
                        f"{name} is sharded, and whole in the state; load it before fully_shard, or save and load with "
                        f"torch.distributed.checkpoint"
                    )
                pairs.append((value, given[name]))
        self._unused, self._calls = False, -math.inf
        for value, new in pairs:
            value.copy_(new)
        averaged = self._averaged_parameters()
        for name, own, _ in averaged:
            if name in self._averages:
                own.copy_(self._averages[name])
        self._note_versions(averaged)


def _check_plain(model: nn.Module) -> None:
    """Raise for models that cannot be copied, or that do not hold their own weights (wrappers, lazy parameters)."""
    if any(hasattr(module, FSDP1) for module in model.modules()):
        raise ValueError(f"model is a {type(model).__name__} with FSDP1, which is not supported; use fully_shard")
    sharded = any(hasattr(module, SHARDED) for module in model.modules())
    wrapped = any(isinstance(module, DistributedDataParallel) for module in model.modules())
    if sharded or wrapped or hasattr(model, ENGINE):
        remedy = "before fully_shard, and shard encoder.module too" if sharded else "from model.module"
        raise ValueError(f"model is a {type(model).__name__}, which cannot be copied; create the encoder {remedy}")
    closure = next((name for name, module in model.named_modules() if _is_replaced(module)), None)
    if closure is not None:
        warnings.warn(
            f"the forward of {closure or 'the model'} was replaced by a function, which the copy shares: if it uses "
            f"the weights of the original module, the copy is never used. Make the copy before forward is replaced",
            stacklevel=3,
        )
    lazy = next((name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise ValueError(f"parameter {lazy} is not initialised yet; run a forward pass of the model first")


def _is_replaced(module: nn.Module) -> bool:
    """Return whether a module has a ``forward`` with a closure; ``deepcopy`` copies methods, but no functions."""
    if COMPILED in module._modules:  # the module that torch.compile() returns, which is copied with its function
        return False
    forward = vars(module).get("forward")
    return isinstance(forward, FunctionType) and forward.__closure__ is not None


def _eager(name: str) -> str:
    """Return the name of a parameter without the modules that ``torch.compile`` adds."""
    return name.replace(f"{COMPILED}.", "")


def _describe(p: Tensor) -> str:
    return f"{type(p).__name__} {tuple(p.shape)} {p.dtype} on {p.device}"
