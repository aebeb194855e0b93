"""Run recipes.clip_trainer under DDP and print how often this process reduced the gradients."""

from accelerate import Accelerator
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from recipes import clip_trainer

reduced = []


def hook(_, bucket):
    reduced.extend([1] * bucket.is_last())
    return allreduce_hook(None, bucket)


def prepare(self, *parts, original=Accelerator.prepare):
    prepared = original(self, *parts)
    (model,) = (part for part in prepared if isinstance(part, DistributedDataParallel))
    model.register_comm_hook(None, hook)
    return prepared


if __name__ == "__main__":
    Accelerator.prepare = prepare
    clip_trainer.main()
    print(f"reduced {len(reduced)} times")
