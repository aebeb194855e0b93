"""CLIP on tar shards: any open_clip model, any estimator, one process or many. One file to copy.

    python -m recipes.make_shards --out runs/glyphs
    python -m recipes.clip_webdataset --shards runs/glyphs/train --model recipes/clip/tiny.json
    torchrun --nproc_per_node 2 -m recipes.clip_webdataset --shards ... --offload disk --shard --prefetch
    torchrun --nnodes 2 ... -m recipes.clip_webdataset --shards ... --offload disk --offload-dir /local/rows
    torchrun --nproc_per_node 2 -m recipes.clip_webdataset --shards ... --deepspeed-config recipes/deepspeed/zero2.json
    accelerate launch --config_file recipes/clip/fsdp2.yaml -m recipes.clip_webdataset --shards ...

--output is one folder that all nodes share, and holds one run; --offload-dir is a folder on each node's own disk.
--resume continues, in the middle of an epoch too: with as many processes and workers to the same bits, with others so
that every sample of the epoch still comes once. epoch_K.pt is open_clip's format, epoch_K.compopt/ has the estimator's
rows, state/ what --resume reads. Batch sizes count per process and forward, as open_clip's.
"""

import argparse
import ast
import hashlib
import inspect
import io
import json
import math
import shutil
import socket
import time
import weakref
from itertools import islice
from pathlib import Path

import open_clip
import torch
import webdataset as wds
from PIL import Image
from torch.utils.data import DataLoader
from tqdm import tqdm

import compopt
from compopt.data import ShardBatches, ShardIndex, indexed_reader, shard_list
from compopt.data.shard_files import check_files
from compopt.files import Claim
from compopt.integrations import accelerate as integration
from compopt.integrations.open_clip.options import DECIDED, METHODS, MODEL
from compopt.integrations.open_clip.rows import open_index
from compopt.rng import fold
from recipes import checkpoints, launch, tars
from recipes.tasks import retrieval

IMAGES = ("jpg", "png", "jpeg", "webp")
ELSEWHERE = DECIDED | {"dim", "dtype", "offload", "offload_dir", "shard"}  # what --set does not decide
LOOK = 16  # samples of a shard that are looked at before training
MAX_SCALE = 100.0  # open_clip's bound of a learned logit_scale.exp()


# -- data --------------------------------------------------------------------------------------------------------------


def load_indices(args):
    """Return what gives samples their rows, and how many samples each shard has; counted once if nothing says it."""
    path = args.sizes or args.output / "shards.json"
    if args.sizes and not path.exists():
        raise SystemExit(f"--sizes {path}: no such file; write it with ShardIndex.build(shards).save")
    launch.on_main(lambda: path.exists() or count_samples(args.shards, path))
    sizes = ShardIndex.load(path)
    return (open_index(args.index) if args.index else sizes), sizes


def count_samples(shards, path):
    """Write the sizes of local shards."""
    if any("://" in shard for shard in shard_list(shards)):
        raise SystemExit("--sizes: shards at URLs need a saved ShardIndex, built where the shards are")
    ShardIndex.build(shards).save(path)


def look(flag, shard):
    """Read the first samples of a shard; a shard that gives none ends the run with the reader's error."""
    errors = []
    read = wds.tarfile_to_samples(handler=lambda error: not errors.append(error))  # true: go on
    samples = list(islice(read([{"url": shard}]), LOOK))
    if not samples and errors:
        said = next((text for text in errors[0].args if isinstance(text, str)), "")
        raise SystemExit(
            f"{flag}: {shard} cannot be read ({type(errors[0]).__name__}: {said}); is it there, and can this machine "
            f"reach it?"
        )
    return samples


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
        """A batch, and the number of samples that were lost since the one before."""
        lost, self.lost = self.lost, 0
        return *batch, lost

    def pair(self, sample):
        torch.manual_seed(fold(self.seed, self.epoch, sample["index"]))  # augmented alike after a resume
        image = next((sample[suffix] for suffix in IMAGES if suffix in sample), b"")
        text = sample.get("txt", b"").decode(errors="replace").strip()
        try:
            image = self.preprocess(Image.open(io.BytesIO(image)).convert("RGB"))
        except (OSError, ValueError, SyntaxError, RuntimeError, Image.DecompressionBombError):
            return None
        return (image, text, sample["index"]) if text else None


# -- parts -------------------------------------------------------------------------------------------------------------


def model_config(model):
    """Name and configuration of an open_clip model, by name or from a JSON file."""
    if model.endswith(".json"):
        open_clip.add_model_config(Path(model))
        model = Path(model).stem
    config = open_clip.get_model_config(model if ":" in model else model.replace("/", "-"))
    if config is None:
        raise SystemExit(f"--model {model}: open_clip has no such configuration; open_clip.list_models() lists them")
    return model, config


def build_model(args):
    """Name, configuration, model and both transforms."""
    name, config = model_config(args.model)
    if "multimodal_cfg" in config:
        raise SystemExit(f"--model {name} is a CoCa, whose loss is generative too; take a CLIP configuration")
    if config.get("init_logit_bias") is not None:
        raise SystemExit(f"--model {name} has a logit_bias, which is of SigLIP's loss; take a configuration without it")
    model, *transforms = open_clip.create_model_and_transforms(name, pretrained=args.pretrained)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    model = model.to(memory_format=torch.contiguous_format)  # DeepSpeed broadcasts flat bytes
    return name, config, model, transforms


def read_options(args):
    """--set as arguments of the preset; ``tau=model`` is --learn-scale."""
    method, options = METHODS[args.estimator], dict(args.set)
    tau = options.pop("tau", MODEL) if options.get("tau") == MODEL else method.defaults.get("tau")
    args.learn_scale |= tau == MODEL and "tau" not in options
    elsewhere = ELSEWHERE | set(method.fixed)
    if unknown := sorted(set(options) - (set(method.parameters) - elsewhere)):
        takes = ", ".join(name for name in method.parameters if name not in elsewhere)
        raise SystemExit(f"--set: {args.estimator} takes {takes}, and not {', '.join(unknown)}")
    return {**method.fixed, **options}


def rows_folder(args):
    """Folder of the rows on disk; None if they are not there. Below --offload-dir each output has its own."""
    if args.offload != "disk":
        if args.offload_dir:
            raise SystemExit("--offload-dir: the folder of rows on disk, which needs --offload disk")
        return None
    if args.offload_dir:
        digest = hashlib.sha256(str(args.output.resolve()).encode()).hexdigest()[:8]
        return args.offload_dir / f"{args.output.name}-{digest}"
    if len(set(launch.from_all(socket.gethostname()))) > 1:
        raise SystemExit(
            "--offload disk on several nodes: --output is shared, and rows belong on each node's own disk; name a "
            "folder there with --offload-dir"
        )
    return args.output / "rows"


def required(parameter):
    return parameter.default is inspect.Parameter.empty


def build_estimator(args, options, n, dim):
    """A method's preset; its rows are where --offload and --shard say."""
    method = METHODS[args.estimator]
    batch = args.batch_size * launch.world_size() * (args.accumulate if args.gradient_cache else 1)
    given = {"n": n, "dim": dim, "batch_size": batch}
    if "batch_size" not in method.parameters:  # what is recommended depends on all of them; others take what they need
        given = {k: v for k, v in given.items() if k in method.parameters and required(method.parameters[k])}
    rows = {"offload": args.offload, "offload_dir": rows_folder(args), "shard": args.shard}
    rows = {name: value for name, value in rows.items() if name in method.parameters}
    est = method.preset(**options, **given, **rows)
    if args.learn_scale and est.temperature.learns:
        raise SystemExit(f"--learn-scale: {args.estimator} with these options learns temperatures of its own")
    if list(est.parameters()) and args.gradient_cache and args.precision == "fp16":
        raise SystemExit("--precision fp16: its scaler does not reach what the estimator learns in a --gradient-cache")
    return est


def set_scale(model, group):
    """Learn the model's logit_scale, or keep it at the temperature of the estimator's sample group."""
    if group is None:  # DeepSpeed cannot send parameters without a dimension
        model.logit_scale = torch.nn.Parameter(model.logit_scale.detach().reshape(1))
        return
    tau = float(group.get("tau", group.get("tau_init", 0.07)))
    del model.logit_scale  # DDP waits for the gradient of a parameter; the state dict shows no difference
    model.register_buffer("logit_scale", torch.tensor(math.log(1 / tau)))


def parameter_groups(model, est, weight_decay):
    """Matrices decay; gains, biases and temperatures do not (open_clip's rule)."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    plain = {name for name, p in named if p.ndim < 2 or any(word in name for word in ("bn", "ln", "bias"))}
    return [
        {"params": [p for name, p in named if name in plain] + list(est.parameters()), "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in plain], "weight_decay": weight_decay},
    ]


def learning_rate(args, progress):
    """Linear warm-up, then a cosine to zero; ``progress`` goes from 0 to 1."""
    if progress < args.warmup:
        return args.lr * progress / args.warmup
    return args.lr * 0.5 * (1 + math.cos(math.pi * (progress - args.warmup) / (1 - args.warmup)))


# -- training ----------------------------------------------------------------------------------------------------------


class Trainer:
    """A model and an estimator in training, and their place in the data."""

    def __init__(self, args):
        self.args, self.step, self.lost = args, 0, 0
        torch.manual_seed(args.seed)
        args.output.mkdir(parents=True, exist_ok=True)
        tracking = {"log_with": args.log_with, "project_dir": args.output}
        self.accelerator = launch.accelerator(
            args.device, args.accumulate, args.precision, args.deepspeed_config, **tracking
        )
        self.device = self.accelerator.device
        self._check_output()
        index, sizes = load_indices(args)
        stage = indexed_reader(wds.tarfile_to_samples(handler=wds.warn_and_continue), index)
        options = {"num_workers": args.workers, "shuffle": args.shuffle, "seed": args.seed}
        self.batches = ShardBatches(args.shards, stage, args.batch_size, sizes=sizes, **options)
        if len(self.batches.shards) < len(sizes):
            self.accelerator.print(f"{len(self.batches.shards)} of the {len(sizes)} shards of its index are read")
        self._build(index)

    def _check_output(self):
        """A folder holds one run: a new one does not begin beside another's state, nor in its rows."""
        args = self.args
        rows = rows_folder(args)
        launch.check_shared(args.output)
        launch.on_main(self._claim)
        found = launch.from_main(checkpoints.latest(args.output / "state"))
        if found is not None and not args.resume:
            raise SystemExit(f"--output {args.output} holds a run: add --resume, or give another folder")
        if args.val_shards and not shard_list(args.val_shards):
            raise SystemExit(f"--val-shards: no shards at {args.val_shards}")
        check_files(shard_list(args.val_shards or []))
        if found is None and rows and launch.is_local_main():
            shutil.rmtree(rows, ignore_errors=True)  # of a run that was killed before its first state
        if found is None and args.resume:
            self.accelerator.print(f"no state in {args.output}: the run begins anew")
        launch.barrier()

    def _claim(self):
        """Lock the folder until this process ends; a run that still writes there is refused by its process."""
        remedy = "two runs would write one folder; end that one, or give another --output"
        try:
            claim = Claim(self.args.output / ".lock", self.args.output, remedy)
        except RuntimeError as error:
            raise SystemExit(f"--output: {error}") from None
        weakref.finalize(self, claim.release)

    def _build(self, index):
        """Build the parts: the estimator after the process group, attached after ``prepare``."""
        args = self.args
        self.name, self.config, model, (preprocess, self.preprocess_val) = build_model(args)
        self.tokenizer = open_clip.get_tokenizer(self.name)
        least = min(2, args.batch_size)  # one alone has no negative
        self.decode = self.batches.decode = Decode(preprocess, self.tokenizer, args.seed, least)
        launch.on_main(self._check_data)
        options = read_options(args)
        torch.manual_seed(args.seed + 1)  # what the estimator draws does not depend on the model
        self.est = build_estimator(args, options, index.n, self.config["embed_dim"]).to(self.device)
        self.est.data_fingerprint = index.fingerprint
        self._check_run(index, options)
        set_scale(model, None if args.learn_scale else self.est.sample_groups[0])
        launch.check_learned(self.accelerator, list(self.est.parameters()), args.estimator)
        launch.set_micro_batch(self.accelerator, args.batch_size)
        if args.grad_clip and launch.uses_deepspeed(self.accelerator):
            raise SystemExit("--grad-clip: DeepSpeed clips where its configuration says gradient_clipping")
        groups = parameter_groups(model.to(self.device), self.est, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        integration.attach(self.est, self.optimizer, self.accelerator)
        integration.register_for_checkpointing(self.est, self.accelerator)
        self.accelerator.register_for_checkpointing(self)
        if args.log_with:
            self.accelerator.init_trackers("clip", {k: str(v) for k, v in vars(args).items()})

    def _check_data(self):
        """Refuse before training what a look at some samples shows: foreign keys, nothing that can be decoded."""
        self.batches.read.check(self.batches.shards)
        decode = Decode(self.preprocess_val, self.tokenizer)
        for flag, shards in ("--shards", self.batches.shards), ("--val-shards", shard_list(self.args.val_shards or [])):
            some = [look(flag, shard) for shard in (*shards[:1], *shards[-1:])]
            if shards and all(decode([{**sample, "index": 0} for sample in samples]) is None for samples in some):
                raise SystemExit(
                    f"{flag}: none of the first {LOOK} samples of {shards[0]} and of {shards[-1]} can be decoded; a "
                    f"sample has a picture ({', '.join(IMAGES)}) and a caption (txt)"
                )

    def _check_run(self, index, options):
        """Refuse to continue a run of another model, estimator or index, before anything is loaded."""
        args, kind = self.args, self.accelerator.distributed_type.value
        sharded = kind in ("FSDP", "DEEPSPEED")
        built = [type(self.est).__name__] if args.estimator == "recommended" else []  # by the batch's size
        mine = {
            "model": self.config,
            "estimator": [args.estimator, {name: repr(value) for name, value in options.items()}, *built],
            "learn-scale": args.learn_scale,
            "index": index.fingerprint,
            "shards and samples": [len(self.batches.shards), self.batches.n],
            "seed": args.seed,
            "accumulate": args.accumulate,
            "samples of an update": args.batch_size * args.accumulate * launch.world_size(),
            "kind of processes": kind if sharded else "whole copies",
            "number of processes under DeepSpeed": launch.world_size() if kind == "DEEPSPEED" else None,
        }
        mine, path = json.loads(json.dumps(mine)), args.output / "run.json"
        saved = launch.from_main(json.loads(path.read_text()) if args.resume and path.exists() else mine)
        windows = [name for name in ("accumulate", "samples of an update") if mine[name] != saved.get(name)]
        different = [name for name in mine if name in saved and mine[name] != saved[name] and name not in windows]
        if len(windows) == 2:  # either may change while the other stays
            different += windows
        if different:
            found = ", ".join(f"{name} {saved.get(name)} instead of {mine[name]}" for name in different)
            raise SystemExit(f"--resume: {path} is of another run: {found}; give another --output")
        launch.barrier()
        if launch.is_main():
            tars.write_json(path, mine)

    def state_dict(self):
        """Return what accelerate keeps beside model, optimizer and rows."""
        return {"batches": self.batches.state_dict(), "step": self.step, "lost": self.lost}

    def load_state_dict(self, state):
        self.batches.load_state_dict(state["batches"])
        self.step, self.lost = state["step"], state["lost"]

    @property
    def samples(self):
        """Samples that all processes have trained on."""
        return self.batches.epoch * self.batches.n + self.batches.samples_seen

    def train(self):
        """Train to the last epoch, from the newest state if asked to."""
        args = self.args
        if args.resume:
            checkpoints.load(self.accelerator, args.output / "state")
            self.accelerator.step = 0  # a state lies between windows, and --accumulate may be another now
        if METHODS[args.estimator].decays:  # FastCLIP's gamma falls in the first half
            self._decay_gamma()
        while self.batches.epoch < args.epochs and self._epoch():
            epoch = self.batches.epoch + 1
            self.batches.set_epoch(epoch)
            self._export(epoch)
            checkpoints.save(self.accelerator, args.output / "state")
            if args.val_shards:
                self._report({f"val/{name}": value for name, value in self.evaluate().items()})
        self.accelerator.end_training()

    def _decay_gamma(self):
        steps = self.args.epochs * (self.batches.layout.batches(self.batches.n) // self.args.accumulate)
        schedule = compopt.schedules.CosineGamma(self.est, max(1, steps // 2))
        schedule.load_state_dict({"t": self.est.t})
        self.est.register_step_post_hook(lambda *_: schedule.step())

    def _epoch(self):
        """Train the rest of the epoch, but for a last part of a window; return False if --max-steps ended it."""
        args, batches = self.args, self.batches
        windows = len(batches) // args.accumulate
        self.decode.epoch = batches.epoch
        workers = {"num_workers": args.workers, "pin_memory": compopt.accelerator.has_streams(self.device)}
        loader = DataLoader(batches, batch_size=None, collate_fn=self.decode.counted, **workers)
        loader = iter(self.est.prefetch(loader, index=2) if args.prefetch else loader)
        total = len(batches) + batches.done
        bar = tqdm(total=total, initial=batches.done, unit="batch", disable=not launch.is_main() or args.quiet)
        started, first = time.perf_counter(), self.samples
        for number in range(windows):
            if args.max_steps is not None and self.step >= args.max_steps:
                checkpoints.save(self.accelerator, args.output / "state")
                return False
            window = [next(loader) for _ in range(args.accumulate)]
            batches.advance(args.accumulate)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(args, self.samples / (args.epochs * batches.n))
            loss = (self._cached if args.gradient_cache else self._accumulated)(window)
            self.step += 1
            self.lost += sum(lost for *_, lost in window)
            bar.update(args.accumulate)
            if self.step % args.log_every == 0 or number + 1 == windows:
                rate = (self.samples - first) / (time.perf_counter() - started)
                self._report({"loss": loss.item(), "samples_per_second": rate, **self._metrics()}, bar)
            if args.save_every and self.step % args.save_every == 0 and number + 1 < windows:
                checkpoints.save(self.accelerator, args.output / "state")
        bar.close()
        if self.lost and launch.is_main():
            tqdm.write(f"{self.lost} samples of process 0 could not be decoded or had no caption, so far")
        return True

    def _forward(self, images, texts, number):
        """Features of a micro-batch, and the model's own temperature if it is to be learned."""
        torch.manual_seed(fold(self.args.seed, self.step, number, launch.rank()))  # dropout is the same the second time
        dtype = next(self.model.parameters()).dtype  # DeepSpeed's own precision; 32 bits elsewhere
        z1, z2, scale, *_ = self.model(images.to(self.device, dtype), texts.to(self.device))
        return (z1, z2, 1 / scale.squeeze().clamp(max=MAX_SCALE)) if self.args.learn_scale else (z1, z2)

    def _update(self, loss):
        """Backward; after the window's last micro-batch the step, in which the attached estimator commits."""
        accelerator = self.accelerator
        accelerator.backward(loss)
        if accelerator.sync_gradients and self.args.grad_clip:
            accelerator.clip_grad_norm_(self.model.parameters(), self.args.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if accelerator.sync_gradients and self.args.learn_scale and not launch.uses_deepspeed(accelerator):
            with torch.no_grad():
                accelerator.unwrap_model(self.model).logit_scale.clamp_(max=math.log(MAX_SCALE))

    def _accumulated(self, window):
        """Each micro-batch has a loss of its own, with its own negatives; their gradients are averaged."""
        total = 0.0
        for number, (images, texts, index, _) in enumerate(window):
            with self.accelerator.accumulate(self.model):
                z1, z2, *tau = self._forward(images, texts, number)
                loss = self.est(z1, z2, index, tau=tau[0] if tau else None)
                self._update(loss)
            total += loss.detach() / len(window)
        return total

    def _cached(self, window):
        """One loss over the window, all of whose samples are negatives, in the memory of a micro-batch."""
        with torch.no_grad():
            outputs = [self._forward(*micro[:2], number) for number, micro in enumerate(window)]
        z1, z2 = (torch.cat(part).requires_grad_() for part in list(zip(*outputs, strict=True))[:2])
        leaves = [z1, z2, *(tau.detach().requires_grad_() for tau in outputs[0][2:])]
        index = torch.cat([index for _, _, index, _ in window])
        loss = self.est(z1, z2, index, tau=leaves[2] if leaves[2:] else None)
        loss.backward()  # reaches the features, and the estimator's own parameters
        sizes = [len(images) for images, *_ in window]
        shares = [leaf.grad / len(window) for leaf in leaves[2:]]  # DDP wants a gradient from every micro-batch
        pieces = zip(z1.grad.split(sizes), z2.grad.split(sizes), strict=True)
        for number, (micro, gradients) in enumerate(zip(window, pieces, strict=True)):
            with self.accelerator.accumulate(self.model):
                z = self._forward(*micro[:2], number)
                surrogate = sum((a * b).sum() for a, b in zip(z, (*gradients, *shares), strict=True))
                self._update(surrogate * len(window))  # accelerate divides it
        return loss.detach()

    def _metrics(self):
        values = {f"estimator/{name}": value.item() for name, value in self.est.metrics.items()}
        return {**values, "lr": self.optimizer.param_groups[0]["lr"], "lost": self.lost, "samples": self.samples}

    def _report(self, values, bar=None):
        self.accelerator.log(values, step=self.step)
        if bar is None:
            self.accelerator.print(" ".join(f"{name} {value:.4g}" for name, value in values.items()))
        else:
            bar.set_postfix_str(f"loss {values['loss']:.3f}, {values['samples_per_second']:.0f} samples/s")

    # -- results -----------------------------------------------------------------------------------------------

    def _export(self, epoch):
        """``epoch_K.pt`` for open_clip and its tools, ``epoch_K.compopt/`` for the rows; on all processes."""
        folder = self.args.output
        with checkpoints.writing(folder / f"epoch_{epoch}.compopt", folder / "state"):
            compopt.save(self.est, folder / f"epoch_{epoch}.compopt")
        weights = self.accelerator.get_state_dict(self.model)
        if launch.is_main():
            weights["logit_scale"] = weights["logit_scale"].reshape(())
            checkpoint = {"epoch": epoch, "name": self.name, "state_dict": weights}
            temporary = folder / f"epoch_{epoch}.partial"
            try:
                with checkpoints.writing(folder / f"epoch_{epoch}.pt", folder / "state"):
                    torch.save(checkpoint, temporary)
                    temporary.replace(folder / f"epoch_{epoch}.pt")
            finally:
                temporary.unlink(missing_ok=True)
        launch.barrier()

    @torch.no_grad()
    def evaluate(self):
        """Recall at 1 among the first pairs of --val-shards; every process does the same."""
        decode = Decode(self.preprocess_val, self.tokenizer)
        read = wds.tarfile_to_samples(handler=wds.warn_and_continue)
        shards = shard_list(self.args.val_shards)
        samples = ({**sample, "index": 0} for sample in read({"url": shard} for shard in shards))
        features, captions, number = [], [], 0
        self.model.eval()
        while number < self.args.val_samples and (batch := list(islice(samples, 256))):
            number += len(batch)
            if (decoded := decode(batch)) is None:
                continue
            z1, z2, *_ = self._forward(*decoded[:2], 0)
            features.append((z1.float(), z2.float()))
            captions.append(decoded[1])
        self.model.train()
        z1, z2 = (torch.cat(z) for z in zip(*features, strict=True))
        _, right = torch.cat(captions).unique(dim=0, return_inverse=True)
        first = torch.stack([(right == label).nonzero()[0, 0] for label in range(int(right.max()) + 1)])
        found = retrieval(z1, z2[first], right.to(z1.device))
        return {"image_to_text": found.image_to_text, "text_to_image": found.text_to_image, "lost": decode.lost}


def option(text):
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse(argv=None):
    root = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = root.add_argument
    add("--shards", required=True, help="folder or pattern of tar shards, or their URLs")
    add("--index", default="", help="keys:N for img2dataset's keys, a .npy of uids; default: position in the shards")
    add("--sizes", type=Path, help="a saved ShardIndex; default: OUTPUT/shards.json, made once")
    add("--val-shards", help="held-out shards for recall after every epoch")
    add("--val-samples", type=int, default=2000)
    add("--model", default="ViT-B-32", help="name or JSON file of an open_clip model")
    add("--pretrained", help="weights to begin with, as open_clip's")
    add("--estimator", choices=sorted(METHODS), default="sogclr")
    add("--set", type=option, nargs="*", default=[], metavar="NAME=VALUE", help="options of the estimator: gamma=0.8")
    add("--learn-scale", action="store_true", help="the model's learned logit_scale is the temperature")
    add("--epochs", type=int, default=2)
    add("--batch-size", type=int, default=64)
    add("--accumulate", type=int, default=1, help="micro-batches per update")
    add("--gradient-cache", action="store_true", help="all of them are each other's negatives")
    add("--lr", type=float, default=1e-3)
    add("--warmup", type=float, default=0.05, help="share of the training")
    add("--weight-decay", type=float, default=0.1)
    add("--grad-clip", type=float, default=0.0)
    add("--precision", choices=("no", "bf16", "fp16"), default="no")
    add("--grad-checkpointing", action="store_true")
    add("--offload", choices=("cpu", "disk"), help="rows in host memory or in a file")
    add("--offload-dir", type=Path, help="folder for that file, on each node's own disk; default: in OUTPUT")
    add("--shard", action="store_true", help="each process keeps its share of the rows")
    add("--prefetch", action="store_true", help="fetch the next batch's rows meanwhile")
    add("--deepspeed-config", type=Path)
    device = compopt.accelerator.available() or "cpu"
    add("--device", type=torch.device, default=device, help=f"here {device}: the accelerator, if there is one")
    add("--workers", type=int, default=2)
    add("--shuffle", type=int, default=2000, help="samples that each worker shuffles together")
    add("--seed", type=int, default=0)
    add("--output", type=Path, default=Path("runs/clip"), help="a folder that all nodes share")
    add("--resume", action="store_true")
    add("--save-every", type=int, default=0, metavar="STEPS", help="also within an epoch")
    add("--max-steps", type=int, metavar="STEPS", help="stop there; --resume continues")
    add("--log-with", help="a tracker of accelerate: tensorboard, wandb, ...")
    add("--log-every", type=int, default=10, metavar="STEPS")
    add("--quiet", action="store_true", help="no progress bar")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    return root.parse_args(argv)


def main(argv=None):
    args = parse(argv)
    args.device = launch.local_device(args.device)
    Trainer(args).train()


if __name__ == "__main__":
    main()
