"""CLIP on a folder of pictures and texts (``cat.png`` beside ``cat.txt``), on one process or on several.

python -m recipes.own_data FOLDER
python -m recipes.own_data FOLDER --epochs 4 --resume                        # two more epochs
torchrun --nproc_per_node 2 -m recipes.own_data FOLDER --epochs 6 --resume   # two more, on two processes
"""

import argparse
import os
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
    """Pairs of a picture and a text, in the order of their names: a pair's position is its index."""

    def __init__(self, paths, tokenizer=None):
        self.paths = paths
        self.texts = [path.with_suffix(".txt").read_text().strip() for path in paths]
        self.tokenizer = tokenizer or Tokenizer(sorted(set(self.texts)))
        self.tokens = self.tokenizer(self.texts)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, position):
        picture = Image.open(self.paths[position]).convert("L").resize((32, 32))
        return torch.from_numpy(np.array(picture)), self.tokens[position]


def read(folder):
    """Pairs to train on, and every tenth one, held out."""
    paths = sorted(path for path in folder.iterdir() if path.suffix in PICTURES and path.with_suffix(".txt").exists())
    train = Folder([path for at, path in enumerate(paths) if at % 10])
    return train, Folder(paths[::10], train.tokenizer)


@torch.no_grad()
def recall(model, held_out):
    """Share of held-out pictures whose nearest text is their own."""
    texts, right = held_out.tokens.unique(dim=0, return_inverse=True)
    pictures = torch.stack([picture for picture, _ in held_out])
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
    sampler = DistributedSampler(train, ranks, rank, drop_last=True)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, sampler=sampler, drop_last=True)
    model = TwoTowers(len(train.tokenizer), train.tokenizer.length)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    est = compopt.SogCLREstimator(n=len(train), gamma=0.8, tau=0.07)  # after the process group: it gathers by itself
    est.attach(optimizer)
    first = 0
    if args.resume:
        saved = torch.load(args.output / "last.pt")
        first = saved["epoch"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        compopt.load(est, args.output / "rows" / saved["rows"])  # on any number of processes
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        for pictures, tokens, index in loader:
            loss = est(*wrapped.train()(pictures, tokens), index)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        rows = compopt.save(est, args.output / "rows").name  # every process takes part
        if rank == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({"epoch": epoch + 1, "rows": rows, **states}, args.output / "last.pt")
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
