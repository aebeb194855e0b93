"""Stand-ins for the ``model``, ``dataset`` and ``loader`` of the pages, small enough to train in milliseconds."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import compopt

__all__ = ["DIM", "DataLoader", "Towers", "compopt", "dataset", "loader"]
__all__ += ["model", "new_optimizer", "optimizer", "torch"]

DIM = 16


class Towers(nn.Module):
    """Two linear encoders."""

    def __init__(self, dim=DIM):
        super().__init__()
        self.image, self.text = nn.Linear(12, dim), nn.Linear(10, dim)

    def forward(self, images, texts):
        return self.image(images), self.text(texts)


def new_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


model = Towers()
optimizer = new_optimizer(model)
dataset = TensorDataset(torch.randn(64, 12), torch.randn(64, 10))
loader = DataLoader(compopt.data.Indexed(dataset), batch_size=16, shuffle=True, drop_last=True)
