"""What a worker process answers to a call, and what is said of one that does not."""

import dataclasses
import pickle
import signal
from typing import Any

from tfdist.errors import WorkerError
from tfdist.launch.first_failure import is_consequence


@dataclasses.dataclass(frozen=True)
class Returned:
    """What worker `index` returned, pickled."""

    index: int
    value: bytes

    def load(self) -> Any:
        """The value, rebuilt in this process."""
        try:
            return pickle.loads(self.value)
        except Exception as error:
            raise WorkerError(
                f"What worker {self.index} returned cannot be rebuilt in this process: {error!r}. "
                f"Return plain values or arrays."
            ) from error


@dataclasses.dataclass(frozen=True)
class Raised:
    """What worker `index` raised: its class, last line, traceback, and pickled if that could be."""

    index: int
    kind: str
    summary: str
    trace: str
    error: bytes | None

    def load(self) -> BaseException | None:
        """What the worker raised, if it survives the way here."""
        try:
            error = pickle.loads(self.error) if self.error else None
        except Exception:  # an exception class may do anything when it is rebuilt; the traceback is there as text
            return None
        return error if isinstance(error, BaseException) else None


@dataclasses.dataclass(frozen=True)
class Died:
    """How worker `index` ended instead of answering; `returncode` as in `subprocess`."""

    index: int
    returncode: int


Reply = Returned | Raised | Died


def doubt(failure: Raised | Died) -> int:
    """How likely a failure is the mere consequence of another."""
    if isinstance(failure, Raised) and is_consequence(failure.kind, failure.summary):
        return 2
    # TensorFlow aborts a process in which nobody is there to hear that a peer is gone.
    return 1 if isinstance(failure, Died) and failure.returncode == -signal.SIGABRT else 0
