"""The minimal recipe under accelerate, for any number of processes and any precision.

python -m recipes.by_feature.with_accelerate
torchrun --nproc_per_node 2 -m recipes.by_feature.with_accelerate --batch-size 32
"""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

import compopt
from compopt.integrations import accelerate as integration
from recipes.minimal import arguments, data_and_model, recall
from recipes.models import finite


def main(argv=None):
    args = arguments(__doc__, "runs/with_accelerate").parse_args(argv)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # otherwise a resumed run draws other batches
    # without cpu=True, torchrun on a CPU creates no process group; with it, DeepSpeed is switched off
    cpu = compopt.accelerator.available() is None
    # by default accelerate would step the schedule once per process in each update
    accelerator = Accelerator(cpu=cpu, dataloader_config=order, step_scheduler_with_optimizer=False)
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters())
    samples, steps = args.batch_size * accelerator.num_processes, len(loader) // accelerator.num_processes
    schedule = OneCycleLR(optimizer, 0.002 * samples**0.5, args.epochs * steps, pct_start=0.75)
    est = compopt.recommended(dim=128, n=len(train), batch_size=samples)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    integration.attach(est, optimizer, accelerator)  # after prepare
    integration.register_for_checkpointing(est, accelerator)
    first = max((int(path.name) for path in args.output.glob("[0-9]*")), default=0) if args.resume else 0
    if first:
        accelerator.load_state(args.output / str(first))
    for epoch in range(args.epochs)[first : args.stop_after]:
        loader.set_epoch(epoch)  # the order of an epoch is the same after a resume
        for images, tokens, index in loader:
            loss = est(*model.train()(images, tokens), index)
            accelerator.backward(loss)
            optimizer.step(), schedule.step(), optimizer.zero_grad()
        finite(model)
        accelerator.save_state(args.output / str(epoch + 1))  # includes the state of the estimator
        found = recall(accelerator.unwrap_model(model), held_out)
        accelerator.print(f"epoch {epoch + 1}: loss {loss.item():.3f}, recall {100 * found:.1f} %")
    accelerator.end_training()


if __name__ == "__main__":
    main()
