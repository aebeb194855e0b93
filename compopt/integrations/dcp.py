"""``torch.distributed.checkpoint``: each rank writes a part of the rows, with checksums.

An estimator implements ``Stateful`` itself: in ``dcp.save({"compopt": est}, ...)`` every rank has the whole state, and
dcp writes that of one rank. With :class:`Stateful` each of K ranks copies and writes n / K rows. It also adds features
that dcp lacks: checksums detect values that changed on disk, and the optimizer state of a network is loaded into an
estimator that has not been trained yet. For tables larger than memory use :func:`compopt.save`. Requires torch 2.5.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from compopt.checkpoint import loading
from compopt.checks import values
from compopt.distributed.collectives import doing
from compopt.estimator import state_dict as states
from compopt.estimator.base import Estimator
from compopt.stores import table as tables
from compopt.stores.table import RowTable

try:
    from torch.distributed.tensor import DTensor, Shard
except ImportError as error:
    raise ImportError(f"compopt.integrations.dcp needs torch 2.5 or newer, not {torch.__version__}") from error

# Odd 64-bit constants (2^64 / golden ratio; a constant of SplitMix64): multiplication by an odd number is invertible.
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687


class Stateful:
    """Adapter of an estimator for ``dcp.save``, ``dcp.async_save`` and ``dcp.load``.

    Example:
        >>> import compopt
        >>> from compopt.integrations.dcp import Stateful
        >>> est = compopt.SogCLREstimator(n=10)
        >>> sorted(Stateful(est).state_dict())
        ['rest', 'rows']

    Use ``dcp.save({"model": ..., "compopt": Stateful(est)}, checkpoint_id=...)``. The number of ranks, ``shard`` and
    ``offload`` may differ between writer and reader. Rows are saved as DTensors on the CPU, a contiguous part per rank,
    in dcp's own format. The rest is one value of bytes: configuration, groups, state other than rows, checksums.

    ``dcp.load`` reads into a copy, which replaces the state of the estimator if all checks pass on every rank;
    otherwise the estimator is unchanged. Errors that dcp itself detects (another n, a missing column) are raised as
    ``CheckpointException``, which ``except Exception`` does not catch.

    Args:
        est: the estimator. The adapter itself has no state.

    Raises:
        ValueError: in ``dcp.load``, see :meth:`load_state_dict`.

    Communicates: each method is collective.
    """

    def __init__(self, est: Estimator) -> None:
        self.est = est

    def state_dict(self) -> dict[str, Any]:
        """Copy the committed state, with this rank's part of the rows; ``state_dict`` pre-hooks run. Collective.

        Returns:
            ``"rows"``: by column, ``(n, 2)`` or ``(n, 1)``, a DTensor on the CPU, or a tensor with one rank;
            ``"rest"``: bytes.
        """
        est = self.est
        est._begin_saving()
        with doing("state_dict()", est.t), est._copying():
            about = states.metadata(est)
            tensors = _flat({name: each.saved_state() for name, each in est._objects().items()})
            states.check_room(est, est._ranks.size)
            parts = {name: table.state_dict(own=_share(est)) for name, table in _tables(est).items()}
        rows = _flat(parts)
        with doing("state_dict()", est.t):
            about |= {"data_fingerprint": est.data_fingerprint, "checksums": _checksums(est, rows)}
        return {"rows": _distributed(est, rows), "rest": _packed(about, tensors)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; discard pending deposits; ``load_state_dict`` post-hooks run. Collective.

        Args:
            state_dict: result of :meth:`state_dict`, filled by dcp.

        Raises:
            ValueError: mode, method, dtype, an option or data_fingerprint differ (the message has both values); rows
                are not those that were saved (the message has their column).
        """
        est = self.est
        est._await_save()
        with doing("load_state_dict()", est.t), est._writing():
            state, parts = est._ranks.agree(lambda: _checked(est, state_dict))
            found = _checksums(est, parts)
            est._ranks.agree(lambda: _check_rows(est, state["checksums"], found, parts))
            for name, each in est._objects().items():
                states.load_object(each, states.entries_of(state, name), partial(_load_shares, each, _of(name, parts)))
            states.reset_progress(est, state)
        est._end_loading()


# -- rows ----------------------------------------------------------------------------------------------------------


def _key(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _flat(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors with the keys ``object.name``."""
    return {_key(name, key): value for name, own in parts.items() for key, value in own.items()}


def _of(name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of one object, the inverse of :func:`_flat`."""
    prefix = _key(name, "")
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _tables(est: Estimator) -> dict[str, RowTable]:
    return {name: each._table for name, each in est._objects().items() if each._table is not None}


def _share(est: Estimator, rank: int | None = None) -> range:
    """Return the rows of a rank (default: this rank) in the division of DTensor's ``Shard(0)``."""
    n, ranks = est.n or 0, est._ranks
    each, rank = -(-n // ranks.size), ranks.rank if rank is None else rank
    return range(min(n, rank * each), min(n, (rank + 1) * each))


def _load_shares(est: Estimator, own: Mapping[str, Tensor]) -> None:
    """Overwrite all rows of an object with the shares of all ranks, ``(share, D)`` on each rank. Collective."""
    if est._table is None:
        return
    ranks = est._ranks
    shares = [_share(est, rank) for rank in range(ranks.size)]

    def parts() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        # in each round every rank sends the next block of its share, so that the work is balanced
        for block in tables.blocks(range(len(shares[0]))):
            at = slice(block.start, block.stop)
            rows = [tables.numbers(share[at]) for share in shares]
            everyone = ranks.gather([value[at] for value in own.values()], [len(part) for part in rows])
            yield torch.cat(rows), dict(zip(own, everyone, strict=True))

    est._table.load(parts())


def _distributed(est: Estimator, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    ranks = est._ranks
    if ranks.size == 1:
        return dict(parts)
    assert ranks.group is not None
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    shapes = {name: torch.Size((est.n or 0, part.shape[1])) for name, part in parts.items()}
    return {
        name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=shapes[name], stride=(part.shape[1], 1))
        for name, part in parts.items()
    }


def _checksums(est: Estimator, parts: Mapping[str, Tensor]) -> dict[str, int]:
    """Return a checksum per column of values and rows, independent of the number of ranks. Collective."""
    if not parts:
        return {}
    everyone = est._ranks.gather_objects([_checksum(part, _share(est).start).item() for part in parts.values()])
    sums = torch.tensor(everyone, dtype=torch.int64, device="cpu").sum(0)  # modulo 2^64
    return dict(zip(parts, sums.tolist(), strict=True))


def _checksum(part: Tensor, first: int) -> Tensor:
    """Return a sum over all values mixed with their positions; any single flipped bit changes the sum."""
    total = torch.zeros((), dtype=torch.int64, device="cpu")
    for at in tables.blocks(range(len(part))):
        block = part[at.start : at.stop].contiguous()
        words = block.view(torch.int32 if block.itemsize == 4 else torch.int64).to(torch.int64).flatten()
        place = (first + at.start) * part.shape[1] + torch.arange(len(words), device="cpu")
        mixed = (words ^ (place * _SPREAD)) * _MIX
        mixed = (mixed ^ ((mixed >> 29) & ((1 << 35) - 1))) * _SPREAD
        total += mixed.sum()
    return total


# -- the rest --------------------------------------------------------------------------------------------------------


def _packed(about: Mapping[str, Any], extra: Mapping[str, Tensor]) -> bytes:
    """Return a CRC-32 in eight hexadecimal digits, and a safetensors file with ``about`` in its metadata."""
    from safetensors.torch import save as to_bytes

    content = to_bytes({name: value.contiguous() for name, value in extra.items()}, {"about": json.dumps(about)})
    return f"{zlib.crc32(content):08x}".encode() + content


def _checked(est: Estimator, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the unpacked rest in the form of ``est.state_dict()``, and this rank's rows, after checks of both."""
    from safetensors.torch import load as from_bytes

    values.entries("state_dict", state_dict, ("rows", "rest"))
    values.mapping("rows", state_dict["rows"])
    packed = state_dict["rest"]
    if not isinstance(packed, bytes) or packed[:8] != f"{zlib.crc32(packed[8:]):08x}".encode():
        raise ValueError(
            "'rest' of the estimator's state is damaged: its checksum does not fit; load another checkpoint"
        )
    content = packed[8:]
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    state: dict[str, Any] = json.loads(header["__metadata__"]["about"])
    loading.check_data(est, "the checkpoint", state["data_fingerprint"])
    state["version"] = states.FORMAT_VERSION
    states.check_tree(est, state)
    with torch.device("cpu"):
        tensors = from_bytes(content)
    for name, each in est._objects().items():
        own = states.entries_of(state, name)
        own["state"] = _of(name, tensors)
        states.check_tensors(each, own)
    parts = {name: x.to_local() if isinstance(x, DTensor) else x for name, x in state_dict["rows"].items()}
    count = len(_share(est))
    expected = {
        _key(name, c.name): torch.empty(count, c.width, dtype=c.dtype, device="meta")
        for name, table in _tables(est).items()
        for c in table.layout.columns
    }
    values.tensors("the rows", parts, expected)
    return state, parts


def _check_rows(est: Estimator, saved: Mapping[str, int], found: Mapping[str, int], parts: Mapping[str, Any]) -> None:
    """Raise if rows are not those that were saved, or have invalid values."""
    for name in found:
        if saved.get(name) != found[name]:
            raise ValueError(
                f"column {name!r} is damaged: its checksum is {found[name]}, the checkpoint says {saved.get(name)}; "
                f"load another checkpoint"
            )
    share = _share(est)
    for name, table in _tables(est).items():
        table.check_values(_of(name, parts), len(share), share.start)
