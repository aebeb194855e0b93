"""Tasks of the recipes: image-name pairs, views of images, and measures on held-out data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from recipes import augment, glyphs
from recipes.models import DIM, Projected, Tokenizer, TwoTowers

Metrics = dict[str, float]
QUERIES = 4096  # images whose similarities with all captions are in memory at a time


class NamedImages:
    """Retrieval between images and captions.

    A query is a held-out image, and the candidates are the distinct captions of the held-out pairs: R@1 is the share
    of queries whose nearest caption is the correct one.  From text to image, a distinct held-out caption counts as a
    hit if its nearest image is any held-out image with that caption.

    ``images`` (N, 32, 32) uint8 and ``caption`` (N,), positions in ``names``, are those of all pairs; ``train`` and
    ``held_out`` are positions of pairs. The data-set index of a training pair is its position in ``train``.
    """

    mode = "bimodal"
    dim = DIM
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
        """Return images and tokens of a batch."""
        return self.images[index.to(self.device)], self.tokens[self.caption[index].to(self.device)]

    def evaluate(self, model: nn.Module, final: bool = False) -> Metrics:
        found = self.retrieve(model)
        return {"r1": found.image_to_text, "r1_text_to_image": found.text_to_image}

    def retrieve(self, model: nn.Module) -> Retrieval:
        """Return the retrieval between the held-out images and their distinct captions."""
        captions = in_chunks(model.text, self.tokens[self.candidates.to(self.device)])
        return retrieval(in_chunks(model.image, self.held_out_images), captions, self.right)

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        texts = in_chunks(model.text, self.tokens)  # each distinct caption once
        return in_chunks(model.image, self.images), texts[self.caption.to(self.device)]

    def caption_frequency(self) -> Tensor:
        """Return the number of training pairs with the caption of each training pair, (n,)."""
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
    """Return all pairs, or a random selection of ``limit`` pairs, in their order."""
    if not limit:
        return pairs
    chosen = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:limit]
    return pairs[chosen.sort().values]


@dataclass(frozen=True)
class Views:
    """Augmentation and head of a unimodal task; None means the task's default.

    Attributes:
        augment: operations of :class:`~recipes.augment.Augmentation`.
        head: widths of the layers after the encoder.
    """

    augment: tuple[augment.Name, ...] | None = None
    head: tuple[int, ...] | None = None


class Labelled(NamedTuple):
    """Images (m, ...) with labels (m,), for the evaluation of features."""

    images: Tensor
    labels: Tensor


class ImageViews:
    """Task in which views of one image are positives, and probes predict the labels of held-out images.

    Args:
        images: (n, 3, 32, 32) uint8, training images.
        bank: labelled images for the training of the probes.
        queries: labelled images for the evaluation of the probes.
        description: description of the data and the split.
        views: see :class:`Views`.
        device: device of the images.
    """

    mode = "unimodal"
    headline = "nn"
    labels = {
        "nn": "1-NN accuracy",
        "probe": "logistic regression",
        "sgd_probe": "SGD probe",
        "head_nn": "head: 1-NN",
        "head_probe": "logistic regression",
        "head_sgd_probe": "SGD probe",
    }
    augment: tuple[augment.Name, ...] = ("crop", "flip", "jitter", "grey", "blur")
    head: tuple[int, ...] = (DIM, DIM)

    def __init__(
        self,
        images: Tensor,
        bank: Labelled,
        queries: Labelled,
        description: str,
        views: Views | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        views = views or Views()
        self.n, self.device = len(images), torch.device(device)
        self.channels = images.shape[1] if images.ndim == 4 else 1
        self.head = views.head or self.head
        chosen = self.augment if views.augment is None else views.augment
        self.augmentation = augment.Augmentation(chosen, self.channels)
        self.images = images.to(device)
        self.bank, self.queries = (Labelled(*(side.to(device) for side in part)) for part in (bank, queries))
        told = [f"{name} {value}" for name, value in vars(views).items() if value != getattr(Views, name)]
        self.description = ", ".join([description, *told])

    @property
    def dim(self) -> int:
        """Return the feature dimension of the loss."""
        return self.head[-1]

    @property
    def group(self) -> Tensor:
        return torch.arange(self.n)

    def model(self) -> nn.Module:
        return Projected(self.channels, self.head)

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, ...]:
        """Return both views of a batch."""
        sources = self.sources(index, generator).to(self.device)
        return self.augmentation(self.images[sources.flatten()], generator).chunk(2)

    def sources(self, index: Tensor, generator: torch.Generator) -> Tensor:
        """Return the positions of the source images of a batch's views, (2, B)."""
        return index.expand(2, -1)

    def evaluate(self, model: nn.Module, final: bool = False) -> Metrics:
        metrics = {"nn": nearest_neighbour(*self._features(model.image))}
        return {**self._probes("", model.image), **self._probes("head_", model.project)} if final else metrics

    def _probes(self, prefix: str, encode: Callable[[Tensor], Tensor]) -> Metrics:
        features = self._features(encode)
        measures = {"nn": nearest_neighbour, "probe": logistic_regression, "sgd_probe": linear_probe}
        return {f"{prefix}{name}": measure(*features) for name, measure in measures.items()}

    def _features(self, encode: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        bank, queries = in_chunks(encode, self.bank.images), in_chunks(encode, self.queries.images)
        return bank, self.bank.labels, queries, self.queries.labels

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the features of two views, which are the same at every call."""
        parts = torch.arange(self.n).split(1024)
        views = [self.inputs(part, torch.Generator().manual_seed(int(part[0]))) for part in parts]
        one, two = (torch.cat([in_chunks(model.project, view[side]) for view in views]) for side in range(2))
        return one, two


class GlyphFaces(ImageViews):
    """Task in which faces of one character are its views, and probes predict the script of held-out characters.

    A sample is a character with at least two faces.  Each visit draws two of them and shifts each by up to two
    pixels.  The probes use one image per character:
    they are trained on the first face (mostly DejaVu Sans) of training characters, and evaluated on the last face
    (mostly bold, serif or STIX) of held-out characters, which requires features that the faces share.
    """

    augment = ("shift",)
    head = (DIM,)

    def __init__(
        self,
        data: glyphs.Glyphs,
        split_seed: int = 0,
        device: torch.device | str = "cpu",
        views: Views | None = None,
    ) -> None:
        split = glyphs.split_characters(data, seed=split_seed)
        order = split.train[data.caption[split.train].argsort(stable=True)]
        characters, count = data.caption[order].unique_consecutive(return_counts=True)
        first = count.cumsum(0) - count
        several = count > 1
        self.count, self.first = count[several], first[several]  # (n,) faces per character, first position
        bank, queries = _one_per_character(data, split.train, 0), _one_per_character(data, split.held_out, -1)
        about = f"glyph faces, split {split_seed}, n = {len(self.count)}"
        super().__init__(data.images[order], bank, queries, about, views, device)
        self.n = len(self.count)

    def sources(self, index: Tensor, generator: torch.Generator) -> Tensor:
        count = self.count[index]
        draw = torch.rand(2, len(index), generator=generator)
        one = (draw[0] * count).long()
        other = (one + 1 + (draw[1] * (count - 1)).long()) % count  # differs from the first face
        return self.first[index] + torch.stack([one, other])

    def training_features(self, model: nn.Module) -> tuple[Tensor, Tensor]:
        """Return the features of the first two faces of each character, unshifted."""
        first = self.first.to(self.device)
        return in_chunks(model.project, self.images[first]), in_chunks(model.project, self.images[first + 1])


def _one_per_character(data: glyphs.Glyphs, pairs: Tensor, face: int) -> Labelled:
    """Return the first (``face=0``) or last (``-1``) image of every character that has a script, and the scripts."""
    captions = data.caption[pairs]
    order = captions.argsort(stable=True)
    count = captions[order].unique_consecutive(return_counts=True)[1]
    end = count.cumsum(0)
    chosen = pairs[order[end - 1 if face else end - count]]
    labels = data.script[data.caption[chosen]]
    return Labelled(data.images[chosen[labels >= 0]], labels[labels >= 0])


# -- measures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Retrieval:
    """Nearest captions of m images and nearest images of k distinct captions.

    Attributes:
        caption_of_image: (m,) position of the caption most similar to each image.
        image_of_caption: (k,) position of the image most similar to each caption.
        image_to_text: recall at 1, the share of images whose retrieved caption is the correct one.
        text_to_image: recall at 1, the share of captions whose retrieved image has that caption.
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
        right: (m,) position of the caption of each image; every caption belongs to an image.
    """
    captions = F.normalize(captions, dim=1)
    answers = []  # best caption of each image, by chunks
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
    """Return the share of queries (m, d) whose nearest feature in the bank (k, d) has the same label."""
    nearest = (F.normalize(queries, dim=1) @ F.normalize(bank, dim=1).T).argmax(dim=1)
    return (bank_labels[nearest] == labels).float().mean().item()


def logistic_regression(train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor) -> float:
    """Return the test accuracy of a logistic regression on standardised frozen features."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from threadpoolctl import threadpool_limits

    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300))
    with threadpool_limits(1):  # threads slow down small products, and change the last bits
        probe.fit(train.cpu().numpy(), train_labels.cpu().numpy())
        return float(probe.score(test.cpu().numpy(), test_labels.cpu().numpy()))


def linear_probe(
    train: Tensor, train_labels: Tensor, test: Tensor, test_labels: Tensor, epochs: int = 90, lr: float = 0.1
) -> float:
    """Return the test accuracy of a linear classifier trained by SGD on standardised frozen features.

    It uses Nesterov momentum 0.9, 90 epochs and no weight decay, as in SimCLR (appendix B.6) and SogCLR (appendix). The
    learning rate, 0.1 for a batch of 4,096 in SogCLR, decays along a cosine. Weights start at 0; batches are seeded.
    """
    mean, scale = train.mean(0), train.std(0).clamp(min=1e-6)
    train, test = (train - mean) / scale, (test - mean) / scale
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    weight, bias = train.new_zeros(classes, train.shape[1]), train.new_zeros(classes)
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    with torch.enable_grad():
        for epoch in range(epochs):
            order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch)).to(train.device)
            for batch in order.split(256):
                loss = F.cross_entropy(F.linear(train[batch], weight, bias), train_labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
    return F.linear(test, weight, bias).argmax(1).eq(test_labels).float().mean().item()


@torch.no_grad()
def in_chunks(encode: Callable[[Tensor], Tensor], inputs: Tensor, size: int = 1024) -> Tensor:
    """Encode many inputs with bounded memory."""
    return torch.cat([encode(chunk) for chunk in inputs.split(size)])
