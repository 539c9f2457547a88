"""Ends a command calmly if nobody reads its output any more, as in `tfdist report RUN | head`."""

import os
import select
import sys
from collections.abc import Callable

EXIT_CODE = 1
"""The exit code of a command that could not print all of its output. Also that of `rich`, which prints tables."""


def run_while_read(command: Callable[[], int]) -> int:
    """Runs a command until it returns or until nobody reads standard output. Then nothing more is printed.

    Python ignores SIGPIPE, so the command gets a `BrokenPipeError`. SIGPIPE stays ignored here, because it would also
    end the command when a peer closes a connection. See "Note on SIGPIPE" in Python's documentation of `signal`.

    Returns:
      The exit code of the command, or `EXIT_CODE` if it was interrupted.

    Raises:
      BrokenPipeError: If the command has written to another pipe or connection that is closed.
    """
    try:
        return command()
    except BrokenPipeError:
        if not _is_unread():
            raise
        return EXIT_CODE
    finally:
        _flush_or_drop()


def _is_unread() -> bool:
    """Returns whether standard output is a pipe or connection, and its other end is closed."""
    try:
        poll = select.poll()
        poll.register(sys.stdout, 0)  # Reports POLLERR and POLLHUP only.
        return bool(poll.poll(0))
    except (AttributeError, OSError, TypeError, ValueError):  # Closed, or replaced by an object without a descriptor.
        return False


def _flush_or_drop() -> None:
    """Prints the buffered text. Drops it if nobody reads it: Python would print an error at its end.

    Raises no other error either, since that would replace the result of the command. Python flushes the text again at
    its end, and reports an error such as a full disk, with exit code 120.
    """
    if sys.stdout is None or getattr(sys.stdout, "closed", False):
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except OSError:
        return
