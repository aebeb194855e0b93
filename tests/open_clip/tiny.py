"""A model and data so small that open_clip's trainer runs in a second; no download."""

import contextlib
import csv
import functools
import io
import logging
from pathlib import Path
from unittest import mock

import torch

N = 16
WORDS = "red green blue black white grey pink brown cat dog bird fish horse mouse bear wolf".split()
# Images are 32 x 32 squares already: with this option the training transform always takes the whole image.
WHOLE = ("--aug-cfg", "scale=(1.0,1.0)")


def add_model():
    """Make `--model ViT-tiny` available."""
    import open_clip

    open_clip.add_model_config(Path(__file__).parent)


def picture(i):
    """Return an image of a single unique colour, whose red channel encodes i."""
    from PIL import Image

    return Image.new("RGB", (32, 32), (i * 15 % 256, (i * 67) % 256, (i * 113) % 256))


def which(images):
    """Return the samples that normalised images show."""
    mean, std = 0.48145466, 0.26862954  # open_clip's, of the red channel
    return ((images[:, 0, 0, 0] * std + mean) * 255 / 15).round().long()


def caption(i):
    return f"a {WORDS[i % len(WORDS)]} thing"


def write_csv(folder, n=N):
    """Write a map-style data set; return the path of its csv file."""
    for i in range(n):
        picture(i).save(folder / f"{i}.png")
    with open(folder / "data.csv", "w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerow(["filepath", "title"])
        rows.writerows([folder / f"{i}.png", caption(i)] for i in range(n))
    return folder / "data.csv"


def write_tars(folder, shards=4, n=N):
    """Write a stream of shards; return open_clip's pattern for them."""
    import webdataset

    for shard in range(shards):
        with webdataset.TarWriter(str(folder / f"{shard:05d}.tar")) as tar:
            for i in range(shard * n // shards, (shard + 1) * n // shards):
                buffer = io.BytesIO()
                picture(i).save(buffer, "png")
                tar.write({"__key__": f"{i:09d}", "png": buffer.getvalue(), "txt": caption(i)})
    return f"{folder}/{{00000..{shards - 1:05d}}}.tar"


def arguments(folder, name="run", **changed):
    """Return open_clip's flags; `lr=1` is `--lr 1`, `siglip=True` is `--siglip`."""
    values = {
        **{"model": "ViT-tiny", "logs": folder / "logs", "name": name, "precision": "fp32", "device": "cpu"},
        **{"batch_size": 8, "epochs": 1, "lr": 1e-3, "wd": 0.0, "warmup": 0, "lr_scheduler": "const", "workers": 0},
        **{"log_every_n_steps": 1, "zeroshot_frequency": 0, "save_frequency": 0},
        **changed,
    }
    given = [
        f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
        for key, value in values.items()
        if value is not None and value is not False
    ]
    return [*given, *WHOLE]


class Stopped(Exception):
    """Simulated kill of a run."""


class Watch:
    """Record of a run.

    `gradients`: one dict for each update, by name, as the optimizer saw them. `seen`: images and their index of each
    batch. `updates`: number of updates that were not skipped. `run`: the integration's run. The order within an epoch
    depends only on its number.
    """

    def __init__(self, stop_before=None, prepare=None):
        self.gradients, self.seen, self.updates, self.run = [], [], 0, None
        self.stop_before, self.prepare = stop_before, prepare

    def around(self, train_one_epoch):
        from compopt.integrations.open_clip import call_of, unwrapped

        @functools.wraps(train_one_epoch)
        def watched(*args, **kwargs):
            call = call_of(train_one_epoch, args, kwargs)
            if call["epoch"] == self.stop_before:
                raise Stopped
            torch.manual_seed(call["epoch"])
            self.model = unwrapped(call["model"])
            if self.prepare is not None:
                self.prepare(call, self)
            handles = [
                call["optimizer"].register_step_pre_hook(self._gradients),
                call["optimizer"].register_step_post_hook(self._updated),
                self.model.register_forward_pre_hook(self._seen, with_kwargs=True),
            ]
            try:
                return train_one_epoch(*args, **kwargs)
            finally:
                for handle in handles:
                    handle.remove()

        return watched

    def _gradients(self, *_):
        parameters = self.model.named_parameters()
        self.gradients.append({name: whole(p.grad) for name, p in parameters if p.grad is not None})

    def _updated(self, *_):
        self.updates += 1

    def _seen(self, model, args, kwargs):
        window = None if self.run is None else self.run.loss
        first = window is not None and torch.is_grad_enabled() == (window.batches == 1)  # not when it is encoded again
        if model.training and first and window.indices:
            image = args[0] if args else kwargs["image"]
            self.seen.append((which(image), window.indices[-1]))

    @property
    def est(self):
        return self.run.est

    @property
    def weights(self):
        return {name: whole(value) for name, value in self.model.state_dict().items()}

    def rows(self, n=N):
        return self.est.read(torch.arange(n))


def whole(tensor):
    """Return a copy, of all shards under FSDP, where a scalar has one dimension."""
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.reshape(()).clone() if tensor.numel() == 1 else tensor.clone()


@contextlib.contextmanager
def logs_as_before():
    """Restore the loggers: open_clip adds handlers to the root logger, and sets the level of all others."""
    levels, handlers = {logger: logger.level for logger in _loggers()}, list(logging.root.handlers)
    try:
        yield
    finally:
        for logger in _loggers():
            logger.setLevel(levels.get(logger, logging.NOTSET))
        for handler in set(logging.root.handlers) - set(handlers):
            logging.root.removeHandler(handler)
            handler.close()


def _loggers():
    return [logging.root, *(x for x in logging.root.manager.loggerDict.values() if isinstance(x, logging.Logger))]


def train(ours, theirs, **watch):
    """Carry out a run of the integration, or with `ours=None` of open_clip alone; return its record."""
    import open_clip_train.main as trainer

    from compopt.integrations import open_clip

    add_model()
    watched = Watch(**watch)
    with logs_as_before(), mock.patch.object(trainer, "train_one_epoch", watched.around(trainer.train_one_epoch)):
        if ours is None:
            trainer.main(theirs)
        else:
            watched.run = open_clip.Run(open_clip.parse_flags(ours), trainer)
            watched.run.start(theirs)
    return watched


def assert_alike(one, other, tolerance):
    """Compare dictionaries of tensors."""
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def files(folder, name="run"):
    """Return the names in the folder of checkpoints, except results and the locks of a run that has not ended."""
    found = (folder / "logs" / name / "checkpoints").iterdir()
    return sorted(path.name for path in found if path.name != "results.jsonl" and path.suffix != ".lock")


def checkpoint(folder, epoch=1, name="run"):
    """Load open_clip's own checkpoint file."""
    return torch.load(folder / "logs" / name / "checkpoints" / f"epoch_{epoch}.pt", weights_only=False)
