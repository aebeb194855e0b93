"""CLIP in plain torch with a compopt estimator: one file to copy and adapt to your data and model.

python -m recipes.minimal  # glyphs, two epochs, about a minute on two cores; --resume continues an interrupted run"""

import argparse
from pathlib import Path

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import compopt
from recipes import glyphs, models, tasks


def data_and_model(limit=None):
    """Return training pairs (image, tokens), held-out pairs, and the model; replace them by yours."""
    data = glyphs.load()
    split, tokenizer = glyphs.split_pairs(data), models.Tokenizer(data.names)
    tokens = tokenizer(data.names)[data.caption]
    train, held_out = (TensorDataset(data.images[at], tokens[at]) for at in (split.train[:limit], split.held_out))
    return train, held_out, models.TwoTowers(len(tokenizer), tokenizer.length)


@torch.no_grad()
def recall(model, held_out):
    """Return the share of held-out images with their own caption as the nearest one."""
    captions, right = held_out.tensors[1].unique(dim=0, return_inverse=True)
    return tasks.retrieval(model.eval().image(held_out.tensors[0]), model.text(captions), right).image_to_text


def save(folder, epoch, est, parts):
    """Save the estimator to a directory, and all other states and the directory's name to one file."""
    states = {name: models.finite(part).state_dict() for name, part in parts.items()}
    torch.save({"epoch": epoch, "state": compopt.save(est, folder / "state").name, **states}, folder / "last.pt")


def load(folder, est, parts):
    """Load the latest checkpoint; return the number of completed epochs."""
    if not (folder / "last.pt").exists():
        raise SystemExit(f"--resume: there is no {folder / 'last.pt'}; train without --resume first")
    saved = torch.load(folder / "last.pt")
    if saved.get("schedule", {}).get("total_steps") != parts["schedule"].total_steps:
        raise SystemExit("--resume: --epochs, --batch-size and the data must be those with which the run was started")
    compopt.load(est, folder / "state" / saved["state"])
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    return saved["epoch"]


def arguments(description, folder):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2, help="length of the run and of its schedule")
    parser.add_argument("--stop-after", type=int, help="end after so many epochs; --resume continues the run")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--limit", type=int, help="train on so many pairs only")
    parser.add_argument("--output", type=Path, default=Path(folder))
    parser.add_argument("--resume", action="store_true")
    return parser


def main(argv=None):
    args = arguments(__doc__, "runs/minimal").parse_args(argv)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, 0.002 * args.batch_size**0.5, args.epochs * len(loader), pct_start=0.75)
    est = compopt.recommended(dim=128, n=len(train), batch_size=args.batch_size)
    est.attach(optimizer)  # its state changes after each real optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = load(args.output, est, parts) if args.resume else 0
    for epoch in range(args.epochs)[first : args.stop_after]:
        torch.manual_seed(epoch)  # the order of an epoch is the same after a resume
        for images, tokens, index in loader:
            loss = est(*model.train()(images, tokens), index)
            loss.backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        save(args.output, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
