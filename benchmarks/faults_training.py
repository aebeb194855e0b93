"""The training run that ``benchmarks/faults.py`` kills: it saves often, and continues from what it saved."""

from __future__ import annotations

import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import compopt
from compopt.estimator.save_handle import SaveHandle

DIM, BATCH = 8, 32
BEGUN, SAVED, INSIDE = 0, 1, 2  # what a run tells of itself: bytes of shared memory


@dataclass(frozen=True)
class Setting:
    """The training run: method, placement, size, and how often it saves."""

    method: str = "isogclr"
    offload: str | None = None
    n: int = 300_000
    steps: int = 24
    save_every: int = 1
    keep: int = 2
    blocking: bool = True
    ranks: int = 1
    shard: bool = False


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class Training:
    """Model, optimizer and estimator, and their common checkpoint.

    The model's file is written, under the number of the step, before ``compopt.save``: the newest complete checkpoint
    of the estimator then always has its model.
    """

    def __init__(self, setting: Setting, directory: Path) -> None:
        self.setting, self.directory = setting, directory
        torch.manual_seed(0)
        self.model = torch.nn.ModuleList([torch.nn.Linear(DIM, DIM), torch.nn.Linear(DIM, DIM)])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        options = {"offload": setting.offload, "shard": setting.shard and ranks() > 1}
        if setting.offload == "disk":
            options["offload_dir"] = directory / "rows"
        if setting.method == "sogclr":
            self.est = compopt.SogCLREstimator(setting.n, gamma=0.7, tau=0.1, **options)
        else:
            self.est = compopt.ISogCLREstimator(setting.n, gamma=0.7, rho=1.0, tau_init=0.1, **options)
        self.est.attach(self.optimizer)
        self.handle: SaveHandle | None = None

    def step(self, number: int) -> None:
        """One update; its batch is a function of its number."""
        generator = torch.Generator().manual_seed(number)
        # half of the samples come from a small set, so that rows are visited again
        index = torch.cat([torch.randperm(50, generator=generator)[: BATCH // 2],
                           50 + torch.randint(self.setting.n - 50, (BATCH // 2,), generator=generator)])  # fmt: skip
        x, y = torch.randn(2, BATCH, DIM, generator=generator)
        self.optimizer.zero_grad()
        own = slice(rank(), None, ranks())
        self.est(self.model[0](x[own]), self.model[1]((x + 0.5 * y)[own]), index[own]).backward()
        self._average_gradients()
        self.optimizer.step()

    def _average_gradients(self) -> None:
        if ranks() > 1:
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= ranks()

    def save(self) -> None:
        """Save model and optimizer, then the rows."""
        if rank() == 0:
            models = self.directory / "models"
            models.mkdir(exist_ok=True)
            partial = models / "partial"
            torch.save((self.model.state_dict(), self.optimizer.state_dict()), partial)
            os.replace(partial, models / f"{self.est.t}.pt")
        folder, keep = self.directory / "checkpoints", self.setting.keep
        if self.setting.blocking:
            compopt.save(self.est, folder, keep=keep)
        else:
            self.handle = compopt.save(self.est, folder, keep=keep, blocking=False)

    @property
    def saving(self) -> bool:
        """A save goes on beside training."""
        return self.handle is not None and not self.handle.done

    def load(self) -> None:
        """Load the newest complete checkpoint."""
        compopt.load(self.est, self.directory / "checkpoints")
        model, optimizer = torch.load(self.directory / "models" / f"{self.est.t}.pt")
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def digest(self) -> str:
        """A hash of all bits of the state."""
        total = hashlib.sha256()
        states = [*self.model.state_dict().values()]
        for moments in self.optimizer.state_dict()["state"].values():
            states += list(moments.values())
        state = self.est.state_dict()
        for tensor in (*states, *state["rows"].values()):
            total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()


def train(setting: Setting, directory: Path, flags: mmap.mmap | None = None) -> dict[int, str]:
    """Run from the newest checkpoint, if there is one, to the end; the digests of its steps, if nobody kills it."""
    run = Training(setting, directory)
    if any((directory / "checkpoints").glob("*/manifest.json")):
        run.load()
    if flags is not None:
        flags[BEGUN] = 1
    digests = {}
    while run.est.t < setting.steps:
        run.step(run.est.t)
        if run.est.t % setting.save_every == 0 or run.est.t == setting.steps:
            if flags is not None:
                flags[INSIDE] = 1
            run.save()
            if flags is not None:
                flags[SAVED] = 1
        if flags is not None:
            flags[INSIDE] = run.saving
        if flags is None:
            digests[run.est.t] = run.digest()
    return {**digests, setting.steps: run.digest()}
