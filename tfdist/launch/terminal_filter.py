"""Filters lines of a worker's standard error that only its log file needs, and the terminal does not.

TensorFlow, XLA, gRPC and TFDS log some 30 lines in a healthy run and some 70 more when a peer fails. No such line needs
an action of the user. All other output passes unchanged: output of the script, Python's warnings and logging, progress
bars, tracebacks.
"""

import re
from collections.abc import Callable

_MOST_BYTES = 1 << 16
_MORE_LINES = 10
_COLOR = re.compile(rb"\x1b\[[0-9;]*m")  # Python 3.13 colors its tracebacks on a terminal.
_FIRST_OF_TRACEBACK = (b"Traceback (most recent call last):", b'  File "', b"  + Exception Group Traceback")
_FIRST_OF_DUMP = b"Fatal Python error: "
_OF_DUMP = re.compile(
    rb"(?:Current thread|Thread) 0x|  File \".*\", line \d+ in |  <|  \.\.\.|Extension modules: |Python runtime state: "
    rb"|$"
)

# Lines of libraries that the terminal does not show. tests/test_output.py has an example of each pattern.
# These may also start in the middle of a line, after an unfinished progress bar.
_PATTERNS_ANYWHERE = (
    # C++ code of TensorFlow, XLA and the coordination service: all but fatal errors
    r"[IWE]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ [\w.-]+\.(?:cc|cu|cpp|h):\d+\] ",
    # The same in versions of TensorFlow up to 2.19
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IWE] \S+\.(?:cc|cu|cpp|h):\d+\] ",
    # TFDS at level INFO, where absl's logging is in use
    r"I\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ (?:dataset_builder\.py:\d+\] (?:Generating|Reusing|Overwrite|Skipping)|"
    r"dataset_info\.py:\d+\] (?:Load dataset info|Field info|Loading info)|writer\.py:\d+\] Done writing|"
    r"reader\.py:\d+\] Creating a tf\.data\.Dataset|logging_logger\.py:\d+\] Constructing)",
)
# These are at the start of a line.
_PATTERNS_AT_START = (
    # The place in the graph, on a line of its own after a message of C++ code
    r"\s*\[\[\{\{(?:function_)?node ",
    # absl's C++ logging
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR",
    # The second line of cpu_feature_guard.cc
    r"To enable the following instructions: .*rebuild TensorFlow",
    # The list of tasks after a message of coordination_service.cc
    r"/job:\w+/replica:\d+/task:\d+$",
    # The line after this list, if tasks have sent no heartbeats
    r"The tasks have crashed\. Check the task logs for an earlier error, or scheduler events ",
    # The second line of an aborted collective
    r"The error could be from a previous operation\. Restart your program to reset\."
    r"(?: \[type\.googleapis\.com/.*)?$",
    # The node of the graph that failed, in local_rendezvous.cc
    r"\t \[\[\{\{.*\[type\.googleapis\.com/tensorflow\.",
    # gRPC, after a message of the coordination service
    r"Additional GRPC error information from remote target ",
    # gRPC's details
    r':(?:UNKNOWN:Error received from peer|\{"created":)',
    # Python code of TensorFlow at level INFO
    r"INFO:tensorflow:",
    # The same once more, where absl's logging is in use
    r"I\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ "
    r"(?:collective_all_reduce_strategy|mirrored_strategy|cross_device_ops)\.py:\d+\] ",
    # Keras, of its own default `shuffle=True`, on every `fit` of a dataset
    r".*/keras/src/trainers/epoch_iterator\.py:\d+: UserWarning: `shuffle=True` was passed, but will be ignored",
    # The line of source that Python shows below it
    r"  self\.data_adapter = data_adapters\.get_data_adapter\($",
    # tfdist, about a peer that has ended, which `tfdist run` reports itself
    r"(?:ERROR:absl:|E\d{4} \S+ +\d+ coordination_store\.py:\d+\] )worker \d+ at \S+ is gone: its process ended",
)
_ANYWHERE = re.compile("|".join(_PATTERNS_ANYWHERE).encode())
_AT_START = re.compile("|".join((*_PATTERNS_ANYWHERE, *_PATTERNS_AT_START)).encode())


def is_library_line(line: str) -> bool:
    """Returns whether a line, without its line end, is one that libraries print, by their patterns."""
    return _AT_START.match(line.encode()) is not None


def without_library_line(line: str) -> str | None:
    """Returns the part of a line before that of a library, such as a progress bar; `None` if all is of the library."""
    if is_library_line(line):
        return None
    found = _ANYWHERE.search(line.encode())
    return line.encode()[: found.start()].decode(errors="replace") if found else line


class OutputFilter:
    """Selects the bytes of a worker's output that the terminal shows. This base class shows all."""

    _rest = b""

    @property
    def has_rest(self) -> bool:
        """Whether bytes are held back, so that `flush` must be called when the output pauses."""
        return bool(self._rest)

    def feed(self, chunk: bytes) -> bytes:
        """Returns the bytes to show of this chunk of output and of earlier bytes held back."""
        return chunk

    def flush(self) -> bytes:
        """Returns the bytes to show of those held back, at a pause of the output."""
        return b""

    def end(self) -> bytes:
        """Returns the bytes to show of those held back, at the end of the output."""
        return b""


class TerminalFilter(OutputFilter):
    """Removes lines of libraries, crash dumps and reported tracebacks from a worker's standard error.

    Call `feed` with each chunk read. When the stream pauses, `flush` returns the incomplete last line.

    Args:
      reported_stack: Returns the traceback of the exception that ends this worker, or an empty string before the worker
        has reported it. The supervisor logs that exception, so its traceback is not printed here.
    """

    def __init__(self, reported_stack: Callable[[], str] = str):
        self._reported_stack = reported_stack
        self._end_of_stack: bytes | None = None  # Last line of the reported traceback, once the traceback begins.
        self._left = 0  # How often that line will still appear.
        self._most_left = 0  # Largest number of lines until then.
        self._in_dump = False

    def feed(self, chunk: bytes) -> bytes:
        """Filters a chunk of output: returns the bytes to show of it and of the incomplete line before it."""
        *lines, self._rest = re.split(rb"(?<=[\r\n])", self._rest + chunk)
        shown = b"".join(map(self._shown, lines))
        return shown + self.flush() if len(self._rest) > _MOST_BYTES else shown

    def flush(self) -> bytes:
        """Returns the bytes to show of an incomplete line at a pause. Holds back a library's line until it ends."""
        found = _AT_START.match(self._rest) or _ANYWHERE.search(self._rest)
        end = found.start() if found else len(self._rest)
        shown, self._rest = self._rest[:end], self._rest[end:]
        return shown

    def end(self) -> bytes:
        """Returns the bytes to show of a last line without a line end, when the worker's output has ended."""
        line, self._rest = self._rest, b""
        return self._shown(line)

    def _shown(self, line: bytes) -> bytes:
        text = _COLOR.sub(b"", line.rstrip(b"\r\n"))
        if self._is_of_dump(text) or _AT_START.match(text) or self._is_of_reported_stack(text):
            return b""
        found = _ANYWHERE.search(line)
        return line[: found.start()] if found else line

    def _is_of_dump(self, text: bytes) -> bool:
        """Returns whether the line belongs to a crash dump of Python's faulthandler, which only the log file needs."""
        self._in_dump = text.startswith(_FIRST_OF_DUMP) or (self._in_dump and _OF_DUMP.match(text) is not None)
        return self._in_dump

    def _is_of_reported_stack(self, text: bytes) -> bool:
        """Returns whether the line belongs to the traceback that the worker has reported and the supervisor logs.

        Lines in between may differ from the report in the line numbers of frames that another thread still runs.
        """
        if self._end_of_stack is None and text.startswith(_FIRST_OF_TRACEBACK):
            lines = [line.rstrip() for line in self._reported_stack().encode(errors="replace").splitlines()]
            if lines:
                self._end_of_stack, self._left = lines[-1], lines.count(lines[-1])
                self._most_left = len(lines) + _MORE_LINES
        if self._left == 0 or self._most_left == 0:
            return False
        self._most_left -= 1
        self._left -= text.rstrip() == self._end_of_stack
        return True
