"""Loader that announces the rows of the next batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from compopt.checks.inputs import INTEGERS

T = TypeVar("T")


class PrefetchLoader(Generic[T]):
    """Iterate over the batches of a loader; announce each batch before yielding the previous one.

    Example:
        >>> import torch, compopt
        >>> announced = []
        >>> batches = [("a", torch.tensor([0, 1])), ("b", torch.tensor([2, 3]))]
        >>> loader = compopt.data.PrefetchLoader(batches, announce=announced.append)
        >>> for name, index in loader:  # est.prefetch(loader) makes such a loader
        ...     print(name, announced)
        a [tensor([0, 1]), tensor([2, 3])]
        b [tensor([0, 1]), tensor([2, 3])]

    While the loop trains on batch k, batch k + 1 has been fetched from the loader and its rows are being read. Batch
    k + 2 is fetched only when the loop requests batch k + 1: the loader is at most one batch ahead. This has two
    visible consequences within an epoch. If ``loader`` is an iterator, ``break`` loses one batch. A stateful loader
    counts the batch ahead as delivered when its position is saved in the loop. An exception of the loader is raised at
    the same point as without this wrapper, after its last valid batch has been yielded. This class starts no thread;
    use a loader with workers.

    All other attributes (``len``, ``sampler``, ``worker_init_fn``, ...) are those of the loader, also if they are
    assigned. Each iteration restarts the loader. A loader that was prepared by accelerate looks one batch ahead itself,
    to detect the last batch for ``accumulate``. Batches are then announced when accelerate fetches them, so that
    detection still works.

    Args:
        loader: an iterable of batches, or an iterator.
        announce: function that is called with the index of the next batch, ``(B,)`` integers on any device, and with
            ``index2`` if that is given.
        forget: function that is called at the end of an iteration, also after ``break`` or an error, when announced
            rows may be unused.
        index: location of the index in a batch: the position in a tuple or list (default: the last entry), the key in a
            dict, or a function of the batch.
        index2: location of the rows of the second modality, if the second modality has rows of its own.

    Communicates: nothing itself; see :meth:`~compopt.Estimator.prefetch` for the effect of an announcement.

    Raises:
        TypeError: ``loader`` is not iterable; the type of a batch does not match ``index``, or the selected entry is
            not a tensor of integers.
        ValueError: ``loader`` is an accelerate loader with batches from the main process; a batch has no such entry, or
            the entry is not ``(B,)``.
    """

    def __init__(
        self,
        loader: Iterable[T],
        announce: Callable[..., Any],
        forget: Callable[[], Any] | None = None,
        index: Any = -1,
        index2: Any = None,
    ) -> None:
        if not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            raise TypeError(f"loader must be an iterable of batches, got {type(loader).__name__}")
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise ValueError(
                "this loader sends batches from the main process, which alone knows the index; prepare it with "
                "DataLoaderConfiguration(dispatch_batches=False), or call est.prefetch(index) yourself"
            )
        self._announce, self._forget = announce, forget
        self._wanted = (index,) if index2 is None else (index, index2)
        self.loader = loader  # last: from here on attributes that the loader has are assigned to the loader

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # copy and pickle look attributes up before loader is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "loader" in vars(self) and name not in vars(self) and hasattr(self.loader, name):
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def __iter__(self) -> Iterator[T]:
        try:
            # recognise accelerate's loaders by their attributes, since accelerate may not be installed
            inside = hasattr(type(self.loader), "end") and hasattr(self.loader, "base_dataloader")
            yield from self._within() if inside else self._ahead()
        finally:
            if self._forget is not None:
                self._forget()

    def _within(self) -> Iterator[T]:
        """Iterate over a loader that looks ahead itself, with announcements by the loader inside it."""
        loader: Any = self.loader
        inner = loader.base_dataloader
        loader.base_dataloader = _Announced(inner, self._announce, None, *self._wanted)
        try:
            yield from loader
        finally:
            loader.base_dataloader = inner

    def _ahead(self) -> Iterator[T]:
        batches = self._announced()
        current = next(batches, _END)
        while current is not _END:
            following, error = _END, None
            try:
                following = next(batches, _END)
            except Exception as problem:  # error of the loader: yield the previous batch first
                error = problem
            yield current
            if error is not None:
                raise error
            current = following

    def _announced(self) -> Iterator[Any]:
        for batch in self.loader:
            self._announce(*(select_index(batch, index) for index in self._wanted))
            yield batch


_END: Any = object()  # a batch may be None


class _Announced(PrefetchLoader[Any]):
    """Loader inside a loader of accelerate; announces each batch when accelerate fetches the batch."""

    def __iter__(self) -> Iterator[Any]:
        return self._announced()

    @property  # type: ignore[misc]  # the class of the wrapped loader, as accelerate does
    def __class__(self) -> type:
        return self.loader.__class__


def select_index(batch: Any, index: Any) -> Tensor:
    """Return the data-set positions in a batch, selected by a position, a key or a function."""
    if callable(index):
        found = index(batch)
    elif isinstance(batch, Mapping) or (isinstance(batch, Sequence) and isinstance(index, int)):
        try:
            found = batch[index]
        except (KeyError, IndexError):
            held = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"{len(batch)} entries"
            hint = ', such as index="index"' if isinstance(batch, Mapping) and "index" in batch else ""
            raise ValueError(f"index={index!r} selects nothing from a batch with {held}; pass another{hint}") from None
    else:
        raise TypeError(
            f"a batch of type {type(batch).__name__} has no entry index={index!r}; pass index= as a function that "
            f"takes the data-set positions out of a batch"
        )
    if not isinstance(found, Tensor) or found.dtype not in INTEGERS:
        kind = found.dtype if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(
            f"index={index!r} selects {kind} from the batch, not a tensor of integers; say where the data-set "
            f"positions are (a position, a key or a function), and see compopt.data.Indexed"
        )
    if found.dim() != 1:
        raise ValueError(f"index={index!r} selects shape {tuple(found.shape)} from the batch, not (B,)")
    return found
