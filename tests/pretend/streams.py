"""Streams and events of the pretend device: who has been given what, who waits for whom."""

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
LOCK = threading.RLock()  # one for the whole device: threads of the library and of autograd use it at once


def who() -> str:
    """This thread, if it is the library's; all others, autograd's among them, are the program."""
    name = threading.current_thread().name
    return name if name.startswith(BACKGROUND) else ""


class Stream:
    """A queue. Its n-th piece of work is known by its number; copies among them are done late.

    Attributes:
        given: pieces of work so far.
        after: by other stream, up to which number this one comes after it.
        done: up to which number the host knows it to be done. What a thread of the library has waited for, the others
            do not know: they may run long before it.
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
        """The number of the next piece of work."""
        self.given += 1
        return self.given

    def later(self, copy: Callable[[], object]) -> None:
        """The piece of work launched last is a copy; do it when somebody needs it."""
        self._late.append((self.given, dict(self.after), copy))

    def carry_out(self, number: int) -> None:
        """Do the late copies up to a number, and what they come after."""
        while self._late and self._late[0][0] <= number:
            _, after, copy = self._late.popleft()
            for stream, other in after.items():
                stream.carry_out(other)
            copy()

    def comes_after(self, stream: Stream, number: int) -> bool:
        """This stream's next work comes after another's; if so, that is carried out."""
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
    """A moment of a stream. Asked whether it is over, it says no once: the device is always a little behind."""

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
        """By stream, the number of the last work before this moment."""
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
        """The host knows that it is over."""
        return all(stream.done >= number for stream, number in self._reached.items())

    def synchronize(self) -> None:
        if not self._known():
            LEDGER.wait("Event.synchronize")
        with LOCK:
            self.pass_by()

    def pass_by(self) -> None:
        """It is over, and the host knows."""
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
