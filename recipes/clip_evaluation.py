"""Evaluation of a CLIP model on tar shards, divided among all processes: retrieval, zero-shot classification."""

from itertools import chain, islice, zip_longest
from types import SimpleNamespace

import open_clip
import torch
import webdataset as wds
from PIL import Image

from compopt.data import shard_list
from recipes import launch
from recipes.tasks import retrieval

BATCH = 256
NAMES, TEMPLATES = "classnames.txt", "zeroshot_classification_templates.txt"  # file names of clip-benchmark


class Evaluation:
    """Measurement of a model, with equal results on all processes, each of which encodes a share of the batches.

    Args:
        encode: function from ``(images, texts)`` to features of both; images may be ``None``. Every process calls it
            the same number of times, because a sharded model gathers its parameters in the call.
        decode: a ``Decode`` with the evaluation transform.
    """

    def __init__(self, encode, decode):
        self.encode, self.decode = encode, decode
        picture = decode.preprocess(Image.new("RGB", (32, 32)))
        self._stand_in = picture[None], decode.tokenizer(["a"]), torch.zeros(1)

    def _features(self, samples):
        """Yield features, texts and rows of this process's batches; None for batches without decodable samples."""
        rank, ranks = launch.rank(), launch.world_size()
        while batches := [batch for _ in range(ranks) if (batch := list(islice(samples, BATCH)))]:
            decoded = self.decode(batches[rank]) if rank < len(batches) else None
            images, texts, rows = decoded or self._stand_in
            z1, z2, *_ = self.encode(images, texts)
            yield (z1.float().cpu(), z2.float().cpu(), texts, rows) if decoded else None

    def _lost(self):
        lost, self.decode.lost = self.decode.lost, 0
        return sum(launch.from_all(lost))

    def recall(self, shards, most):
        """Return recall at 1 among the first ``most`` pairs of shards; equal captions count as one candidate."""
        samples = ({**sample, "index": 0} for sample in _read(shards))
        each = launch.from_all(list(self._features(islice(samples, most))))
        batches = [batch for batch in chain(*zip_longest(*each)) if batch is not None]
        z1, z2, texts, _ = (torch.cat(part) for part in zip(*batches, strict=True))
        _, right = texts.unique(dim=0, return_inverse=True)
        first = torch.stack([(right == label).nonzero()[0, 0] for label in range(int(right.max()) + 1)])
        found = retrieval(z1, z2[first], right)
        return {"image_to_text": found.image_to_text, "text_to_image": found.text_to_image, "lost": self._lost()}

    def zero_shot(self, folder):
        """Return accuracies on a folder of clip-benchmark: class names, templates, and shards of labelled pictures."""
        names, templates = ((folder / file).read_text().splitlines() for file in (NAMES, TEMPLATES))
        classifier = self._classifier(names, templates)
        samples = ({**sample, "index": int(sample["cls"]), "txt": b"a"} for sample in _read(folder / "test"))
        counts = torch.zeros(3)
        for z1, _, _, label in filter(None, self._features(samples)):
            best = (z1 @ classifier).topk(min(5, len(names))).indices == label[:, None]
            counts += torch.tensor([best[:, 0].sum(), best.sum(), len(label)])
        top1, top5, number = sum(launch.from_all(counts)).tolist()
        return {"zero_shot_top1": top1 / number, "zero_shot_top5": top5 / number, "zero_shot_lost": self._lost()}

    def _classifier(self, names, templates):
        """Return the embeddings of all classes, (d, classes); each process computes those of its block of classes."""
        block = -(-len(names) // launch.world_size())
        start = block * launch.rank()
        own = [names[min(place, len(names) - 1)] for place in range(start, start + block)]
        words = [lambda name, text=text: text.replace("{c}", name).replace("{}", name) for text in templates]
        model = SimpleNamespace(encode_text=lambda texts, normalize: self.encode(None, texts)[1].float().cpu())
        made = open_clip.build_zero_shot_classifier(model, self.decode.tokenizer, own, words)
        return torch.cat(launch.from_all(made), dim=1)[:, : len(names)]


def _read(shards):
    return wds.tarfile_to_samples(handler=wds.warn_and_continue)({"url": shard} for shard in shard_list(shards))
