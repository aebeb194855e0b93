"""The minimal recipe with numbers of captions: pairs with the same caption are not negatives of each other.

python -m recipes.by_feature.several_captions
"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import compopt
from recipes.minimal import arguments, data_and_model, load, recall, save


def main(argv=None):
    args = arguments(__doc__, "runs/several_captions").parse_args(argv)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    captions, caption_of = train.tensors[1].unique(dim=0, return_inverse=True)
    train = TensorDataset(train.tensors[0], caption_of)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, 0.002 * args.batch_size**0.5, args.epochs * len(loader), pct_start=0.75)
    est = compopt.recommended(dim=128, n=len(train), batch_size=args.batch_size)
    est.attach(optimizer)  # its state changes after each real optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = load(args.output, est, parts) if args.resume else 0
    for epoch in range(args.epochs)[first : args.stop_after]:
        torch.manual_seed(epoch)  # the order of an epoch is the same after a resume
        for images, caption, index in loader:
            # index: number of the image, index2: number of the caption; pairs that share either are not negatives
            loss = est(*model.train()(images, captions[caption]), index, index2=caption)
            loss.backward()
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        save(args.output, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
