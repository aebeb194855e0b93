"""What the recipes learn: image-name pairs, and two faces of one character."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recipes import glyphs
from recipes.engine import Metrics, in_chunks
from recipes.evaluate import Retrieval, linear_probe, nearest_neighbour, retrieval
from recipes.methods import BIMODAL, UNIMODAL
from recipes.models import Projected, TwoTowers
from recipes.tokens import Tokenizer


class GlyphNames:
    """Image-name retrieval.

    A query is a held-out image and the candidates are the distinct captions of the held-out pairs: R@1 is the
    share of queries whose top caption is the right name.  Text to image, a distinct held-out caption is a hit
    if any held-out image of that name is on top.

    Args:
        data: all pairs.
        split_seed: which 5 % of the pairs are held out.
        limit: train on the first ``limit`` pairs of the split only (0: all).
        device: where images, tokens and features live.
    """

    mode = BIMODAL
    headline = "r1"
    labels = {"r1": "R@1 image to name", "r1_text_to_image": "R@1 name to image"}

    def __init__(
        self, data: glyphs.Glyphs, split_seed: int = 0, limit: int = 0, device: torch.device | str = "cpu"
    ) -> None:
        split = glyphs.split_pairs(data, seed=split_seed)
        train = split.train
        if limit:
            chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(split_seed))[:limit]
            train = train[chosen.sort().values]
        self.n = len(train)
        self.description = f"glyph names, split {split_seed}, n = {self.n}"
        self.names, self.device = data.names, torch.device(device)
        self.caption = self.group = data.caption[train]  # (n,) caption of each training pair
        self.images = data.images[train].to(device)
        self.held_out_images = data.images[split.held_out].to(device)
        self.candidates, right = data.caption[split.held_out].unique(return_inverse=True)
        self.right = right.to(device)
        self.tokenizer = Tokenizer(data.names)
        self.tokens = self.tokenizer(data.names).to(device)

    def model(self) -> nn.Module:
        return TwoTowers(len(self.tokenizer), self.tokenizer.length)

    def inputs(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Images and tokens."""
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


class GlyphFaces:
    """Two faces of one character are its two views; the probes tell the script of characters never seen.

    A sample is a character with at least two faces.  Each visit draws two of them and shifts each by up to two
    pixels.  The probes read one image per character: the bank and the regression's training set are the
    training characters in their first face (mostly DejaVu Sans), the queries are held-out characters in their
    last (mostly a bold, serif or STIX one), so that what the faces share has to be known.

    Args:
        data: all pairs.
        split_seed: which 10 % of the characters are held out.
        device: where images and features live.
    """

    mode = UNIMODAL
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
        """Two views."""
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
    padded = nn.functional.pad(images, (shift, shift, shift, shift))
    rows = offsets[0, :, None] + torch.arange(height, device=images.device)
    columns = offsets[1, :, None] + torch.arange(width, device=images.device)
    sample = torch.arange(batch, device=images.device)
    return padded[sample[:, None, None], rows[:, :, None], columns[:, None, :]]
