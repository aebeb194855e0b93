"""Export of data sets to files for other tools: pictures, captions, facts, parts and classes."""

from __future__ import annotations

import hashlib
import io
from abc import ABC, abstractmethod
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from recipes import glyphs, icon_task, icons


class Export(ABC):
    """Data set to be written to files.

    Attributes:
        parts: name of a part (train, validation, test) -> positions of its pairs.
        classes: names of the classes of the zero-shot test.
        classified: (m,) positions of the test pairs that have a class.
        label: (m,) classes of these pairs.
    """

    parts: dict[str, Tensor]
    classes: list[str]
    classified: Tensor
    label: Tensor

    def __init__(self, images: Tensor, caption: Tensor, names: list[str]) -> None:
        self.images, self.position, self.names = images, caption, names

    def png(self, pair: int) -> bytes:
        """Return the picture, black on white, as PNG."""
        content = io.BytesIO()
        Image.fromarray(255 - self.images[pair].numpy()).save(content, "png")
        return content.getvalue()

    def caption(self, pair: int) -> str:
        return self.names[self.position[pair]]

    def others(self, pair: int) -> list[str]:
        """Return further captions of the same picture."""
        return []

    @abstractmethod
    def facts(self, pair: int) -> dict[str, Any]:
        """Return further facts about a pair."""

    def one_per_caption(self, part: str) -> tuple[Tensor, list[list[str]]]:
        """Return one pair of each distinct caption of a part, and the captions of each pair, all of them distinct.

        In a retrieval test, every caption then has exactly one correct picture.
        """
        pairs = self.parts[part]
        pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
        order = pairs[self.position[pairs].argsort(stable=True)]
        changes = self.position[order].diff(prepend=torch.tensor([-1])) != 0
        chosen = order[changes]
        taken = {self.caption(pair) for pair in chosen.tolist()}
        captions = []
        for pair in chosen.tolist():
            new = [other for other in self.others(pair) if other not in taken]
            taken.update(new)
            captions.append([self.caption(pair), *new])
        return chosen, captions

    @property
    def fingerprint(self) -> str:
        """Return a digest of pictures and captions."""
        digest = hashlib.sha256(self.images.numpy())
        digest.update("\n".join(self.names).encode())
        digest.update(self.position.numpy())
        return digest.hexdigest()[:32]


class GlyphExport(Export):
    """Glyphs: 5 % of the pairs are test pairs, and their scripts are the classes."""

    def __init__(self, data: glyphs.Glyphs) -> None:
        super().__init__(data.images, data.caption, data.names)
        self.data, split = data, glyphs.split_pairs(data)
        self.parts = {"train": split.train, "test": split.held_out}
        self.classes = list(glyphs.SCRIPTS)
        script = data.script[data.caption[split.held_out]]
        self.classified, self.label = split.held_out[script >= 0], script[script >= 0]

    def facts(self, pair: int) -> dict[str, Any]:
        face = glyphs.FACES[self.data.face[pair]]
        licence = "STIX fonts licence" if face.startswith("STIX") else "DejaVu fonts licence"
        return {"character": chr(self.data.codepoint[pair]), "family": face, "licence": licence}


class IconExport(Export):
    """Icons: families are held out, and the captions that occur in most training families are the classes."""

    def __init__(self, data: icons.Icons) -> None:
        super().__init__(data.images, data.caption, data.names)
        self.data, split = data, icons.split_families(data)
        self.parts = {"train": split.train, "validation": split.validation, "test": split.test}
        classes, place, self.label = icon_task.zero_shot(data, split.train, split.test)
        self.classes, self.classified = [data.names[position] for position in classes], split.test[place]

    def others(self, pair: int) -> list[str]:
        return [alias for alias in self.data.aliases[pair].split("\t") if alias]

    def facts(self, pair: int) -> dict[str, Any]:
        return {
            "source": self.data.sources[pair],
            "family": self.data.families[self.data.family[pair]],
            "kind": icons.KINDS[self.data.kind[pair]],
            "licence": self.data.licences[self.data.licence[pair]],
            "other_captions": self.others(pair),
        }
