"""CLIP on a folder of pictures and texts (``cat.png`` beside ``cat.txt``), on one process or on several.

python -m recipes.own_data FOLDER
python -m recipes.own_data FOLDER --epochs 4 --resume                        # two more epochs
torchrun --nproc_per_node 2 -m recipes.own_data FOLDER --epochs 6 --resume   # two more, on two processes
"""

import argparse
import hashlib
import json
import os
import zlib
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import compopt
from recipes.models import Tokenizer, TwoTowers
from recipes.tasks import retrieval

PICTURES = (".png", ".jpg", ".jpeg")


class Folder(Dataset):
    """Pairs of a picture and a text, in the order of their names: a pair's position is its index.

    An item is the picture, the tokens of its text, and a number of that text: texts may repeat.
    """

    def __init__(self, paths, tokenizer=None):
        self.paths = paths
        self.texts = [path.with_suffix(".txt").read_text().strip() for path in paths]
        self.tokenizer = tokenizer or Tokenizer(sorted(set(self.texts)))
        self.tokens = self.tokenizer(self.texts)
        self.caption = torch.from_numpy(np.unique(self.texts, return_inverse=True)[1])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, position):
        picture = Image.open(self.paths[position]).convert("L").resize((32, 32))
        return torch.from_numpy(np.array(picture)), self.tokens[position], self.caption[position]


def read(folder):
    """Pairs to train on, and a tenth that is held out: by their names, so that a new pair moves no other."""
    pictures = (path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
    paths = sorted(path for path in pictures if path.with_suffix(".txt").exists())
    held_out = {path for path in paths if zlib.crc32(path.name.encode()) % 10 == 0}
    train = Folder([path for path in paths if path not in held_out])
    return train, Folder(sorted(held_out), train.tokenizer)


def fingerprint(*parts):
    """Return a hash of the names and texts of all pairs: a resume on other pairs is refused."""
    pairs = [[(path.name, text) for path, text in zip(part.paths, part.texts, strict=True)] for part in parts]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def load_state(est, path):
    """Load the estimator's state, or end the program with the reason."""
    try:
        compopt.load(est, path)  # on any number of processes
    except (ValueError, OSError) as error:
        raise SystemExit(
            f"--resume: {error}\nResume with the pairs that the run began with, or begin anew with another --output"
        ) from None


@torch.no_grad()
def recall(model, held_out):
    """Share of held-out pictures whose nearest text is their own."""
    texts, right = held_out.tokens.unique(dim=0, return_inverse=True)
    pictures = torch.stack([picture for picture, *_ in held_out])
    return retrieval(model.eval().image(pictures), model.text(texts), right).image_to_text


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="the folder")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64, help="of each process")
    parser.add_argument("--output", type=Path, default=Path("runs/own_data"))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args(argv)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # torchrun
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    train, held_out = read(args.data)
    if len(train) < args.batch_size * ranks:
        parser.error(
            f"{args.data} has {len(train)} pairs to train on, {', '.join(PICTURES)} with a .txt beside each, and "
            f"--batch-size {args.batch_size} on {ranks} processes asks for {args.batch_size * ranks}"
        )
    if len(held_out) < 2:
        parser.error(f"{args.data} has {len(held_out)} pairs to evaluate on, a tenth of all: add pairs")
    sampler = DistributedSampler(train, ranks, rank, drop_last=True)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, sampler=sampler, drop_last=True)
    model = TwoTowers(len(train.tokenizer), train.tokenizer.length)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # after the process group: it gathers the features of all processes by itself
    est = compopt.recommended(dim=128, n=len(train), batch_size=args.batch_size * ranks)
    est.data_fingerprint = fingerprint(train, held_out)
    est.attach(optimizer)
    first = 0
    if args.resume and not (args.output / "last.pt").exists():
        parser.error(f"--resume: there is no {args.output / 'last.pt'}")
    if args.resume:
        saved = torch.load(args.output / "last.pt")
        first = saved["epoch"]
        load_state(est, args.output / "state" / saved["state"])  # before the model, whose tokens are those of the texts
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if first >= args.epochs:
            parser.error(f"--resume: {first} epochs are done already, and --epochs {args.epochs} counts them")
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for pictures, tokens, caption, index in loader:
            loss = est(*wrapped.train()(pictures, tokens), index, index2=caption)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = compopt.save(est, args.output / "state").name  # every process takes part
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, "state": state, **states}, args.output / "last.pt")
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
