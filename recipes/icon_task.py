"""Tasks on icons: retrieval and classification of captions in held-out families, and views of icons in colour."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from recipes import icons
from recipes.models import Tokenizer
from recipes.tasks import ImageViews, Labelled, Metrics, NamedImages, Views, in_chunks, limited, retrieval

CLASSES = 500  # number of classes of the zero-shot measure
PARTS = ("test", "validation")
LabelName = Literal["names", "families"]
LABELS: tuple[LabelName, ...] = get_args(LabelName)
BANK = 10_000  # largest number of training icons for the probes of families


class IconNames(NamedImages):
    """Icons and the words of their names, measured on held-out families.

    Zero-shot classification assigns each held-out icon one of the :data:`CLASSES` captions that occur in most training
    families; icons with other captions are left out.
    """

    labels = {
        "r1": "R@1 image to name",
        "r1_text_to_image": "R@1 name to image",
        "r1_mean": "R@1 mean",
        "zero_shot": "zero-shot",
    }

    def __init__(
        self,
        data: icons.Icons,
        part: str = "test",
        split_seed: int = 0,
        limit: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        if part not in PARTS:
            raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
        split = icons.split_families(data)
        train, held_out = limited(split.train, limit, split_seed), getattr(split, part)
        known = [data.names[position] for position in data.caption[train].unique().tolist()]
        super().__init__(data.images, data.caption, data.names, train, held_out, Tokenizer(known), device)
        self.classes, self.classified, self.label = zero_shot(data, split.train, held_out)
        self.classified, self.label = self.classified.to(device), self.label.to(device)
        self.description = f"icon names, {part} families, limit {limit}, split {split_seed}, n = {self.n}"

    def evaluate(self, model: nn.Module, final: bool = False) -> Metrics:
        captions = in_chunks(model.text, self.tokens[self.candidates.to(self.device)])
        classes = in_chunks(model.text, self.tokens[self.classes.to(self.device)])
        images = in_chunks(model.image, self.held_out_images)
        found = retrieval(images, captions, self.right)
        both = (found.image_to_text, found.text_to_image)
        metrics = {"r1": both[0], "r1_text_to_image": both[1], "r1_mean": sum(both) / 2}
        return metrics | {"zero_shot": retrieval(images[self.classified], classes, self.label).image_to_text}


def zero_shot(
    data: icons.Icons, train: Tensor, held_out: Tensor, count: int = CLASSES
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (k,) captions as classes, most common first; (m,) positions in ``held_out``; (m,) their classes."""
    classes = icons.common_captions(data, train, count)
    position = torch.full((len(data.names),), -1)
    position[classes] = torch.arange(len(classes))
    label = position[data.caption[held_out]]
    return classes, (label >= 0).nonzero().flatten(), label[label >= 0]


def icon_views(
    data: icons.Icons,
    labels: LabelName = "names",
    part: str = "test",
    split_seed: int = 0,
    limit: int = 0,
    views: Views | None = None,
    device: torch.device | str = "cpu",
) -> ImageViews:
    """Return views of icons in colour, with one of two kinds of labels.

    ``"names"``: the label is one of the :data:`CLASSES` most common names; evaluation is on held-out families.
    ``"families"``: the label is the family (the design) of an icon; evaluation is on held-out names.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    judged = _by_name if labels == "names" else _by_family
    train, bank, queries = judged(data, part, split_seed)
    train = limited(train, limit, split_seed)
    about = f"icons in colour, {part}, labels {labels}, limit {limit}, split {split_seed}, n = {len(train)}"
    return ImageViews(data.images[train], bank, queries, about, views, device)


def _by_name(data: icons.Icons, part: str, seed: int) -> tuple[Tensor, Labelled, Labelled]:
    """Return training icons, and labelled icons with common names, from training and from the families of ``part``."""
    held_out = [icons.of_families(data, names) for names in (icons.COLOURED_TEST, icons.COLOURED_VALIDATION)]
    train = (~held_out[0] & ~held_out[1]).nonzero().flatten()
    judged = []
    for pairs in (train, held_out[PARTS.index(part)].nonzero().flatten()):
        _, place, label = zero_shot(data, train, pairs)
        judged.append(Labelled(data.images[pairs[place]], label))
    return train, judged[0], judged[1]


def _by_family(data: icons.Icons, part: str, seed: int) -> tuple[Tensor, Labelled, Labelled]:
    """Return training icons, a labelled selection of them, and the labelled icons of ``part``, a tenth of all names."""
    order = torch.randperm(len(data.names), generator=torch.Generator().manual_seed(seed))
    tenth = torch.empty(len(data.names), dtype=torch.int64)
    tenth[order] = torch.arange(len(data.names)) * 10 // len(data.names)
    here = tenth[data.caption]
    train, queries = (here >= len(PARTS)).nonzero().flatten(), (here == PARTS.index(part)).nonzero().flatten()
    bank = limited(train, min(BANK, len(train)), seed)
    return train, *(Labelled(data.images[pairs], data.family[pairs]) for pairs in (bank, queries))
