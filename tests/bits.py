"""Record and compare losses, gradients and states of every entry of the database, around a refactoring.

python -m tests.bits record before.pt                      # at the commit before
python -m tests.bits compare before.pt                     # at the commit after, on the same machine: bit for bit
python -m tests.bits compare before.pt --tolerance 1e-5    # differences relative to a tensor's largest value

Each entry runs in both modes and both dtypes: whole and in chunks, with rows in memory, in host memory and on disk,
with two calls per commit, some of them with ``labels`` or ``index2``, on one process and on two ranks. The recorded
values are the loss, both gradients, the gradient of a learned temperature, and all of ``state_dict()``.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from tests.database import BY_NAME, DATABASE, MODES
from tests.helpers import batches, bits, make, run
from tests.pool import the_pool

N, STEPS, RANKS = 24, 5, 2
CALLS: list[dict[str, Any]] = [{}, {"chunk_size": 2}, {"offload": "cpu"}, {"offload": "disk"}]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, bytes]]:
    """Yield every tensor and number of a nested state with its path."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for at, inner in enumerate(value):
            yield from leaves(inner, f"{name}[{at}]")
    elif isinstance(value, torch.Tensor):
        yield name, f"{value.dtype} {tuple(value.shape)} ".encode() + bits(value)
    else:
        yield name, repr(value).encode()


def trace(name: str, mode: str, dtype: torch.dtype, rank: int = 0, ranks: int = 1, **options: Any) -> dict[str, bytes]:
    """Return the results of one configuration over a few commits."""
    info = BY_NAME[name]
    est, _ = make(info, mode, N, dtype, **options)
    found: dict[str, bytes] = {}
    for t, (z1, z2, index) in enumerate(batches(N, 2 * STEPS, dtype=dtype)):
        own = slice(rank * len(index) // ranks, (rank + 1) * len(index) // ranks)
        keys = {"labels": index // 2} if t % 4 == 2 else {}
        if t % 4 == 3 and mode == "bimodal":
            keys = {"index2": index.flip(0)}
        loss, g1, g2 = run(est, z1[own], z2[own], index[own], **{name: key[own] for name, key in keys.items()})
        found |= dict(leaves({"loss": loss, "g1": g1, "g2": g2}, f"{t}"))
        if info.tau_leaf:
            found |= dict(leaves({"tau": info.tau_leaf(est).grad}, f"{t}"))
        if t % 2:
            est.step()
            found |= dict(leaves(est.state_dict(), f"{t}.state"))
    return found


def everything() -> dict[str, dict[str, bytes]]:
    """Return the results by configuration."""
    found = {}
    for info in DATABASE:
        for mode in MODES:
            for dtype in (torch.float32, torch.float64):
                for options in CALLS:
                    with tempfile.TemporaryDirectory() as folder:
                        place = {"offload_dir": folder} if options.get("offload") == "disk" else {}
                        key = f"{info} {mode} {dtype} {options}"
                        found[key] = trace(info.name, mode, dtype, **options, **place)
            for shard in (False, True):
                results = the_pool(RANKS, timeout=120).run(on_rank, RANKS, info.name, mode, shard)
                found |= {f"{info} {mode} rank {rank} shard {shard}": result for rank, result in enumerate(results)}
    return found


def on_rank(group: Any, name: str, mode: str, shard: bool) -> dict[str, bytes]:
    """Return the results of one of two ranks."""
    rank = torch.distributed.get_rank(group)
    return trace(name, mode, torch.float32, rank, RANKS, shard=shard, process_group=group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("record", "compare"))
    parser.add_argument("file")
    parser.add_argument("--tolerance", type=float, default=0.0, help="largest relative difference in float32")
    parser.add_argument("--tolerance64", type=float, default=0.0, help="the same in float64")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found = everything()
    if args.do == "record":
        torch.save(found, args.file)
        print(f"{len(found)} configurations, {sum(map(len, found.values()))} values")
        return
    before = torch.load(args.file, weights_only=True)
    both = sorted(before.keys() & found.keys())
    print(f"{len(both)} configurations in both; not compared: {sorted(before.keys() ^ found.keys())}")
    allowed = {"float32": args.tolerance, "float64": args.tolerance64}
    largest, wrong, missing = dict.fromkeys(allowed, (0.0, "")), [], set()
    for key in both:
        missing |= {name.partition(".")[2] for name in before[key].keys() ^ found[key].keys()}
        for name in before[key].keys() & found[key].keys():
            dtype, gap = difference(before[key][name], found[key][name])
            if dtype in largest:
                largest[dtype] = max(largest[dtype], (gap, f"{key}: {name}"))
            if gap > allowed.get(dtype, 0.0):
                wrong.append((gap, f"{key}: {name}"))
    print(f"largest difference: {largest}")
    print(f"{len(wrong)} values differ by more, in {len({where.split()[0] for _, where in wrong})} entries")
    print(f"values of one commit only: {sorted(missing)}")
    print(*sorted(wrong, reverse=True)[:20], sep="\n")
    raise SystemExit(bool(wrong))


def difference(before: bytes, after: bytes) -> tuple[str, float]:
    """Return the dtype of two recorded tensors and their largest difference, relative to the largest value.

    The difference of other values, of shapes and of integers is 0 or infinite; NaN equals NaN.
    """
    (header, one), (other, two) = (
        value.split(b") ", 1) if b") " in value else (value, b"") for value in (before, after)
    )
    dtype = header.decode().removeprefix("torch.").partition(" ")[0]
    if before == after or header != other or not dtype.startswith("float"):
        return dtype, 0.0 if before == after else float("inf")
    a, b = (np.frombuffer(value, dtype).astype(np.float64) for value in (one, two))
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return dtype, float("inf")
    gap = np.nan_to_num(np.abs(a - b)).max(initial=0.0)
    return dtype, float(gap / max(np.nan_to_num(np.abs(a)).max(initial=0.0), np.finfo(dtype).tiny))


if __name__ == "__main__":
    main()
