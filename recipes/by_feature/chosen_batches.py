"""The minimal recipe with batches of mutually hard negatives (spectral clustering).

python -m recipes.by_feature.chosen_batches  # needs scipy, scikit-learn
"""

import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import compopt
from recipes.minimal import arguments, data_and_model, load, recall, save


def main(argv=None):
    args = arguments(__doc__, "runs/chosen_batches").parse_args(argv)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    sampler = compopt.samplers.SpectralBatchSampler(len(train), args.batch_size, drop_last=True)
    loader = DataLoader(compopt.data.Indexed(train), batch_sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = OneCycleLR(optimizer, 0.002 * args.batch_size**0.5, args.epochs * len(loader), pct_start=0.75)
    est = compopt.DCLEstimator(tau=0.07)  # these batches are not for `recommended`, see docs/which.md
    est.attach(optimizer)  # its state changes after each real optimizer.step()
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "sampler": sampler}
    first = load(args.output, est, parts) if args.resume else 0
    for epoch in range(args.epochs)[first : args.stop_after]:
        for images, tokens, index in loader:
            z1, z2 = model.train()(images, tokens)
            loss = est(z1, z2, index)
            loss.backward()
            sampler.observe(index, z1, z2)  # the batches of the next epoch depend on these features
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        save(args.output, epoch + 1, est, parts)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * recall(model, held_out):.1f} %")


if __name__ == "__main__":
    main()
