"""Gradients of a large batch in the memory of a small one, in every framework: compopt and the framework's own way.

    python -m benchmarks.small_memory             # two ranks on CPUs; writes benchmarks/results/small_memory.md
    python -m benchmarks.small_memory --only DDP
    python -m benchmarks.small_memory --lengths   # budgets of tokens; writes benchmarks/results/token_budget.md

Each row starts two new processes, which train one text encoder on the same batch with InfoNCE over the whole batch. The
framework's own way is the accumulation of gradients over micro-batches, which is what its documentation offers for
batches that do not fit, or the cached loss of sentence-transformers.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import compopt
from benchmarks.report import ROOT, environment, finish, stored, table
from recipes.launch import whole
from tests.launching import environment as launching
from tests.trainers import PLAIN_SGD, placed

RANKS, BATCH, MICRO, LENGTH, WIDTH, LAYERS = 2, 128, 8, 64, 128, 4
TAU, LR, UPDATES = 0.05, 10.0, 2
WORDS = [f"{a}{b}{c}" for a in "bdfgklmn" for b in "aeiou" for c in "prst"]
CACHE, OWN, WHOLE = FORMS = "gradient cache", "own way", "whole batch"
ABOUT = f"""{RANKS} processes with gloo, one thread each. A DistilBERT of {LAYERS} layers and width {WIDTH} with random
weights, texts of {LENGTH} tokens, {BATCH} pairs per update, InfoNCE in one direction with temperature {TAU}, SGD,
float32. *Error*: norm of the difference of the gradient from that of one process with the whole batch, divided by the
norm of the latter. *Peak*: additional memory of a rank during the first update, in MiB. *Time*: seconds of the second
update. The gradient cache and the framework's own way use micro-batches of {MICRO} pairs per rank. The own way is
gradient accumulation, so that each loss sees the negatives of a micro-batch; that of sentence-transformers is
`CachedMultipleNegativesRankingLoss(gather_across_devices=True)`, whose gradient is multiplied by the temperature before
the comparison, as that of compopt is. Whole batch: the estimator without a cache."""


def texts() -> tuple[list[str], list[str]]:
    """Return the two texts of each pair."""
    draw = random.Random(0)
    made = [[" ".join(draw.choices(WORDS, k=LENGTH - 2)) for _ in range(BATCH)] for _ in range(2)]
    return made[0], made[1]


def encoder() -> nn.Module:
    """Return the model, which maps tokens to ``{"sentence_embedding": ...}``."""
    from recipes.text import small_model, tokenizer_of

    torch.manual_seed(0)
    return small_model(tokenizer_of(WORDS, length=LENGTH), width=WIDTH, layers=LAYERS)


def encode(model: nn.Module, part: Any) -> Tensor:
    return model(dict(part))["sentence_embedding"]


def estimator(**options: Any) -> compopt.InfoNCEEstimator:
    return compopt.InfoNCEEstimator(tau=TAU, directions="forward", **options)


class Meter:
    """Peak memory and time of updates, and the parameters after the first one."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.before, self.after = model, parameters(model), None
        self.peak, self.times = 0.0, []

    def begin(self) -> None:
        """Start an update."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.resident, self.started = _status("VmRSS"), time.perf_counter()

    def end(self) -> None:
        """End an update."""
        self.times.append(time.perf_counter() - self.started)
        if self.after is None:
            self.peak, self.after = _status("VmHWM") - self.resident, parameters(self.model)

    def result(self) -> dict[str, Any]:
        """Return the figures, with the gradient as the change of parameters divided by the rate."""
        gradient = (self.before - self.after) / LR
        return {"gradient": gradient, "peak": self.peak, "seconds": min(self.times[1:])}


def _status(name: str) -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def parameters(model: nn.Module) -> Tensor:
    """Return all parameters in one float64 vector, those of other ranks included."""
    with whole(model):
        found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return torch.cat([p.detach().double().flatten() for p in found])


# -- own loops -------------------------------------------------------------------------------------------------------


def loop(kind: str, form: str) -> dict[str, Any]:
    """Train in a loop of torch, DeepSpeed or accelerate."""
    model, deep = encoder(), None
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    backward: Callable[[Tensor], Any] = Tensor.backward
    wrapped, update, accumulated = model, optimizer.step, BATCH // RANKS // MICRO if form == OWN else 1
    if kind == "DDP":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif kind == "FSDP2":
        from torch.distributed.fsdp import fully_shard

        for layer in model.modules():
            if type(layer).__name__ == "TransformerBlock":
                fully_shard(layer)
        wrapped = fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        update = optimizer.step
    elif kind.startswith("ZeRO"):
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": BATCH // RANKS // accumulated, "gradient_clipping": 0.0,
            "gradient_accumulation_steps": accumulated, "steps_per_print": 10**9,
            "zero_optimization": {"stage": int(kind[-1])}, "zero_allow_untested_optimizer": True,
        }  # fmt: skip
        wrapped = deep = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        backward, update = deep.backward, deep.step
    elif kind == "accelerate":
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        wrapped, optimizer = accelerator.prepare(model, optimizer)
        backward, update = accelerator.backward, optimizer.step
    return _loop(model, wrapped, form, backward, update, deep, optimizer)


def _loop(
    model: nn.Module, wrapped: Any, form: str, backward: Any, update: Any, deep: Any, optimizer: Any
) -> dict[str, Any]:
    columns, meter, est = own_columns(model), Meter(model), estimator()
    for _ in range(UPDATES):
        meter.begin()
        if form == CACHE:
            towers, given = (wrapped, wrapped), {} if deep is not None else {"backward": backward}
            compopt.gradient_cache(est, towers, columns, encode=encode, micro_batch_size=MICRO, **given)
            update()
        elif form == WHOLE:
            backward(est(*(encode(wrapped, column) for column in columns)))
            update()
        else:
            starts = range(0, BATCH // RANKS, MICRO)
            for start in starts:
                part = [{key: value[start : start + MICRO] for key, value in column.items()} for column in columns]
                loss = est(*(encode(wrapped, each) for each in part))
                backward(loss if deep is not None else loss / len(starts))  # DDP may reduce in each, with the same sum
                if deep is not None:
                    update()
            if deep is None:
                update()
        if deep is None:
            optimizer.zero_grad()
        meter.end()
    return meter.result()


def own_columns(model: Any) -> tuple[Any, Any]:
    """Return the tokens of this rank."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    found = [model.preprocess(column[own]) for column in texts()]
    return tuple({key: value for key, value in each.items() if isinstance(value, Tensor)} for each in found)


# -- trainers --------------------------------------------------------------------------------------------------------


class Pairs(torch.utils.data.Dataset):
    """Tokens of one pair per item; an epoch is one batch of all ranks."""

    def __init__(self, model: Any) -> None:
        self.columns = [model.preprocess(column) for column in texts()]

    def __len__(self) -> int:
        return BATCH

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        names = ("input_ids", "attention_mask")
        return {f"{name}_{k}": column[name][at] for k, column in enumerate(self.columns) for name in names}


def columns_of(inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    """Return the two columns of a collated batch."""
    return tuple({name: inputs[f"{name}_{k}"] for name in ("input_ids", "attention_mask")} for k in range(2))


def shared_options(kind: str, form: str) -> dict[str, Any]:
    """Return the arguments of a Trainer of transformers that do not depend on its strategy."""
    each = BATCH // RANKS
    size = {"per_device_train_batch_size": each}
    if form == OWN and kind.startswith("Trainer"):
        size = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": each // MICRO}
    return {
        **size, "max_steps": UPDATES, "optim": "sgd", "learning_rate": LR, "lr_scheduler_type": "constant", "seed": 1,
        "max_grad_norm": 0.0, "weight_decay": 0.0, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
        "remove_unused_columns": False, "dataloader_drop_last": True, "dataloader_pin_memory": False,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip


def strategy_of(kind: str) -> AbstractContextManager[dict[str, Any]]:
    """Return a context with the arguments of the strategy in the name of a row."""
    if "FSDP2" in kind:
        return placed("fsdp2", transformer_layer_cls_to_wrap=["TransformerBlock"])
    return placed(f"zero{kind[-1]}", **PLAIN_SGD) if "ZeRO" in kind else placed("ddp")


def trained(kind: str, form: str, folder: str, place: dict[str, Any]) -> dict[str, Any]:
    """Train with the Trainer of transformers, or that of sentence-transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from compopt.integrations.transformers import GradientCacheMixin

    class Measured(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.meter = Meter(trainer.model_wrapped)

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.meter.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.meter.end()

    class Contrastive(GradientCacheMixin, Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None):
            columns = columns_of(inputs)
            if form == CACHE:
                given = {"encode": encode, "micro_batch_size": MICRO}
                return compopt.gradient_cache(self.est, (model, model), columns, **given)
            return self.est(*(encode(model, column) for column in columns))

    measured = Measured()
    options = {**shared_options(kind, form), **place, **({"fsdp": "full_shard auto_wrap"} if "fsdp" in place else {})}
    if kind.startswith("Trainer"):
        model = encoder()
        trainer = Contrastive(model, TrainingArguments(folder, **options), train_dataset=Pairs(model))
        trainer.est = estimator()
    else:
        trainer = sentence_trainer(form, folder, options)
    trainer.add_callback(measured)
    trainer.train()
    return measured.meter.result()


def sentence_trainer(form: str, folder: str, options: dict[str, Any]) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    from compopt.integrations.sentence_transformers import CachedEstimatorLoss, EstimatorLoss
    from compopt.integrations.transformers import GradientCacheMixin

    class Cached(GradientCacheMixin, SentenceTransformerTrainer):
        pass

    args = SentenceTransformerTrainingArguments(folder, **options)
    model, (first, second) = encoder(), texts()
    if form == OWN:
        loss = CachedMultipleNegativesRankingLoss(model, 1 / TAU, mini_batch_size=MICRO, gather_across_devices=True)
    elif form == CACHE:
        loss = CachedEstimatorLoss(model, estimator(), mini_batch_size=MICRO)
    else:
        loss = EstimatorLoss(model, estimator())
    data = Dataset.from_dict({"anchor": first, "positive": second})  # one batch, in any order
    return (SentenceTransformerTrainer if form == OWN else Cached)(model, args, train_dataset=data, loss=loss)


def lightning_trained(form: str, folder: str) -> dict[str, Any]:
    """Train with Lightning and DDP."""
    import lightning

    class Module(lightning.LightningModule):
        automatic_optimization = form == OWN

        def __init__(self) -> None:
            super().__init__()
            self.model = encoder()

        def setup(self, stage: str) -> None:
            self.est = estimator()

        def training_step(self, batch: Any, at: int) -> Any:
            columns = columns_of(batch)
            if form == OWN:
                return self.est(*(encode(self.model, column) for column in columns))
            optimizer = self.optimizers()
            optimizer.zero_grad()
            if form == CACHE:
                towers, given = (self.model, self.model), {"encode": encode, "backward": self.manual_backward}
                compopt.gradient_cache(self.est, towers, columns, micro_batch_size=MICRO, **given)
            else:
                self.manual_backward(self.est(*(encode(self.model, column) for column in columns)))
            optimizer.step()
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=LR)

    class Measured(lightning.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.meter = Meter(module.model)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, at: int) -> None:
            if at % each == 0:
                self.meter.begin()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, at: int) -> None:
            if at % each == each - 1:
                self.meter.end()

    each, measured, module = BATCH // RANKS // MICRO if form == OWN else 1, Measured(), Module()
    loader = torch.utils.data.DataLoader(Pairs(module.model), BATCH // RANKS // each, shuffle=False)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", accumulate_grad_batches=each, max_epochs=UPDATES,
        callbacks=[measured], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, loader)
    return measured.meter.result()


# -- all rows --------------------------------------------------------------------------------------------------------

LOOPS = ("DDP", "FSDP2", "ZeRO 1", "ZeRO 2", "ZeRO 3", "accelerate")
NAMES, MORE = ("Trainer", "SentenceTransformerTrainer"), ("", ", FSDP2", ", ZeRO 3")
TRAINERS = [name + more for name in NAMES for more in MORE]
KINDS = (*LOOPS, *TRAINERS, "Lightning")


def process(kind: str, form: str, folder: Path) -> None:
    """Carry out one training on this rank, and write its result from rank 0."""
    torch.set_num_threads(1)
    if kind == "lengths":
        return lengths_process(int(form), folder)
    if kind == "one process":
        model = encoder()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        found = _loop(model, model, WHOLE, Tensor.backward, optimizer.step, None, optimizer)
    elif kind == "Lightning":
        found = lightning_trained(form, str(folder))
    elif kind in LOOPS:
        dist.init_process_group("gloo")
        found = loop(kind, form)
    else:
        with strategy_of(kind) as place:
            found = trained(kind, form, str(folder), place)
    if int(os.environ.get("RANK", 0)) == 0:
        torch.save(found, folder / "result.pt")
    if dist.is_initialized():
        dist.barrier()


def run(kind: str, form: str) -> dict[str, Any]:
    """Start the processes of a training; return its result, or the last line of its error."""
    ranks = 1 if kind in ("one process", "lengths") else RANKS
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command = command if ranks > 1 else command[:1]
    with tempfile.TemporaryDirectory() as folder:
        command += ["-m", "benchmarks.small_memory", "--process", kind, form, folder]
        try:
            done = subprocess.run(command, cwd=ROOT, env=launching(), capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return {"error": "no end within ten minutes"}
        file = Path(folder) / "result.pt"
        if done.returncode or not file.is_file():
            lines = [line.strip() for line in done.stderr.splitlines() if line.startswith("[rank0]:")]
            return {"error": " ".join(line.removeprefix("[rank0]:").strip() for line in lines[-3:])}
        return torch.load(file)


# -- budgets of tokens -----------------------------------------------------------------------------------------------

SIZES: tuple[Any, ...] = (4, 8, 16, 32, *(compopt.TokenBudget(tokens) for tokens in (512, 1024, 2048, 4096)))
LONGEST, TEXTS = 256, 256
ABOUT_LENGTHS = f"""One process and one thread. The encoder of the table of frameworks, {TEXTS} names of functions of
Python's standard library and the first paragraphs of their docstrings (3 to {LONGEST} tokens, drawn at random), InfoNCE
in one direction. *Micro-batches*: of both columns. *Peak*: additional memory of the first call, in MiB. *Time*:
seconds of the second call. *Error* of the gradient as in the table of frameworks, from the whole batch."""


def natural(model: Any) -> tuple[Any, Any]:
    """Return the tokens of texts with a natural spread of lengths."""
    from recipes.text import docstrings

    names, paragraphs = docstrings()
    chosen = random.Random(0).sample(range(len(names)), TEXTS)
    columns = [model.preprocess([column[at] for at in chosen]) for column in (names, paragraphs)]
    return tuple({key: value for key, value in each.items() if isinstance(value, Tensor)} for each in columns)


def lengths_process(number: int, folder: Path) -> None:
    """Call the gradient cache with one size, or without it; write gradient, peak, seconds and micro-batches."""
    from recipes.text import docstrings, small_model, tokenizer_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = small_model(tokenizer_of(docstrings()[1], length=LONGEST), width=WIDTH, layers=LAYERS)
    columns, est, passes = natural(model), estimator(), 0

    def counted(tower: nn.Module, part: Any) -> Tensor:
        nonlocal passes
        passes += 1
        return encode(tower, part)

    meter = Meter(model)
    for _ in range(2):
        passes = 0
        model.zero_grad()
        meter.begin()
        if number < len(SIZES):
            given = {"encode": counted, "micro_batch_size": SIZES[number]}
            compopt.gradient_cache(est, (model, model), columns, **given)
        else:
            est(*(encode(model, column) for column in columns)).backward()
        meter.end()
    gradient = torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])
    torch.save({**meter.result(), "gradient": gradient, "parts": max(1, passes // 2)}, folder / "result.pt")


def lengths() -> None:
    """Compare fixed micro-batches with budgets of tokens."""
    env, results, body = environment(), [], []
    found = [run("lengths", str(number)) for number in range(len(SIZES) + 1)]
    whole = found[-1]["gradient"]
    for number, each in enumerate(found):
        gradient = each.pop("gradient")
        each["difference"] = float((gradient - whole).norm() / whole.norm())
        size = "whole batch" if number == len(SIZES) else SIZES[number]
        name = f"{size} pairs" if isinstance(size, int) else size if isinstance(size, str) else f"{size.tokens} tokens"
        results.append({"size": name, **each})
        body.append([name, str(each["parts"]), *cells(each)[1:], cells(each)[0]])
    head = ["micro-batch", "micro-batches", "peak", "time", "error"]
    finish("token_budget", "Budgets of tokens", env, [ABOUT_LENGTHS, table(head, body)], results)


def measured(kind: str, form: str, whole: Tensor) -> dict[str, Any]:
    """Return the figures of a training, with the error of its gradient."""
    found = run(kind, form)
    if "error" not in found:
        gradient = found.pop("gradient")
        if form == OWN and kind.startswith("Sentence"):
            gradient *= TAU  # its loss is not multiplied by the temperature
        found["difference"] = float((gradient - whole).norm() / whole.norm())
    print(kind, form, found, flush=True)
    return found


def cells(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return ["fails", "", ""]
    return [f"{found['difference']:.0e}", f"{found['peak']:.0f}", f"{found['seconds']:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--process", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", choices=KINDS, action="append", help="a row, in place of the stored one; may be repeated"
    )
    parser.add_argument("--lengths", action="store_true", help="compare fixed micro-batches with budgets of tokens")
    args = parser.parse_args()
    if args.lengths:
        lengths()
        return
    if args.process:
        process(args.process[0], args.process[1], Path(args.process[2]))
        return
    env, failures = environment(), []
    whole = run("one process", WHOLE)["gradient"]
    results = {each["framework"]: each for each in (stored("small_memory")["results"] if args.only else ())}
    for kind in args.only or KINDS:
        results[kind] = {"framework": kind, **{form: measured(kind, form, whole) for form in FORMS}}
    for kind, forms in results.items():
        failures += [f"- {kind}, {form}: `{forms[form]['error']}`" for form in FORMS if "error" in forms[form]]
    body = [[kind, *(cell for form in FORMS for cell in cells(forms[form]))] for kind, forms in results.items()]
    head = ["framework", "compopt: error", "peak", "time", "own way: error", "peak", "time"]
    head += ["whole batch: error", "peak", "time"]
    parts = [ABOUT, table(head, body), *(["What failed:\n\n" + "\n".join(failures)] if failures else [])]
    finish("small_memory", "Large batches in small memory", env, parts, list(results.values()))


if __name__ == "__main__":
    main()
