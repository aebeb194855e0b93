"""CLIP on your own pictures and texts, on one or several processes: one file to copy.

DATA is a folder (``cat.png`` with ``cat.txt``, in any sub-folder), a table of paths and texts (CSV, JSONL, parquet), or
the result of ``datasets.Dataset.save_to_disk``::

    python -m recipes.own_data DATA
    python -m recipes.own_data DATA --size 64 --augment crop flip jitter --labels label
    python -m recipes.own_data DATA --model open_clip:ViT-B-32 --size 224 --precision bfloat16
    python -m recipes.own_data DATA --epochs 12 --stop-after 4                   # the first third of a run
    torchrun --nproc_per_node 2 -m recipes.own_data DATA --epochs 12 --batch-size 32 --resume    # the rest

The learning rate rises during three quarters of the run. In ``--output``: last.pt, metrics.jsonl, curve.png.
"""

import argparse
import hashlib
import json
import os
import random
import zlib
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.distributed as dist
from PIL import ImageOps
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import compopt
from recipes.augment import NAMES, Augmentation
from recipes.models import DIM, Tokenizer, TwoTowers, finite, pixels
from recipes.run_log import RunLog

PICTURES = (".png", ".jpg", ".jpeg", ".webp")
TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


# -- data ----------------------------------------------------------------------------------------------------------


def read(data, image="image", text="text", labels=None):
    """Return DATA as a Hugging Face dataset: "name", "image", "text" (a list per picture), with labels also "label".

    Pairs without a picture or without a text are omitted.
    """
    if (data / "state.json").exists():
        table = datasets.load_from_disk(str(data))
    elif data.is_dir():
        table = read_folder(data)
    else:
        separator = {"sep": "\t"} if data.suffix == ".tsv" else {}
        kind = TABLES[data.suffix]
        table = datasets.load_dataset(kind, data_files=str(data), split="train", **separator)
    wanted = {column for column in (image, text, labels) if column is not None}
    if missing := sorted(wanted - set(table.column_names)):
        raise SystemExit(f"{data} has no column {missing}, only {table.column_names}: give --image, --text, --labels")
    columns = {"text": [captions(cell) for cell in table[text]]}
    if labels is not None:
        columns["label"] = class_names(table, labels)
    table = table.select_columns(image).rename_columns({image: "image"})
    decoded = isinstance(table.features["image"], datasets.Image)
    columns["name"] = list(map(str, range(len(table)))) if decoded else table["image"][:]
    for column, values in columns.items():
        table = table.add_column(column, values)
    if not decoded:
        base = data if data.is_dir() else data.parent
        paths = [str(base / str(name)) for name in columns["name"]]  # an absolute path is not changed
        table = table.remove_columns("image").add_column("image", paths).cast_column("image", datasets.Image())
    pairs = zip(columns["name"], columns["text"], strict=True)
    return table.select([place for place, pair in enumerate(pairs) if all(pair)])


def captions(cell):
    """Return the non-empty texts of a cell, which contains a text or a list of texts."""
    texts = (str(text).strip() for text in (cell if isinstance(cell, list) else [cell]) if text is not None)
    return [text for text in texts if text]


def class_names(table, column):
    """Return the class of every picture as a text; numbers of a ``ClassLabel`` column become their names."""
    labels, kind = table[column][:], table.features[column]
    if None in labels:
        raise SystemExit(f"--labels {column}: {labels.count(None)} pictures have no class; give them one")
    return kind.int2str(labels) if isinstance(kind, datasets.ClassLabel) else list(map(str, labels))


def read_folder(folder):
    """Return the pictures of a folder that have a .txt, one caption per line; labels are names of sub-folders."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in PICTURES)
    paths = [path for path in paths if path.with_suffix(".txt").exists()]
    texts = [path.with_suffix(".txt").read_text().split("\n") for path in paths]
    names = [str(path.relative_to(folder)) for path in paths]
    labels = [path.parent.name for path in paths]
    return datasets.Dataset.from_dict({"image": names, "text": texts, "label": labels})


def split(table):
    """Return training pairs and a held-out tenth, split by names, so that new pairs do not move existing ones."""
    held_out = np.array([zlib.crc32(name.encode()) % 10 == 0 for name in table["name"]], dtype=bool)
    return table.select(np.flatnonzero(~held_out)), table.select(np.flatnonzero(held_out))


class Pairs(Dataset):
    """Pictures, each with one of its captions; the index of a picture is its position.

    An item consists of the picture, the tokens of a caption, and the number of the caption among the distinct texts.

    Args:
        table: data set with columns "image" and "text".
        tokenizer: function from texts to tokens, (k, length).
        size: pixels per side; pictures are cropped to squares.
    """

    def __init__(self, table, tokenizer, size):
        self.table, self.size, self.epoch = table, size, 0
        self.texts = list(table["text"])
        self.distinct = sorted({text for texts in self.texts for text in texts})
        number = {text: position for position, text in enumerate(self.distinct)}
        self.captions = [[number[text] for text in texts] for texts in self.texts]
        self.tokens = tokenizer(self.distinct)

    def __len__(self):
        return len(self.texts)

    def picture(self, position):
        """Return a picture, (3, size, size) uint8."""
        picture = ImageOps.fit(self.table[position]["image"].convert("RGB"), (self.size, self.size))
        return torch.from_numpy(np.array(picture)).movedim(2, 0)

    def __getitem__(self, position):
        draw = random.Random(f"{self.epoch} {position}")  # a new caption in every epoch, the same after a resume
        caption = draw.choice(self.captions[position])
        return self.picture(position), self.tokens[caption], caption


def fingerprint(*tables):
    """Return a hash of the names and texts of all pairs, to detect a resume with other pairs."""
    pairs = [list(zip(table["name"], table["text"], strict=True)) for table in tables]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


# -- models --------------------------------------------------------------------------------------------------------


def build(name, texts, size):
    """Return a model, (pictures, tokens) -> features of both, and its tokenizer.

    Args:
        name: "small"; "timm:NAME", a picture encoder of timm with the small text encoder; or "open_clip:NAME".
        texts: training texts, which define the vocabulary of the small tokenizer.
        size: pixels per side.
    """
    kind, _, name = name.partition(":")
    if kind == "open_clip":
        import open_clip

        model = open_clip.create_model(name, force_image_size=size, output_dict=False)
        return OpenClip(model), open_clip.get_tokenizer(name)
    tokenizer = Tokenizer(sorted(set(texts)), length=32)
    model = TwoTowers(len(tokenizer), tokenizer.length, channels=3, size=size)
    if kind == "timm":
        import timm

        try:
            encoder = timm.create_model(name, num_classes=DIM, img_size=size)
        except TypeError:  # models for pictures of any size, such as a ResNet
            encoder = timm.create_model(name, num_classes=DIM)
        model.image = nn.Sequential(Scaled(), encoder)
    return model, tokenizer


class Scaled(nn.Module):
    """Scale pictures, uint8 or floats in [0, 1], to a mean of about 0 and a standard deviation of about 1."""

    def forward(self, pictures):
        return (pixels(pictures) - 0.5) / 0.25


class OpenClip(nn.Module):
    """Adapter of an open_clip model to the interface of `recipes.models.TwoTowers`."""

    def __init__(self, model):
        super().__init__()
        self.model, self.scaled = model, Scaled()
        for name in ("logit_scale", "logit_bias"):  # parameters of a loss; the estimator has its own temperature
            if (parameter := getattr(model, name, None)) is not None:
                parameter.requires_grad_(False)

    def image(self, pictures):
        return self.model.encode_image(self.scaled(pictures))

    def text(self, tokens):
        return self.model.encode_text(tokens)

    def forward(self, pictures, tokens):
        return self.image(pictures), self.text(tokens)


# -- evaluation ----------------------------------------------------------------------------------------------------


def encode(encoder, chunks, device):
    """Return normalised features of all chunks, on the CPU."""
    return torch.cat([normalize(encoder(chunk.to(device)).float(), dim=1).cpu() for chunk in chunks])


def recall(similarities, right, k):
    """Return the share of rows with one of their ``right`` columns among the ``k`` most similar columns."""
    best = similarities.topk(min(k, similarities.shape[1]), dim=1).indices
    return right.gather(1, best).any(1).float().mean().item()


@torch.no_grad()
def evaluate(model, held_out, device, labels=None, classes=None):
    """Return recalls from pictures to captions and from captions to pictures, and the zero-shot accuracy.

    Args:
        held_out: held-out pairs.
        labels: class number of each picture, if there are classes.
        classes: tokens, (classes, templates, length); the feature of a class is the mean over its templates.
    """
    model.eval()
    pictures = encode(model.image, (chunk for chunk, *_ in DataLoader(held_out, 256)), device)
    similarities = pictures @ encode(model.text, held_out.tokens.split(256), device).T
    right = torch.zeros(similarities.shape, dtype=torch.bool)
    for row, captions in zip(right, held_out.captions, strict=True):
        row[captions] = True
    found = {f"recall@{k}": recall(similarities, right, k) for k in (1, 5)}
    found |= {f"recall@{k} of pictures": recall(similarities.T, right.T, k) for k in (1, 5)}
    if labels is not None:
        each = normalize(encode(model.text, classes, device).unflatten(0, classes.shape[:2]).mean(1), dim=1)
        found["zero-shot"] = ((pictures @ each.T).argmax(1) == torch.tensor(labels)).float().mean().item()
    return found


# -- training ------------------------------------------------------------------------------------------------------


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("data", type=Path, help="a folder, a table, or a saved data set")
    add("--image", default="image", metavar="COLUMN", help="of a table: paths relative to its folder, or pictures")
    add("--text", default="text", metavar="COLUMN", help="of a table: a text, or a list of them")
    add("--labels", metavar="COLUMN", help="classes for zero-shot evaluation; of a folder: label, its sub-folders")
    add("--templates", nargs="+", default=["a photo of a {}"], metavar="TEXT", help="texts of a class")
    add("--model", default="small", help="small, timm:NAME or open_clip:NAME")
    add("--size", type=int, default=32, help="pixels per side")
    add("--augment", nargs="*", default=(), choices=NAMES)
    add("--precision", default="float32", choices=("float32", "bfloat16"))
    add("--epochs", type=int, default=2, help="length of the run and of its schedule")
    add("--stop-after", type=int, metavar="N", help="end after N epochs; --resume continues the run")
    add("--batch-size", type=int, default=64, help="of each process")
    add("--lr", type=float, help="highest learning rate; default: 0.002 times the root of the samples per update")
    add("--workers", type=int, default=0, help="processes that read pictures")
    add("--log-every", type=int, default=10, metavar="STEPS", help="steps between lines of metrics.jsonl")
    add("--output", type=Path, default=Path("runs/own_data"))
    add("--resume", action="store_true")
    args = parser.parse_args(argv)
    if not args.data.exists() or not (args.data.is_dir() or args.data.suffix in TABLES):
        parser.error(f"{args.data} is no folder and no table ({', '.join(TABLES)})")
    if (args.data / "dataset_dict.json").exists():
        parser.error(f"{args.data} contains several data sets; give the folder of one of them")
    if wrong := [text for text in args.templates if "{}" not in text]:
        parser.error(f"--templates: {wrong[0]!r} has no {{}} in the place of the class")
    if args.resume and not (args.output / "last.pt").exists():
        parser.error(f"--resume: there is no {args.output / 'last.pt'}")
    return args, parser.error


def start():
    """Initialise the process group under torchrun; return the device of this process."""
    device, local = torch.device("cpu"), int(os.environ.get("LOCAL_RANK", 0))
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(local)
        device = torch.accelerator.current_accelerator()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group()
    return device


def load(folder, est, parts, device):
    """Load the latest checkpoint, or exit with an error message; return the number of completed epochs."""
    saved = torch.load(folder / "last.pt", map_location=device)
    anew = "or begin anew with another --output"
    try:
        compopt.load(est, folder / "state" / saved["state"])  # on any number of processes
    except (ValueError, OSError) as error:
        raise SystemExit(f"--resume: {error}\nResume with the pairs that the run began with, {anew}") from None
    steps = saved.get("schedule", {}).get("total_steps")
    if steps != parts["schedule"].total_steps:
        raise SystemExit(
            f"--resume: the schedule of the run has {steps} steps, and that of the arguments "
            f"{parts['schedule'].total_steps}\nResume with the same --epochs and samples per update, {anew}"
        )
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def save(folder, epoch, est, parts, rank):
    """Save the estimator on every process, and all other states on process 0."""
    state = compopt.save(est, folder / "state").name
    if rank == 0:
        states = {name: part.state_dict() for name, part in parts.items()}
        torch.save({"epoch": epoch, "state": state, **states}, partial := folder / "last.partial")
        partial.replace(folder / "last.pt")  # a killed process leaves the old file or the new one


def prepare(args, ranks, refuse):
    """Return training pairs, held-out pairs, arguments of `evaluate` for classes, the model and a fingerprint."""
    tables = split(read(args.data, args.image, args.text, args.labels))
    needed = args.batch_size * ranks
    if len(tables[0]) < needed:
        refuse(
            f"{args.data} has {len(tables[0])} pairs to train on ({', '.join(PICTURES)} with a .txt beside each, or "
            f"lines of a table), and --batch-size {args.batch_size} on {ranks} processes asks for {needed}"
        )
    if len(tables[1]) < 2:
        refuse(f"{args.data} has {len(tables[1])} pairs to evaluate on, a tenth of all: add pairs")
    model, tokenizer = build(args.model, [text for texts in tables[0]["text"] for text in texts], args.size)
    train, held_out = (Pairs(table, tokenizer, args.size) for table in tables)
    classes = zero_shot_classes(tables, args.templates, tokenizer) if args.labels else {}
    return train, held_out, classes, model, fingerprint(*tables)


def zero_shot_classes(tables, templates, tokenizer):
    """Return class numbers of the held-out pictures and tokens of the classes, as arguments of `evaluate`."""
    names = sorted({name for table in tables for name in table["label"]})
    labels = [names.index(name) for name in tables[1]["label"]]
    tokens = [tokenizer([template.replace("{}", name) for template in templates]) for name in names]
    return {"labels": labels, "classes": torch.stack(tokens)}


def measures(epoch, loss, rate, est):
    """Return the measures of an update for the log; the loss of an estimator is not on the scale of InfoNCE."""
    return {"loss": loss.item(), "epoch": epoch + 1, "lr": rate, "info_nce": float(est.metrics["info_nce"])}


@torch.no_grad()
def width(model, tokens):
    """Return the feature dimension of a model."""
    return model.eval().text(tokens).shape[1]


def main(argv=None):
    args, refuse = parse(argv)
    device = start()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    train, held_out, classes, model, pairs = prepare(args, ranks, refuse)
    sampler = DistributedSampler(train, ranks, rank, drop_last=True)
    indexed = compopt.data.Indexed(train)
    loader = DataLoader(indexed, args.batch_size, sampler=sampler, drop_last=True, num_workers=args.workers)
    augment = Augmentation(args.augment, channels=3, size=args.size)
    samples = args.batch_size * ranks  # of an update
    # after the process group, over which the estimator gathers the features of all processes
    est = compopt.recommended(dim=width(model, train.tokens[:1]), n=len(train), batch_size=samples).to(device)
    est.data_fingerprint = pairs
    model.to(device)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, args.lr or 0.002 * samples**0.5, args.epochs * len(loader), pct_start=0.75)
    est.attach(optimizer)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = load(args.output, est, parts, device) if args.resume else 0
    if first == args.epochs:
        refuse(f"--resume: all {first} epochs of the run are done")
    log = RunLog(args.output, schedule.total_steps, schedule.last_epoch, main=rank == 0)
    for epoch in range(args.epochs)[first : args.stop_after]:
        sampler.set_epoch(epoch)
        train.epoch = epoch
        draws = torch.Generator().manual_seed(epoch * ranks + rank)
        for pictures, tokens, caption, index in loader:
            pictures, tokens = augment(pictures, draws).to(device), tokens.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bfloat16"):
                features = wrapped.train()(pictures, tokens)
            loss, (rate,) = est(*features, index, index2=caption), schedule.get_last_lr()
            loss.backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
            if schedule.last_epoch % args.log_every == 0:
                log.add(schedule.last_epoch, **measures(epoch, loss, rate, est))
        finite(model)
        save(args.output, epoch + 1, est, parts, rank)
        if rank == 0:
            found = evaluate(model, held_out, device, **classes)
            log.add(schedule.last_epoch, **measures(epoch, loss, rate, est), **found)
            shown = ", ".join(f"{name} {100 * value:.1f} %" for name, value in found.items())
            log.say(f"epoch {epoch + 1}: loss {loss.item():.3f}, {shown}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
