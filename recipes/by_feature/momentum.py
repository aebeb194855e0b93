"""The minimal recipe with a momentum encoder and the long warm-up that it needs.

python -m recipes.by_feature.momentum                                      # two epochs
python -m recipes.by_feature.momentum --planned-epochs 4                   # two of four epochs
python -m recipes.by_feature.momentum --planned-epochs 4 --epochs 4 --resume
"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import compopt
from recipes.minimal import arguments, data_and_model, load, recall, save


def main(argv=None):
    parser = arguments(__doc__, "runs/momentum")
    parser.add_argument("--planned-epochs", type=int, default=2, help="epochs of the schedule of the learning rate")
    args = parser.parse_args(argv)
    if args.epochs > args.planned_epochs:
        parser.error(f"--epochs {args.epochs} exceeds --planned-epochs {args.planned_epochs}, the schedule of a run")
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, shuffle=True, drop_last=True)
    rate = 0.003 * args.batch_size**0.5  # AdamW, a small model from scratch
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = OneCycleLR(optimizer, rate, total_steps=args.planned_epochs * len(loader), pct_start=0.75)
    est = compopt.recommended(dim=128, n=len(train), batch_size=args.batch_size, momentum=True)
    est.attach(optimizer)  # its state changes after each real optimizer.step()
    encoder = compopt.MomentumEncoder(model)
    encoder.attach(est)  # the copy moves after each commit of the estimator
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "encoder": encoder}
    first = load(args.folder, est, parts) if args.resume else 0
    if schedule.total_steps != args.planned_epochs * len(loader):
        raise SystemExit("--planned-epochs and the data must be those with which the run was started")
    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # the order of an epoch is the same after a resume
        for images, tokens, index in loader:
            keys = encoder(images, tokens)  # features of the copy, without a graph
            loss = est(*model.train()(images, tokens), index, keys=keys)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        save(args.folder, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
