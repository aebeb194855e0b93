"""Rows in the label column: written by ``add_index``, read by the losses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LABELS = ("label", "labels", "score", "scores")  # the first that is there is the trainer's label


def add_index(data: Any, anchors: str | None = None, positives: str | None = None) -> Any:
    """A data set, or a dictionary of several, with the label column that :class:`EstimatorLoss` reads.

    Rows are positions, those of a second data set after the first's, and so on: ``n`` is the number of all samples.

    Args:
        data: a ``datasets.Dataset``, or a dictionary of them.
        anchors: the column of the anchors, if equal texts in it are one sample.
        positives: the column of the positives, if equal texts in it are never each other's negatives; labels are then
            ``[i, j]``.

    Returns:
        The same with a column ``label``.

    Raises:
        ValueError: there is a column already that the trainer would take for the label.
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    first, made = 0, {}
    seen: tuple[dict[Any, int], dict[Any, int]] = ({}, {})
    for name, each in sets.items():
        taken = [column for column in LABELS if column in each.column_names]
        if taken:
            raise ValueError(f"column {taken[0]!r} would be taken for the label; remove or rename it")
        rows = [_rows_of(each, column, first, known) for column, known in zip((anchors, positives), seen, strict=True)]
        labels = rows[0] if positives is None else [list(pair) for pair in zip(*rows, strict=True)]
        made[name] = each.add_column("label", labels)
        first += len(each)
    make: Any = type(data)  # a DatasetDict stays one
    return make(made) if isinstance(data, Mapping) else made[""]


def _rows_of(data: Any, column: str | None, first: int, known: dict[Any, int]) -> list[int]:
    """Positions, or that of the first sample with the same text."""
    if column is None:
        return list(range(first, first + len(data)))
    return [known.setdefault(text, first + at) for at, text in enumerate(data[column])]


class LabelReader:
    """Rows from the labels of a batch."""

    def __init__(self) -> None:
        self._looked = False

    def __call__(self, labels: Tensor | None, batch: int, columns: int, needed: str | None) -> list[Tensor]:
        """Rows of the anchors, the positives, the negatives; as many as there are.

        Args:
            labels: the label column, ``(B,)`` or ``(B, k)``.
            batch: number of samples.
            columns: of text.
            needed: who cannot do without, for the message.
        """
        if labels is None:
            if needed is not None:
                raise ValueError(
                    f"{needed}, and the data set has no label column that says whose; see "
                    f"compopt.integrations.sentence_transformers.add_index"
                )
            return []
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(f"the label column must hold the rows of the samples, integers, got {labels.dtype}")
        rows = list(labels.reshape(batch, -1).unbind(1))
        if len(rows) not in (1, 2, columns):
            raise ValueError(
                f"{len(rows)} labels per sample and {columns} columns of text; give the row of the sample, or those "
                f"of anchor and positive, or one for every column"
            )
        if not self._looked:
            self._looked = True
            self._look(rows[0])
        return rows

    @staticmethod
    def _look(rows: Tensor) -> None:
        """Classes look like rows; that they repeat gives them away."""
        different = len(rows.unique())
        if len(rows) >= 8 and 2 * different <= len(rows):
            warnings.warn(
                f"a batch of {len(rows)} samples has {different} different labels, and equal ones are one sample; the "
                f"label column must hold each sample's row (add_index), not its class",
                stacklevel=6,
            )
