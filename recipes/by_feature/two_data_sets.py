"""The minimal recipe on two data sets, each with its own hyper-parameters.

python -m recipes.by_feature.two_data_sets
"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

import compopt
from recipes.minimal import arguments, data_and_model, load, recall, save


def by_style(pairs):
    """Return the first and the second half of the pairs, as an example of two data sets."""
    half = len(pairs) // 2
    return TensorDataset(*pairs[:half]), TensorDataset(*pairs[half:])


def main(argv=None):
    args = arguments(__doc__, "runs/two_data_sets").parse_args(argv)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    upright, slanted = by_style(train)
    both = ConcatDataset([upright, slanted])
    loader = DataLoader(compopt.data.Indexed(both), args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, 0.002 * args.batch_size**0.5, args.epochs * len(loader), pct_start=0.75)
    groups = [{"n": len(upright), "gamma": 0.8}, {"n": len(slanted), "gamma": 0.5, "tau": 0.1}]
    est = compopt.SogCLREstimator(groups, tau=0.07)  # one group per data set, in the same order
    est.attach(optimizer)  # rows are committed after each real optimizer.step()
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
