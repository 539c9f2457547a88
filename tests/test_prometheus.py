"""A real Prometheus reads four workers of a job and evaluates the alert rules; TensorBoard returns all scalars."""

import contextlib
import gzip
import importlib.util
import json
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from launched import eventually, first_of_free_ports, nothing_left
from tfdist.cluster import free_ports
from tfdist.telemetry.worker_metrics import METRICS, PHASES

ROOT = pathlib.Path(__file__).parents[1]
WORKERS, SECONDS = 4, 120
pytestmark = [pytest.mark.exhaustive]

SCRIPT = """
import keras, numpy as np, tfdist
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(0)
x, y = rng.normal(size=(640, 64)).astype("float32"), rng.integers(0, 2, 640)
data = strategy.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, y), global_batch_size=64, seed=0))

class UntilAsked(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        stop = strategy.reduce("SUM", int((here / "stop").exists()), axis=None)
        self.model.stop_training = bool(stop)

telemetry = tfdist.callbacks.Telemetry(
    here / "tensorboard", PORT, every_seconds=0.5, trace_steps=(12, 14), trace_workers=[1])
backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=20)
model.fit(data, epochs=10**6, verbose=0, callbacks=[backup, UntilAsked(), telemetry])
"""


def asked(port, path, **query):
    url = f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        content = answer.read()
    return json.loads(gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content)


def results(port, query):
    return asked(port, "/api/v1/query", query=query)["data"]["result"]


@contextlib.contextmanager
def server(*command, **options):
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


# The figures of worker 1 with which an alert fires, minute by minute, and the minute from which it fires.
SLOW = {
    "TfdistNoProgress": (["tfdist_steps_total 600+0x60"], 16),
    "TfdistStraggler": (["tfdist_rows_total 0+400x60", 'tfdist_straggler{cause="computation"} 1x60'], 12),
    "TfdistWaitsForInput": (['tfdist_phase_seconds_total{phase="input"} 0+50x60'], 12),
    "TfdistSlowCallback": (['tfdist_straggler{cause="callback"} 0x9 1x20 0x40'], 20),
    "TfdistSlowLink": (['tfdist_straggler{cause="link"} 0x9 1x20 0x40'], 20),
    "TfdistOldBackup": (["tfdist_last_commit_timestamp_seconds 0x90"], 66),
    "TfdistRestarts": (["tfdist_restarts 0x5 4x60"], 7),
}
HEALTHY = [
    *("tfdist_steps_total 0+60x90", "tfdist_rows_total 0+600x90", "tfdist_restarts 0x90"),
    *('tfdist_phase_seconds_total{phase="compute"} 0+40x90', 'tfdist_phase_seconds_total{phase="exchange"} 0+15x90'),
    *('tfdist_phase_seconds_total{phase="input"} 0+5x90', "tfdist_last_commit_timestamp_seconds 0+60x90"),
    *('tfdist_straggler{cause="computation"} 0x90', 'tfdist_straggler{cause="callback"} 0x90'),
    'tfdist_straggler{cause="link"} 0x90',
]


def series_of(worker, lines):
    """Returns the series of a worker as promtool reads them."""
    series = []
    for line in lines:
        name, _, numbers = line.partition(" ")
        metric, _, labels = name.rstrip("}").partition("{")
        own = ",".join(filter(None, [labels, f'worker="{worker}",host="host-{worker}",job="tfdist"']))
        series.append({"series": f"{metric}{{{own}}}", "values": numbers})
    return series


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs the program promtool (of Prometheus)")
def test_each_alert_fires_for_the_worker_that_needs_it_and_no_earlier(tmp_path):
    yaml = pytest.importorskip("yaml")
    rules = yaml.safe_load((ROOT / "deploy/prometheus-rules.yaml").read_text())["groups"][0]["rules"]
    alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
    assert set(SLOW) == set(alerts)
    tests = []
    for name, (bad, minute) in SLOW.items():
        replaced = {line.partition(" ")[0] for line in bad}
        rest = [line for line in HEALTHY if line.partition(" ")[0] not in replaced]
        series = [*series_of(0, HEALTHY), *series_of(1, [*rest, *bad])]
        checks = [{"eval_time": f"{minute - 2}m", "alertname": each, "exp_alerts": []} for each in SLOW]
        tests.append({"interval": "1m", "input_series": series, "alert_rule_test": checks})
        tests[-1]["promql_expr_test"] = [
            {
                "expr": f'count by (worker) (ALERTS{{alertname="{name}",alertstate="firing"}})',
                "eval_time": f"{minute}m",
                "exp_samples": [{"labels": '{worker="1"}', "value": 1}],
            }
        ]
    file = {"rule_files": [str(ROOT / "deploy/prometheus-rules.yaml")], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(file))
    command = ["promtool", "test", "rules", str(tmp_path / "alerts.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus (Debian package)")
def test_prometheus_reads_four_workers_and_evaluates_the_alerts(tmp_path):
    ports, (port,) = first_of_free_ports(WORKERS), free_ports(1)
    rules = (ROOT / "deploy/prometheus-rules.yaml").read_text()
    (tmp_path / "prometheus-rules.yaml").write_text(rules)
    # The rule of old backups with a limit that the job reaches, so that an alert fires.
    quick = rules.replace("_seconds > 3600\n    for: 5m", "_seconds > -1").replace("name: tfdist", "name: quick")
    (tmp_path / "quick.yaml").write_text(quick.replace("tfdist:", "quick:"))
    config = (ROOT / "deploy/prometheus.yaml").read_text().replace("15s", "1s")
    config = config.replace("[prometheus-rules.yaml]", "[prometheus-rules.yaml, quick.yaml]")
    for index in range(WORKERS):
        config = config.replace(f"127.0.0.1:{9400 + index}", f"127.0.0.1:{ports + index}")
    (tmp_path / "prometheus.yaml").write_text(config)
    listen = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]

    def steps():
        with contextlib.suppress(OSError):
            return [float(each["value"][1]) for each in results(port, "tfdist_steps_total")]
        return []

    def rates():
        found = results(port, "sum by (worker) (rate(tfdist_phase_seconds_total[20s]))")
        return [float(each["value"][1]) for each in found]

    with nothing_left(tmp_path) as run, server("prometheus", f"--config.file={tmp_path / 'prometheus.yaml'}", *listen):
        script = run.script(SCRIPT.replace("PORT", str(ports)))
        with run.start("--workers", WORKERS, "--log-dir", tmp_path / "run", script) as job:
            try:
                assert eventually(lambda: len(steps()) == WORKERS and min(steps()) > 100, SECONDS)
                assert eventually(lambda: results(port, 'ALERTS{alertname="TfdistOldBackup",alertstate="firing"}'), 30)
                names = {each["metric"]["__name__"] for each in results(port, '{__name__=~"tfdist_.*"}')}
                up, healths = results(port, "up"), asked(port, "/api/v1/rules")["data"]["groups"]
                # A rate is too small until the job has run for its whole window.
                assert eventually(lambda: all(each == pytest.approx(1, abs=0.15) for each in rates()), 60), rates()
                phases = rates()
                slow = results(port, "tfdist:compute_seconds_per_row")
            finally:
                (tmp_path / "stop").touch()
                out, err = job.communicate(timeout=SECONDS)
    assert job.returncode == 0, out + err
    assert names == {metric.name for metric in METRICS} and [each["value"][1] for each in up] == ["1"] * WORKERS
    assert {rule["health"] for group in healths for rule in group["rules"]} == {"ok"}
    assert len(phases) == len(slow) == WORKERS
    listening = [path.read_text().splitlines()[0] for path in sorted((tmp_path / "run/attempt-0").glob("telemetry-*"))]
    assert [json.loads(line)["prometheus"] for line in listening] == [f"127.0.0.1:{ports + i}" for i in range(WORKERS)]

    (web,) = free_ports(1)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", tmp_path / "tensorboard", "--port", web]
    with server(*command, "--load_fast=false"):

        def tags():
            with contextlib.suppress(OSError):
                return asked(web, "/data/plugin/scalars/tags")
            return {}

        assert eventually(lambda: len(tags()) == WORKERS, 60)
        time.sleep(2)
        for worker in range(WORKERS):
            found = tags()[f"worker-{worker}"]
            assert {f"step/{phase}_seconds" for phase in PHASES} | {"logs/loss", "balance/share"} <= found.keys()
            for tag in found:
                points = asked(web, "/data/plugin/scalars/scalars", run=f"worker-{worker}", tag=tag)
                assert points and all(len(point) == 3 for point in points)
        if importlib.util.find_spec("xprof"):
            (trace,) = asked(web, "/data/plugin/profile/runs")
            assert trace.startswith("worker-1/") and "trace_viewer@" in asked(
                web, "/data/plugin/profile/run_tools", run=trace
            )
            shown = asked(web, "/data/plugin/profile/data", run=trace, tag="trace_viewer@", host=socket.gethostname())
            assert shown["returnedEventsSize"] > 100
    traces = [path.relative_to(tmp_path / "tensorboard").parts[0] for path in tmp_path.rglob("*.xplane.pb")]
    assert traces == ["worker-1"]
