"""Refuses operations that need all workers, such as `predict`, while the chief runs code alone, as in a callback."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tfdist.errors import ClusterError

_local = threading.local()


@contextmanager
def on_chief_alone(what: str) -> Iterator[None]:
    """Marks a block of code in this thread, described by `what`, that only the chief runs."""
    before = getattr(_local, "what", None)
    _local.what = what
    try:
        yield
    finally:
        _local.what = before


def is_on_chief_alone() -> bool:
    """Whether this thread runs code of the chief alone, such as a `ChiefOnly` callback, inside `on_chief_alone`."""
    return getattr(_local, "what", None) is not None


def check_in_company() -> None:
    """Raises a ClusterError inside `on_chief_alone`, for operations in which the chief would wait for its peers."""
    what = getattr(_local, "what", None)
    if what is not None:
        raise ClusterError(
            "All workers must take part in `predict`, `evaluate`, results of metrics and the creation of variables in "
            f"the scope, but {what} runs on the chief alone, which would wait for its peers. Use a callback that is "
            "not `ChiefOnly`, and put only code that writes files under `if tfdist.cluster.is_chief():`; or call "
            "`self.model(x)`, which needs no peer."
        )


def check_is_read_in_company() -> None:
    """Raises a ClusterError inside `on_chief_alone`, for a read of optimizer state that is on all workers."""
    what = getattr(_local, "what", None)
    if what is not None:
        raise ClusterError(
            f"With model_sharding, each worker has a part of the model or its optimizer, so all workers must save it, "
            f"but {what} runs on the chief alone. Use `tfdist.callbacks.ModelCheckpoint`, save weights only "
            "(`save_weights`), or call `model.save` on all workers, each with a path of its own."
        )
