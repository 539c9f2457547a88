"""Whether the chief does something alone, in which nobody else takes part: what needs all workers is then refused."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tfdist.errors import ClusterError

_local = threading.local()


@contextmanager
def on_chief_alone(what: str) -> Iterator[None]:
    """Says of this thread that only the chief does `what`."""
    before = getattr(_local, "what", None)
    _local.what = what
    try:
        yield
    finally:
        _local.what = before


def is_on_chief_alone() -> bool:
    """Whether this thread is at what only the chief does."""
    return getattr(_local, "what", None) is not None


def check_in_company() -> None:
    """Refuses what all workers have to do together, and for which the chief alone would wait.

    Raises:
      ClusterError: If only the chief does what this thread is at.
    """
    what = getattr(_local, "what", None)
    if what is not None:
        raise ClusterError(
            "All workers have to take part in `predict`, `evaluate`, results of metrics and variables made in the "
            f"scope, but {what} runs on the chief alone, which would wait for the others. Do it in a callback that is "
            "not `ChiefOnly`, and only write `if tfdist.cluster.is_chief():`; or call `self.model(x)`, which needs "
            "nobody else."
        )
