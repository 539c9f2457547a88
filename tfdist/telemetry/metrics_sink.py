"""Interface of the places to which the figures of a worker go."""

import abc
import dataclasses

from tfdist.telemetry.worker_metrics import WorkerMetrics


@dataclasses.dataclass(frozen=True)
class WorkerIdentity:
    """The worker whose figures are written.

    Attributes:
      worker: Number of the worker.
      workers: Number of workers.
      host: Name of its machine.
      pid: Number of its process.
      attempt: Restarts of the job by `tfdist run` before this process.
    """

    worker: int
    workers: int
    host: str
    pid: int
    attempt: int


class MetricsSink(abc.ABC):
    """A place to which the figures of one worker go: a file, or an HTTP address. One thread calls it at a time."""

    @abc.abstractmethod
    def write(self, figures: WorkerMetrics) -> None:
        """Writes the figures. Any error is logged once; training goes on, and the next figures are tried again."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases files and ports."""
