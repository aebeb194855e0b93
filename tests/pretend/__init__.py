"""A pretend accelerator: data on the CPU with the behaviour of a device.

``install()`` makes ``torch.device("pretend")`` the accelerator of this process permanently: run it in a process of its
own. Operations are computed at once, in program order; the hazards of a real device are simulated:

- Mixing devices raises.
- Copies with ``non_blocking=True`` between the device and pinned memory happen later: when the host waits for them, or
  when an operation that comes after them on their stream, or on one that waits for it, needs the result. Until then the
  target is poisoned: NaN, or -1.
- A stream that uses what another stream writes, without waiting for it, computes poison. Memory that a stream still
  uses when its last tensor is freed is poisoned too, unless ``record_stream`` was called. Both are listed as races.
- Every wait of the host, every transfer and every operation is counted, with the line of the library that caused it
  (:mod:`tests.pretend.ledger`).

``install(like="mps")``: without streams and pinned memory, and without float64 and complex128.
"""

from tests.pretend.backend import NAME, install
from tests.pretend.ledger import LEDGER, Wait

__all__ = ["LEDGER", "NAME", "Wait", "install"]
