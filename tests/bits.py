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
    redefined = [
        key for key in both if any(before[key][name] != found[key][name] for name in configuration(before[key]))
    ]
    both = [key for key in both if key not in redefined]
    largest, wrong, lacking = {}, [], set()
    for key in both:
        lacking |= {name.partition(".")[2] for name in before[key].keys() ^ found[key].keys()}
        dtype = "float64" if "torch.float64" in key else "float32"
        for gap, name in differences(before[key], found[key]):
            largest[dtype] = max(largest.get(dtype, (0.0, "")), (gap, f"{key}: {name}"))
            if gap > (args.tolerance if dtype == "float32" else args.tolerance64):
                wrong.append((gap, f"{key}: {name}"))
    print(f"{len(both)} configurations compared; {len(before.keys() ^ found.keys())} are of one commit only:")
    print(*sorted({key.split()[0] for key in before.keys() ^ found.keys()}))
    print(f"{len(redefined)} have another configuration:", *sorted({key.split()[0] for key in redefined}))
    print("values of one commit only:", *sorted(lacking))
    print(*(f"largest difference, {dtype}: {gap:.2g}, {where}" for dtype, (gap, where) in largest.items()), sep="\n")
    print(f"{len(wrong)} values differ by more than the tolerance")
    print(*sorted(wrong, reverse=True)[:20], sep="\n")
    raise SystemExit(bool(wrong))


def configuration(values: Mapping[str, bytes]) -> list[str]:
    """Return the names of the entries of a configuration in the recorded state."""
    return [name for name in values if ".state.config." in name]


def differences(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> Iterator[tuple[float, str]]:
    """Yield the largest difference and the name of all values of two records of a configuration.

    Differences are relative to the largest value of the same tensor in all steps; those of other values, of shapes and
    of integers are 0 or infinite. NaN equals NaN.
    """
    sizes: dict[str, float] = {}
    for name, value in before.items():
        kind = name.partition(".")[2]
        sizes[kind] = max(sizes.get(kind, 0.0), np.abs(np.nan_to_num(decoded(value)[1])).max(initial=0.0))
    for name in before.keys() & after.keys():
        (header, a), (other, b) = decoded(before[name]), decoded(after[name])
        if before[name] == after[name]:
            gap = 0.0
        elif header != other or not header.startswith("float") or not np.array_equal(np.isnan(a), np.isnan(b)):
            gap = float("inf")
        else:
            gap = float(np.nan_to_num(np.abs(a - b)).max() / max(sizes[name.partition(".")[2]], 1e-30))
        yield gap, name


def decoded(value: bytes) -> tuple[str, np.ndarray]:
    """Return dtype and shape of a recorded tensor, and its values if it is of floating point."""
    header, _, rest = value.partition(b") ")
    name = header.decode(errors="replace").removeprefix("torch.")
    dtype = name.partition(" ")[0]
    return name, np.frombuffer(rest, dtype if dtype in ("float32", "float64") else np.uint8).astype(np.float64)


if __name__ == "__main__":
    main()
