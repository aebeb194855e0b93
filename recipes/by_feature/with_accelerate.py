"""The minimal recipe under accelerate, for any number of processes, precision and accumulation.

python -m recipes.by_feature.with_accelerate
torchrun --nproc_per_node 2 -m recipes.by_feature.with_accelerate --resume
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

import compopt
from compopt.integrations import accelerate as integration
from recipes.minimal import arguments, data_and_model, finite, recall


def main(argv=None):
    args = arguments(__doc__, "runs/with_accelerate").parse_args(argv)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # otherwise a resumed run draws other batches
    # without cpu=True, torchrun on a CPU creates no process group; with it, DeepSpeed is switched off
    accelerator = Accelerator(cpu=compopt.accelerator.available() is None, dataloader_config=order)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    est = compopt.SogCLREstimator(n=len(train), gamma=0.8, tau=0.07)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    integration.attach(est, optimizer, accelerator)  # after prepare
    integration.register_for_checkpointing(est, accelerator)
    first = max((int(path.name) for path in args.folder.glob("[0-9]*")), default=0) if args.resume else 0
    if first:
        accelerator.load_state(args.folder / str(first))
    for epoch in range(first, args.epochs):
        loader.set_epoch(epoch)  # the order of an epoch is the same after a resume
        for images, tokens, index in loader:
            loss = est(*model.train()(images, tokens), index)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        finite(model)
        accelerator.save_state(args.folder / str(epoch + 1))  # includes the rows of all ranks
        found = recall(accelerator.unwrap_model(model), held_out)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * found:.1f} %")
    accelerator.end_training()


if __name__ == "__main__":
    main()
