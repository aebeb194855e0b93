"""The minimal recipe with rows for images and for captions: all faces of a character share a caption.

python -m recipes.by_feature.several_captions
"""

import torch
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    est = compopt.SogCLREstimator(n=len(train), gamma=0.8, tau=0.07)
    est.attach(optimizer)  # rows are committed after each real optimizer.step()
    parts = {"model": model, "optimizer": optimizer}
    first = load(args.folder, est, parts) if args.resume else 0
    for epoch in range(first, args.epochs):
        torch.manual_seed(epoch)  # the order of an epoch is the same after a resume
        for images, caption, index in loader:
            # index: row of the image, index2: row of the caption; pairs that share either are not negatives
            loss = est(*model.train()(images, captions[caption]), index, index2=caption)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        save(args.folder, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
