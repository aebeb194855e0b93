"""Loader that announces one batch ahead which rows will be needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor

from compopt.checks.inputs import INTEGERS

T = TypeVar("T")


class PrefetchLoader(Generic[T]):
    """Iterate over the batches of a loader, each announced before its predecessor is handed out.

    While the loop trains on batch k, batch k + 1 has been taken from the loader and its rows are under way. The
    batch after it is taken only when the loop asks for batch k + 1: the loader is at most one batch ahead. This has
    two visible consequences. A loader that is an iterator itself loses one batch when the loop breaks, and a loader
    whose position is saved in the loop (a stateful one) counts the batch ahead as delivered. Neither exists at the
    end of an epoch. An exception of the loader is raised where it would be without this wrapper: after its last
    good batch has been handed out. No thread is started here; give the loader workers.

    Everything else (``len``, ``sampler``, ``dataset``, ...) is the loader's. Iterating again starts it anew. A loader
    that accelerate has prepared looks one batch ahead by itself, in order to tell ``accumulate`` which batch is the
    last: there, batches are announced as it takes them, and its count stays right.

    Args:
        loader: an iterable of batches, or an iterator.
        announce: called with the index of the next batch, ``(B,)`` integers on whatever device it is, and with
            index2 if that is given.
        forget: called when the iteration ends, also by ``break`` or an error: announced rows may not be needed.
        index: place of the index in a batch: the position in a tuple or list (the last entry by default), the key in a
            dict, or a function of the batch.
        index2: place of the rows of the second modality, if these have their own.

    Communicates: nothing itself; see :meth:`~compopt.Estimator.prefetch` for what announcing does.

    Raises:
        TypeError: ``loader`` cannot be iterated; a batch is of another kind than ``index`` asks for, or its entry is no
            tensor of integers.
        ValueError: an accelerate loader whose batches come from the main process; a batch has no such entry, or it is
            not ``(B,)``.

    Example:
        >>> import torch, compopt
        >>> announced = []
        >>> batches = [("a", torch.tensor([0, 1])), ("b", torch.tensor([2, 3]))]
        >>> loader = compopt.data.PrefetchLoader(batches, announce=lambda index: announced.append(index.tolist()))
        >>> for name, index in loader:  # est.prefetch(loader) makes such a loader
        ...     print(name, announced)
        a [[0, 1], [2, 3]]
        b [[0, 1], [2, 3]]
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
        self.loader = loader
        self._announce, self._forget = announce, forget
        self._wanted = (index,) if index2 is None else (index, index2)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":  # copy and pickle look attributes up before loader is set
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __iter__(self) -> Iterator[T]:
        try:
            # accelerate's loaders, recognised by their attributes, since accelerate need not be installed
            inside = hasattr(type(self.loader), "end") and hasattr(self.loader, "base_dataloader")
            yield from self._within() if inside else self._ahead()
        finally:
            if self._forget is not None:
                self._forget()

    def _within(self) -> Iterator[T]:
        """Batches of a loader that looks ahead by itself, announced where it takes them from the one inside it."""
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
            except Exception as problem:  # of the loader; the batch before it is handed out first
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
    """Loader inside accelerate's, which looks ahead itself; announces each batch when it is taken."""

    def __iter__(self) -> Iterator[Any]:
        return self._announced()

    @property  # type: ignore[misc]  # the loader outside passes its own class on, as accelerate does
    def __class__(self) -> type:
        return self.loader.__class__


def select_index(batch: Any, index: Any) -> Tensor:
    """Return the data-set positions in a batch: at a position, under a key, or what a function finds."""
    if callable(index):
        found = index(batch)
    elif isinstance(batch, Mapping) or (isinstance(batch, Sequence) and isinstance(index, int)):
        try:
            found = batch[index]
        except (KeyError, IndexError):
            held = f"the keys {', '.join(map(repr, batch))}" if isinstance(batch, Mapping) else f"{len(batch)} entries"
            raise ValueError(f"index={index!r} selects nothing from a batch with {held}; pass another") from None
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
