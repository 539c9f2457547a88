"""Interface of the places to which the figures of a worker go."""

import abc
import dataclasses
import importlib.util

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


def check_package(argument: str, package: str) -> None:
    """Checks that the package is installed which an argument of `Telemetry` needs.

    Args:
      argument: Name of the argument.
      package: Name of the package; "prometheus_client" or "tensorboard".

    Raises:
      ImportError: If it is not installed.
    """
    if importlib.util.find_spec(package) is None:
        extra = package.partition("_")[0]
        raise ImportError(
            f"`{argument}` needs the package `{package}`, which is not installed. Run `pip install 'tfdist[{extra}]'`, "
            f"or leave `{argument}` out."
        )
