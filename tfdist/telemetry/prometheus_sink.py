"""Serves the figures of a worker to Prometheus, over HTTP. Needs `prometheus_client`, which it imports when used."""

import contextlib
import errno
import threading
from collections.abc import Iterator
from typing import Any

from tfdist.cluster.port_holder import holder_of
from tfdist.errors import ClusterError
from tfdist.telemetry.metrics_sink import MetricsSink, WorkerIdentity
from tfdist.telemetry.worker_metrics import METRICS, WorkerMetrics, values


class PrometheusSink(MetricsSink):
    """Serves the newest figures at `http://<address>:<port>/metrics`.

    Args:
      address: Address at which to listen.
      port: Port at which to listen; 0 for a free one.
      identity: The worker, whose number and host are labels of every metric.

    Attributes:
      endpoint: Address and port at which it listens.

    Raises:
      ClusterError: If it cannot listen there.
    """

    def __init__(self, address: str, port: int, identity: WorkerIdentity) -> None:
        import prometheus_client
        from prometheus_client.registry import CollectorRegistry

        self._labels = {"worker": str(identity.worker), "host": identity.host}
        self._figures: WorkerMetrics | None = None
        self._is_closed = threading.Lock()  # Taken once.
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, address, registry)
        except OSError as error:
            raise ClusterError(_why(address, port, error)) from error
        self.endpoint = f"{f'[{address}]' if ':' in address else address}:{self._server.server_port}"

    def write(self, figures: WorkerMetrics) -> None:
        """Keeps the figures for the next request."""
        self._figures = figures

    def close(self) -> None:
        """Closes the port. Does nothing the second time."""
        if not self._is_closed.acquire(blocking=False):
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def describe(self) -> Iterator[Any]:
        """Yields nothing, so that `prometheus_client` does not collect figures when the sink is registered."""
        yield from ()

    def collect(self) -> Iterator[Any]:
        """Yields all known metrics, in the classes of `prometheus_client`, which calls this method."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        figures = self._figures
        if figures is None:
            return
        for metric in METRICS:
            family = (CounterMetricFamily if metric.is_total else GaugeMetricFamily)(
                metric.name, f"{metric.meaning}.", labels=[*self._labels, *filter(None, [metric.label])]
            )
            for key, value in values(metric, figures).items():
                family.add_metric([*self._labels.values(), *([key] if metric.label else [])], value)
            if family.samples:
                yield family


def _why(address: str, port: int, error: OSError) -> str:
    where = f"`prometheus_port` must be a free port of this machine, but port {port} at {address}"
    if error.errno == errno.EADDRINUSE:
        holder = None
        with contextlib.suppress(OSError):
            holder = holder_of(port)
        return f"{where} is taken by {holder or 'another process'}. Give another port, or 0 for any free port."
    return f"{where} cannot be opened: {error}. Give another port, or another `prometheus_address`."
