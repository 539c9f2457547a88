"""Determines the kind of a failure, which decides whether a restart may help, and the line that names its cause.

Uses only the names and texts of exceptions, so a worker, its supervisor and the supervisors of other hosts get the same
answer. Does not load TensorFlow.
"""

import builtins
import dataclasses
import enum
import errno
import pathlib
import re
import sysconfig
from collections.abc import Iterable, Sequence

import tfdist.errors


class FailureKind(str, enum.Enum):
    """Kinds of failures of workers, to decide on a restart. A restart helps with neither of the first two kinds."""

    __str__ = str.__str__  # As in `enum.StrEnum`, which Python 3.10 does not have.

    CONFIGURATION = "configuration"
    """An option, a path, a permission or a cluster description is wrong."""
    PROGRAM = "program"
    """The script, or a library that it calls, has a mistake."""
    DATA = "data"
    """A row or value in training is wrong, and the same row or value will come again."""
    ENVIRONMENT = "environment"
    """A file system, port or network is unavailable at the moment."""
    MACHINE = "machine"
    """A process was killed, or a peer is lost."""
    UNKNOWN = "unknown"
    """The kind is unknown, so the supervisor tries one restart."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """An exception in a chain of causes, reduced to names and text so that it may also come from a report or a log.

    Attributes:
      names: Names of the exception's class and of all its base classes, the class first.
      text: Message of the exception.
    """

    names: tuple[str, ...]
    text: str


_OF_FILES = ("FileNotFoundError", "PermissionError", "IsADirectoryError", "NotADirectoryError", "FileExistsError")
# The first of an exception's class names that is a key here decides.
_BY_CLASS = {
    **dict.fromkeys(_OF_FILES, FailureKind.CONFIGURATION),
    "OSError": FailureKind.ENVIRONMENT,
    "WorkerLostError": FailureKind.MACHINE,
    "SourceError": FailureKind.DATA,
    "BackupError": FailureKind.UNKNOWN,  # The text tells another model from failing storage.
    "TfdistError": FailureKind.CONFIGURATION,
    **dict.fromkeys(("InvalidArgumentError", "OutOfRangeError", "DataLossError"), FailureKind.DATA),
    **dict.fromkeys(("PermissionDeniedError", "UnauthenticatedError"), FailureKind.CONFIGURATION),
    **dict.fromkeys(("UnimplementedError", "FailedPreconditionError"), FailureKind.PROGRAM),
    **dict.fromkeys(
        ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError", "InternalError"),
        FailureKind.MACHINE,
    ),
    "UnknownError": FailureKind.ENVIRONMENT,
    **dict.fromkeys(("NotFoundError", "AlreadyExistsError", "ResourceExhaustedError", "OpError"), FailureKind.UNKNOWN),
    "FloatingPointError": FailureKind.DATA,
    **dict.fromkeys(
        (
            *("ArithmeticError", "AssertionError", "AttributeError", "ImportError", "LookupError", "NameError"),
            *("NotImplementedError", "RecursionError", "SyntaxError", "TypeError", "ValueError"),
        ),
        FailureKind.PROGRAM,
    ),
}
# A match of the text overrides `_BY_CLASS`. Entries: required class of the exception, pattern, kind.
_BY_TEXT = (
    ("OpError", r"[Cc]oordination service|[Hh]eartbeat|Socket closed|[Ff]ailed to connect", FailureKind.MACHINE),
    ("OpError", r"Collective ops is aborted|Connection (reset|refused)", FailureKind.MACHINE),
    ("OpError", r"Agent must be in CONNECTED state", FailureKind.MACHINE),
    ("OpError", r"No space left on device|Input/output error|Stale file handle", FailureKind.ENVIRONMENT),
    ("OpError", r"No such file or directory", FailureKind.CONFIGURATION),
    ("RuntimeError", r"^NaN or Inf ", FailureKind.DATA),  # keras.callbacks.TerminateOnNaN(raise_error=True)
)
_LASTING_ERRNOS = {
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
    *(errno.ELOOP, errno.EINVAL),
}

_HEADINGS = re.compile(
    r"in user code:|Graph execution error:|Detected at node .*|<stack traces unavailable>|\d+ root error\(s\) found\.?|"
    r"Traceback \(most recent call last\):|(.*: )?Exception encountered when calling .*|.*Error encountered:|[~^* ]*"
)
_FRAME = re.compile(r'( *)File "(?P<file>.*?)", line (?P<line>\d+)(?:, in (?P<name>\S+))?')
_SYNTAX_ERROR = re.compile(
    r'^  File ".*", line \d+\n(?:    .*\n)*(?P<name>(?:Syntax|Indentation|Tab)Error): (?P<text>.*)\Z', re.MULTILINE
)
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAMING = re.compile(
    r"^\{\{function_node .*?\}\} |^Error in user-defined function passed to \S+ transformation with iterator: \S+: |"
    r"^\(\d+\) [A-Z_]+: +| \[Op:[^\]]*\](?: name:.*)?$"
)
_MOST_CHARACTERS = 80  # A message cuts longer names of files and functions.
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(pathlib.Path(__file__).parent)}
    | {str(pathlib.Path(__file__).parents[1] / name) for name in ("strategies", "data")}
)


def causes_of(error: BaseException | None) -> list[Cause]:
    """Returns an exception and the chain of its causes as `Cause` objects, each once, since a chain may be a cycle."""
    seen: list[BaseException] = []
    while error is not None and not any(error is each for each in seen):
        seen.append(error)
        error = error.__cause__
    return [Cause(tuple(base.__name__ for base in type(each).__mro__), str(each)) for each in seen]


def cause_from_text(name: str, text: str) -> Cause:
    """Returns the `Cause` for an exception of which only the printed class name and the message are known."""
    name = name.rpartition(".")[2]
    known = getattr(builtins, name, None) or getattr(tfdist.errors, name, None)
    if isinstance(known, type):
        return Cause(tuple(base.__name__ for base in known.__mro__), text)
    return Cause((name,), text)


def kind_of_exception(causes: Sequence[Cause]) -> FailureKind:
    """Returns the kind of failure that an exception is, from which the supervisor decides whether to restart.

    Args:
      causes: The exception, followed by the chain of its causes.
    """
    kinds = [_kind_of_one(cause) for cause in causes]
    if FailureKind.ENVIRONMENT in kinds:
        return FailureKind.ENVIRONMENT
    is_own = bool(causes) and "TfdistError" in causes[0].names
    if is_own and kinds[0] == FailureKind.CONFIGURATION and FailureKind.MACHINE in kinds:
        return FailureKind.UNKNOWN  # Workers disagreed, and an exchange failed because of it.
    known = [kind for kind in kinds if kind != FailureKind.UNKNOWN]
    if not known:
        return FailureKind.UNKNOWN
    return known[0] if is_own else known[-1]


def tell_kind(words: str, error: BaseException) -> str:
    """Appends the kind of failure to the text with which a worker reports its end to its peers."""
    kind = told_kind(str(error)) or kind_of_exception(causes_of(error))
    return f"{words} [{kind} error]"


def told_kind(text: str) -> FailureKind | None:
    """Returns the kind of failure that a peer appended to a message with `tell_kind`, or None if there is none."""
    found = re.search(rf"worker \d+ ended by .* \[({'|'.join(FailureKind)}) error\]", text)
    return FailureKind(found[1]) if found else None


def _kind_of_one(cause: Cause) -> FailureKind:
    # A `Cause` that comes from a log has only the class name.
    is_of_tensorflow = "OpError" in cause.names or (len(cause.names) == 1 and cause.names[0] in _BY_CLASS)
    if is_of_tensorflow and (quoted := _quoted(cause.text)):
        return _kind_of_one(quoted)
    for base, pattern, kind in _BY_TEXT:
        if (base in cause.names or (base == "OpError" and is_of_tensorflow)) and re.search(pattern, cause.text):
            return kind
    if cause.names[0] == "UnknownError" and (inner := _inner_kind(cause.text)):
        return inner
    kind = next((_BY_CLASS[name] for name in cause.names if name in _BY_CLASS), FailureKind.UNKNOWN)
    number = re.search(r"\[Errno (\d+)\]", cause.text)
    if number and (kind == FailureKind.UNKNOWN or cause.names[0] == "OSError"):
        return FailureKind.CONFIGURATION if int(number[1]) in _LASTING_ERRNOS else FailureKind.ENVIRONMENT
    return kind


def _quoted(text: str) -> Cause | None:
    """Returns the tfdist error quoted in a TensorFlow message. Errors raised while a graph runs appear that way."""
    for line in _COLOURS.sub("", text).splitlines():
        found = re.match(r"(\w+): (.*)", _without_framing(line))
        if found and found[1] in tfdist.errors.__all__:
            return cause_from_text(found[1], found[2])
    return None


def _inner_kind(text: str) -> FailureKind | None:
    """Returns the kind of a Python exception from an input function. TensorFlow passes it on as text only."""
    name = re.match(r"(\w+)(: |$)", telling_line(text))
    known = getattr(builtins, name[1], None) if name else None
    if not (isinstance(known, type) and issubclass(known, BaseException)):
        return None
    kind = _kind_of_one(cause_from_text(known.__name__, telling_line(text)))
    return FailureKind.DATA if kind in (FailureKind.PROGRAM, FailureKind.UNKNOWN) else kind


def telling_line(text: str) -> str:
    """Returns the line of an exception's message that states the cause.

    Some messages of Keras and TensorFlow begin with headings, such as "in user code:" or "Graph execution error:", and
    with the lines of a stack. This function skips such headings and stack lines.
    """
    lines = [line for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    frame_indent = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        frame = _FRAME.match(line)
        if frame:
            frame_indent = indent
        elif frame_indent is not None and indent > frame_indent:
            continue  # The source line of a frame.
        elif not _HEADINGS.fullmatch(line.strip()):
            return _without_framing(line)
        else:
            frame_indent = None
    return _without_framing(lines[0]) if lines else ""


def _without_framing(line: str) -> str:
    line = line.strip()
    while (shorter := _FRAMING.sub("", line).strip()) != line:
        line = shorter
    return line


def user_line(stack: str) -> str | None:
    """Returns the innermost line of a traceback outside libraries and tfdist, such as "train.py:12 in load"."""
    frames = list(_FRAME.finditer(_COLOURS.sub("", stack)))
    return user_call((frame["file"], frame["line"], frame["name"]) for frame in reversed(frames))


def user_call(calls: Iterable[tuple[str, int | str, str | None]]) -> str | None:
    """Returns the innermost call outside libraries and tfdist, such as "train.py:12 in load".

    Args:
      calls: File, line and function of each call in a stack, the innermost first.
    """
    for path, line, name in calls:
        if path.endswith(".py") and not path.startswith(_LIBRARIES) and "/site-packages/" not in path:
            where = f" in {name[:_MOST_CHARACTERS]}" if name and name not in ("<module>", "None") else ""
            return f"{pathlib.Path(path).name[-_MOST_CHARACTERS:]}:{line}{where}"
    return None


def exception_in_log(log: str) -> tuple[Cause, str] | None:
    """Returns the exception that Python printed at the end of a worker's log, and its text, or None.

    Used for a worker that failed before `import tfdist` and so left no report. Ignores a traceback that has any output
    after it: the script may have handled that exception and ended for another reason.

    Args:
      log: End of the log, without lines printed by libraries.
    """
    lines = log.splitlines()
    while lines and (not lines[-1].strip() or lines[-1].startswith("tfdist: ")):  # Printed while Python exits.
        lines.pop()
    log = "\n".join(["", *lines])
    start = log.rfind("\nTraceback (most recent call last):\n") + 1
    before = log[:start].rstrip().rpartition("\n")[2]
    if start and not before.startswith(("Exception in thread", "Exception ignored")):
        stack = log[start:]
        found = re.search(r"^(?![ \n]|Traceback )(?P<name>[\w.]+)(?:: (?P<text>.*))?\Z", stack, re.MULTILINE)
        if found:
            return cause_from_text(found["name"], (found["text"] or "").rstrip()), stack
    found = _SYNTAX_ERROR.search(log)
    return (cause_from_text(found["name"], found["text"]), found[0]) if found else None


def is_refusal(log: str) -> bool:
    """Returns whether a worker's log ends with a command line error (argparse, absl, Python): a restart cannot help."""
    last = log.rstrip().rpartition("\n")[2]
    return bool(re.match(r"\S+: error: |\S*python\S*: (can't open file|No module named|Error while finding)", last))
