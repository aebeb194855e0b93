"""Where rows live: which memory, and whose."""

from __future__ import annotations

import os
from dataclasses import dataclass

from compopt import checks
from compopt.ranks import ProcessGroup, Ranks
from compopt.rows import RowLayout
from compopt.stores import DirectRows, MemoryStore, Rows

OFFLOADS = ("cpu", "disk")


@dataclass(frozen=True)
class Placement:
    """The arguments of an estimator that decide where its rows are, and never what they are.

    Args:
        process_group: the ranks that form the global batch; ``None``: the default group, if there is one.
        offload: ``None``, on the features' device; ``"cpu"``, host memory; ``"disk"``, a file.
        offload_dir: folder of that file, on a local disk.
        shard: each rank keeps ``n / K`` rows instead of all.
    """

    process_group: ProcessGroup | None = None
    offload: str | None = None
    offload_dir: str | os.PathLike[str] | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        checks.flag("shard", self.shard)

    def open(self, n: int, layout: RowLayout, ranks: Ranks) -> Rows:
        """The rows of this process."""
        return DirectRows(MemoryStore(n, layout.words))
