"""Rows of a table in successive parts, one per rank, as ``Shard(0)`` of torch's DTensor divides them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from compopt.distributed.ranks import Part
from compopt.stores import table as tables
from compopt.stores.table import RowTable


def share(n: int, rank: int, size: int) -> Part:
    """The rows that ``Shard(0)`` gives to a rank: equal parts, rounded up, so that the last ones may be shorter."""
    each = -(-n // size)
    return Part(min(n, rank * each), min(n, (rank + 1) * each))


def columns(table: RowTable) -> dict[str, Tensor]:
    """A copy of every column of this rank's part, on the CPU, ``(part, D)``. Collective where ranks split rows."""
    ranks = table._ranks
    own = share(table.n, ranks.rank, ranks.size)
    result = {c.name: torch.empty(own.size, c.width, dtype=c.dtype, device="cpu") for c in table.layout.columns}
    if table.sharded:
        ranks.barrier()
    store = table.at_rest()
    for start in range(0, table.n if table.sharded else own.size, tables.BLOCK_ROWS):
        if table.sharded:
            first, block = start, _gathered(table, start, min(start + tables.BLOCK_ROWS, table.n))
        else:
            first = own.start + start
            block = store.block(first, min(first + tables.BLOCK_ROWS, own.stop)).cpu()
        low, high = max(first, own.start), min(first + len(block), own.stop)
        if low < high:
            for name, view in table.layout.unpack(block).items():
                result[name][low - own.start : high - own.start] = view[low - first : high - first]
    return result


def _gathered(table: RowTable, start: int, stop: int) -> Tensor:
    """Rows ``start`` to ``stop`` of a sharded table, from their holders."""
    bounds = [(_before(start, rank, table.stride), _before(stop, rank, table.stride)) for rank in range(table.stride)]
    sizes = [high - low for low, high in bounds]
    block = table._ranks.gather([table.store.block(*bounds[table.first]).cpu()], sizes)[0]
    order = torch.cat([torch.arange(low, high) * table.stride + rank for rank, (low, high) in enumerate(bounds)])
    result = torch.empty_like(block)
    result[order - start] = block
    return result


def _before(row: int, first: int, stride: int) -> int:
    """How many of the rows ``first, first + stride, ...`` come before a row."""
    return max(0, -(-(row - first) // stride))


def load(table: RowTable, parts: Mapping[str, Tensor]) -> None:
    """Overwrite all rows with those of all ranks' parts, ``(part, D)`` each. Collective."""
    ranks, layout, cpu = table._ranks, table.layout, torch.device("cpu")
    shares = [share(table.n, rank, ranks.size) for rank in range(ranks.size)]
    with table.overwriting() as store:
        for start in range(0, shares[0].size, tables.BLOCK_ROWS):
            pieces = [Part(*(min(start + more, part.size) for more in (0, tables.BLOCK_ROWS))) for part in shares]
            own = {name: pieces[ranks.rank].of(value) for name, value in parts.items()}
            packed = layout.pack(own, layout.zeros(pieces[ranks.rank].size, cpu))
            everyone = ranks.gather([packed], [piece.size for piece in pieces])[0]
            for part, piece, block in zip(shares, pieces, everyone.split([p.size for p in pieces]), strict=True):
                first = part.start + piece.start
                mine = block[(table.first - first) % table.stride :: table.stride]
                if len(mine):
                    table.find_partial(layout.unpack(mine.contiguous()))
                    store.write_block(_before(first, table.first, table.stride), mine.contiguous())
    table.agree_partial()
