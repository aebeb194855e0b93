"""Where rows live: which memory, and whose."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from compopt import checks
from compopt.distributed.control import doing
from compopt.distributed.ranks import ProcessGroup, Ranks
from compopt.stores import RowAccess, check_offload, describe, open_rows
from compopt.stores.layout import RowLayout


@dataclass(frozen=True)
class Placement:
    """The arguments of an estimator that decide where its rows are, and never what they are.

    Args:
        process_group: the ranks that form the global batch; ``None``: the default group, if there is one.
        offload: ``None``, on the features' device; ``"cpu"``, host memory; ``"disk"``, a file.
        offload_dir: folder of that file, on a local disk.
        shard: each of K ranks keeps ``n / K`` rows instead of all; always so with ``"disk"``.
    """

    process_group: ProcessGroup | None = None
    offload: str | None = None
    offload_dir: str | os.PathLike[str] | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        checks.flag("shard", self.shard)
        check_offload(self.offload, self.offload_dir)
        object.__setattr__(self, "shard", self.shard or self.offload == "disk")
        if self.offload_dir is not None:  # a later chdir moves nothing
            object.__setattr__(self, "offload_dir", os.path.abspath(self.offload_dir))

    def __getstate__(self) -> dict[str, Any]:
        """A process group stays with its process."""
        return {**self.__dict__, "process_group": None}

    def open(self, n: int, layout: RowLayout, ranks: Ranks) -> RowAccess:
        """The rows of this process; collective for ``"disk"``, where each rank has a file of its own."""

        def rows() -> RowAccess:
            return open_rows(
                n,
                layout.words,
                offload=self.offload,
                offload_dir=self.offload_dir,
                name="rows" if ranks.size == 1 else f"rows-{ranks.rank:05d}-of-{ranks.size:05d}",
                description=describe(layout),
            )

        if self.offload != "disk":
            return rows()
        with doing("the construction of an estimator"):
            return ranks.agree(rows)
