"""The progress of a `fit`: its estimate, and what Kubeflow Trainer gets of it."""

import dataclasses
import datetime
import http.server
import json
import threading
import types
import urllib.error

import pytest

from tfdist.telemetry import kubeflow_sink, progress_estimate
from tfdist.telemetry.kubeflow_sink import KubeflowSink, is_given, status_of
from tfdist.telemetry.progress_estimate import ProgressEstimate
from tfdist.telemetry.worker_metrics import WorkerMetrics

pytestmark = pytest.mark.unit

FIGURES = WorkerMetrics(
    time=0.0,
    step=30,
    epoch=1,
    steps=30,
    restarts=0,
    resident_bytes=1,
    cpu_seconds=1.0,
    progress=0.3999,
    remaining_seconds=59.2,
    logs={"loss": 0.123456789, "": 1.0, "a" * 100: float("nan")},
)


@pytest.fixture
def clock(monkeypatch):
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress_estimate, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_the_rest_takes_as_long_as_the_steps_so_far_say(clock):
    progress = ProgressEstimate(epochs=4, steps=5)
    assert progress.done == 0 and progress.remaining_seconds is None
    for epoch in range(4):
        progress.begin_epoch(epoch)
        for batch in range(5):
            progress.end_batch(batch)
            done = (5 * epoch + batch + 1) / 20
            assert progress.done == pytest.approx(done)
            if epoch or batch:
                assert progress.remaining_seconds == pytest.approx((1 - done) * 20 * 2)
            clock.now += 2
        progress.end_epoch(epoch)
    assert progress.done == 1 and progress.remaining_seconds == 0


def test_the_first_epoch_tells_how_many_steps_an_epoch_has(clock):
    progress = ProgressEstimate(epochs=2, steps=None)
    progress.begin_epoch(0)
    progress.end_batch(0)
    assert progress.done is None and progress.remaining_seconds is None
    progress.end_batch(3)
    progress.end_epoch(0)
    assert progress.done == 0.5
    progress.begin_epoch(1)
    progress.end_batch(0)
    assert progress.done == 0.625


def test_a_restored_fit_counts_from_where_it_continues(clock):
    progress = ProgressEstimate(epochs=4, steps=4)
    progress.begin_epoch(3)
    progress.end_batch(0)
    clock.now += 8
    progress.end_batch(1)
    assert progress.done == 0.875 and progress.remaining_seconds == 16


def test_a_loop_without_a_number_of_epochs_has_no_progress(clock):
    progress = ProgressEstimate(epochs=None, steps=None)
    progress.begin_epoch(0)
    progress.end_batch(0)
    progress.end_epoch(0)
    assert progress.done is None and progress.remaining_seconds is None


def test_the_status_has_the_names_and_limits_of_kubeflow():
    status = status_of(FIGURES)
    assert status == {
        "progressPercentage": 39,
        "estimatedRemainingSeconds": 60,
        "lastUpdatedTime": "1970-01-01T00:00:00Z",
        "metrics": [
            {"name": "step", "value": "30"},
            {"name": "epoch", "value": "1"},
            {"name": "loss", "value": "0.123457"},
            {"name": "a" * 63, "value": "nan"},
        ],
    }
    datetime.datetime.strptime(status["lastUpdatedTime"], "%Y-%m-%dT%H:%M:%SZ")


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Returns the requests that a server got in place of Kubeflow Trainer; it answers with `code` and `location`."""
    got = types.SimpleNamespace(bodies=[], tokens=[], code=200, location=None)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.tokens.append(self.headers["Authorization"])
            got.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(got.code)
            if got.location:
                self.send_header("Location", got.location)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        got.url = f"http://127.0.0.1:{listening.server_port}/status"
        got.token = tmp_path / "token"
        got.token.write_text("first\n")
        monkeypatch.setenv(kubeflow_sink.SERVER_URL, got.url)
        monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", str(got.token))
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        yield got
        listening.shutdown()
        thread.join()


def test_the_server_gets_figures_every_five_seconds_and_at_the_end(server, monkeypatch):
    now = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(kubeflow_sink, "time", types.SimpleNamespace(monotonic=lambda: now.now))
    monkeypatch.setattr(kubeflow_sink, "_due", 0.0)
    assert is_given()
    sink = KubeflowSink()
    for _ in range(8):  # At 0, 2, ... 14 seconds.
        sink.write(FIGURES)
        now.now += 2
    assert len(server.bodies) == 3
    sink.close()  # Too soon, and not the end.
    server.token.write_text("second\n")
    last, end = KubeflowSink(), dataclasses.replace(FIGURES, progress=1.0, remaining_seconds=1e12)
    last.write(end)
    last.close()
    last.close()
    assert server.bodies == [{"trainerStatus": status_of(each)} for each in [*[FIGURES] * 3, end]]
    assert server.bodies[-1]["trainerStatus"]["estimatedRemainingSeconds"] < 2**31
    assert server.tokens == ["Bearer first"] * 3 + ["Bearer second"]


@pytest.mark.parametrize("code", [302, 307, 401, 500])
def test_a_refusal_and_a_redirect_are_errors_without_the_token(server, code):
    server.code, server.location = code, server.url
    with pytest.raises(urllib.error.HTTPError) as caught:
        KubeflowSink()._send(FIGURES)
    assert str(code) in str(caught.value) and "first" not in str(caught.value)
    assert len(server.bodies) == 1


def test_a_token_in_place_of_its_path_is_not_in_the_message(server, monkeypatch):
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", "eyJhbGciOi")
    with pytest.raises(OSError, match="must be the path of a file") as caught:
        KubeflowSink()._send(FIGURES)
    assert "eyJ" not in str(caught.value) and server.bodies == []


def test_without_kubeflow_nothing_is_sent(monkeypatch):
    monkeypatch.delenv(kubeflow_sink.SERVER_URL, raising=False)
    assert not is_given()
    KubeflowSink().close()
