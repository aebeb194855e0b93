"""Tasks of the recipes: image-name pairs, two faces of one character, measures on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import glyphs
from recipes.models import Projected, Tokenizer, TwoTowers

Metrics = dict[str, float]
QUERIES = 4096  # images whose similarities with all captions are held at a time


class NamedImages:
    """Retrieval between images and captions.

    A query is a held-out image and the candidates are the distinct captions of the held-out pairs: R@1 is the
    share of queries whose top caption is the right one.  Text to image, a distinct held-out caption is a hit
    if any held-out image of that caption is on top.

    ``images`` (N, 32, 32) uint8 and ``caption`` (N,), positions in ``names``, are those of all pairs; ``train`` and
    ``held_out`` are positions of pairs. A training pair's data-set index is its place in ``train``.
    """

    mode = "bimodal"
    headline = "r1"
    labels = {"r1": "R@1 image to name", "r1_text_to_image": "R@1 name to image"}
    description = ""

    def __init__(
        self,
        images: Tensor,
        caption: Tensor,
        names: Sequence[str],
        train: Tensor,
        held_out: Tensor,
        tokenizer: Tokenizer,
        device: torch.device | str = "cpu",
    ) -> None:
        self.n = len(train)
        self.names, self.device = names, torch.device(device)
        self.caption = self.group = caption[train]  # (n,) caption of each training pair
        self.images = images[train].to(device)
        self.held_out_images = images[held_out].to(device)
        self.candidates, right = caption[held_out].unique(return_inverse=True)
        self.right = right.to(device)
        self.tokenizer = tokenizer
        self.tokens = tokenizer(names).to(device)

    def model(self) -> nn.Module:
        return TwoTowers(len(self.tokenizer), self.tokenizer.length)

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images and tokens of a batch."""
        return self.images[index.to(self.device)], self.tokens[self.caption[index].to(self.device)]

    def evaluate(self, model: nn.Module, final: bool = False) -> Metrics:
        found = self.retrieve(model)
        return {"r1": found.image_to_text, "r1_text_to_image": found.text_to_image}

    def retrieve(self, model: nn.Module) -> Retrieval:
        """Retrieval between the held-out images and their distinct captions."""
        captions = in_chunks(model.text, self.tokens[self.candidates.to(self.device)])
        return retrieval(in_chunks(model.image, self.held_out_images), captions, self.right)

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        texts = in_chunks(model.text, self.tokens)  # each distinct caption once
        return in_chunks(model.image, self.images), texts[self.caption.to(self.device)]

    def caption_frequency(self) -> Tensor:
        """(n,) how many training pairs share each training pair's caption."""
        return torch.bincount(self.caption, minlength=len(self.names))[self.caption]


class GlyphNames(NamedImages):
    """Glyphs and their names."""

    def __init__(
        self, data: glyphs.Glyphs, split_seed: int = 0, limit: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        split = glyphs.split_pairs(data, seed=split_seed)
        train = limited(split.train, limit, split_seed)
        names = data.names
        super().__init__(data.images, data.caption, names, train, split.held_out, Tokenizer(names), device)
        self.description = f"glyph names, split {split_seed}, n = {self.n}"


def limited(pairs: Tensor, limit: int, seed: int) -> Tensor:
    """All pairs, or a random choice of ``limit`` of them, in their order."""
    if not limit:
        return pairs
    chosen = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:limit]
    return pairs[chosen.sort().values]


class GlyphFaces:
    """Two faces of one character are its two views; the probes tell the script of characters never seen.

    A sample is a character with at least two faces.  Each visit draws two of them and shifts each by up to two
    pixels.  The probes read one image per character: the bank and the regression's training set are the
    training characters in their first face (mostly DejaVu Sans), the queries are held-out characters in their
    last (mostly a bold, serif or STIX one), so that what the faces share has to be known.
    """

    mode = "unimodal"
    headline = "nn"
    labels = {"nn": "1-NN accuracy", "probe": "linear probe accuracy"}
    shift = 2

    def __init__(self, data: glyphs.Glyphs, split_seed: int = 0, device: torch.device | str = "cpu") -> None:
        split = glyphs.split_characters(data, seed=split_seed)
        order = split.train[data.caption[split.train].argsort(stable=True)]
        characters, count = data.caption[order].unique_consecutive(return_counts=True)
        first = count.cumsum(0) - count
        several = count > 1
        self.count, self.first = count[several], first[several]  # (n,) faces of a character, and where they begin
        self.n, self.device = len(self.count), torch.device(device)
        self.group = torch.arange(self.n)
        self.description = f"glyph faces, split {split_seed}, n = {self.n}"
        self.images = data.images[order].to(device)
        self.bank, self.bank_labels = _one_per_character(data, split.train, 0, device)
        self.queries, self.query_labels = _one_per_character(data, split.held_out, -1, device)

    def model(self) -> nn.Module:
        return Projected()

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Two views of a batch."""
        batch, count = len(index), self.count[index]
        draw = torch.rand(2, batch, generator=generator)
        one = (draw[0] * count).long()
        two = (one + 1 + (draw[1] * (count - 1)).long()) % count  # another face
        chosen = torch.cat([self.first[index] + one, self.first[index] + two]).to(self.device)
        offsets = torch.randint(0, 2 * self.shift + 1, (2, 2 * batch), generator=generator).to(self.device)
        views = _shifted(self.images[chosen], offsets, self.shift)
        return views[:batch], views[batch:]

    def evaluate(self, model: nn.Module, final: bool = False) -> Metrics:
        bank, queries = in_chunks(model.image, self.bank), in_chunks(model.image, self.queries)
        features = (bank, self.bank_labels, queries, self.query_labels)
        metrics = {"nn": nearest_neighbour(*features)}
        return {**metrics, "probe": linear_probe(*features)} if final else metrics

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """The first two faces of each character, unshifted."""
        first = self.first.to(self.device)
        return in_chunks(model.project, self.images[first]), in_chunks(model.project, self.images[first + 1])


def _one_per_character(
    data: glyphs.Glyphs, pairs: Tensor, face: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """The first (``face=0``) or last (``-1``) image of every character that has a script, and the scripts."""
    captions = data.caption[pairs]
    order = captions.argsort(stable=True)
    count = captions[order].unique_consecutive(return_counts=True)[1]
    end = count.cumsum(0)
    chosen = pairs[order[end - 1 if face else end - count]]
    labels = data.script[data.caption[chosen]]
    return data.images[chosen[labels >= 0]].to(device), labels[labels >= 0].to(device)


def _shifted(images: Tensor, offsets: Tensor, shift: int) -> Tensor:
    """Move each image (B, H, W) by its own offsets (2, B), each 0 .. 2 * shift, over an empty border."""
    batch, height, width = images.shape
    padded = F.pad(images, (shift, shift, shift, shift))
    rows = offsets[0, :, None] + torch.arange(height, device=images.device)
    columns = offsets[1, :, None] + torch.arange(width, device=images.device)
    sample = torch.arange(batch, device=images.device)
    return padded[sample[:, None, None], rows[:, :, None], columns[:, None, :]]


# -- measures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retrieval:
    """The best answers between m images and k distinct captions.

    Attributes:
        caption_of_image: (m,) position of the caption most similar to each image.
        image_of_caption: (k,) position of the image most similar to each caption.
        image_to_text: recall at 1, the share of images whose retrieved caption is the right one.
        text_to_image: recall at 1, the share of captions whose retrieved image bears that caption.
    """

    caption_of_image: Tensor
    image_of_caption: Tensor
    image_to_text: float
    text_to_image: float


def retrieval(images: Tensor, captions: Tensor, right: Tensor) -> Retrieval:
    """Retrieve captions by image and images by caption.

    Args:
        images: (m, d) features of the query images.
        captions: (k, d) features of the distinct captions.
        right: (m,) position of each image's own caption; every caption belongs to an image.
    """
    captions = F.normalize(captions, dim=1)
    answers = []  # the best caption of each image, a chunk of them at a time
    best = captions.new_full((len(captions),), -torch.inf)
    image = torch.zeros(len(captions), dtype=torch.int64, device=captions.device)
    for start in range(0, len(images), QUERIES):
        similarity = F.normalize(images[start : start + QUERIES], dim=1) @ captions.T
        answers.append(similarity.argmax(dim=1))
        highest, here = similarity.max(dim=0)
        image = torch.where(highest > best, start + here, image)
        best = torch.maximum(best, highest)
    caption = torch.cat(answers)
    image_hits = caption == right
    caption_hits = right[image] == torch.arange(len(captions), device=right.device)
    return Retrieval(caption, image, image_hits.float().mean().item(), caption_hits.float().mean().item())


def nearest_neighbour(bank: Tensor, bank_labels: Tensor, queries: Tensor, labels: Tensor) -> float:
    """Share of queries (m, d) whose nearest feature in the bank (k, d) bears their label."""
    nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).argmax(dim=1)
    return (bank_labels[nearest] == labels).float().mean().item()


def linear_probe(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Test accuracy of a logistic regression on standardised frozen features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    with threadpool_limits(1):  # small products: threads cost more than they give, and change the last bits
        probe.fit(train.cpu().numpy(), train_labels.cpu().numpy())
        return float(probe.score(test.cpu().numpy(), test_labels.cpu().numpy()))


@torch.no_grad()
def in_chunks(encode: Callable[[Tensor], Tensor], inputs: Tensor, size: int = 1024) -> Tensor:
    """Encode many inputs with bounded memory."""
    return torch.cat([encode(chunk) for chunk in inputs.split(size)])
