"""Streams and events of the pretend device: launched work and its dependencies."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from tests.pretend.ledger import BACKGROUND, LEDGER

STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()
LOCK = threading.RLock()  # one for the whole device: threads of the library and of autograd use it concurrently


def who() -> str:
    """Return the name of this thread if it is the library's; all others, including autograd's, are the program ("")."""
    name = threading.current_thread().name
    return name if name.startswith(BACKGROUND) else ""


class Stream:
    """A queue of work. The n-th piece of work has the number n; copies are carried out late.

    Attributes:
        given: number of pieces of work so far.
        after: by other stream, the number of its last piece of work that precedes this stream's next one.
        done: number of the last piece of work that the host knows to be done. Waits of a thread of the library do not
            count for other threads, which may run long before it.
    """

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        del device, priority
        self.given = 0
        self._done: dict[str, int] = {}
        STREAMS.add(self)
        self.after: dict[Stream, int] = {}
        self._late: deque[tuple[int, dict[Stream, int], Callable[[], object]]] = deque()

    @property
    def done(self) -> int:
        return self._done.get(who(), 0)

    @done.setter
    def done(self, number: int) -> None:
        self._done[who()] = number

    def launch(self) -> int:
        """Launch a piece of work and return its number."""
        self.given += 1
        return self.given

    def later(self, copy: Callable[[], object]) -> None:
        """Register the piece of work launched last as a copy, which is carried out when it is needed."""
        self._late.append((self.given, dict(self.after), copy))

    def carry_out(self, number: int) -> None:
        """Carry out the late copies up to a number, and the work that they depend on."""
        while self._late and self._late[0][0] <= number:
            _, after, copy = self._late.popleft()
            for stream, other in after.items():
                stream.carry_out(other)
            copy()

    def comes_after(self, stream: Stream, number: int) -> bool:
        """Return True if this stream's next work comes after another's, which is then carried out."""
        if stream is not self and max(self.after.get(stream, 0), stream.done) < number:
            return False
        stream.carry_out(number)
        return True

    def wait_event(self, event: Event) -> None:
        with LOCK:
            for stream, number in event.reached().items():
                if stream is not self:
                    self.after[stream] = max(self.after.get(stream, 0), number)

    def wait_stream(self, stream: Stream) -> None:
        event = Event()
        event.record(stream)
        self.wait_event(event)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        LEDGER.wait("synchronize")
        with LOCK:
            self.record_event().pass_by()

    def query(self) -> bool:
        return self.record_event().query()


class Event:
    """A point in a stream. The first query returns False unless the host has waited: the device always lags behind."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        del enable_timing, blocking, interprocess
        self._reached: dict[Stream, int] = {}
        self._asked, self._time = False, 0.0

    def record(self, stream: Stream | None = None) -> None:
        with LOCK:
            stream = stream or current_stream()
            self._reached = {**stream.after, stream: stream.given}
            self._asked, self._time = False, time.perf_counter()

    def reached(self) -> dict[Stream, int]:
        """Return, by stream, the number of the last work before this point."""
        return self._reached

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        with LOCK:
            over = self._asked or self._known()
            self._asked = True
            if over:
                self.pass_by()
            return over

    def _known(self) -> bool:
        """Return True if the host knows that the event has completed."""
        return all(stream.done >= number for stream, number in self._reached.items())

    def synchronize(self) -> None:
        if not self._known():
            LEDGER.wait("Event.synchronize")
        with LOCK:
            self.pass_by()

    def pass_by(self) -> None:
        """Complete the event, and mark it as completed for the host."""
        for stream, number in self._reached.items():
            stream.carry_out(number)
            stream.done = max(stream.done, number)

    def elapsed_time(self, end: Event) -> float:
        return 1e3 * (end._time - self._time)


DEFAULT = Stream()
_here = threading.local()


def current_stream(device: Any = None) -> Stream:
    """Return the stream of this thread."""
    del device
    return getattr(_here, "stream", DEFAULT)


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    """Make a stream this thread's current one."""
    before = current_stream()
    _here.stream = chosen or before
    try:
        yield
    finally:
        _here.stream = before
