"""The screen of a run on a terminal: output scrolls by, below it are the table and the progress bar of the chief."""

import re
import threading
import time
from collections.abc import Callable, Sequence

from tfdist.launch.ansi_text import as_line, begun_sequence, moves_cursor
from tfdist.launch.line_splitter import LineSplitter
from tfdist.launch.live_region import LiveRegion
from tfdist.launch.output_target import OutputTarget

_DRAW_SECONDS = 0.25
_OWN_DISPLAY_SECONDS = 3.0
_HEADING = re.compile(rb"Epoch \d+/\d+")


class LiveScreen:
    """Shows complete lines of several streams above the table, and their incomplete lines below it.

    A script may draw several lines itself, such as the bars of nested loops. Meanwhile the screen is the script's, and
    the table comes back when it has drawn nothing for some seconds. All methods may be called from any thread.

    Args:
      put: Writes to the terminal.
      size: Returns the present columns and lines of the terminal.
    """

    def __init__(self, put: Callable[[bytes], None], size: Callable[[], tuple[int, int]]):
        self._put, self._size = put, size
        self._region = LiveRegion(put)
        self._lock = threading.Lock()
        self._streams: list[ScreenStream] = []
        self._table: Sequence[str] = ()
        self._above = bytearray()  # Complete lines that are not yet on the screen.
        self._drawn_at = 0.0
        self._own_display_until = 0.0  # Positive while the screen is the script's.
        self._was_left = False

    def stream(self) -> "ScreenStream":
        """Returns a target for the output of a worker, or for messages of this process."""
        stream = ScreenStream(self)
        with self._lock:
            self._streams.append(stream)
        return stream

    def refresh(self, table: Sequence[str]) -> None:
        """Shows these lines of the table from now on, and output that came since the screen was last drawn."""
        with self._lock:
            self._table = table
            if not self._own_display_until or self._is_display_over():
                self._draw()

    def was_left(self) -> None:
        """Notes that this process was stopped, so that a shell has written to the terminal. For signal handlers."""
        self._was_left = True

    def feed(self, stream: "ScreenStream", data: bytes, *, now: bool = False) -> None:
        """Shows output of a stream: `now`, or soon."""
        with self._lock:
            data = stream.held + data
            held = begun_sequence(data)
            stream.held, data = data[len(data) - held :], data[: len(data) - held]
            if moves_cursor(data):
                self._leave_screen_to_script()
            if self._own_display_until:
                stream.pass_on(data)
                self._put(data)
                return
            self._above += stream.lines_of(data)
            if now or time.monotonic() - self._drawn_at >= _DRAW_SECONDS:
                self._draw()

    def end(self, stream: "ScreenStream") -> None:
        """Shows the incomplete last line of a stream that has ended as a line."""
        with self._lock:
            rest = stream.rest()
            if self._own_display_until:
                self._put(rest if stream.is_at_start else rest + b"\r\n")
            else:
                self._above += rest
                self._draw()
            if stream in self._streams:
                self._streams.remove(stream)

    def _leave_screen_to_script(self) -> None:
        if not self._own_display_until:
            rest = b"".join(stream.unfinished() for stream in self._streams)
            self._region.draw([], width=self._size()[0], above=bytes(self._above) + rest)
            self._above.clear()
        self._own_display_until = time.monotonic() + _OWN_DISPLAY_SECONDS

    def _is_display_over(self) -> bool:
        if time.monotonic() < self._own_display_until or not all(stream.is_at_start for stream in self._streams):
            return False
        self._own_display_until = 0.0
        return True

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._was_left:
            self._was_left = False
            self._region.forget()
        width, height = self._size()
        lines = [*self._table, *(line for stream in self._streams for line in stream.unfinished_lines)]
        self._region.draw(lines[-max(1, height - 1) :] if lines else [], width=width, above=bytes(self._above))
        self._above.clear()


class ScreenStream(OutputTarget):
    """The output of one stream on a `LiveScreen`.

    Attributes:
      held: First part of an escape sequence at the end of the output so far.
      is_at_start: Whether the output so far ends with a line end.
    """

    def __init__(self, screen: LiveScreen):
        super().__init__(None)
        self._screen = screen
        self._splitter = LineSplitter(bar_seconds=float("inf"))
        self._heading = b""  # "Epoch 1/3", which stays beside its progress bar until that is complete.
        self.held = b""
        self.is_at_start = True

    def write(self, data: bytes) -> None:
        """Shows output."""
        if data:
            self._screen.feed(self, data)

    def write_now(self, data: bytes) -> None:
        """Shows output at once."""
        self._screen.feed(self, data, now=True)

    def end(self) -> None:
        """Shows the last line, if it is incomplete."""
        self._screen.end(self)

    def lines_of(self, data: bytes) -> bytes:
        """Returns the lines that this output completes, and keeps the rest."""
        shown = bytearray()
        for line in self._splitter.split(data):
            if self._heading:
                shown += self._heading + b"\n"
            self._heading = line if _HEADING.fullmatch(line) else b""
            if not self._heading:
                shown += line + b"\n"
        return bytes(shown)

    @property
    def unfinished_lines(self) -> list[str]:
        """The heading and the incomplete last line as text, if there are such."""
        return [as_line(line) for line in (self._heading, self._splitter.incomplete) if line.strip()]

    def unfinished(self) -> bytes:
        """Returns the heading and the incomplete last line as output, and forgets them."""
        heading = self._heading + b"\n" if self._heading else b""
        line = b"".join(self._splitter.rest())
        self._heading, self.is_at_start = b"", not line
        return heading + line

    def rest(self) -> bytes:
        """Returns what remains at the end as complete lines."""
        is_at_start = self.is_at_start
        rest = self.unfinished() + self.held
        self.is_at_start, self.held = is_at_start, b""
        return rest if not rest or rest.endswith(b"\n") else rest + b"\n"

    def pass_on(self, data: bytes) -> None:
        """Notes output that goes to the terminal as it is."""
        if data:
            self.is_at_start = data.endswith(b"\n")
