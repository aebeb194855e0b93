"""Rows beside open_clip's checkpoints: ``epoch_K.compopt/`` for ``epoch_K.pt``.

Never inside that file, which one rank writes, and never named ``.pt``: open_clip resumes from the newest of these. They
are written by all ranks before the file is, so that no kill leaves a file without its rows.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from compopt.checkpoint import loading, saving
from compopt.contrastive import ContrastiveEstimator

ABOUT = "about.json"
LATEST = ("epoch_latest.pt", "epoch_latest")
_log = logging.getLogger(__name__)


def folder_of(checkpoints: Path, epoch: int) -> Path:
    """Rows after so many epochs."""
    return checkpoints / f"epoch_{epoch}.compopt"


class Rows:
    """An estimator's state beside the checkpoints of one run.

    Args:
        est: the estimator; one without state saves nothing, and resumes from anything.
        args: open_clip's flags.
    """

    def __init__(self, est: ContrastiveEstimator, args: Any) -> None:
        self.est, self.args = est, args
        self.stateful = est.n is not None or any(est.state_dict()["extra"].values())
        self.saves = bool(self.stateful and args.logs and args.logs.lower() != "none")

    def due(self, epoch: int) -> bool:
        """Whether open_clip writes a checkpoint after so many epochs."""
        args = self.args
        regular = args.save_frequency > 0 and epoch % args.save_frequency == 0
        return self.saves and bool(epoch == args.epochs or regular or args.save_most_recent)

    def save(self, epoch: int) -> None:
        """On every rank, before open_clip writes its file."""
        if not self.due(epoch):
            return
        folder = folder_of(Path(self.args.checkpoint_path), epoch)
        saved = saving.save(self.est, folder, keep=1).name
        if self.args.rank == 0:
            temporary = folder / f"{ABOUT}.{os.getpid()}"
            temporary.write_text(json.dumps({"epoch": epoch, "checkpoint": saved}))
            temporary.replace(folder / ABOUT)

    def load(self, epoch: int) -> None:
        """On every rank, once open_clip has loaded its own file, which says how many epochs are completed.

        Raises:
            ValueError: no rows beside that file, or those of another epoch, other data, another estimator; damaged.
        """
        if not self.stateful:
            return
        source = str(self.args.resume)
        if "://" in source:
            raise ValueError(f"--resume {source}: rows are read from a file system; copy the checkpoint and its rows")
        folder = folder_of(Path(source).absolute().parent, epoch)
        instead = f"to begin with its weights and new rows, use --pretrained {source} instead of --resume"
        if not folder.is_dir():
            raise ValueError(f"--resume {source}: no rows beside it, {folder} is missing; {instead}")
        try:
            about = json.loads((folder / ABOUT).read_text())
            found, name = about["epoch"], about["checkpoint"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{folder / ABOUT} cannot be read ({error}): unfinished or damaged; {instead}") from None
        if found != epoch:
            raise ValueError(f"{folder} has rows of epoch {found}, {source} is of epoch {epoch}; {instead}")
        before = [dict(group) for group in self.est.sample_groups]
        try:
            loading.load(self.est, folder / name)
        except (ValueError, FileNotFoundError) as error:
            raise ValueError(f"--resume {source}: its rows do not fit this run. {error}; {instead}") from error
        for old, new in zip(before, self.est.sample_groups, strict=False):
            changed = {key: (value, new[key]) for key, value in old.items() if new.get(key, value) != value}
            if changed:
                _log.warning(f"Options of the estimator are those of the checkpoint (asked, found): {changed}")

    def prune(self, epoch: int) -> None:
        """Remove rows whose file is gone; so many epochs are completed, and open_clip has written and deleted."""
        if not self.saves or self.args.rank != 0:
            return
        checkpoints = Path(self.args.checkpoint_path)
        latest = any((checkpoints / name).exists() for name in LATEST)
        for folder in checkpoints.glob("epoch_*.compopt"):
            match = re.fullmatch(r"epoch_(\d+)\.compopt", folder.name)
            own = (checkpoints / f"{folder.stem}{ending}" for ending in (".pt", ""))
            if match and not any(path.exists() for path in own) and not (latest and int(match[1]) == epoch):
                shutil.rmtree(folder)
