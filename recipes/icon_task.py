"""Tasks on icons: captions of families never seen, by retrieval and as classes; views of icons in colour."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from recipes import icons
from recipes.models import Tokenizer
from recipes.tasks import ImageViews, Labelled, Metrics, NamedImages, Views, in_chunks, limited, retrieval

CLASSES = 500  # of the zero-shot measure
PARTS = ("test", "validation")
LabelName = Literal["names", "families"]
LABELS: tuple[LabelName, ...] = get_args(LabelName)
BANK = 10_000  # icons at most that the probes of families learn from


class IconNames(NamedImages):
    """Icons and the words of their names, measured on held-out families.

    Zero-shot classification tells which of the :data:`CLASSES` captions that most training families have a
    held-out icon bears; icons that bear none of them are left out.
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
    """(k,) captions that are the classes, the most common first; (m,) places in ``held_out``; (m,) their classes."""
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
    """Views of icons in colour, with one of two kinds of labels.

    ``"names"``: which of the :data:`CLASSES` most common names an icon of a family never seen has.
    ``"families"``: whose design an icon is whose name was never seen.
    """
    if part not in PARTS:
        raise ValueError(f"part must be one of {', '.join(PARTS)}, got {part!r}")
    judged = _by_name if labels == "names" else _by_family
    train, bank, queries = judged(data, part, split_seed)
    train = limited(train, limit, split_seed)
    about = f"icons in colour, {part}, labels {labels}, limit {limit}, split {split_seed}, n = {len(train)}"
    return ImageViews(data.images[train], bank, queries, about, views, device)


def _by_name(data: icons.Icons, part: str, seed: int) -> tuple[Tensor, Labelled, Labelled]:
    """Training icons, and those that have common names of them and of the held-out families of ``part``."""
    held_out = [icons.of_families(data, names) for names in (icons.COLOURED_TEST, icons.COLOURED_VALIDATION)]
    train = (~held_out[0] & ~held_out[1]).nonzero().flatten()
    judged = []
    for pairs in (train, held_out[PARTS.index(part)].nonzero().flatten()):
        _, place, label = zero_shot(data, train, pairs)
        judged.append(Labelled(data.images[pairs[place]], label))
    return train, judged[0], judged[1]


def _by_family(data: icons.Icons, part: str, seed: int) -> tuple[Tensor, Labelled, Labelled]:
    """Training icons, some of them, and those of ``part``, a tenth of all names."""
    order = torch.randperm(len(data.names), generator=torch.Generator().manual_seed(seed))
    tenth = torch.empty(len(data.names), dtype=torch.int64)
    tenth[order] = torch.arange(len(data.names)) * 10 // len(data.names)
    here = tenth[data.caption]
    train, queries = (here >= len(PARTS)).nonzero().flatten(), (here == PARTS.index(part)).nonzero().flatten()
    bank = limited(train, min(BANK, len(train)), seed)
    return train, *(Labelled(data.images[pairs], data.family[pairs]) for pairs in (bank, queries))
