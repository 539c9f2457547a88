"""Reports the progress of a job to Kubeflow Trainer, which shows it in the status of the TrainJob.

Kubeflow Trainer 2.2 with the feature gate `TrainJobStatus` gives every pod an address, a token and a certificate
(https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress). Does not load TensorFlow.
"""

import datetime
import json
import math
import os
import pathlib
import ssl
import time
import urllib.request
from typing import Any

from tfdist.telemetry.metrics_sink import MetricsSink
from tfdist.telemetry.worker_metrics import WorkerMetrics

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
"""Environment variable with the address that takes the progress."""

_TOKEN_FILE = "KUBEFLOW_TRAINER_SERVER_TOKEN"
_CERTIFICATE_FILE = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_EVERY_SECONDS = 5.0  # Kubeflow asks its clients not to send more often.
_TIMEOUT_SECONDS = 5.0
_MOST_METRICS, _LONGEST_NAME = 256, 63
_LONGEST_SECONDS = 2**31 - 1

_due = 0.0  # When this process may send again, on the monotonic clock.


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, since the token must not go to another server."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class KubeflowSink(MetricsSink):
    """Sends progress, remaining time and metrics of the chief to Kubeflow Trainer.

    Sends at most every 5 seconds, and the end of a `fit` also sooner.

    Raises:
      OSError: When it writes, if the server does not take the figures, or the token or the certificate is missing.
    """

    def __init__(self) -> None:
        self._unsent: WorkerMetrics | None = None

    def write(self, figures: WorkerMetrics) -> None:
        """Sends the figures, unless others were sent less than 5 seconds ago."""
        self._unsent = figures
        if time.monotonic() >= _due:
            self._send(figures)

    def close(self) -> None:
        """Sends the last figures if they were not sent yet, and are of the end of a `fit` or due."""
        if self._unsent is not None and (self._unsent.progress == 1 or time.monotonic() >= _due):
            self._send(self._unsent)

    def _send(self, figures: WorkerMetrics) -> None:
        global _due
        _due = time.monotonic() + _EVERY_SECONDS
        headers = {"Content-Type": "application/json", **_authorization()}
        certificate = os.environ.get(_CERTIFICATE_FILE)
        secure = urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate))
        body = json.dumps({"trainerStatus": status_of(figures)}).encode()
        request = urllib.request.Request(os.environ[SERVER_URL], body, headers, method="POST")
        with urllib.request.build_opener(secure, _NoRedirects).open(request, timeout=_TIMEOUT_SECONDS):
            self._unsent = None


def _authorization() -> dict[str, str]:
    """Returns the header with the token, which is read each time, since Kubernetes renews it.

    Raises:
      OSError: If the file cannot be read. The message does not have its path, which may be a token by mistake.
    """
    path = os.environ.get(_TOKEN_FILE)
    if not path:
        return {}
    try:
        return {"Authorization": f"Bearer {pathlib.Path(path).read_text().strip()}"}
    except OSError as error:
        raise OSError(f"{_TOKEN_FILE} must be the path of a file with a token ({error.strerror})") from None


def is_given() -> bool:
    """Returns whether Kubeflow Trainer takes the progress of this job."""
    return bool(os.environ.get(SERVER_URL))


def status_of(figures: WorkerMetrics) -> dict[str, Any]:
    """Returns figures in the form of the status of a TrainJob."""
    metrics = {"step": figures.step, "epoch": figures.epoch, **figures.logs}
    status: dict[str, Any] = {
        "metrics": [{"name": name[:_LONGEST_NAME], "value": f"{value:.6g}"} for name, value in metrics.items() if name][
            :_MOST_METRICS
        ],
        "lastUpdatedTime": datetime.datetime.fromtimestamp(figures.time, datetime.timezone.utc).strftime(
            "%Y-%m-%dT%H:%M:%SZ"
        ),
    }
    if figures.progress is not None:
        status["progressPercentage"] = math.floor(100 * figures.progress)
    if figures.remaining_seconds is not None:
        status["estimatedRemainingSeconds"] = min(math.ceil(figures.remaining_seconds), _LONGEST_SECONDS)
    return status
