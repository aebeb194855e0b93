"""Rows in the label column: written by ``add_index``, read by the losses."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

NOBODY = -1  # row of a negative that is nobody's positive
LOOKS = 8  # batches that are asked whether their labels are classes
LABELS = ("label", "labels", "score", "scores")  # the first that is there is the trainer's label


def add_index(
    data: Any, anchors: str | None = None, positives: str | None = None, negatives: str | Sequence[str] = ()
) -> Any:
    """A data set, or a dictionary of several, with the label column that :class:`EstimatorLoss` reads.

    Rows are positions, those of a second data set after the first's, and so on: ``n`` is the number of all samples.
    Equal texts of the named columns get one row, that of the first: a document that is the positive of two anchors is a
    negative of neither. A text that is an anchor here and a positive there has two rows.

    Args:
        data: a ``datasets.Dataset``, or a dictionary of them; not streamed, since positions are counted here.
        anchors: the column of the anchors, if equal texts in it are one sample.
        positives: the column of the positives, if equal texts in it are one; labels are then ``[i, j]``.
        negatives: the columns of the negatives, all of them in their order, where these may be the positives of other
            anchors, or of their own; labels are then ``[i, j, k, ...]``. They get their rows from ``positives``, and
            -1 if they are nobody's positive.

    Returns:
        The same with a column ``label``, of integers or lists of them; all texts of the named columns are in memory
        meanwhile. Communicates nothing: every rank makes the same.

    Raises:
        TypeError: a data set without a length; a column of something else than texts.
        ValueError: there is a column already that the trainer would take for the label; ``negatives`` without
            ``positives``.

    Example:
        >>> from datasets import Dataset
        >>> from compopt.integrations.sentence_transformers import add_index
        >>> data = Dataset.from_dict({"question": ["a", "b", "c"], "answer": ["x", "y", "x"]})
        >>> list(add_index(data)["label"])
        [0, 1, 2]
        >>> list(add_index(data, positives="answer")["label"])  # the first and the third have one answer
        [[0, 0], [1, 1], [2, 0]]
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    negatives = [negatives] if isinstance(negatives, str) else list(negatives)
    if negatives and positives is None:
        raise ValueError("negatives= get their rows from positives=, which is None")
    first, rows = 0, {}
    known: tuple[dict[str, int], dict[str, int]] = ({}, {})
    for name, each in sets.items():
        _check(each)
        columns = (anchors,) if positives is None else (anchors, positives)
        rows[name] = [_rows(each, column, first, seen) for column, seen in zip(columns, known, strict=False)]
        first += len(each)
    made = {}
    for name, each in sets.items():
        for column in negatives:  # now that all positives are known
            rows[name].append([known[1].get(text, NOBODY) for text in _texts(each, column)])
        labels = rows[name][0] if positives is None else [list(row) for row in zip(*rows[name], strict=True)]
        made[name] = each.add_column("label", labels)
    make: Any = type(data)  # a DatasetDict stays one
    return make(made) if isinstance(data, Mapping) else made[""]


def _check(data: Any) -> None:
    if not hasattr(data, "__len__"):
        raise TypeError(
            f"data of type {type(data).__name__} has no length; add a column 'label' of positions where it is made"
        )
    taken = [column for column in LABELS if column in data.column_names]
    if taken:
        raise ValueError(f"column {taken[0]!r} would be taken for the label; remove or rename it")


def _rows(data: Any, column: str | None, first: int, known: dict[str, int]) -> list[int]:
    """Positions, or those of the first samples with the same text."""
    if column is None:
        return list(range(first, first + len(data)))
    return [known.setdefault(text, first + at) for at, text in enumerate(_texts(data, column))]


def _texts(data: Any, column: str) -> list[str]:
    texts = list(data[column])
    other = next((text for text in texts if not isinstance(text, str)), None)
    if other is not None or None in texts:
        raise TypeError(f"column {column!r} holds {type(other).__name__}, and only texts can be told to be equal")
    return texts


class LabelReader:
    """Rows from the labels of a batch."""

    def __init__(self) -> None:
        self._looks = 0

    def __call__(self, labels: Tensor | None, batch: int, columns: int, needed: str) -> list[Tensor]:
        """Rows of the anchors, the positives, the negatives; as many as there are.

        Args:
            labels: the label column, ``(B,)`` or ``(B, k)``.
            batch: number of samples.
            columns: of text.
            needed: who cannot do without, for the message.
        """
        if labels is None:
            raise ValueError(
                f"{needed}, and the data set has no label column that says whose; see "
                f"compopt.integrations.sentence_transformers.add_index"
            )
        if labels.is_floating_point() or labels.dtype == torch.bool:
            raise TypeError(
                f"{needed}: the label column must hold the rows of the samples, integers, got {labels.dtype}; give the "
                f"scores or classes another name, and see compopt.integrations.sentence_transformers.add_index"
            )
        rows = list(labels.reshape(batch, -1).unbind(1))
        if len(rows) not in (1, 2, columns):
            raise ValueError(
                f"{len(rows)} labels per sample and {columns} columns of text; give the row of the sample, or those "
                f"of anchor and positive, or one for every column"
            )
        if self._looks < LOOKS:
            self._looks += 1
            self._look(rows[0])
        return rows

    def _look(self, rows: Tensor) -> None:
        """Classes look like rows; that they repeat gives them away."""
        different = len(rows.unique())
        if len(rows) >= 8 and 2 * different < len(rows):
            self._looks = LOOKS
            warnings.warn(
                f"a batch of {len(rows)} samples has {different} different labels, and equal ones are one sample; the "
                f"label column must hold each sample's row (add_index), not its class",
                stacklevel=6,
            )
