"""The minimal recipe under DeepSpeed, with ZeRO stage 2 in the configuration.

torchrun --nproc_per_node 2 -m recipes.by_feature.with_deepspeed --batch-size 32   # on a CPU: DS_ACCELERATOR=cpu
"""

import deepspeed
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import compopt
from compopt.integrations import deepspeed as integration
from recipes import launch
from recipes.minimal import arguments, data_and_model, recall
from recipes.models import finite


def main(argv=None):
    args = arguments(__doc__, "runs/with_deepspeed").parse_args(argv)
    launch.check_locks()  # DeepSpeed would wait for a lock that a killed run has left
    deepspeed.init_distributed()
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    sampler = DistributedSampler(train, drop_last=True)
    loader = DataLoader(compopt.data.Indexed(train), args.batch_size, sampler=sampler, drop_last=True)
    model = model.to(memory_format=torch.contiguous_format)  # DeepSpeed broadcasts weights as flat bytes
    optimizer, samples = torch.optim.AdamW(model.parameters()), args.batch_size * sampler.num_replicas
    schedule = OneCycleLR(optimizer, 0.002 * samples**0.5, args.epochs * len(loader), pct_start=0.75)
    est = compopt.recommended(dim=128, n=len(train), batch_size=samples)
    config = {"train_micro_batch_size_per_gpu": args.batch_size, "zero_optimization": {"stage": 2}}
    config["gradient_clipping"] = 0.0  # DeepSpeed's default is to clip at norm 1
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, lr_scheduler=schedule)
    est.attach(engine)  # after initialize
    client = integration.load_checkpoint(engine, est, args.output)[1] if args.resume else None
    first = client["epoch"] if client else 0
    for epoch in range(args.epochs)[first : args.stop_after]:
        sampler.set_epoch(epoch)  # the order of an epoch is the same after a resume
        for images, tokens, index in loader:
            engine.train()
            z1, z2 = engine(images.to(engine.device), tokens.to(engine.device))
            engine.backward(est(z1, z2, index))
            engine.step()  # includes the schedule
        finite(engine.module)
        integration.save_checkpoint(engine, est, args.output, client_state={"epoch": epoch + 1})
        found = 100 * recall(engine.module, held_out)
        print(f"rank {engine.global_rank}, epoch {epoch + 1}: recall {found:.1f} %")


if __name__ == "__main__":
    main()
