"""The minimal recipe under the Trainer of transformers, for any number of processes, precision and accumulation.

python -m recipes.by_feature.with_transformers
torchrun --nproc_per_node 2 -m recipes.by_feature.with_transformers --batch-size 32
"""

import torch
from torch.utils.data import default_collate
from transformers import Trainer, TrainingArguments

import compopt
from compopt.integrations.transformers import EstimatorCallback
from recipes.minimal import arguments, data_and_model, recall
from recipes.models import finite
from recipes.stopping import StopAfter


def collate(items):
    """Collate items to a dict, as the Trainer requires."""
    return dict(zip(("images", "tokens", "index"), default_collate(items), strict=True))


class DualEncoderTrainer(Trainer):
    loss_is_scaled_for_ga = False  # the loss is the mean of one batch

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return self.est(*model(inputs["images"], inputs["tokens"]), inputs["index"])

    def evaluate(self, *args, **kwargs):
        found = 100 * recall(finite(self.model), self.eval_dataset)
        if self.is_world_process_zero():
            print(f"epoch {self.state.epoch:.0f}: recall {found:.1f} %")
        return {"eval_recall": found}


def main(argv=None):
    args = arguments(__doc__, "runs/with_transformers").parse_args(argv)
    settings = TrainingArguments(
        args.output, num_train_epochs=args.epochs, per_device_train_batch_size=args.batch_size, optim="adamw_torch",
        weight_decay=0.01, lr_scheduler_type="cosine", warmup_steps=0.75,  # the rate rises during 75 % of the run
        eval_strategy="epoch", save_strategy="epoch", save_total_limit=2, remove_unused_columns=False,
        dataloader_drop_last=True, report_to="none", disable_tqdm=True, use_cpu=compopt.accelerator.available() is None,
    )  # fmt: skip
    samples = args.batch_size * settings.world_size  # of an update
    settings.learning_rate = 0.002 * samples**0.5
    torch.manual_seed(0)
    train, held_out, model = data_and_model(args.limit)
    model = model.to(memory_format=torch.contiguous_format)  # safetensors requires contiguous weights
    trainer = DualEncoderTrainer(model, settings, collate, compopt.data.Indexed(train), held_out)
    trainer.est = compopt.recommended(dim=128, n=len(train), batch_size=samples)  # after TrainingArguments
    trainer.add_callback(EstimatorCallback(trainer.est, trainer))  # steps, and its state in each checkpoint
    trainer.add_callback(StopAfter(args.stop_after))
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
