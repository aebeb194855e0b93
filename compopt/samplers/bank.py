"""Bank of the latest features of all samples, in half precision by default."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from compopt import accelerator, checks
from compopt.checks import values
from compopt.kernel.features import prepare

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Offload = Literal["cpu"]


class FeatureBank:
    """Bank of the latest L2-normalised features, two per sample.

    Example:
        >>> import torch
        >>> from compopt.samplers import FeatureBank
        >>> bank = FeatureBank(n=10)
        >>> index = torch.tensor([3, 7])
        >>> bank.write(index, bank.rounded(*torch.randn(2, 2, 4)))
        >>> bank.rows.shape, bank.seen.nonzero().flatten().tolist()
        (torch.Size([10, 2, 4]), [3, 7])

    Args:
        n: number of samples.
        dtype: stored dtype: float16 (rounding errors of at most 0.0005 per coordinate), bfloat16, float32 or float64.
        offload: ``None``: the bank is on the device of the features; ``"cpu"``: in host memory, to which features are
            copied asynchronously.

    State: ``rows`` (n, 2, d), allocated at the first write, and two flags per sample: ``seen``, the bank contains
    features, and ``offered``, features were written or skipped. ``4 n d`` bytes in half precision, 27 MB for n = 54,000
    and d = 128. A row with a feature that is not finite, or too large to be normalised, is skipped; :meth:`unseen`
    warns about skipped rows.

    Communicates: nothing.

    Raises:
        ValueError: ``n`` < 1, or invalid ``dtype`` or ``offload``; at a write, ``d`` has changed.
        TypeError: ``n`` is not an integer.
    """

    def __init__(self, n: int, dtype: torch.dtype = torch.float16, offload: Offload | None = None) -> None:
        self.n = checks.positive_int("n", n)
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype!r}")
        if offload not in (None, "cpu"):
            raise ValueError(f"offload must be None or 'cpu', got {offload!r}")
        self.dtype, self.offload = dtype, offload
        self.rows: Tensor | None = None
        self.seen = torch.zeros(n, dtype=torch.bool, device="cpu")
        self.offered = torch.zeros(n, dtype=torch.bool, device="cpu")
        self._copies: deque[tuple[Tensor, Tensor, Any]] = deque()  # in progress from the device to host memory
        self._skipped = torch.zeros((), dtype=torch.int64, device="cpu")

    def __getstate__(self) -> dict[str, Any]:
        self._settle()  # events of a device can be neither copied nor pickled
        return self.__dict__

    def rounded(self, z1: Tensor, z2: Tensor) -> Tensor:
        """Normalise features ``(b, d)`` and round them to the bank's dtype; return ``(b, 2, d)``."""
        with torch.autocast(z1.device.type, enabled=False):
            return prepare(torch.stack([z1, z2], dim=1), True)[0].to(self.dtype)

    def check_width(self, d: int) -> None:
        """Raise a ``ValueError`` if ``d`` differs from the dimension of the stored features."""
        if self.rows is not None and self.rows.shape[2] != d:
            raise ValueError(f"z1 and z2 have d={d}, but the features so far had d={self.rows.shape[2]}")

    @torch.inference_mode(False)  # inference tensors could not be written later
    def write(self, index: Tensor, rows: Tensor) -> None:
        """Store features of some samples.

        Args:
            index: data-set positions, ``(b,)`` int64 on the CPU; for equal positions the last row is stored.
            rows: result of :meth:`rounded`, ``(b, 2, d)``; the bank is moved to their device, unless it is offloaded.

        Raises:
            ValueError: ``d`` has changed.
        """
        self.check_width(rows.shape[2])
        device = torch.device("cpu") if self.offload else rows.device
        if self.rows is None:
            self.rows = torch.zeros((self.n, *rows.shape[1:]), dtype=self.dtype, device=device)
        elif self.rows.device != device:  # a loaded bank
            self.rows = self.rows.to(device)
        self.seen, self._skipped = self.seen.to(device), self._skipped.to(device)
        event = None
        if self.offload == "cpu":
            rows, event = accelerator.to_host(rows), accelerator.event(rows.device)
        self._copies.append((index, rows, event))
        self._settle(wait=False)

    def _settle(self, wait: bool = True) -> None:
        """Store completed copies; with ``wait`` also wait for the others."""
        while self._copies:
            index, rows, event = self._copies[0]
            if event is not None:
                if not wait and not event.query():
                    return
                event.synchronize()
            self._copies.popleft()
            self._store(index, rows)

    def _store(self, index: Tensor, rows: Tensor) -> None:
        assert self.rows is not None
        self.offered[index] = True
        last = {sample: place for place, sample in enumerate(index.tolist())}
        if len(last) < len(index):  # the result of several writes to one row is undefined on a device
            index, places = (torch.tensor(list(part), device="cpu") for part in (last, last.values()))
            rows = rows[accelerator.to_device(places, rows.device)]
        index, rows = (accelerator.to_device(x, self.rows.device) for x in (index, rows))
        good = rows.isfinite().all(dim=2).all(dim=1)
        self.rows[index] = torch.where(good[:, None, None], rows, self.rows[index])
        self.seen[index] |= good
        self._skipped += (~good).sum()

    def unseen(self) -> Tensor:
        """Return a mask of the samples without features, ``(n,)`` bool on the CPU. Waits for the device.

        Warns:
            UserWarning: features that were not finite, or too large, were skipped since the last call.
        """
        self._settle()
        skipped = int(self._skipped)
        if skipped:
            warnings.warn(
                f"{skipped} features that were not finite, or too large to be normalised, are not in the bank",
                stacklevel=2,
            )
            self._skipped.zero_()
        return ~self.seen.cpu()

    def missing(self) -> Tensor:
        """Return a mask of samples never written, ``(n,)`` bool on the CPU; skipped samples count as written."""
        self._settle()
        return ~self.offered

    @property
    def filled(self) -> bool:
        """True if every sample has features. Waits for the device."""
        self._settle()
        return bool(self.seen.all())

    def read(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return both features, ``(..., d)`` each, of samples ``index``, ``(...)``, in float32 or wider."""
        assert self.rows is not None
        rows = self.rows[index.to(self.rows.device)]
        rows = rows.to(torch.promote_types(self.dtype, torch.float32))
        return rows[..., 0, :], rows[..., 1, :]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of ``rows``, ``seen`` and ``offered`` on the CPU, and the device type. Waits for the device."""
        self._settle()
        rows = None if self.rows is None else self.rows.detach().to("cpu", copy=True)
        device = "cpu" if self.rows is None else self.rows.device.type
        seen = self.seen.to("cpu", copy=True)
        return {"rows": rows, "seen": seen, "offered": self.offered.clone(), "device": device}

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse a state that does not fit, with a ``TypeError`` or ``ValueError``; change nothing."""
        values.entries("the state of the bank", state_dict, ("rows", "seen", "offered", "device"))
        expected = {"seen": self.seen, "offered": self.offered}
        given = {name: state_dict[name] for name in expected}
        rows = state_dict["rows"]
        if rows is not None:
            given["rows"] = rows
            width = rows.shape[2] if isinstance(rows, Tensor) and rows.dim() == 3 else 1
            expected["rows"] = torch.empty(self.n, 2, width, dtype=self.dtype, device="meta")
        values.tensors("FeatureBank", given, expected, cast=True)
        values.bounded("FeatureBank", given, {} if rows is None else {"rows": ""})
        if rows is None and any(bool(mask.any()) for mask in given.values()):
            raise ValueError("the state of the bank has samples with features, but no rows; load an earlier state")

    @torch.inference_mode(False)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy a :meth:`state_dict` into this bank, in its own dtype.

        Rows are stored on a device of their former type; on the CPU if there is none, or with ``offload``.

        Raises:
            TypeError, ValueError: entries are missing, or are not those of a bank with ``n`` samples; values are not
                finite. Nothing is changed in these cases.
        """
        self.check_state(state_dict)
        present, rows = accelerator.available(), state_dict["rows"]
        here = self.offload or present is None or state_dict["device"] != present.type
        device = torch.device("cpu" if here or present is None else present.type)
        rows = None if rows is None else rows.to(device, self.dtype, copy=True)
        seen, offered = state_dict["seen"], state_dict["offered"]
        self._copies.clear()
        self.rows, self.seen, self.offered = rows, seen.to(device, copy=True), offered.to("cpu", copy=True)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
