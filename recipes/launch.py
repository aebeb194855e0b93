"""One process or many, with or without DeepSpeed: how a run gets its ``Accelerator``.

All of these start the same recipe; ``--batch-size`` counts over all ranks, so that the results agree::

    python -m recipes.train_clip
    torchrun --nproc_per_node 2 -m recipes.train_clip
    accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no \\
        -m recipes.train_clip
    torchrun --nproc_per_node 2 -m recipes.train_clip --deepspeed-config recipes/deepspeed/zero2.json
    DS_ACCELERATOR=cpu deepspeed --num_accelerators 2 --module recipes.train_clip \\
        --deepspeed-config recipes/deepspeed/zero2.json

``accelerate launch --use_deepspeed --deepspeed_config_file FILE`` does the same if the recipe is given
``--deepspeed-config`` too. On a CPU DeepSpeed may first compile an extension (a minute); a run that is killed meanwhile
leaves a ``lock`` in torch's extensions folder, at which the next one waits until it is removed. On GPUs
add ``--device cuda`` and leave ``--cpu`` and ``DS_ACCELERATOR`` out.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.state import AcceleratorState
from torch import nn


def local_device(device: torch.device) -> torch.device:
    """``cuda`` is this rank's own card, the one that accelerate takes."""
    if device.type != "cuda" or device.index is not None:
        return device
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process prints, draws and writes results; known before the process group is."""
    return int(os.environ.get("RANK", 0)) == 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_main(value: Any) -> Any:
    """What the main process has, on every rank."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


@contextlib.contextmanager
def results_folder(folder: Path) -> Iterator[Path]:
    """``folder`` on the main process; elsewhere one that goes.

    All ranks draw, since reading sharded rows or gathering ZeRO 3's weights needs all of them.
    """
    if is_main():
        yield folder
        return
    with tempfile.TemporaryDirectory() as elsewhere:
        yield Path(elsewhere)


def accelerator(device: torch.device, accumulate: int, mixed_precision: str, deepspeed: Path | None) -> Accelerator:
    """A fresh one for each run; all of them share one process group."""
    AcceleratorState._reset_state()  # keeps the process group; accelerate takes no second DeepSpeed plugin otherwise
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulate, "mixed_precision": mixed_precision}
    if deepspeed is None:
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "false"
        return Accelerator(cpu=device.type == "cpu", **options)
    return _with_deepspeed(device, accumulate, deepspeed, options)


def _with_deepspeed(device: torch.device, accumulate: int, path: Path, options: dict[str, Any]) -> Accelerator:
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    if "LOCAL_RANK" not in os.environ:
        raise ValueError("--deepspeed-config needs a launcher, for one process too: torchrun --nproc_per_node 1 -m ...")
    handlers = []
    if device.type == "cpu":
        # accelerate's CPU branch excludes DeepSpeed: take the other one, and name the backend that it would not find
        os.environ.update(ACCELERATE_USE_CPU="false", DS_ACCELERATOR="cpu")
        handlers = [InitProcessGroupKwargs(backend="gloo")]
    from accelerate import DeepSpeedPlugin

    config = json.loads(path.read_text())
    config["gradient_accumulation_steps"] = accumulate
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(deepspeed_plugin=plugin, kwargs_handlers=handlers, **options)


def set_micro_batch(accelerator: Accelerator, samples: int) -> None:
    """DeepSpeed wants to know what a rank takes per forward; there is no loader from which it could tell."""
    plugin = accelerator.state.deepspeed_plugin if uses_deepspeed(accelerator) else None
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = samples


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type.value == "DEEPSPEED"


def check_learned(accelerator: Accelerator, parameters: list[nn.Parameter], method: str) -> None:
    """DeepSpeed's optimizers take the parameters of the model and no others."""
    if parameters and uses_deepspeed(accelerator):
        raise ValueError(
            f"{method} learns a parameter outside the model, which DeepSpeed does not take; leave --deepspeed-config "
            f"out, or choose a method without one"
        )


@contextlib.contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Inside, every rank has all of the parameters, which ZeRO 3 keeps in pieces."""
    parameters = [p for p in module.parameters() if hasattr(p, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield
