"""Replies of a worker process to a call, including a value for a worker that died without a reply."""

import dataclasses
import pickle
import signal
from typing import Any

from tfdist.errors import WorkerError
from tfdist.launch.first_failure import is_consequence


@dataclasses.dataclass(frozen=True)
class Returned:
    """The value that a call returned in worker `index`, pickled."""

    index: int
    value: bytes

    def load(self) -> Any:
        """Unpickles the value that the call returned."""
        try:
            return pickle.loads(self.value)
        except Exception as error:
            raise WorkerError(
                f"The value that worker {self.index} returned cannot be rebuilt in this process: {error!r}. "
                f"Return plain values or arrays."
            ) from error


@dataclasses.dataclass(frozen=True)
class Raised:
    """An exception of a call in worker `index`: its class name, last line, traceback, and pickled form if possible."""

    index: int
    kind: str
    summary: str
    trace: str
    error: bytes | None

    def load(self) -> BaseException | None:
        """Unpickles the exception of the call. Returns None if that fails."""
        try:
            error = pickle.loads(self.error) if self.error else None
        except Exception:  # Unpickling may run any code of the exception's class. The traceback is also kept as text.
            return None
        return error if isinstance(error, BaseException) else None


@dataclasses.dataclass(frozen=True)
class Died:
    """The end of worker `index` without a reply to a call, with `returncode` as in `subprocess`."""

    index: int
    returncode: int


Reply = Returned | Raised | Died


def doubt(failure: Raised | Died) -> int:
    """Rates a worker's failure: the higher, the more likely it is only a consequence of another worker's failure."""
    if isinstance(failure, Raised) and is_consequence(failure.kind, failure.summary):
        return 2
    # TensorFlow aborts a process that learns of a lost peer while no call can raise the error.
    return 1 if isinstance(failure, Died) and failure.returncode == -signal.SIGABRT else 0
