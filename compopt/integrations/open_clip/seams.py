"""Where open_clip is open: the names in ``open_clip_train.main`` that are wrapped while it runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

# In every version: what is looked up by name when main() runs.
COMMON = ("main", "parse_args", "create_model_and_transforms", "get_data", "train_one_epoch")
RELEASED = ("create_loss", {"model", "loss", "data", "epoch", "optimizer", "scaler", "args"})
REBUILT = ("create_task", {"state", "data", "args"})


@dataclass
class Epoch:
    """What ``train_one_epoch`` is called with, in any version.

    Attributes:
        model: as it is trained: wrapped, compiled.
        number: of the epoch, from 0 on; also how many are completed.
    """

    model: nn.Module
    data: Mapping[str, Any]
    optimizer: Any
    scaler: Any
    number: int
    args: Any
    writer: Any


class Seams:
    """The seams of one version.

    Args:
        trainer: the module ``open_clip_train.main``.

    Attributes:
        rebuilt: batches are dictionaries, and a task holds the loss; otherwise ``create_loss`` makes it.

    Raises:
        RuntimeError: neither form; it says what was looked for, and what was found.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        missing = [name for name in COMMON if not callable(getattr(trainer, name, None))]
        factory = next((name for name, _ in (REBUILT, RELEASED) if hasattr(trainer, name)), None)
        self.rebuilt = factory == REBUILT[0]
        wanted = (REBUILT if self.rebuilt else RELEASED)[1]
        epoch = getattr(trainer, "train_one_epoch", None)
        self._signature = inspect.signature(epoch) if callable(epoch) else inspect.Signature()
        has = set(self._signature.parameters)
        if missing or factory is None or not wanted <= has:
            raise RuntimeError(
                f"open_clip {_version()} fits neither form that is known here. Looked for in open_clip_train.main: "
                f"{', '.join(COMMON)}, and create_loss with train_one_epoch({', '.join(sorted(RELEASED[1]))}) as in "
                f"3.3.0, or create_task with train_one_epoch({', '.join(sorted(REBUILT[1]))}) as in 4.2.0.dev0. Found: "
                f"missing {', '.join(missing) or 'nothing'}, {factory or 'neither factory'}, "
                f"train_one_epoch({', '.join(sorted(has))})"
            )

    def epoch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Epoch:
        """The call of ``train_one_epoch``, by name."""
        call = self._signature.bind(*arguments, **keywords).arguments
        args, writer = call["args"], call.get("tb_writer")
        if not self.rebuilt:
            parts = (call["optimizer"], call["scaler"], call["epoch"])
            return Epoch(call["model"], call["data"], *parts, args, writer)
        state = call["state"]
        parts = (state.optimizer, state.scaler, state.epoch)
        return Epoch(state.task.trainable_module, call["data"], *parts, args, writer)

    def factory(self, make_loss: Callable[[], nn.Module]) -> tuple[str, Callable[..., Any]]:
        """The name that makes the loss, and what takes its place."""
        if not self.rebuilt:
            return RELEASED[0], lambda args: make_loss()
        create_task = self.trainer.create_task

        def with_our_loss(*arguments: Any, **keywords: Any) -> Any:
            task = create_task(*arguments, **keywords)
            if type(task).__name__ != "CLIPTask" or not isinstance(getattr(task, "loss", None), nn.Module):
                raise ValueError(
                    f"open_clip trains this model as a {type(task).__name__}; an estimator takes the place of the loss "
                    f"of a CLIPTask, of one image and one text, and of no other"
                )
            task.loss = make_loss()
            return task

        return REBUILT[0], with_our_loss

    def board(self, args: Any) -> Any:
        """``wandb`` or what takes its place, if this run reports there."""
        if not self.rebuilt:
            return self.trainer.wandb if args.wandb else None
        return self.trainer.get_wandb_backend(args)

    @contextmanager
    def replaced(self, names: Mapping[str, Any]) -> Iterator[None]:
        """Names of the module are others inside, and their own again outside."""
        own = {name: getattr(self.trainer, name) for name in names}
        try:
            for name, value in names.items():
                setattr(self.trainer, name, value)
            yield
        finally:
            for name, value in own.items():
                setattr(self.trainer, name, value)


def _version() -> str:
    import open_clip

    return str(getattr(open_clip, "__version__", "of unknown version"))


def unwrapped(model: Any) -> Any:
    """The model inside DDP and ``torch.compile``."""
    while True:
        inner = getattr(model, "module", None) or getattr(model, "_orig_mod", None)
        if inner is None:
            return model
        model = inner


def check_flags(args: Any, indexed: bool) -> None:
    """Refuse flags of open_clip that an estimator cannot serve.

    Args:
        args: what open_clip's parser made.
        indexed: samples need an index.

    Raises:
        ValueError: it names the flag and the remedy.
    """
    name = args.model.lower()
    compiled_step = getattr(args, "torchcompile", False) and getattr(args, "torchcompile_strategy", None) == "step"
    problems = {
        "--distill-model": (
            args.distill_model is not None or args.distill_pretrained is not None,
            "a teacher's features are no part of an estimator's objective; train without it",
        ),
        "--siglip": (args.siglip, "a sigmoid for each pair has no normalizer to estimate; train without it"),
        "--horovod": (getattr(args, "horovod", False), "ranks are torch.distributed's; start with torchrun"),
        f"--model {args.model}": (
            any(kind in name for kind in ("coca", "genlip", "genlap")),
            "its loss is generative too; take a CLIP model",
        ),
        "--use-naflex": (
            getattr(args, "use_naflex", False) and indexed,
            "its batches keep patches and texts only; take an estimator without rows",
        ),
        "--torchcompile-strategy step": (compiled_step, "commits run outside of compiled code; use model or task"),
    }
    for flag, (found, why) in problems.items():
        if found:
            raise ValueError(f"{flag}: {why}")
