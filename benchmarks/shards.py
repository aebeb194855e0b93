"""Shards: what the index costs a webdataset pipeline, an estimator a step of CLIP, and what a large manifest takes.

    .venv-clip/bin/python -m benchmarks.shards              # `make test-clip` makes this environment; writes results/
    .venv/bin/python -m benchmarks.shards --quick           # a short look, printed; without open_clip no training steps

Variants are measured in turns, in another order each round, so that a busy moment meets all of them; readers in turns
of 100 samples.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import random
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import webdataset as wds

import compopt
from benchmarks.machine import in_turns
from benchmarks.report import environment, heading, quartiles, save, table
from compopt.data import ShardBatches, ShardIndex, indexed_reader
from recipes import make_shards

MODEL = Path("recipes/clip/tiny.json")
BATCH = 64
TURN = 100
ESTIMATORS: dict[str, Callable[[int], compopt.ContrastiveEstimator]] = {
    "InfoNCE": lambda n: compopt.InfoNCEEstimator(),
    "DCL": lambda n: compopt.DCLEstimator(),
    "SogCLR": lambda n: compopt.SogCLREstimator(n),
    "iSogCLR": lambda n: compopt.ISogCLREstimator(n, rho=2.0),
    "Residual": lambda n: compopt.ResidualEstimator(128),
}


# -- the pipeline --------------------------------------------------------------------------------------------------


def pipelines(folder: Path, decode: bool) -> dict[str, Callable[[], Iterator[Any]]]:
    """Samples of all shards, one after another: bare, with their index, and as resumable batches."""
    shards = compopt.data.shard_list(folder)
    index = ShardIndex.build(folder, progress=False)

    def stream(*reader: Any) -> Iterator[Any]:
        stages = [wds.SimpleShardList(shards), *reader, wds.shuffle(500)]
        return iter(wds.DataPipeline(*stages, *([wds.decode("pil", partial=True)] if decode else [])))

    def batched() -> Iterator[Any]:
        batches = ShardBatches(shards, indexed_reader(wds.tarfile_to_samples(), index), BATCH, sizes=index, shuffle=500)
        samples = (sample for batch in batches for sample in batch)
        return iter(wds.decode("pil", partial=True)(samples)) if decode else samples

    return {
        "webdataset": lambda: stream(wds.tarfile_to_samples()),
        "with the index": lambda: stream(indexed_reader(wds.tarfile_to_samples(), index)),
        "ShardBatches": batched,
    }


def rates(folder: Path, samples: int, rounds: int, decode: bool) -> dict[str, list[float]]:
    """Microseconds of CPU time per sample, in each round; the readers take turns of ``TURN`` samples."""
    made, shuffle = pipelines(folder, decode), random.Random(0)
    found: dict[str, list[float]] = {name: [] for name in made}
    turns = (samples - BATCH) // TURN  # a last batch that is not full is left out
    for number in range(rounds + 1):
        open_now = {name: make() for name, make in made.items()}
        spent = dict.fromkeys(made, 0.0)
        for _ in range(turns):
            for name in shuffle.sample(list(made), len(made)):
                started = time.process_time()
                taken = sum(1 for _ in islice(open_now[name], TURN))
                spent[name] += time.process_time() - started
                assert taken == TURN, "the shards have fewer samples than were to be read"
        for name, seconds in spent.items():
            if number:  # the first round opens files for the first time
                found[name].append(1e6 * seconds / (turns * TURN))
    return found


def photographs(folder: Path, samples: int, pixels: int = 256) -> None:
    """A shard of JPEG files as large as img2dataset writes them by default: smooth noise, some 20 kB each."""
    from PIL import Image

    generator = np.random.default_rng(0)
    with wds.TarWriter(str(folder / "00000.tar")) as writer:
        for number in range(samples):
            coarse = Image.fromarray(generator.integers(0, 256, (pixels // 8, pixels // 8, 3), dtype=np.uint8))
            kept = io.BytesIO()
            coarse.resize((pixels, pixels), Image.Resampling.BICUBIC).save(kept, "jpeg", quality=95)
            writer.write({"__key__": f"{number:09d}", "jpg": kept.getvalue(), "txt": f"picture {number}"})


# -- a step --------------------------------------------------------------------------------------------------------


def steps(n: int, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of a whole step (model, loss, AdamW) with each estimator."""
    import open_clip

    open_clip.add_model_config(MODEL)
    torch.manual_seed(0)
    model = open_clip.create_model(MODEL.stem)
    images, texts = torch.randn(BATCH, 3, 32, 32), torch.randint(1, 40_000, (BATCH, 20))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step(est: compopt.ContrastiveEstimator) -> float:
        index = torch.randperm(n)[:BATCH]
        started = time.perf_counter()
        z1, z2, _ = model(images, texts)
        est(z1, z2, index).backward()
        optimizer.step()
        est.step()
        optimizer.zero_grad()
        return 1e3 * (time.perf_counter() - started)

    made = {name: make(n) for name, make in ESTIMATORS.items()}
    return in_turns({name: lambda est=est: step(est) for name, est in made.items()}, rounds)


# -- the manifest --------------------------------------------------------------------------------------------------


def manifest(shards: int) -> dict[str, float]:
    """Opening a manifest of shards with 10,000 samples each, and asking it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shards.json"
        ShardIndex({f"{number:06d}.tar": 10_000 for number in range(shards)}).save(path)
        started = time.process_time()
        index = ShardIndex.load(path)
        seconds = time.process_time() - started
        tracemalloc.start()
        held = ShardIndex.load(path)
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        del held
    asked = [f"/data/{random.Random(k).randrange(shards):06d}.tar" for k in range(20_000)]
    started = time.process_time()
    for url in asked:
        index.index({"__url__": url}, 7)
    other = (time.process_time() - started) / len(asked)
    started = time.process_time()
    for position in range(10_000):
        index.index({"__url__": asked[0]}, position)
    same = (time.process_time() - started) / 10_000
    found = {"shards": shards, "samples": index.n, "open, s": seconds, "memory, MiB": held_bytes / 2**20}
    return {**found, "an answer, microseconds": 1e6 * same, "the first of a shard, microseconds": 1e6 * other}


# -- report --------------------------------------------------------------------------------------------------------


def compared(found: dict[str, list[float]], unit: str, decimals: int) -> str:
    """Median, quartiles, and the median of the ratios to the first variant of the same round."""
    first = next(iter(found))
    rows = []
    for name, values in found.items():
        low, middle, high = quartiles(values)
        ratio = median(value / base for value, base in zip(values, found[first], strict=True))
        rows.append([name, f"{middle:,.{decimals}f}", f"{low:,.{decimals}f} to {high:,.{decimals}f}", f"{ratio:.3f}"])
    return table(["", unit, "quartiles", f"of {first}'s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=150, help="rounds of training steps")
    parser.add_argument("--samples", type=int, default=8000, help="read in a round")
    parser.add_argument("--quick", action="store_true", help="few rounds, printed only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.rounds, options.steps, options.samples = 3, 5, 1000
    env = environment()
    results: dict[str, Any] = {"manifest": manifest(100_000)}
    with tempfile.TemporaryDirectory() as folder:
        make_shards.main(["--out", folder, "--limit", str(options.samples), "--no-progress"])
        train = Path(folder) / "train"
        results["read"] = rates(train, options.samples, options.rounds, decode=False)
        results["read and decoded"] = rates(train, options.samples, options.rounds, decode=True)
        jpeg = Path(folder) / "jpeg"
        jpeg.mkdir()
        photographs(jpeg, options.samples // 4)
        results["of 256 x 256 pixels (JPEG), read and decoded"] = rates(
            jpeg, options.samples // 4, options.rounds, decode=True
        )
    if importlib.util.find_spec("open_clip") is not None:
        results["step"] = steps(100_000, options.steps)
    text = [*heading("Shards", env), f"Glyphs of 32 x 32 pixels, {options.samples:,} samples in shards of 1,000.", ""]
    for name in (name for name in results if "read" in name):
        text += [f"## A sample {name}, one process", ""]
        text += [compared(results[name], "µs of CPU time", 2), ""]
    if "step" in results:
        text += [f"## A training step of {MODEL.name}, batch {BATCH}, AdamW, one thread", ""]
        text += [compared(results["step"], "ms", 1), ""]
    rows = [[name, f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"] for name, value in results["manifest"].items()]
    text += ["## A manifest", "", table(["", ""], rows)]
    print("\n".join(text))
    if not options.quick:
        save("shards", "\n".join(text), env, results)


if __name__ == "__main__":
    main()
