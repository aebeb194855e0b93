"""The minimal recipe under Lightning, for any strategy, precision and gradient accumulation.

python -m recipes.by_feature.with_lightning
python -m recipes.by_feature.with_lightning --batch-size 32 --devices 2   # starts the second process
"""

import lightning
import torch
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, DistributedSampler

import compopt
from compopt.integrations.lightning import EstimatorCallback
from recipes.minimal import arguments, data_and_model, recall
from recipes.models import finite


class DualEncoder(lightning.LightningModule):
    def __init__(self, args):
        super().__init__()
        self.args = args
        self.train_set, self.held_out, self.model = data_and_model(args.limit)

    def setup(self, stage):  # after the process group
        self.samples = self.args.batch_size * self.trainer.world_size
        if not hasattr(self, "est"):  # setup runs in every fit, validate and test
            self.est = compopt.recommended(dim=128, n=len(self.train_set), batch_size=self.samples)

    def train_dataloader(self):
        place = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler = DistributedSampler(self.train_set, **place, drop_last=True)  # Lightning calls set_epoch
        return DataLoader(compopt.data.Indexed(self.train_set), self.args.batch_size, sampler=sampler, drop_last=True)

    def training_step(self, batch, batch_idx):
        return self.est(*self.model(*batch[:2]), batch[2])

    def configure_optimizers(self):
        optimizer, steps = torch.optim.AdamW(self.model.parameters()), self.trainer.estimated_stepping_batches
        schedule = OneCycleLR(optimizer, 0.002 * self.samples**0.5, steps, pct_start=0.75)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_epoch_end(self):
        found = 100 * recall(finite(self.model), self.held_out)
        self.model.train()
        self.print(f"epoch {self.current_epoch + 1}: recall {found:.1f} %")
        self.trainer.should_stop |= self.current_epoch + 1 == self.args.stop_after


def main(argv=None):
    parser = arguments(__doc__, "runs/with_lightning")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    last = lightning.pytorch.callbacks.ModelCheckpoint(args.output, "last", enable_version_counter=False)
    options = {"devices": args.devices, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=args.epochs, callbacks=[last, EstimatorCallback()], **options)
    trainer.fit(DualEncoder(args), ckpt_path=args.output / "last.ckpt" if args.resume else None)


if __name__ == "__main__":
    main()
