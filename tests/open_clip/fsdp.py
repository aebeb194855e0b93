"""Run recipes.clip_trainer under accelerate's FSDP2 on CPUs, although accelerate requires accelerators for it."""

import os

from accelerate import Accelerator
from accelerate.state import DistributedType, PartialState

from recipes import clip_trainer, launch

# What `accelerate launch --config_file recipes/clip/fsdp2.yaml` sets.
CONFIGURATION = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_USE_DEEPSPEED": "false",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "ResidualAttentionBlock",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


def accelerator(device, accumulate, precision, deepspeed, **options):
    made = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision, **options)
    launch.check_processes(made)  # FSDP is in use
    return made


def main(arguments=None):
    os.environ.update(CONFIGURATION, ACCELERATE_TORCH_DEVICE="cpu")
    PartialState._prepare_backend = lambda *_, **__: ("gloo", DistributedType.MULTI_GPU)
    launch.accelerator = accelerator
    clip_trainer.main(arguments)


if __name__ == "__main__":
    main()
