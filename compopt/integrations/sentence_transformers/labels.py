"""Label column of a data set, which contains the rows of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

NOBODY = -1  # row of a negative that is not the positive of any anchor
LABELS = ("label", "labels", "score", "scores")  # the trainer uses the first of these columns as label


def add_index(
    data: Any, anchors: str | None = None, positives: str | None = None, negatives: str | Sequence[str] = ()
) -> Any:
    """Add the label column that the loss reads to a data set, or to a dictionary of data sets.

    Example:
        >>> from datasets import Dataset
        >>> from compopt.integrations.sentence_transformers import add_index
        >>> data = Dataset.from_dict({"question": ["a", "b", "c"], "answer": ["x", "y", "x"]})
        >>> list(add_index(data)["label"])
        [0, 1, 2]
        >>> list(add_index(data, positives="answer")["label"])  # the first and the third have one answer
        [[0, 0], [1, 1], [2, 0]]

    Rows are positions; the positions of a second data set follow those of the first, and so on: ``n`` is the number of
    all samples. Equal texts in a given column have the same row, that of the first occurrence: a document that is the
    positive of two anchors is a negative of neither. Anchors and positives have separate rows, even for equal texts. A
    loss whose estimator has no rows reads the column only with ``index_labels=True``.

    Args:
        data: a ``datasets.Dataset``, or a dictionary of them; not streaming, since positions are counted.
        anchors: column of the anchors, if equal texts in it are one sample.
        positives: column of the positives, if equal texts in it are one sample; labels are then ``[i, j]``.
        negatives: all columns of negatives, in order, if negatives may be positives of other anchors or of their own;
            labels are then ``[i, j, k, ...]``. The row of a negative is that of the equal positive, or -1 if it is not
            a positive of any anchor.

    Returns:
        The data with a column ``label`` of integers or lists of integers. All texts of the given columns are held in
        memory during the call. Communicates nothing: the result is the same on every rank.

    Raises:
        TypeError: a data set has no length, or a column contains something other than texts.
        ValueError: the data have a column that the trainer would use as label; ``negatives`` without ``positives``.
    """
    sets = data if isinstance(data, Mapping) else {"": data}
    negatives = [negatives] if isinstance(negatives, str) else list(negatives)
    if negatives and positives is None:
        raise ValueError("negatives= get their rows from positives=, which is None")
    first, rows = 0, {}
    known: tuple[dict[str, int], dict[str, int]] = ({}, {})  # row of each text: of anchors, of positives
    for name, each in sets.items():
        if not hasattr(each, "__len__"):
            raise TypeError(
                f"data of type {type(each).__name__} has no length; add a column 'label' of positions where it is made"
            )
        if taken := [column for column in LABELS if column in each.column_names]:
            raise ValueError(f"column {taken[0]!r} would be taken for the label; remove or rename it")
        columns = (anchors,) if positives is None else (anchors, positives)
        rows[name] = [_rows(each, column, first, seen) for column, seen in zip(columns, known, strict=False)]
        first += len(each)
    made = {}
    for name, each in sets.items():  # all positives are known by now
        rows[name] += [[known[1].get(text, NOBODY) for text in _texts(each, column)] for column in negatives]
        labels = rows[name][0] if positives is None else [list(row) for row in zip(*rows[name], strict=True)]
        made[name] = each.add_column("label", labels)
    make: Any = type(data)  # keep the type of a DatasetDict
    return make(made) if isinstance(data, Mapping) else made[""]


def _rows(data: Any, column: str | None, first: int, known: dict[str, int]) -> list[int]:
    if column is None:
        return list(range(first, first + len(data)))
    return [known.setdefault(text, first + at) for at, text in enumerate(_texts(data, column))]


def _texts(data: Any, column: str) -> list[str]:
    texts = list(data[column])
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"column {column!r} holds {type(text).__name__}, must hold str")
    return texts
