"""Creation of a run's ``Accelerator``, on one process or several, with or without DeepSpeed.

``python -m recipes.train_clip --help`` ends with the commands that start a recipe on several ranks; batch sizes are
global, so that the results do not depend on the number of ranks. ``accelerate launch --cpu`` starts one process for any
``--num_processes``; with ``--multi_gpu`` it starts the given number, also on CPUs. A run with fewer processes than
requested from its launcher is refused.

With ``torchrun --max-restarts N`` and ``--checkpoint-every``, a run that loses a rank continues automatically from its
last checkpoint; ``--resume`` does the same for a new ``torchrun``, with any number of ranks that divides the batch
size. Set ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`` for restarts: otherwise restarted ranks may read the addresses of the
previous ranks, and fail to connect (pytorch issue 135712).
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
from torch import nn
from torch.utils.cpp_extension import get_default_build_root

TIMEOUT = 600.0  # seconds that a rank waits for another one, as torch's default for accelerators


def local_device(device: torch.device) -> torch.device:
    """Replace ``cuda``, ``xpu``, ... by the device of this rank, which accelerate also selects."""
    if device.type in ("cpu", "mps") or device.index is not None:
        return device
    device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
    torch.get_device_module(device).set_device(device)
    return device


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Return whether this process prints, draws and writes results; valid before the process group exists."""
    return int(os.environ.get("RANK", 0)) == 0


def is_local_main() -> bool:
    """Return whether this process is responsible for the work that is done once per node."""
    return int(os.environ.get("LOCAL_RANK", 0)) == 0


def restarted() -> bool:
    """Return whether torchrun has restarted these ranks after the loss of one (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def from_main(value: Any) -> Any:
    """Give every rank the value of the main process."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def from_all(value: Any) -> list[Any]:
    """Give every rank the values of all ranks, in rank order."""
    values = [value] * world_size()
    if dist.is_initialized():
        dist.all_gather_object(values, value)
    return values


def on_main(function: Callable[[], Any]) -> Any:
    """Call a function on the main process only, and give every rank its result."""
    result, error = None, None
    if is_main():
        try:
            result = function()
        except (Exception, SystemExit) as raised:
            error = raised
    result, failed = from_main((result, error is not None))
    if error is not None:
        raise error
    if failed:
        raise SystemExit(1)  # the main process raises the error
    return result


class Pulse:
    """Asynchronous exchange of a few numbers between all processes, once per step."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._sent: list[torch.Tensor] = []
        self._work: dist.Work | None = None

    def beat(self, *values: float) -> torch.Tensor:
        """Send numbers; return those of the previous call from all ranks: (ranks, k), empty at the first call."""
        if self._work is not None:
            self._work.wait()
        before, mine = self._sent, torch.tensor(values, dtype=torch.float64)
        self._sent = [torch.empty_like(mine) for _ in range(world_size())]
        if self._group is None:
            self._sent = [mine]
        else:
            self._work = dist.all_gather(self._sent, mine, group=self._group, async_op=True)
        return torch.stack(before) if before else mine.new_empty(0, len(values))


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list to which SIGTERM and SIGUSR1 are appended instead of ending this process."""
    got: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGUSR1)
    before = [signal.signal(number, lambda number, _: got.append(number)) for number in numbers]
    try:
        yield got
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def leave_group(_: int) -> None:
    """Put a loader's worker into a process group of its own, out of reach of signals for the trainer's group."""
    os.setpgid(0, 0)


def check_shared(folder: Path) -> None:
    """Exit if some process does not see the files that the main process writes into a folder."""
    host = socket.gethostname()
    probe, author = from_main((f".seen-by-all-{secrets.token_hex(8)}", host))
    on_main((folder / probe).touch)
    blind = [place for place in from_all(None if (folder / probe).exists() else (rank(), host)) if place]
    on_main((folder / probe).unlink)
    if blind:
        raise SystemExit(
            f"{folder}: process {blind[0][0]} on {blind[0][1]} does not see what process 0 on {author} writes there. "
            f"All processes need one folder: put it on a file system that the nodes share"
        )


@contextlib.contextmanager
def results_folder(folder: Path) -> Iterator[Path]:
    """Yield ``folder`` on the main process, and a temporary folder on others.

    All ranks draw pictures, since reading sharded rows and gathering ZeRO 3's weights are collective.
    """
    if is_main():
        yield folder
        return
    with tempfile.TemporaryDirectory() as elsewhere:
        yield Path(elsewhere)


# DeepSpeed configuration and accumulation of this process's first accelerator; at most one entry.
_first: list[tuple[Path | None, int]] = []


def accelerator(
    device: torch.device,
    accumulate: int,
    mixed_precision: str,
    deepspeed: Path | None,
    timeout: float = TIMEOUT,
    handlers: Sequence[Any] = (),
    **options: Any,
) -> Accelerator:
    """Return a new accelerator for a run. A process has one process group, precision and DeepSpeed plugin.

    No rank waits for another longer than ``timeout`` seconds. Further options are those of ``Accelerator``.
    """
    wanted = (deepspeed, accumulate if deepspeed else 1)
    known = _first[0] if _first else None
    if known not in (None, wanted):
        raise ValueError(
            f"a process keeps the DeepSpeed configuration of its first run, (file, accumulate) = {known}; start "
            f"another process for {wanted}"
        )
    _first[:] = [wanted]
    group: dict[str, Any] = {"timeout": datetime.timedelta(seconds=timeout)}
    options |= {"gradient_accumulation_steps": accumulate, "mixed_precision": mixed_precision}
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "false" if deepspeed is None else "true"
    if deepspeed is None:
        options["cpu"] = device.type == "cpu"
    elif "LOCAL_RANK" not in os.environ:
        raise ValueError("--deepspeed-config needs a launcher, for one process too: torchrun --nproc_per_node 1 -m ...")
    elif device.type == "cpu":
        # accelerate's CPU branch excludes DeepSpeed: use the other branch, and give it the backend explicitly
        os.environ.update(ACCELERATE_USE_CPU="false", DS_ACCELERATOR="cpu")
        group["backend"] = "gloo"
    if deepspeed is not None:
        check_locks()
    if deepspeed is not None and known is None:  # later accelerators reuse this plugin and accept no other
        config = {**json.loads(deepspeed.read_text()), "gradient_accumulation_steps": accumulate}
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    made = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(**group), *handlers], **options)
    check_processes(made)
    return made


def check_processes(accelerator: Accelerator) -> None:
    """Exit if the process group does not have the requested size, or if requested FSDP is not active."""
    asked, found = os.environ.get("WORLD_SIZE"), world_size()
    if asked is None and found == 1 and {"ACCELERATE_USE_CPU", "MASTER_PORT"} <= os.environ.keys():
        # accelerate sets both for several processes, but without --multi_gpu starts only one
        raise SystemExit(
            "accelerate launch was asked for several processes and started one: give it --multi_gpu in place of --cpu "
            "(on CPUs too), or use torchrun --nproc_per_node N; if one process is meant, set WORLD_SIZE=1"
        )
    if asked is not None and int(asked) != found:
        raise SystemExit(
            f"the launcher was asked for {asked} processes (WORLD_SIZE), and the process group has {found}: each would "
            f"train alone; check --device, and that the launcher starts every process"
        )
    kind = accelerator.distributed_type.value
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1") and kind != "FSDP":
        raise SystemExit(
            f"accelerate was asked for FSDP, and this run would be {kind} on {accelerator.device}: FSDP needs "
            f"accelerators (--device cuda); leave its configuration out to train whole copies"
        )


def check_locks() -> None:
    """Exit if a killed process has left the lock of a compilation, for which DeepSpeed would wait without end."""
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    locks = {os.path.realpath(path) for path in (*folder.glob("*/lock"), *folder.glob("*/*/lock"))}
    for held in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes of others, and those that end now
            locks.discard(os.readlink(held))
    if locks and Path("/proc/self/fd").exists():
        raise SystemExit(
            f"DeepSpeed would wait for ever for a lock that no process of this machine holds: a run was killed while "
            f"it compiled. Unless another machine that shares the folder compiles now: rm {' '.join(sorted(locks))}"
        )


def set_micro_batch(accelerator: Accelerator, samples: int) -> None:
    """Set DeepSpeed's number of samples per rank and forward, which it cannot infer without a loader."""
    plugin = accelerator.state.deepspeed_plugin if uses_deepspeed(accelerator) else None
    if plugin is not None:
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = samples


def uses_deepspeed(accelerator: Accelerator) -> bool:
    return accelerator.distributed_type.value == "DEEPSPEED"


def check_learned(accelerator: Accelerator, parameters: list[nn.Parameter], method: str) -> None:
    """Refuse a parameter outside the model under DeepSpeed, whose optimizers accept only parameters of the model."""
    if parameters and uses_deepspeed(accelerator):
        raise ValueError(
            f"{method} learns a parameter outside the model, which DeepSpeed does not take; leave --deepspeed-config "
            f"out, or choose a method without one"
        )


def check_optimizer(accelerator: Accelerator, name: str) -> None:
    """Refuse LARS under DeepSpeed, whose optimizers get flat partitions instead of layers."""
    if name == "lars" and uses_deepspeed(accelerator):
        raise ValueError(
            "optimizer='lars' scales the update of each layer, and DeepSpeed's ZeRO joins layers; leave "
            "--deepspeed-config out, or choose --optimizer adamw"
        )


@contextlib.contextmanager
def whole(module: nn.Module) -> Iterator[None]:
    """Gather the parameters that ZeRO 3 partitions, on every rank, inside the context."""
    parameters = [p for p in module.parameters() if hasattr(p, "ds_id")]
    if not parameters:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(parameters):
        yield
