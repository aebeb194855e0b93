"""Compare time, memory and exactness of gradient caches on one batch of a CLIP model.

    python -m benchmarks.gradient_cache             # writes benchmarks/results/gradient_cache.md

It needs open_clip with its trainer, GradCache and sentence-transformers; schemes of missing packages are skipped and
listed. Every scheme runs in a separate process and uses the package's own code: ``train_one_epoch`` of open_clip's
trainer with ``--accum-freq``, ``GradCache``, and ``CachedMultipleNegativesRankingLoss``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import compopt
from benchmarks.machine import MIB, Peak
from benchmarks.report import environment, finish, quartiles, spread, table

SCALE = 14.0
ABOUT = """One training step without the update of the optimizer: a batch of {batch} image-text pairs, micro-batches of
{size}, a ViT and a text transformer of open_clip with {parameters:.1f} million parameters, float32, one thread. *Time*:
median (first to third quartile) of {repeats} steps after a first one. *Memory*: highest anonymous memory of the process
during the steps minus that before them, including the gradients. *Error*: relative distance of all gradients of the
towers from those of the whole batch in float64. *Of the scale*: the same for the gradient of the learned temperature,
which sentence-transformers does not have."""


def new_model(dtype: torch.dtype = torch.float32) -> Any:
    """Return a small CLIP model, with the same weights in every call."""
    import open_clip

    torch.manual_seed(0)
    vision = {"image_size": 64, "patch_size": 8, "width": 96, "layers": 3, "head_width": 32}
    text = {"context_length": 32, "vocab_size": 1000, "width": 96, "heads": 3, "layers": 3}
    model = open_clip.CLIP(64, vision, text, output_dict=True).to(dtype)
    nn.init.constant_(model.logit_scale, math.log(SCALE))
    return model


def new_batch(size: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return torch.randn(size, 3, 64, 64, generator=draw), torch.randint(1, 1000, (size, 32), generator=draw)


# -- schemes: each leaves gradients in the model ----------------------------------------------------------------------


def clip_loss(z1: Tensor, z2: Tensor, scale: Tensor | float) -> Tensor:
    logits, target = scale * z1 @ z2.T, torch.arange(len(z1))
    return (cross_entropy(logits, target) + cross_entropy(logits.T, target)) / 2


def whole(model: Any, images: Tensor, texts: Tensor, size: int) -> None:
    made = model(images, texts)
    clip_loss(made["image_features"], made["text_features"], made["logit_scale"]).backward()


def ours(model: Any, images: Tensor, texts: Tensor, size: int) -> None:
    def encode(model: Any, part: Any) -> Any:
        made = model(*part)
        return made["image_features"], made["text_features"], 1 / made["logit_scale"]

    est = compopt.InfoNCEEstimator(multiply_tau=False)
    compopt.gradient_cache(est, model, (images, texts), torch.arange(len(images)), micro_batch_size=size, encode=encode)


def open_clip_trainer(model: Any, images: Tensor, texts: Tensor, size: int) -> None:
    import open_clip
    from open_clip_train.train import train_one_epoch

    class Loader(list):  # type: ignore[type-arg]
        num_batches, num_samples = len(images) // size, len(images)

    loader = Loader(zip(images.split(size), texts.split(size), strict=True))
    data = {"train": SimpleNamespace(dataloader=loader, set_epoch=lambda epoch: None)}
    none = dict.fromkeys(("distill", "horovod", "wandb", "grad_clip_norm", "distributed", "log_local"))
    args = SimpleNamespace(device="cpu", precision="fp32", accum_freq=len(loader), skip_scheduler=True, **none)
    vars(args).update(batch_size=size, world_size=1, rank=0, local_rank=0, log_every_n_steps=10**9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train_one_epoch(model, data, open_clip.ClipLoss(), 0, optimizer, None, None, None, args)


class Tower(nn.Module):
    """Module whose ``forward`` is one tower of the model."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, inputs: Tensor) -> Tensor:
        features: Tensor = getattr(self.model, f"encode_{self.name}")(inputs)
        return normalize(features, dim=1)


def grad_cache(model: Any, images: Tensor, texts: Tensor, size: int) -> None:
    import gradcache

    sys.modules.setdefault("grad_cache", gradcache)  # version 0.0.1 imports itself under another name
    from gradcache.grad_cache import GradCache

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        return clip_loss(z1, z2, model.logit_scale.exp())

    GradCache([Tower(model, "image"), Tower(model, "text")], size, loss)(images, texts)


class Sentences(nn.Sequential):
    """Model with the interface of sentence-transformers, which passes the inputs of one column."""

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        (name, value), *_ = inputs.items()
        return {"sentence_embedding": self[0 if name == "images" else 1](value)}


def sentence_transformers(model: Any, images: Tensor, texts: Tensor, size: int) -> None:
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    both: dict[str, Any] = {"directions": ("query_to_doc", "doc_to_query"), "partition_mode": "per_direction"}
    towers: Any = Sentences(Tower(model, "image"), Tower(model, "text"))
    loss = CachedMultipleNegativesRankingLoss(towers, scale=SCALE, mini_batch_size=size, **both)
    loss([{"images": images}, {"texts": texts}], torch.empty(0)).backward()


SCHEMES = {
    "the whole batch": (whole, "torch"),
    "compopt.gradient_cache": (ours, "compopt"),
    "open_clip --accum-freq": (open_clip_trainer, "open_clip_train"),
    "GradCache": (grad_cache, "gradcache"),
    "sentence-transformers": (sentence_transformers, "sentence_transformers"),
}

# -- measurement ------------------------------------------------------------------------------------------------------


def gradients(model: Any) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of the towers in one vector, and that of the scale."""
    found = [p.grad.double().flatten() for name, p in model.named_parameters() if name != "logit_scale"]
    return torch.cat(found), model.logit_scale.grad


def measure(name: str, batch: int, size: int, repeats: int, exact: Path) -> dict[str, Any]:
    """Measure one scheme in this process."""
    run, model, inputs = SCHEMES[name][0], new_model(), new_batch(batch)
    run(model, *new_batch(4), 2)  # late imports must not count as memory of a step
    times = []
    with Peak() as peak:
        before = peak.most
        for _ in range(repeats + 1):
            model.zero_grad()
            begun = time.perf_counter()
            run(model, *inputs, size)
            times.append(time.perf_counter() - begun)
    (found, scale), (wanted, wanted_scale) = gradients(model), torch.load(exact)
    error = ((found - wanted).norm() / wanted.norm()).item()
    scale_error = None if scale is None else ((scale - wanted_scale) / wanted_scale).abs().item()
    return {"name": name, "seconds": times[1:], "bytes": peak.most - before, "error": error, "scale": scale_error}


def write_exact(batch: int, path: Path) -> float:
    """Save the gradients of the whole batch in float64; return the number of parameters in millions."""
    model, (images, texts) = new_model(torch.float64), new_batch(batch)
    whole(model, images.double(), texts, batch)
    torch.save(gradients(model), path)
    return sum(p.numel() for p in model.parameters()) / 1e6


def missing(package: str) -> bool:
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode != 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=192)
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="use a small batch and write no files")
    parser.add_argument("--scheme", help=argparse.SUPPRESS)
    parser.add_argument("--exact", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch, size = (32, 8) if args.quick else (args.batch_size, args.micro_batch_size)
    if args.scheme:
        print(json.dumps(measure(args.scheme, batch, size, args.repeats, args.exact)))
        return
    env, left_out, results = environment(), [], []
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.pt"
        parameters = write_exact(batch, exact)
        for name, (_, package) in SCHEMES.items():
            if missing(package):
                left_out.append(name)
                continue
            command = [sys.executable, "-m", "benchmarks.gradient_cache", *sys.argv[1:]]
            done = subprocess.run([*command, "--scheme", name, "--exact", str(exact)], stdout=-1, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
            print(results[-1], flush=True)
    body = [
        [r["name"], spread(quartiles(r["seconds"])), f"{r['bytes'] / MIB:,.0f}", f"{r['error']:.1e}",
         "-" if r["scale"] is None else f"{r['scale']:.1e}"]
        for r in results
    ]  # fmt: skip
    about = ABOUT.format(batch=batch, size=size, parameters=parameters, repeats=args.repeats)
    if left_out:
        about += f"\n\nNot run, since the package is not installed: {', '.join(left_out)}."
    head = ["scheme", "time, s", "memory, MiB", "error", "of the scale"]
    finish("gradient_cache", "Gradient caches", env, [about, table(head, body)], results, args.quick)


if __name__ == "__main__":
    main()
