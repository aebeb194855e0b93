"""CLIP on tar shards in plain torch: any open_clip model, one process or many. A loop to copy and to adapt.

    python -m recipes.make_shards --out runs/glyphs
    python -m recipes.clip_webdataset --shards runs/glyphs/train --model recipes/clip/tiny.json
    torchrun --nproc_per_node 2 -m recipes.clip_webdataset --shards ... --resume

The method is chosen in ``build_estimator``. A run that was stopped and goes on with --resume ends in the same weights
and rows, bit for bit, in the middle of an epoch too. --output is one folder that all processes see: epoch_K.pt is
open_clip's format, epoch_K.compopt/ has the estimator's rows, state.pt and rows/ are what --resume reads.
``python -m recipes.clip_trainer`` is this loop with checks of its input, accelerate, DeepSpeed, FSDP2 and evaluation.
"""

import argparse
import io
import math
import os
import random
import shutil
import time
from pathlib import Path

import numpy as np
import open_clip
import torch
import torch.distributed as dist
import webdataset as wds
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import compopt
from compopt.data import ShardBatches, ShardIndex, indexed_reader

IMAGES = ("jpg", "png", "jpeg", "webp")


class Decode:
    """From samples of a tar to tensors; what cannot be decoded is left out and counted, None if too few are left."""

    def __init__(self, preprocess, tokenizer, seed=0, least=1):
        self.preprocess, self.tokenizer, self.seed, self.least = preprocess, tokenizer, seed, least
        self.epoch, self.lost = 0, 0

    def __call__(self, samples):
        with torch.random.fork_rng(devices=[]):
            pairs = [pair for sample in samples if (pair := self.pair(sample)) is not None]
        enough = len(pairs) >= self.least
        self.lost += len(samples) - len(pairs) * enough
        if not enough:
            return None
        images, texts, rows = zip(*pairs, strict=True)
        return torch.stack(images), self.tokenizer(list(texts)), torch.tensor(rows)

    def counted(self, batch):
        """Return a batch, and the number of samples that were lost since the one before."""
        lost, self.lost = self.lost, 0
        return *batch, lost

    def pair(self, sample):
        seed = hash((self.seed, self.epoch, sample["index"]))  # augmented alike after a resume
        torch.manual_seed(seed)
        random.seed(seed)  # of open_clip's colour jitter and of timm
        np.random.seed(seed % 2**32)
        image = next((sample[suffix] for suffix in IMAGES if suffix in sample), b"")
        text = sample.get("txt", b"").decode(errors="replace").strip()
        try:
            image = self.preprocess(Image.open(io.BytesIO(image)).convert("RGB"))
        except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError):
            return None
        return (image, text, sample["index"]) if text else None


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def hold_scale(model, tau):
    """Keep the model's ``logit_scale`` at a temperature; it is no parameter, so that DDP waits for no gradient."""
    del model.logit_scale
    model.register_buffer("logit_scale", torch.tensor(math.log(1 / tau)))


def parameter_groups(model, est, weight_decay):
    """Matrices decay; gains, biases and temperatures do not (open_clip's rule)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = {name for name, p in named if p.ndim < 2 or any(word in name for word in ("bn", "ln", "bias"))}
    return [
        {"params": [p for name, p in named if name in plain] + list(est.parameters()), "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in plain], "weight_decay": weight_decay},
    ]


def write(value, path):
    """Save so that a kill leaves the former file or the new one."""
    torch.save(value, partial := path.with_suffix(".partial"))
    partial.replace(path)


class Loop:
    """A model and an estimator in training, and their place in the data."""

    def __init__(self, args):
        self.args, self.step, self.lost = args, 0, 0
        torch.manual_seed(args.seed)
        args.output.mkdir(parents=True, exist_ok=True)
        self.device = self.start()
        self.index, sizes = self.load_indices()
        stage = indexed_reader(wds.tarfile_to_samples(handler=wds.warn_and_continue), self.index)
        options = {"num_workers": args.workers, "shuffle": args.shuffle, "seed": args.seed, "repeats": args.repeats}
        self.batches = ShardBatches(args.shards, stage, args.batch_size, sizes=sizes, **options)
        if not 1 <= args.accumulate <= len(self.batches):
            raise SystemExit(
                f"--accumulate {args.accumulate}: an epoch has {len(self.batches)} batches on each process"
            )
        self.name, model, preprocess, self.preprocess_val = self.build_model()
        self.tokenizer = open_clip.get_tokenizer(self.name)
        least = min(2, args.batch_size)  # one alone has no negative
        self.decode = self.batches.decode = Decode(preprocess, self.tokenizer, args.seed, least)
        torch.manual_seed(args.seed + 1)  # what the estimator draws does not depend on the model
        self.est = self.build_estimator().to(self.device)
        self.est.data_fingerprint = self.index.fingerprint
        self.prepare(model)

    def start(self):
        """Join the processes that torchrun started; return this one's device."""
        device = torch.device("cpu")
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
            device = torch.accelerator.current_accelerator()
        if "RANK" in os.environ:
            dist.init_process_group()
        return device

    def load_indices(self):
        """Return what gives samples their rows, and the sizes of the shards: here one object, built once."""
        path = self.args.output / "shards.json"
        if rank() == 0 and not path.exists():
            ShardIndex.build(self.args.shards).save(path)
        if dist.is_initialized():
            dist.barrier()
        return (index := ShardIndex.load(path)), index

    def build_model(self):
        """Return the name in open_clip, the model, and both transforms."""
        name = self.args.model
        if name.endswith(".json"):
            open_clip.add_model_config(path := Path(name))
            name = path.stem
        return name, *open_clip.create_model_and_transforms(name, pretrained=self.args.pretrained)

    def build_estimator(self):
        """Return the method; it is built after the process group."""
        return compopt.SogCLREstimator(self.index.n, gamma=self.args.gamma, tau=self.args.tau)

    def prepare(self, model):
        """Keep the model, distributed, and its optimizer, after whose steps the estimator commits."""
        hold_scale(model, self.args.tau)
        groups = parameter_groups(model.to(self.device), self.est, self.args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.98), eps=1e-6)
        self.model = DistributedDataParallel(model) if dist.is_initialized() else model
        self.est.attach(self.optimizer)
        self.parts = {"model": model, "optimizer": self.optimizer, "batches": self.batches}

    @property
    def samples(self):
        """Samples that all processes have trained on."""
        return self.batches.epoch * self.batches.n + self.batches.samples_seen

    def train(self):
        """Train to the last epoch, from the newest state if asked to."""
        self.begin()
        while self.batches.epoch < self.args.epochs and self.run_epoch():
            self.batches.set_epoch(self.batches.epoch + 1)
            self.end_epoch(self.batches.epoch)

    def run_epoch(self):
        """Train the rest of an epoch, but for a last part of a window; return False if the run ends within it."""
        args, batches = self.args, self.batches
        windows = len(batches) // args.accumulate
        self.decode.epoch = batches.epoch
        loader = iter(self.loader())
        started, first = time.perf_counter(), self.samples
        for left in reversed(range(windows)):
            if self.stops():
                self.save()
                return False
            window = [next(loader) for _ in range(args.accumulate)]
            batches.advance(args.accumulate)
            for group in self.optimizer.param_groups:
                group["lr"] = args.lr * self.rate(self.samples / (args.epochs * batches.n))
            loss = self.update(window)
            self.step += 1
            self.lost += sum(lost for *_, lost in window)
            if self.step % args.log_every == 0 or not left:
                per_second = (self.samples - first) / (time.perf_counter() - started)
                self.report({"loss": loss.item(), "samples_per_second": per_second})
            if args.save_every and self.step % args.save_every == 0 and left:
                self.save()
        return True

    def stops(self):
        """Return whether the run is to end before the next step."""
        return self.args.max_steps is not None and self.step >= self.args.max_steps

    def loader(self, **options):
        """Return the batches that are left of the epoch: images, texts, rows and the number of lost samples."""
        options = {"num_workers": self.args.workers, "pin_memory": self.device.type == "cuda", **options}
        return DataLoader(self.batches, batch_size=None, collate_fn=self.decode.counted, **options)

    def rate(self, progress):
        """Return the factor of the learning rate: a linear warm-up, then a cosine; ``progress`` goes from 0 to 1."""
        warmup = self.args.warmup
        if progress < warmup:
            return progress / warmup
        return 0.5 * (1 + math.cos(math.pi * (progress - warmup) / (1 - warmup)))

    def encode(self, model, part):
        """Return the features of images and texts."""
        images, texts = (inputs.to(self.device, non_blocking=True) for inputs in part)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.precision == "bf16"):
            z1, z2, *_ = model(images, texts)
        return z1, z2

    def update(self, window):
        """Take a step on a window of batches, all of whose samples are negatives of each other; return the loss."""
        *part, index = (torch.cat(inputs) for inputs in list(zip(*window, strict=True))[:3])
        torch.manual_seed(hash((self.args.seed, self.step, rank())))  # dropout is the same after a resume
        if len(window) == 1:
            loss = self.est(*self.encode(self.model, part), index)
            loss.backward()
        else:  # in the memory of one batch
            options = {"micro_batch_size": self.args.batch_size, "encode": self.encode, "batch_norm": "update_once"}
            loss = compopt.gradient_cache(self.est, self.model, tuple(part), index, **options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def report(self, values):
        if rank() == 0:
            print(f"step {self.step}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))

    def end_epoch(self, epoch):
        """Write the model for open_clip and its tools, the rows beside it, and the state."""
        compopt.save(self.est, self.args.output / f"epoch_{epoch}.compopt")
        if rank() == 0:
            checkpoint = {"epoch": epoch, "name": self.name, "state_dict": self.parts["model"].state_dict()}
            write(checkpoint, self.args.output / f"epoch_{epoch}.pt")
        self.save()

    def save(self):
        """Write rows, then the state that names them; a kill leaves the former state, whose rows are kept."""
        rows = compopt.save(self.est, self.args.output / "rows", keep=2)
        state = {name: part.state_dict() for name, part in self.parts.items()}
        if rank() == 0:
            write({**state, "rows": rows.name, "step": self.step, "lost": self.lost}, self.args.output / "state.pt")

    def begin(self):
        """Continue from the newest state, if asked to and there is one."""
        path, rows = self.args.output / "state.pt", self.args.output / "rows"
        if not path.exists():
            return
        if not self.args.resume:
            raise SystemExit(f"--output {self.args.output} holds a run: add --resume, or give another folder")
        state = torch.load(path, map_location=self.device, weights_only=True)
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        compopt.load(self.est, rows / state["rows"])
        self.step, self.lost = state["step"], state["lost"]
        if rank() == 0:  # rows of saves that were cut off; two of them would push out those that the state names
            for other in rows.glob("checkpoint-*"):
                if other.name != state["rows"]:
                    shutil.rmtree(other)


def flags(description, output):
    """Return a parser with the flags of the loop."""
    root = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = root.add_argument
    add("--shards", required=True, nargs="+", help="folders or patterns of tar shards, or their URLs")
    add("--model", default="ViT-B-32", help="name or JSON file of an open_clip model")
    add("--pretrained", help="weights to begin with, as open_clip's")
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=64, help="of one process")
    add("--accumulate", type=int, default=1, help="batches per update")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=float, default=0.05, help="share of the training")
    add("--weight-decay", type=float, default=0.1)
    add("--workers", type=int, default=2)
    add("--shuffle", type=int, default=2000, help="samples that each worker shuffles together")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path(output), help="a folder that all nodes share")
    add("--save-every", type=int, default=0, metavar="STEPS", help="also within an epoch")
    add("--max-steps", type=int, metavar="STEPS", help="stop there; --resume continues")
    add("--log-every", type=int, default=10, metavar="STEPS")
    root.set_defaults(repeats=None)
    return root


def main(argv=None):
    root = flags(__doc__, "runs/clip_loop")
    root.add_argument("--gamma", type=float, default=0.9)
    root.add_argument("--tau", type=float, default=0.07)
    root.add_argument("--precision", choices=("no", "bf16"), default="no")
    root.add_argument("--resume", action="store_true")
    Loop(root.parse_args(argv)).train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
