"""CLIP on tar shards: the loop of ``clip_webdataset.py`` on accelerate, with every estimator and all checks.

    python -m recipes.make_shards --out runs/glyphs
    python -m recipes.clip_trainer --shards runs/glyphs/train --model recipes/clip/tiny.json
    torchrun --nproc_per_node 2 -m recipes.clip_trainer --shards ... --offload disk --shard --prefetch
    torchrun --nnodes 2 ... -m recipes.clip_trainer --shards ... --offload disk --offload-dir /local/rows
    torchrun --nproc_per_node 2 -m recipes.clip_trainer --shards ... --deepspeed-config recipes/deepspeed/zero2.json
    accelerate launch --config_file recipes/clip/fsdp2.yaml -m recipes.clip_trainer --shards ...

--output is one folder that all nodes share, and contains one run; --offload-dir is a folder on each node's own disk.
--resume continues, also in the middle of an epoch: bitwise exactly with the same number of processes and workers;
otherwise each sample of the epoch is still visited once. epoch_K.pt has open_clip's format, epoch_K.compopt/ contains
the estimator's rows, and state/ is read by --resume. Batch sizes are per process and forward, as in open_clip.
"""

import argparse
import ast
import contextlib
import hashlib
import inspect
import json
import math
import os
import random
import shutil
import socket
import time
from itertools import islice
from pathlib import Path

import numpy as np
import open_clip
import torch
import webdataset as wds
from accelerate import DistributedDataParallelKwargs
from accelerate.tracking import get_available_trackers
from open_clip_train import scheduler
from torch.utils.data import DataLoader
from tqdm import tqdm

import compopt
from compopt.data import ShardIndex, indexed_reader, shard_list
from compopt.data.shards import check_files
from compopt.files import lock
from compopt.integrations import accelerate as integration
from compopt.integrations.open_clip.options import DECIDED, METHODS, MODEL
from compopt.integrations.open_clip.rows import open_index
from recipes import checkpoints, launch, tars
from recipes import clip_webdataset as loop
from recipes.clip_evaluation import NAMES, TEMPLATES, Evaluation
from recipes.shard_batches import ShardBatches
from recipes.uploads import Uploads, holds_run

ELSEWHERE = DECIDED | {"dim", "dtype", "offload", "offload_dir", "shard"}  # options that --set does not accept
LOOK = 16  # samples of a shard that are checked before training
TEST_FILES = (NAMES, TEMPLATES, "test")
STOPPED = 75  # exit status of a run that saved after a stop request and can be resumed: EX_TEMPFAIL
MAX_SCALE = 100.0  # open_clip's bound of a learned logit_scale.exp()


# -- data --------------------------------------------------------------------------------------------------------------


class Decode(loop.Decode):
    """Decoder of the loop that also counts the omitted samples."""

    lost = 0

    def __call__(self, samples):
        with torch.random.fork_rng(devices=[]):
            batch = super().__call__(samples)
        self.lost += len(samples) - (0 if batch is None else len(batch[2]))
        return batch

    def pair(self, sample):
        seed = hash((self.seed, self.epoch, sample["index"]))
        random.seed(seed)  # used by open_clip's colour jitter and by timm
        np.random.seed(seed % 2**32)
        return super().pair(sample)

    def counted(self, batch):
        """Return a batch, and the number of samples lost since the previous batch."""
        lost, self.lost = self.lost, 0
        return *batch, lost


def count_samples(shards, path):
    """Count the samples of local shards and save the sizes."""
    if any("://" in shard for shard in shard_list(shards)):
        raise SystemExit("--sizes: shards at URLs need a saved ShardIndex, built where the shards are")
    ShardIndex.build(shards).save(path)


def look(flag, shard):
    """Return the first samples of a shard; exit with the reader's error if there are none."""
    errors = []
    read = wds.tarfile_to_samples(handler=lambda error: not errors.append(error))  # true: continue
    samples = list(islice(read([{"url": shard}]), LOOK))
    if not samples and errors:
        said = next((text for text in errors[0].args if isinstance(text, str)), "")
        raise SystemExit(
            f"{flag}: {shard} cannot be read ({type(errors[0]).__name__}: {said}); is it there, and can this machine "
            f"reach it?"
        )
    return samples


# -- parts -------------------------------------------------------------------------------------------------------------


def model_config(model):
    """Return name and configuration of an open_clip model, by name or from a JSON file."""
    if model.endswith(".json"):
        open_clip.add_model_config(Path(model))
        model = Path(model).stem
    config = open_clip.get_model_config(model if ":" in model else model.replace("/", "-"))
    if config is None:
        raise SystemExit(f"--model {model}: open_clip has no such configuration; open_clip.list_models() lists them")
    return model, config


def build_model(args):
    """Return the name in open_clip, the model, and both transforms."""
    name, config = model_config(args.model)
    if "multimodal_cfg" in config:
        raise SystemExit(f"--model {name} is a CoCa, whose loss is generative too; take a CLIP configuration")
    if config.get("init_logit_bias") is not None:
        raise SystemExit(f"--model {name} has a logit_bias, which is of SigLIP's loss; take a configuration without it")
    size = args.force_image_size
    size = size[0] if size and not size[1:] else size
    forced = {"force_patch_dropout": args.force_patch_dropout, "force_image_size": size}
    forced |= {"pretrained": args.pretrained, "aug_cfg": dict(args.aug_cfg)}
    model, *transforms = open_clip.create_model_and_transforms(name, **forced)
    lock_towers(model, args)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    if args.use_bn_sync:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if args.float8:
        to_float8(model, args.device)
    if args.compile:
        model.compile(backend=args.compile)  # in place, so that the names of its parameters do not change
    model = model.to(memory_format=torch.contiguous_format)  # DeepSpeed broadcasts flat bytes
    return name, model, *transforms


def to_float8(model, device):
    """Let linear layers multiply in float8 (E4M3, gradients E5M2), without changes of their parameters and names.

    Layers whose dimensions are not multiples of 16 are skipped, and so are the projections of attention, which are not
    called as layers.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise SystemExit("--float8 needs torchao: pip install torchao") from None

    def fits(layer, name):
        return type(layer) is torch.nn.Linear and not any(size % 16 for size in layer.weight.shape)

    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    config = Float8LinearConfig(emulate=not native, pad_inner_dim=True)  # the number of tokens depends on the batch
    convert_to_float8_training(model, config=config, module_filter_fn=fits)


def lock_towers(model, args):
    """Freeze towers except for their last groups of layers, like open_clip's flags of the same names."""
    if args.lock_image:
        statistics = args.lock_image_freeze_bn_stats
        model.lock_image_tower(unlocked_groups=args.lock_image_unlocked_groups, freeze_bn_stats=statistics)
    if args.lock_text:
        model.lock_text_tower(unlocked_layers=args.lock_text_unlocked_layers)


def read_options(args):
    """Return the arguments of the preset given by --set; ``tau=model`` means --learn-scale."""
    method, options = METHODS[args.estimator], dict(args.set)
    tau = options.pop("tau", MODEL) if options.get("tau") == MODEL else method.defaults.get("tau")
    args.learn_scale |= tau == MODEL and "tau" not in options
    elsewhere = ELSEWHERE | set(method.fixed)
    if unknown := sorted(set(options) - (set(method.parameters) - elsewhere)):
        takes = ", ".join(name for name in method.parameters if name not in elsewhere)
        raise SystemExit(f"--set: {args.estimator} takes {takes}, and not {', '.join(unknown)}")
    return {**method.fixed, **options}


def rows_folder(args):
    """Return the folder of the rows on disk, None without --offload disk; in --offload-dir, each output has its own."""
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


def build_schedule(args, optimizer, n):
    """Return a function that sets the learning rate for the number of samples so far; an epoch has ``n``."""
    given = optimizer, args.lr, args.warmup * args.epochs * n, args.epochs * n
    if args.lr_scheduler == "const-cooldown":
        cooldown = args.epochs_cooldown * n, args.lr_cooldown_power, args.lr_cooldown_end
        return scheduler.const_lr_cooldown(*given, *cooldown)
    return {"cosine": scheduler.cosine_lr, "const": scheduler.const_lr}[args.lr_scheduler](*given)


def link(source, target):
    """Create a hard link to a file, or copy it if the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def set_scale(model, group):
    """Learn the model's logit_scale, or keep it at the temperature of the estimator's sample group."""
    if group is None:  # DeepSpeed cannot send parameters without a dimension
        model.logit_scale = torch.nn.Parameter(model.logit_scale.detach().reshape(1))
    else:  # no parameter: FSDP cannot shard those without a dimension
        scale = 1 / float(group.get("tau", group.get("tau_init", 0.07)))
        del model.logit_scale
        model.register_buffer("logit_scale", torch.tensor(math.log(scale)))


def build_estimator(args, options, n, dim):
    """Return the estimator of a method's preset, with rows placed by --offload and --shard."""
    method = METHODS[args.estimator]
    batch = args.batch_size * launch.world_size() * (args.accumulate if args.gradient_cache else 1)
    given = {"n": n, "dim": dim, "batch_size": batch}
    if "batch_size" not in method.parameters:  # only `recommended` takes them all; others take the required ones
        needed = {k for k, parameter in method.parameters.items() if parameter.default is inspect.Parameter.empty}
        given = {k: v for k, v in given.items() if k in needed}
    rows = {"offload": args.offload, "offload_dir": rows_folder(args), "shard": args.shard}
    rows = {name: value for name, value in rows.items() if name in method.parameters}
    est = method.preset(**options, **given, **rows)
    if args.learn_scale and est.temperature.learns:
        raise SystemExit(f"--learn-scale: {args.estimator} with these options learns temperatures of its own")
    return est


# -- training ----------------------------------------------------------------------------------------------------------


SHARDED = ("FSDP", "DEEPSPEED")  # accelerate's names of what splits a model


class Stopped(Exception):
    """Raised after a stop request, when the run has saved."""


class Trainer(loop.Loop):
    """The loop on accelerate, with early checks of everything that could fail later."""

    decoder = Decode

    def start(self):
        args = self.args
        if args.log_with not in (None, "all", *map(str, get_available_trackers())):
            raise SystemExit(f"--log-with {args.log_with}: it is not installed: pip install {args.log_with}")
        tracking = {"log_with": args.log_with, "project_dir": args.output}
        if args.ddp_static_graph and args.accumulate > 1 and not args.gradient_cache:
            raise SystemExit(
                "--ddp-static-graph: torch's DDP cannot accumulate then; add --gradient-cache, or leave it out"
            )
        if args.ddp_static_graph:
            tracking["handlers"] = [DistributedDataParallelKwargs(static_graph=True)]
        self.window, self.lost = args.accumulate, 0
        self.stopping = False  # whether a signal has requested a stop
        self.gradient_norm = math.nan  # at the last logged step
        windows = 1 if args.gradient_cache else args.accumulate
        self.accelerator = launch.accelerator(args.device, windows, args.precision, args.deepspeed_config, **tracking)
        self._check_test_data()
        self._check_output()
        return self.accelerator.device

    def _check_output(self):
        """Refuse an output that contains another run, and remove rows of a run that has no state."""
        args = self.args
        rows, states = rows_folder(args), args.output / "state"
        launch.check_shared(args.output)
        launch.on_main(self._claim)
        if isinstance(args.resume, str):
            launch.on_main(lambda: checkpoints.fetch(args.resume, states))
        found = launch.from_main(checkpoints.latest(states))
        if found is not None and not args.resume:
            raise SystemExit(f"--output {args.output} holds a run: add --resume, or give another folder")
        begins = found is None and not args.evaluate
        if begins and args.upload and launch.on_main(lambda: holds_run(args.upload, states)):
            raise SystemExit(f"--upload {args.upload} holds a run: add --resume {args.upload}, or give another URL")
        if args.evaluate and found is None and not args.pretrained:
            raise SystemExit(f"--evaluate: there is no state in {args.output}; give another --output, or --pretrained")
        if found is None and rows and launch.is_local_main():
            shutil.rmtree(rows, ignore_errors=True)  # left by a run that was killed before its first state
        if found is None and args.resume:
            places = args.output if args.resume is True else f"{args.output} and at {args.resume}"
            self.accelerator.print(f"no state in {places}: the run begins anew")
        launch.barrier()

    def _check_test_data(self):
        """Refuse missing data for the evaluation."""
        args = self.args
        if args.evaluate and not (args.val_shards or args.zero_shot):
            raise SystemExit("--evaluate needs test data: give --val-shards or --zero-shot")
        if args.val_shards and not shard_list(args.val_shards):
            raise SystemExit(f"--val-shards: no shards at {args.val_shards}")
        check_files(shard_list(args.val_shards or []))
        if args.zero_shot and (missing := [name for name in TEST_FILES if not (args.zero_shot / name).exists()]):
            raise SystemExit(f"--zero-shot: {args.zero_shot} lacks {', '.join(missing)}")
        if args.zero_shot and not shard_list(args.zero_shot / "test"):
            raise SystemExit(f"--zero-shot: no shards in {args.zero_shot / 'test'}")

    def _claim(self):
        """Lock the folder until this process ends; exit if another running process has locked it."""
        remedy = "two runs would write one folder; end that one, or give another --output"
        try:
            self.lock = lock(self.args.output / ".lock", self.args.output, remedy)
        except RuntimeError as error:
            raise SystemExit(f"--output: {error}") from None

    def build_batches(self):
        """Return index and batches; shards without stored sizes are counted once; keys or uids may determine rows."""
        args = self.args
        path = args.sizes or args.output / "shards.json"
        if args.sizes and not path.exists():
            raise SystemExit(f"--sizes {path}: no such file; write it with ShardIndex.build(shards).save")
        launch.on_main(lambda: path.exists() or count_samples(args.shards, path))
        sizes = ShardIndex.load(path)
        if (read := len(shard_list(args.shards))) < len(sizes):
            self.accelerator.print(f"{read} of the {len(sizes)} shards of its index are read")
        index = open_index(args.index) if args.index else sizes
        read = indexed_reader(wds.tarfile_to_samples(handler=wds.warn_and_continue), index)
        options = {"num_workers": args.workers, "shuffle": args.shuffle, "seed": args.seed}
        options |= {"repeats": args.repeats, "replacement": args.dataset_resampled}
        batches = ShardBatches(args.shards, read, args.batch_size, sizes=sizes, **options)
        if not 1 <= args.accumulate <= len(batches):
            raise SystemExit(f"--accumulate {args.accumulate}: an epoch has {len(batches)} batches on each process")
        return index, batches

    def build_model(self):
        return build_model(self.args)

    def build_estimator(self):
        launch.on_main(self._check_data)
        options, (_, config) = read_options(self.args), model_config(self.args.model)
        est = build_estimator(self.args, options, self.index.n, config["embed_dim"])
        self.follow = options.get("momentum", False)  # whether a momentum encoder is needed
        if self.follow and self.accelerator.distributed_type.value in SHARDED:
            raise SystemExit("--set momentum=True: this recipe copies whole models; use DDP, or a loop of your own")
        self._check_run(est, config, options)
        return est

    def prepare(self, model):
        args, accelerator = self.args, self.accelerator
        set_scale(model, None if args.learn_scale else self.est.sample_groups[0])
        launch.check_learned(accelerator, list(self.est.parameters()), args.estimator)
        launch.set_micro_batch(accelerator, args.batch_size)
        if args.grad_clip and launch.uses_deepspeed(accelerator):
            raise SystemExit("--grad-clip: DeepSpeed clips where its configuration says gradient_clipping")
        if not any(p.requires_grad for p in model.parameters()):
            raise SystemExit("--lock-image --lock-text: nothing is left to train")
        groups = loop.parameter_groups(model.to(self.device), self.est, args.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), eps=args.eps)
        # before prepare(), which replaces the forward() that a copy would share
        self.encoder = compopt.MomentumEncoder(model) if self.follow else None
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.schedule = build_schedule(args, self.optimizer, self.batches.n)
        integration.attach(self.est, self.optimizer, accelerator)
        rows = integration.register_for_checkpointing(self.est, accelerator, blocking=False)
        accelerator.register_for_checkpointing(self)
        if self.encoder:
            self.encoder.attach(self.est)
            accelerator.register_for_checkpointing(self.encoder)
        if args.log_with:
            accelerator.init_trackers("clip", {k: str(v) for k, v in vars(args).items()})
        beside = [args.output / "run.json", *([] if args.sizes else [args.output / "shards.json"])]
        uploads = launch.is_main() and args.upload
        # fp16's scaler and DeepSpeed skip updates that are not finite; without them one of them ends the run
        self.skips = args.precision == "fp16" or (args.precision == "bf16" and launch.uses_deepspeed(accelerator))
        self.pulse = launch.Pulse()
        self.uploads = Uploads(args.upload, args.output, beside, args.keep) if uploads else None
        self.states = checkpoints.States(accelerator, args.output / "state", rows, args.keep, self.uploads)

    def _check_data(self):
        """Check some samples before training: exit for foreign keys, or if no sample can be decoded."""
        self.batches.read.check(shard_list(self.args.shards))
        decode = Decode(self.transforms[1], self.tokenizer)
        for flag, shards in ("--shards", self.batches.shards), ("--val-shards", shard_list(self.args.val_shards or [])):
            some = [look(flag, shard) for shard in (*shards[:1], *shards[-1:])]
            if shards and all(decode([{**sample, "index": 0} for sample in samples]) is None for samples in some):
                raise SystemExit(
                    f"{flag}: none of the first {LOOK} samples of {shards[0]} and of {shards[-1]} can be decoded; a "
                    f"sample has a picture ({', '.join(loop.IMAGES)}) and a caption (txt)"
                )

    def _check_run(self, est, config, options):
        """Exit, before anything is loaded, if the run to resume has another model, estimator or index."""
        args, kind = self.args, self.accelerator.distributed_type.value
        sharded = kind in SHARDED
        built = [type(est).__name__] if args.estimator == "recommended" else []  # depends on the batch size
        mine = {
            "model": config,
            "estimator": [args.estimator, {name: repr(value) for name, value in options.items()}, *built],
            "learn-scale": args.learn_scale,
            "index": self.index.fingerprint,
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
        if len(windows) == 2:  # one of them may change alone
            different += windows
        if different:
            found = ", ".join(f"{name} {saved.get(name)} instead of {mine[name]}" for name in different)
            raise SystemExit(f"--resume: {path} is of another run: {found}; give another --output")
        launch.barrier()
        if launch.is_main():
            tars.write_json(path, mine)

    def state_dict(self):
        """Return the state that accelerate saves in addition to model, optimizer and rows."""
        return {"batches": self.batches.state_dict(), "step": self.step, "lost": self.lost}

    def load_state_dict(self, state):
        self.batches.load_state_dict(state["batches"])
        self.step, self.lost = state["step"], state["lost"]

    def train(self):
        with launch.stop_signals() as self.signals:
            if self.args.evaluate:
                self.begin()
                self.evaluate()
            else:
                with contextlib.suppress(Stopped):
                    super().train()
            self.states.finish()
        self.accelerator.end_training()
        left = self.uploads.finish(hurry=self.stopping) if self.uploads else {}
        if self.stopping:
            raise SystemExit(STOPPED)
        if left:
            missing = ", ".join(f"{path} ({why})" for path, why in left.items())
            raise SystemExit(f"--upload: the store lacks {missing}; the files in {self.args.output} are complete")

    def finish_saving(self):
        self.states.finish()

    def begin(self):
        if self.args.resume:
            checkpoints.load(self.accelerator, self.args.output / "state")
            self.accelerator.step = 0  # a state is saved between windows, and --accumulate may have changed
        if METHODS[self.args.estimator].decays:  # FastCLIP's gamma falls in the first half
            steps = self.args.epochs * (self.batches.layout.batches(self.batches.n) // self.args.accumulate)
            schedule = compopt.schedules.CosineGamma(self.est, max(1, steps // 2))
            schedule.load_state_dict({"t": self.est.t})
            self.est.register_step_post_hook(lambda *_: schedule.step())

    def loader(self):
        """Yield windows of batches until a stop is requested; incomplete windows are dropped."""
        batches = self.batches
        options = {"pin_memory": compopt.accelerator.has_streams(self.device), "collate_fn": batches.decode.counted}
        options |= {"num_workers": self.args.workers, "worker_init_fn": launch.leave_group}
        loader = DataLoader(batches, batch_size=None, **options)
        loader = self.est.prefetch(loader, index=2) if self.args.prefetch else loader
        total, quiet = len(batches) + batches.done, not launch.is_main() or self.args.quiet
        self.began, self.waited, self.beats, self.paces = time.perf_counter(), 0.0, 0, []
        self.started, self.first = self.began, self.samples
        with tqdm(self._timed(loader), total=total, initial=batches.done, unit="batch", disable=quiet) as self.bar:
            for window in zip(*[iter(self.bar)] * self.window, strict=False):
                if self.stops():
                    self.save()
                    raise Stopped
                yield window
        if self.lost and launch.is_main():
            tqdm.write(f"{self.lost} samples of process 0 could not be decoded or had no caption, so far")

    def stops(self):
        """Return True at --max-steps, or after a signal to any process, at the same step on all of them."""
        now = time.perf_counter()
        beats = self.pulse.beat(len(self.signals), self.waited, now - self.began)
        self.began, self.waited = now, 0.0
        self.stopping, self.beats = bool(beats[:, 0].any()), self.beats + 1
        if self.beats > 2:  # the first beat belongs to the previous epoch, the second to the time before the first step
            self.paces.append(beats[:, 1:])
        return self.stopping or (self.args.max_steps is not None and self.step >= self.args.max_steps)

    def _timed(self, loader):
        """Yield batches, and add up the time spent waiting for them."""
        loader = iter(loader)
        while True:
            started = time.perf_counter()
            batch = next(loader, None)
            self.waited += time.perf_counter() - started
            if batch is None:
                return
            yield batch

    def _pace(self):
        """Return mean times over the steps since the last report, and the slowest rank's wait for data."""
        steps, self.paces = self.paces, []
        if not steps:
            return {}
        data, step = torch.stack(steps).mean(dim=0).unbind(dim=1)
        slowest = {"data_seconds_slowest": data.max().item(), "slowest_rank": int(data.argmax())}
        return {"data_seconds": data.mean().item(), "step_seconds": step.mean().item(), **slowest}

    def update(self, window):
        self.lost += sum(lost for *_, lost in window)
        return (self._cached if self.args.gradient_cache else self._accumulated)(window)

    def encode(self, model, part):
        """Return features, and with --learn-scale the model's temperature."""
        dtype = next(self.model.parameters()).dtype  # DeepSpeed's own precision; 32 bits elsewhere
        images, texts = part
        images = images if images is None else images.to(self.device, dtype)
        z1, z2, scale, *_ = model(images, texts.to(self.device))
        return (z1, z2, 1 / scale.squeeze().clamp(max=MAX_SCALE)) if self.args.learn_scale else (z1, z2)

    def keys(self, images, texts):
        """Return the momentum features of a window, computed batch by batch; None without a momentum encoder."""
        if self.encoder is None:
            return None
        parts = zip(images.split(self.args.batch_size), texts.split(self.args.batch_size), strict=True)
        with self.accelerator.autocast():
            found = [self.encode(self.encoder, part)[:2] for part in parts]
        return [torch.cat(side) for side in zip(*found, strict=True)]

    def _take_step(self):
        """Let optimizer and attached estimator step, which has an effect only after the window's last micro-batch."""
        accelerator = self.accelerator
        logged = (self.step + 1) % self.args.log_every == 0
        if accelerator.sync_gradients and (logged or self.args.grad_clip):
            norm = accelerator.clip_grad_norm_(self.model.parameters(), self.args.grad_clip or math.inf)
            if logged and norm is not None:  # DeepSpeed may have none
                self.gradient_norm = float(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if accelerator.sync_gradients and self.args.learn_scale and not launch.uses_deepspeed(accelerator):
            with torch.no_grad():
                accelerator.unwrap_model(self.model).logit_scale.clamp_(max=math.log(MAX_SCALE))

    def _accumulated(self, window):
        """Update with a separate loss and separate negatives for each micro-batch; their gradients are averaged."""
        total = 0.0
        for number, (images, texts, index, _) in enumerate(window):
            torch.manual_seed(hash((self.args.seed, self.step, number, launch.rank())))
            with self.accelerator.accumulate(self.model):
                z1, z2, *tau = self.encode(self.model, (images, texts))
                keys = self.keys(images, texts)
                loss = self.est(z1, z2, index, tau=tau[0] if tau else None, keys=keys)
                self.accelerator.backward(loss)
                self._take_step()
            total += loss.detach() / len(window)
        return total

    def _cached(self, window):
        """Update with one loss whose negatives are from the whole window, in the memory of a micro-batch."""
        *part, index = (torch.cat(inputs) for inputs in list(zip(*window, strict=True))[:3])
        torch.manual_seed(hash((self.args.seed, self.step, launch.rank())))
        options = {"micro_batch_size": self.args.batch_size, "encode": self.encode, "batch_norm": "update_once"}
        options["keys"] = self.keys(*part)
        backward = self.accelerator.backward
        loss = compopt.gradient_cache(self.est, self.model, tuple(part), index, backward=backward, **options)
        self._take_step()
        return loss

    def report(self, loss):
        per_second = (self.samples - self.first) / (time.perf_counter() - self.started)
        estimator = {f"estimator/{name}": value.item() for name, value in self.est.metrics.items()}
        own = launch.from_all(estimator["estimator/effective_negatives"])  # others are of the global batch
        estimator["estimator/effective_negatives"] = sum(own) / len(own)
        pace = {"lr": self.optimizer.param_groups[0]["lr"], "gradient_norm": self.gradient_norm, **self._pace()}
        place = {"loss": loss, "samples": self.samples, "lost": self.lost, "samples_per_second": per_second}
        place["samples_per_second_per_process"] = per_second / launch.world_size()
        self.accelerator.log({**estimator, **place, **pace}, step=self.step)
        info_nce = estimator["estimator/info_nce"]
        line = f"loss {loss:.3f}, InfoNCE {info_nce:.3f}, {per_second:.0f} samples/s"
        self.bar.set_postfix_str(line)
        if self.args.quiet and launch.is_main():  # a log file has no progress bar
            more = {name: estimator[f"estimator/{name}"] for name in ("tau_median", "effective_negatives")} | pace
            print(f"step {self.step}: {line}, " + ", ".join(f"{k} {v:.3g}" for k, v in more.items()), flush=True)

    # -- results -----------------------------------------------------------------------------------------------

    def save(self, then=lambda state: []):
        self.check()
        self.states.save(f"step-{self.step:09d}-epoch-{self.batches.epoch:04d}", then)

    def end_epoch(self, epoch):
        self._export(epoch)
        self.save(lambda state: self._link_rows(state, epoch))
        self.evaluate()

    def _export(self, epoch):
        """Write ``epoch_K.pt`` for open_clip and its tools; called on all processes."""
        weights, path = self.accelerator.get_state_dict(self.model), self.args.output / f"epoch_{epoch}.pt"
        if launch.is_main():
            weights["logit_scale"] = weights["logit_scale"].reshape(())
            with checkpoints.writing(path, self.args.output / "state"):
                loop.write({"epoch": epoch, "name": self.name, "state_dict": weights}, path)
        launch.barrier()

    def _link_rows(self, state, epoch):
        """Create ``epoch_K.compopt/`` with links to the rows of a state; return the exported paths."""
        target = self.args.output / f"epoch_{epoch}.compopt"
        partial = target.with_suffix(".partial")
        for folder in (partial, target):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(state / "compopt", partial, copy_function=link)
        partial.replace(target)
        return [target.with_suffix(".pt"), target]

    @torch.no_grad()
    def evaluate(self):
        """Measure the model on --val-shards and --zero-shot, and report the results."""
        args = self.args
        self.model.eval()
        decode = Decode(self.transforms[1], self.tokenizer)
        measure = Evaluation(lambda *part: self.encode(self.model, part), decode)
        found = measure.recall(args.val_shards, args.val_samples) if args.val_shards else {}
        found |= measure.zero_shot(args.zero_shot) if args.zero_shot else {}
        self.model.train()
        values = {f"val/{name}": value for name, value in found.items()}
        if values:
            self.accelerator.log(values, step=self.step)
            self.accelerator.print(" ".join(f"{name} {value:.4g}" for name, value in values.items()))


def option(text):
    """Return a name and a value; a value that is not a Python literal, such as a path, is a string."""
    name, given, value = text.partition("=")
    if not (name and given):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def parse(argv=None):
    root = loop.flags(__doc__, "runs/clip")
    add = root.add_argument
    add("--upsample", type=int, nargs="*", metavar="K", help="an epoch reads each source of --shards so often")
    add("--dataset-resampled", action="store_true", help="draw the shards of an epoch with replacement")
    add("--index", default="", help="keys:N for img2dataset's keys, a .npy of uids; default: position in the shards")
    add("--sizes", type=Path, help="a saved ShardIndex; default: OUTPUT/shards.json, made once")
    add("--val-shards", help="held-out shards for recall after every epoch")
    add("--val-samples", type=int, default=2000, help="the first ones of them")
    add("--zero-shot", type=Path, metavar="FOLDER", help="a test set in clip-benchmark's form, classified too")
    add("--evaluate", action="store_true", help="do this alone, with --pretrained or --resume")
    add("--estimator", choices=sorted(METHODS), default="sogclr")
    words = {"type": option, "nargs": "*", "default": [], "metavar": "NAME=VALUE"}
    add("--set", **words, help="options of the estimator: gamma=0.8")
    add("--learn-scale", action="store_true", help="the model's learned logit_scale is the temperature")
    add("--beta1", type=float, default=0.9)
    add("--beta2", type=float, default=0.98)
    add("--eps", type=float, default=1e-6)
    add("--lr-scheduler", choices=("cosine", "const", "const-cooldown"), default="cosine", help="after the warm-up")
    add("--epochs-cooldown", type=float, default=0.0, help="of const-cooldown: how long the rate falls at the end")
    add("--lr-cooldown-end", type=float, default=0.0, help="the rate it falls to")
    add("--lr-cooldown-power", type=float, default=1.0, help="1: linearly")
    for tower, parts in ("image", "groups"), ("text", "layers"):
        add(f"--lock-{tower}", action="store_true", help="do not train this tower")
        add(f"--lock-{tower}-unlocked-{parts}", type=int, default=0, metavar="K", help="but for its last K")
    add("--lock-image-freeze-bn-stats", action="store_true")
    add("--force-patch-dropout", type=float, help="share of the patches that training leaves out; 0: none")
    add("--force-image-size", type=int, nargs="+")
    add("--aug-cfg", **words, help="open_clip's: scale=(0.5,1.0)")
    add("--use-bn-sync", action="store_true", help="batch normalisation over all processes")
    add("--ddp-static-graph", action="store_true")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile of the model")
    add("--max-steps", type=int, metavar="STEPS", help="stop there; --resume continues")
    add("--accumulate", type=int, default=1, help="batches per update")
    add("--gradient-cache", action="store_true", help="samples of all --accumulate batches are negatives")
    add("--grad-clip", type=float, default=0.0)
    add("--precision", choices=("no", "bf16", "fp16"), default="no")
    add("--float8", action="store_true", help="linear layers by torchao in float8; emulated where the device has none")
    add("--grad-checkpointing", action="store_true")
    add("--offload", choices=("cpu", "disk"), help="rows in host memory or in a file")
    add("--offload-dir", type=Path, help="folder for that file, on each node's own disk; default: in OUTPUT")
    add("--shard", action="store_true", help="each process keeps its share of the rows")
    add("--prefetch", action="store_true", help="fetch the next batch's rows meanwhile")
    add("--deepspeed-config", type=Path)
    device = compopt.accelerator.available() or "cpu"
    add("--device", type=torch.device, default=device, help=f"here {device}: the accelerator, if there is one")
    add("--resume", nargs="?", const=True, metavar="URL", help="from the newest state in OUTPUT, or at URL")
    add("--keep", type=int, default=2, help="states that stay")
    add("--upload", metavar="URL", help="copy states and models there meanwhile: s3://bucket/run")
    add("--log-with", help="a tracker of accelerate: tensorboard, wandb, ...")
    add("--quiet", action="store_true", help="no progress bar; a line per report instead")
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # DeepSpeed's launcher adds it
    args = root.parse_args(argv)
    args.repeats = None
    if args.lr_scheduler == "const-cooldown" and not 0 < args.epochs_cooldown <= args.epochs:
        raise SystemExit(
            f"--epochs-cooldown must be above 0 and at most --epochs {args.epochs}, got {args.epochs_cooldown}"
        )
    if args.keep < 1:
        raise SystemExit(f"--keep must be at least 1, got {args.keep}: --resume goes on from the newest state")
    if not 0 <= args.warmup < 1:
        raise SystemExit(f"--warmup is a share of the training, at least 0 and below 1, got {args.warmup}")
    if args.upsample is not None:
        if min(args.upsample, default=1) < 1:
            raise SystemExit(
                f"--upsample: factors must be at least 1, got {args.upsample}; leave a source out of --shards"
            )
        if len(args.upsample) != len(args.shards):
            raise SystemExit(f"--upsample: {len(args.upsample)} factors for {len(args.shards)} sources of --shards")
        args.repeats = [k for k, part in zip(args.upsample, args.shards, strict=True) for _ in shard_list(part)]
    return args


def main(argv=None):
    args = parse(argv)
    args.device = launch.local_device(args.device)
    Trainer(args).train()


if __name__ == "__main__":
    main()
