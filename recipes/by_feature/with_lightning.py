"""The minimal recipe under Lightning, for any strategy, precision and gradient accumulation.

python -m recipes.by_feature.with_lightning
python -m recipes.by_feature.with_lightning --epochs 3 --resume --devices 2   # starts the second process
"""

import lightning
import torch
from torch.utils.data import DataLoader, DistributedSampler

import compopt
from compopt.integrations.lightning import EstimatorCallback
from recipes.minimal import arguments, data_and_model, finite, recall


class DualEncoder(lightning.LightningModule):
    def __init__(self, batch_size, limit):
        super().__init__()
        self.batch_size = batch_size
        self.train_set, self.held_out, self.model = data_and_model(limit)

    def setup(self, stage):
        self.est = compopt.SogCLREstimator(n=len(self.train_set), gamma=0.8, tau=0.07)  # after the process group

    def train_dataloader(self):
        place = {"num_replicas": self.trainer.world_size, "rank": self.trainer.global_rank}
        sampler = DistributedSampler(self.train_set, **place, drop_last=True)  # Lightning calls set_epoch
        return DataLoader(compopt.data.Indexed(self.train_set), self.batch_size, sampler=sampler, drop_last=True)

    def training_step(self, batch, batch_idx):
        return self.est(*self.model(*batch[:2]), batch[2])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def on_train_epoch_end(self):
        found = 100 * recall(finite(self.model), self.held_out)
        self.model.train()
        self.print(f"epoch {self.current_epoch + 1}: recall {found:.1f} %")


def main(argv=None):
    parser = arguments(__doc__, "runs/with_lightning")
    parser.add_argument("--devices", default="auto")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    last = lightning.pytorch.callbacks.ModelCheckpoint(args.folder, "last", enable_version_counter=False)
    options = {"devices": args.devices, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=args.epochs, callbacks=[last, EstimatorCallback()], **options)
    trainer.fit(DualEncoder(args.batch_size, args.limit), ckpt_path=args.folder / "last.ckpt" if args.resume else None)


if __name__ == "__main__":
    main()
