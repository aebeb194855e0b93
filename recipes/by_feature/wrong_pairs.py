"""The minimal recipe with scores per pair: suspects are left out, and a picture shows the worst pairs.

python -m recipes.by_feature.wrong_pairs --epochs 4 --wrong 0.2   # a fifth of the names is shuffled"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import compopt
from recipes import glyphs, pictures
from recipes.minimal import arguments, data_and_model, load, recall, save


def texts_of(limit, given):
    """Return the text of each training pair, for the picture; replace them by yours."""
    data = glyphs.load()
    return [data.names[name] for name in data.caption[glyphs.split_pairs(data).train[:limit][given]].tolist()]


def whose_text(n, share):
    """Return, for each sample, the position of its text: its own, except for a shuffled share of the samples."""
    moved = torch.randperm(n, generator=torch.Generator().manual_seed(0))[: round(share * n)]
    return torch.arange(n).index_copy(0, moved, moved.roll(1))


def main(argv=None):
    parser = arguments(__doc__, "runs/wrong_pairs")
    parser.add_argument("--wrong", type=float, default=0.0, help="share of the training pairs that is shuffled")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    given = whose_text(len(train), args.wrong)
    train = TensorDataset(train.tensors[0], train.tensors[1][given])
    optimizer = torch.optim.AdamW(model.parameters())
    est = compopt.recommended(dim=128, n=len(train), batch_size=args.batch_size)
    est.attach(optimizer)  # rows are committed after each real optimizer.step()
    keeper = compopt.ScoreKeeper(n=len(train))
    keeper.attach(est)  # records the scores of each call
    sampler = compopt.samplers.ScoredSampler(keeper, warm_up=2)  # two epochs with all pairs
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, sampler=sampler, drop_last=True)
    steps = len(loader)  # of an epoch with all pairs
    schedule = OneCycleLR(optimizer, 0.002 * args.batch_size**0.5, args.epochs * steps, pct_start=0.75)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "keeper": keeper, "sampler": sampler}
    first = load(args.output, est, parts) if args.resume else 0
    for epoch in range(args.epochs)[first : args.stop_after]:
        torch.manual_seed(epoch)  # the order of an epoch is the same after a resume
        sampler.set_epoch(epoch)
        for images, tokens, index in loader:
            loss = est(*model.train()(images, tokens), index)
            loss.backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        for _ in range(steps - len(loader)):  # an epoch without suspects is shorter
            schedule.step()
        save(args.output, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")
    found = compopt.curation.scores(keeper)
    compopt.curation.export(found, args.output / "scores.csv")
    texts = texts_of(args.limit, given)
    print(f"see {pictures.wrong_pairs(found, train.tensors[0], texts, args.output / 'wrong_pairs.png')}")


if __name__ == "__main__":
    main()
