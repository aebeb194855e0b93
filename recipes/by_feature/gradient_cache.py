"""The minimal recipe with a gradient cache: a batch of any size in the memory of a micro-batch.

python -m recipes.by_feature.gradient_cache
"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import compopt
from recipes.minimal import arguments, data_and_model, load, recall, save


def main(argv=None):
    parser = arguments(__doc__, "runs/gradient_cache")
    parser.set_defaults(batch_size=256)
    parser.add_argument("--micro-batch-size", type=int, default=64)
    args = parser.parse_args(argv)
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
            loss = compopt.gradient_cache(
                est,
                model.train(),
                (images, tokens),
                index,
                micro_batch_size=args.micro_batch_size,
                batch_norm="update_once",  # each micro-batch is normalised by its own statistics
            )
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        save(args.output, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
