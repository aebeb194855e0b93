"""CLIP on tar shards in plain torch: any open_clip model, one or several processes. A loop to copy and adapt.

    python -m recipes.make_shards --out runs/glyphs
    python -m recipes.clip_webdataset --shards runs/glyphs/train --model recipes/clip/tiny.json
    torchrun --nproc_per_node 2 -m recipes.clip_webdataset --shards ... --batch-size 4096 --micro-batch-size 64

Select the method in ``build_estimator``. The same command resumes from the latest state in --output, bitwise exactly.
All processes must share that folder: epoch_K.pt has open_clip's format, epoch_K.compopt/ contains the estimator's rows,
state-*.pt and rows/ are read at a resume. Optimizer and schedule are open_clip's: a short warm-up and a cosine decay,
not the long rise of the other recipes. For shards at URLs the folder must contain their ShardIndex, shards.json.
``python -m recipes.clip_trainer`` is this loop with accelerate, DeepSpeed, FSDP2, evaluation and checks.
"""

import argparse
import io
import math
import os
from pathlib import Path

import open_clip
import torch
import torch.distributed as dist
import webdataset as wds
from open_clip_train.scheduler import cosine_lr
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import compopt
from compopt.data import ShardIndex, indexed_reader
from recipes.shard_batches import ShardBatches

IMAGES = ("jpg", "png", "jpeg", "webp")
RANK = int(os.environ.get("RANK", 0))


class Decode:
    """Convert samples of a tar to tensors; omit samples that cannot be decoded; return None if too few remain."""

    epoch = 0

    def __init__(self, preprocess, tokenizer, seed=0, least=1):
        self.preprocess, self.tokenizer, self.seed, self.least = preprocess, tokenizer, seed, least

    def __call__(self, samples):
        pairs = [pair for sample in samples if (pair := self.pair(sample)) is not None]
        if len(pairs) < self.least:
            return None
        images, texts, rows = zip(*pairs, strict=True)
        return torch.stack(images), self.tokenizer(list(texts)), torch.tensor(rows)

    def pair(self, sample):
        torch.manual_seed(hash((self.seed, self.epoch, sample["index"])))  # the same augmentation after a resume
        image = next((sample[suffix] for suffix in IMAGES if suffix in sample), b"")
        text = sample.get("txt", b"").decode("utf-8-sig", errors="replace").strip()
        try:
            image = self.preprocess(Image.open(io.BytesIO(image)).convert("RGB"))
        except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError):
            return None
        return (image, text, sample["index"]) if text else None


def write(value, path):
    """Save atomically: a killed process leaves no file or a complete one."""
    torch.save(value, partial := path.with_suffix(".partial"))
    partial.replace(path)


def parameter_groups(model, est, weight_decay):
    """Return groups with weight decay for matrices only, not for gains, biases and temperatures (as open_clip)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = {name for name, p in named if p.ndim < 2 or any(word in name for word in ("bn", "ln", "bias"))}
    gains = [p for name, p in named if name in plain] + list(est.parameters())
    matrices = [p for name, p in named if name not in plain]
    return [{"params": gains, "weight_decay": 0.0}, {"params": matrices, "weight_decay": weight_decay}]


class Loop:
    """Training of a model with an estimator, and its position in the data."""

    decoder = Decode
    window = 1  # batches per update
    skips = False  # whether updates that are not finite are skipped

    def __init__(self, args):
        self.args, self.step, self.saving = args, 0, None
        self.loss, self.infinite = torch.zeros(()), set()  # infinite: the last steps with a loss that is not finite
        torch.manual_seed(args.seed)
        args.output.mkdir(parents=True, exist_ok=True)
        self.device = self.start()
        self.index, self.batches = self.build_batches()
        self.name, model, *transforms = self.build_model()
        least = min(2, args.batch_size)  # a single sample has no negatives
        self.transforms, self.tokenizer = transforms, open_clip.get_tokenizer(self.name)
        self.batches.decode = self.decoder(transforms[0], self.tokenizer, args.seed, least)
        torch.manual_seed(args.seed + 1)  # the estimator's random numbers do not depend on the model
        self.est = self.build_estimator().to(self.device)
        self.est.data_fingerprint = self.index.fingerprint
        self.prepare(model)

    def start(self):
        """Initialise the process group under torchrun; return the device of this process."""
        if "RANK" in os.environ:
            dist.init_process_group()
        if not torch.accelerator.is_available():
            return torch.device("cpu")
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)))
        return torch.accelerator.current_accelerator()

    def build_batches(self):
        """Return the index, which maps samples to rows by their position in the shards, and the batches."""
        args, path = self.args, self.args.output / "shards.json"
        index = ShardIndex.load(path) if path.exists() else ShardIndex.build(args.shards)
        if RANK == 0:
            index.save(path)
        read = indexed_reader(wds.tarfile_to_samples(handler=wds.warn_and_continue), index)
        options = {"num_workers": args.workers, "shuffle": args.shuffle, "seed": args.seed}
        return index, ShardBatches(args.shards, read, args.batch_size, sizes=index, **options)

    def build_model(self):
        """Return the name of the open_clip model, the model, and both transforms."""
        name = self.args.model
        if name.endswith(".json"):
            open_clip.add_model_config(path := Path(name))
            name = path.stem
        return name, *open_clip.create_model_and_transforms(name, pretrained=self.args.pretrained)

    def build_estimator(self):
        """Return the estimator; called after the process group has been created."""
        return compopt.SogCLREstimator(self.index.n)

    def prepare(self, model):
        """Set the distributed model, the optimizer with the attached estimator, and the schedule."""
        tau = self.est.sample_groups[0].get("tau", 0.07)  # temperature for users of the saved model
        model.logit_scale.requires_grad_(False).fill_(math.log(1 / tau))
        groups = parameter_groups(model.to(self.device), self.est, self.args.weight_decay)
        self.optimizer = torch.optim.AdamW(groups, lr=self.args.lr, betas=(0.9, 0.98), eps=1e-6)
        self.model = DistributedDataParallel(model) if dist.is_initialized() else model
        self.est.attach(self.optimizer)
        samples = self.args.epochs * self.batches.n
        self.schedule = cosine_lr(self.optimizer, self.args.lr, self.args.warmup * samples, samples)
        self.parts = {"model": model, "optimizer": self.optimizer, "batches": self.batches}

    def train(self):
        """Train to the last epoch, from the latest state if there is one."""
        self.begin()
        for epoch in range(self.batches.epoch, self.args.epochs):
            self.run_epoch()
            self.batches.set_epoch(epoch + 1)
            self.end_epoch(epoch + 1)
        self.finish_saving()

    @property
    def samples(self):
        """Number of samples that all processes together have trained on."""
        return self.batches.epoch * self.batches.n + self.batches.samples_seen

    def run_epoch(self):
        """Train the rest of an epoch."""
        args, batches = self.args, self.batches
        batches.decode.epoch = batches.epoch
        for batch in self.loader():
            batches.advance(self.window)
            self.schedule(self.samples)
            self.loss = self.update(batch)
            self.step += 1
            left = len(batches) // self.window
            if self.step % args.log_every == 0 or not left:
                self.check()
                self.report(self.loss.item())
            if left and args.save_every and self.step % args.save_every == 0:
                self.save()

    def check(self):
        """Exit before a report or a state if the loss is NaN: then the weights are too, unless updates are skipped."""
        loss = self.loss.item()
        self.infinite = set() if math.isfinite(loss) else {*self.infinite, self.step}
        if len(self.infinite) > self.skips:
            self.finish_saving()
            raise SystemExit(
                f"step {self.step}: the loss is {loss}, and the weights with it; training stops without saving them. "
                f"The same command{' with --resume' * hasattr(self.args, 'resume')} goes on from the latest state in "
                f"{self.args.output}, if there is one"
            )

    def finish_saving(self):
        """Wait until the latest state is complete."""
        if self.saving is not None:
            self.saving.wait()

    def loader(self):
        """Return a loader of the remaining batches of the epoch."""
        options = {"num_workers": self.args.workers, "pin_memory": self.device.type == "cuda"}
        return DataLoader(self.batches, batch_size=None, **options)

    def encode(self, model, part):
        """Return the features of images and texts."""
        images, texts = (inputs.to(self.device, non_blocking=True) for inputs in part)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.args.bf16):
            z1, z2, *_ = model(images, texts)
        return z1, z2

    def update(self, batch):
        """Perform a step on a batch, with negatives from the whole batch; return the loss."""
        *part, index = batch
        torch.manual_seed(hash((self.args.seed, self.step, RANK)))  # the same dropout after a resume
        if self.args.micro_batch_size is None:
            loss = self.est(*self.encode(self.model, part), index)
            loss.backward()
        else:  # in the memory of a micro-batch
            options = {"micro_batch_size": self.args.micro_batch_size, "encode": self.encode}
            loss = compopt.gradient_cache(self.est, self.model, tuple(part), index, batch_norm="update_once", **options)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def report(self, loss):
        if RANK == 0:
            print(f"epoch {self.batches.epoch}, step {self.step}: loss {loss:.4g}", flush=True)

    def end_epoch(self, epoch):
        """Save the model in open_clip's format, and the state, with rows next to the model."""
        if RANK == 0:
            checkpoint = {"epoch": epoch, "name": self.name, "state_dict": self.parts["model"].state_dict()}
            write(checkpoint, self.args.output / f"epoch_{epoch}.pt")
        self.save(f"epoch_{epoch}.compopt")

    def save(self, rows="rows"):
        """Save a state, and its rows in the background; the state is valid when the rows are complete."""
        self.check()
        state = {name: part.state_dict() for name, part in self.parts.items()}
        path = self.args.output / f"state-{self.est.t:09d}.pt"
        if RANK == 0:
            write({**state, "rows": rows, "step": self.step}, path)
        self.saving = compopt.save(self.est, path.with_name(rows), blocking=False)  # waits for the previous save
        if RANK == 0:
            states = path.parent.glob("state-*.pt")  # sort by age: a killed run may have left later ones, without rows
            for older in sorted(states, key=lambda state: (state.stat().st_mtime_ns, state))[:-3]:
                older.unlink()

    def begin(self):
        """Load the latest state with complete rows."""
        for path in sorted(self.args.output.glob("state-*.pt"), reverse=True):
            state = torch.load(path, map_location=self.device, weights_only=True)
            try:
                compopt.load(self.est, path.with_name(state["rows"]), t=int(path.stem[6:]))
            except FileNotFoundError:  # the run was killed before the rows were complete
                continue
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.step = state["step"]
            if RANK == 0:
                print(f"goes on from {path}", flush=True)
            return


def flags(description, output):
    """Return a parser with the flags of the loop."""
    root = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = root.add_argument
    add("--shards", required=True, nargs="+", help="folders or patterns of tar shards, or their URLs")
    add("--model", default="ViT-B-32", help="name or JSON file of an open_clip model")
    add("--pretrained", help="weights to begin with, as open_clip's")
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=64, help="of one process")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=float, default=0.05, help="share of the training")
    add("--weight-decay", type=float, default=0.1)
    add("--workers", type=int, default=2)
    add("--shuffle", type=int, default=2000, help="samples that each worker shuffles together")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path(output), help="a folder that all nodes share")
    add("--save-every", type=int, default=0, metavar="STEPS", help="also within an epoch")
    add("--log-every", type=int, default=10, metavar="STEPS")
    return root


def main(argv=None):
    root = flags(__doc__, "runs/clip_loop")
    root.add_argument("--micro-batch-size", type=int, help="encode so many samples at a time")
    root.add_argument("--bf16", action="store_true")
    Loop(root.parse_args(argv)).train()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
