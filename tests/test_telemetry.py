"""The figures of a worker: how steps are divided into phases and added up, and what files and readers get of them."""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import re
import socket
import threading
import time
import types
import urllib.request

import numpy as np
import pytest
from absl import logging

import telemetry_checks
import tfdist
from launched import eventually, first_of_free_ports
from tfdist.callbacks import telemetry_callback
from tfdist.errors import ClusterError
from tfdist.strategies.step_phases import StepMoments, divide, divide_on_gpu
from tfdist.strategies.step_report import StepReport
from tfdist.telemetry import step_tally
from tfdist.telemetry.json_lines_sink import JsonLinesSink
from tfdist.telemetry.metrics_sink import MetricsSink, WorkerIdentity
from tfdist.telemetry.metrics_writer import MetricsWriter
from tfdist.telemetry.prometheus_sink import PrometheusSink
from tfdist.telemetry.step_tally import StepTally, divide_outside, mean_step_seconds, share_of
from tfdist.telemetry.tensorboard_sink import TensorBoardSink
from tfdist.telemetry.worker_metrics import METRICS, MODEL_MEMORY, PHASES, WorkerMetrics, scalars

IDENTITY = WorkerIdentity(worker=1, workers=2, host="b", pid=7, attempt=3)
FIGURES = WorkerMetrics(
    time=1000.0,
    step=150,
    epoch=2,
    steps=50,
    restarts=3,
    resident_bytes=4096,
    cpu_seconds=8.0,
    rows=640,
    global_rows=1280,
    phase_seconds=dict.fromkeys(PHASES, 1.5),
    step_seconds=0.25,
    share=0.5,
    imbalance=1.25,
    straggler={"computation": 1.0, "input": 0.0, "link": 0.0, "callback": 0.0},
    raw_bytes=4000,
    sent_bytes=1000,
    compression_ratio=4.0,
    residual_norm=0.125,
    network_sent_bytes=1100,
    network_received_bytes=1200,
    progress=0.25,
    remaining_seconds=30.0,
    committed_at=900.0,
    model_bytes={"weights": 800.0, "optimizer_state": 1600.0},
    logs={"loss": 0.5, "val_loss": 0.75},
)


def moments(**given):
    told = {"ended_before": 10, "asked": 11, "agrees": 13, "begin": 14, "loss": 16, "share": 17, "gradients": 19}
    return StepMoments(**{**told, "end": 24, **given})


@pytest.mark.parametrize(
    ("given", "outside", "input_", "compute", "exchange"),
    [
        ({}, 1, 2, 4, 7),
        ({"loss": 0, "share": 0}, 1, 2, 5, 6),
        ({"agrees": 0}, 1, 3, 4, 6),
        ({"asked": 0, "agrees": 0}, 4, 0, 4, 6),  # The graph did not say when it asked.
        ({"asked": 5}, 4, 0, 4, 6),  # It asked in a step before.
        ({"gradients": 0}, 1, 2, 9, 2),  # No optimizer in the step.
        ({"ended_before": 0}, 0, 2, 4, 7),
        ({"ended_before": 0, "asked": 0, "agrees": 0}, 0, 0, 4, 6),
    ],
)
def test_the_phases_of_a_step_sum_to_its_time(given, outside, input_, compute, exchange):
    step = moments(**given)
    phases = divide(step)
    assert (phases.outside, phases.input, phases.compute, phases.exchange) == (outside, input_, compute, exchange)
    if step.ended_before:
        assert phases.seconds == step.end - step.ended_before


@pytest.mark.parametrize(
    ("given", "outside", "input_", "compute"),
    [
        ({}, 1, 2, 12),
        ({"asked": 8, "begin": 9}, 0, 0, 15),  # Launched while the GPU computes the step before.
        ({"asked": 8}, 0, 3, 12),
        ({"asked": 0}, 3, 0, 12),  # The graph did not say when it asked.
        ({"computed_before": 0}, 0, 2, 12),
        ({"computed_before": 0, "asked": 0}, 0, 0, 12),
        ({"computed": 12}, 1, 1, 0),  # The clocks of two threads differ.
    ],
)
def test_on_a_gpu_only_time_without_kernels_is_outside_or_input(given, outside, input_, compute):
    phases = divide_on_gpu(**{"computed_before": 10, "asked": 11, "begin": 13, "computed": 25, **given})
    assert (phases.outside, phases.input, phases.compute, phases.exchange) == (outside, input_, compute, 0)


def test_pauses_are_taken_out_of_the_time_of_callbacks():
    assert divide_outside(10, {"validation": 3, "save": 1}) == {"validation": 3, "save": 1, "callback": 6}
    assert divide_outside(2, {"validation": 3, "save": 1}) == {"validation": 1.5, "save": 0.5, "callback": 0}
    assert divide_outside(2, {"validation": 0, "save": 0}) == {"validation": 0, "save": 0, "callback": 2}


def report(number, rows=(4, 12), compute=(0.1, 0.3)):
    seconds = np.array(compute, np.float32)
    return StepReport(number, np.array(rows), seconds, seconds, False, np.zeros(len(compute)))


def phases_of(seconds):
    return types.SimpleNamespace(input=0.25 * seconds, compute=0.5 * seconds, exchange=0.25 * seconds)


@pytest.fixture
def clock(monkeypatch):
    """Returns a clock that the test moves."""
    clock = types.SimpleNamespace(now=100.0)
    monkeypatch.setattr(step_tally, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_a_tally_has_the_own_rows_and_all_the_time_of_a_fit(clock):
    tally = StepTally(slice(1, 2))
    tally.begin()
    start = tally.latest
    clock.now += 5  # It traces.
    tally.add(report(1), phases_of(2))
    first = tally.latest
    assert mean_step_seconds(first, start) is None
    clock.now += 10
    tally.pause("validation", 4)
    tally.pause("save", 1)
    tally.add(report(2), phases_of(2))
    clock.now += 1
    tally.end()
    whole = tally.latest

    assert (whole.rows, whole.work.rows, whole.work.steps) == (24, 32, 2)
    assert share_of(whole, first) == 0.75 and share_of(whole, whole) is None
    assert whole.phase_seconds == {
        **{"start": 3, "input": 1, "compute": 2, "exchange": 1},
        **{"validation": 4, "save": 1, "callback": 4},
    }
    assert sum(whole.phase_seconds.values()) == 16
    assert mean_step_seconds(whole, first) == mean_step_seconds(whole, start) == 10
    assert (whole.work - first.work).imbalance == pytest.approx(1.5)


def test_steps_without_reports_have_a_number_and_a_time_only(clock):
    tally = StepTally(slice(0, 1))
    start = tally.latest
    for _ in range(3):
        clock.now += 2
        tally.add_batches(1)
    tally.end()
    assert tally.latest.work.steps == 3 and mean_step_seconds(tally.latest, start) == 2
    assert not step_tally.is_reported(tally.latest)


def test_tensorboard_shows_totals_as_means_of_the_interval():
    before = dataclasses.replace(
        FIGURES, time=990.0, steps=40, rows=540, sent_bytes=500, phase_seconds={"compute": 0.5}, cpu_seconds=3.0
    )
    told = dict(scalars(FIGURES, before))
    assert told["throughput/rows_per_second"] == 10 and told["throughput/steps_per_second"] == 1
    assert told["traffic/sent_bytes"] == 50 and told["step/compute_seconds"] == pytest.approx(0.1)
    assert told["process/used_cores"] == 0.5 and told["backup/age_seconds"] == 100
    assert told["logs/val_loss"] == 0.75 and told["step/seconds"] == 0.25


def test_names_are_those_that_prometheus_recommends():
    for metric in METRICS:
        assert re.fullmatch(r"tfdist_[a-z_]+", metric.name) and metric.is_total == metric.name.endswith("_total")
        assert hasattr(FIGURES, metric.field)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_the_page_of_figures_has_all_names():
    page = (pathlib.Path(__file__).parents[1] / "docs/reference/telemetry.md").read_text()
    named = set(re.findall(r"`([^`]+)`", page))
    for metric in METRICS:
        label, tag = metric.label and f"{{{metric.label}=}}", metric.tag.replace("{}", f"<{metric.label}>")
        assert {metric.field, f"{metric.name}{label}", *filter(None, [tag])} <= named
    assert PHASES.keys() | MODEL_MEMORY.keys() <= named


def scraped(endpoint):
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
        return answer.read().decode()


def test_prometheus_reads_every_known_figure():
    parser = pytest.importorskip("prometheus_client.parser")
    sink = PrometheusSink("127.0.0.1", 0, IDENTITY)
    try:
        assert scraped(sink.endpoint) == ""
        sink.write(FIGURES)
        families = list(parser.text_string_to_metric_families(scraped(sink.endpoint)))
        samples = [sample for family in families for sample in family.samples]
        assert {sample.name for sample in samples} == {metric.name for metric in METRICS}
        assert all({"worker": "1", "host": "b"}.items() <= sample.labels.items() for sample in samples)
        assert {s.labels["phase"] for s in samples if s.name == "tfdist_phase_seconds_total"} == PHASES.keys()
        (age,) = [sample.value for sample in samples if sample.name == "tfdist_last_commit_timestamp_seconds"]
        assert age == 900

        sink.write(dataclasses.replace(FIGURES, rows=None))
        assert "tfdist_rows_total" not in scraped(sink.endpoint)
    finally:
        sink.close()
    with pytest.raises(OSError):
        scraped(sink.endpoint)


def test_only_loopback_can_connect_unless_another_address_is_given():
    pytest.importorskip("prometheus_client")
    sink = PrometheusSink("127.0.0.1", 0, IDENTITY)
    port = int(sink.endpoint.rpartition(":")[2])
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=5)
    finally:
        sink.close()


def test_a_taken_port_is_named_with_its_holder():
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ClusterError, match=rf"port {port} at 127\.0\.0\.1 is taken by process {os.getpid()}"):
            PrometheusSink("127.0.0.1", port, IDENTITY)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_file_has_a_header_and_whole_lines_although_the_disk_is_full_for_a_while(tmp_path, monkeypatch):
    path = tmp_path / "telemetry-1.jsonl"
    sink = JsonLinesSink(path, IDENTITY, {"prometheus": "127.0.0.1:1", "every_seconds": 5.0})
    sink.write(FIGURES)
    write = os.write
    writes = iter([lambda *given: write(given[0], given[1][:9]), None])

    def full(descriptor, data):
        if do := next(writes):
            return do(descriptor, data)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            sink.write(FIGURES)
    sink.write(dataclasses.replace(FIGURES, share=None, logs={"loss": float("nan")}))

    header, first, second = lines(path)
    assert header | {"start": 0} == dataclasses.asdict(IDENTITY) | {
        **{"start": 0, "prometheus": "127.0.0.1:1", "every_seconds": 5.0}
    }
    assert first == dataclasses.asdict(FIGURES)
    assert "share" not in second and second["logs"] == {"loss": "nan"}


class Memory(MetricsSink):
    def __init__(self, fails=False):
        self.written, self.fails, self.is_closed = [], fails, False

    def write(self, figures):
        self.written.append(figures)
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")

    def close(self):
        self.is_closed = True


def test_a_sink_that_fails_is_logged_once_and_the_others_go_on(monkeypatch):
    errors, broken, sound = [], Memory(fails=True), Memory()
    monkeypatch.setattr(logging, "error", lambda text, *given: errors.append(text % given))
    writer = MetricsWriter(lambda: FIGURES, [broken, sound], 0.01)
    assert eventually(lambda: len(sound.written) > 3)
    writer.close()
    writer.close()

    # `close` waits for ten seconds at most.
    assert eventually(lambda: broken.is_closed and sound.is_closed) and len(broken.written) == len(sound.written)
    assert len(errors) == 1 and "No space left" in errors[0] and "Training continues" in errors[0]
    assert eventually(lambda: "tfdist-telemetry" not in [thread.name for thread in threading.enumerate()])


def test_the_end_of_a_fit_frees_its_port_although_a_write_hangs():
    pytest.importorskip("prometheus_client")
    telemetry = tfdist.callbacks.Telemetry(prometheus_port=first_of_free_ports(1))
    (first,) = telemetry._sinks(IDENTITY)
    telemetry._stop()  # The thread that writes, which a hanging disk may hold, has not closed the sink.
    (second,) = telemetry._sinks(IDENTITY)
    second.close()
    first.close()


@pytest.mark.parametrize(("slot", "port"), [("", 9400), ("0", 65535), ("3", 9403)])
def test_workers_of_a_machine_take_consecutive_ports(slot, port, monkeypatch):
    monkeypatch.setenv("TFDIST_SLOT", slot)
    assert telemetry_callback._own_port(port - int(slot or 0)) == port
    assert telemetry_callback._own_port(0) == 0


def test_a_port_beyond_the_last_one_is_refused(monkeypatch):
    monkeypatch.setenv("TFDIST_SLOT", "2")
    with pytest.raises(ValueError, match="must be at most 65533, got 65534"):
        telemetry_callback._own_port(65534)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"log_dir": ""}, "log_dir"),
        ({"prometheus_port": -1}, "prometheus_port"),
        ({"prometheus_port": 65536}, "prometheus_port"),
        ({"prometheus_port": True}, "prometheus_port"),
        ({"prometheus_port": "9400"}, "prometheus_port"),
        ({"prometheus_address": ""}, "prometheus_address"),
        ({"every_seconds": 0}, "every_seconds"),
        ({"every_seconds": float("nan")}, "every_seconds"),
        ({"every_seconds": "5"}, "every_seconds"),
        ({"trace_steps": (1, 2)}, "log_dir"),
        ({"log_dir": "a", "trace_steps": (0, 2)}, "trace_steps"),
        ({"log_dir": "a", "trace_steps": (3, 2)}, "trace_steps"),
        ({"log_dir": "a", "trace_steps": 3}, "trace_steps"),
        ({"trace_workers": [-1]}, "trace_workers"),
        ({"trace_when_asked": 5}, "log_dir"),
        ({"log_dir": "a", "trace_when_asked": 0}, "trace_when_asked"),
        ({"log_dir": "a", "trace_when_asked": True}, "trace_when_asked"),
        ({"log_dir": "a", "trace_when_asked": "5"}, "trace_when_asked"),
        ({"trace_workers": 0}, "trace_workers"),
    ],
)
def test_wrong_arguments_are_refused_with_the_value(given, named):
    with pytest.raises(ValueError, match=named) as caught:
        tfdist.callbacks.Telemetry(**given)
    assert repr(list(given.values())[-1]) in str(caught.value) or given == {"log_dir": ""}


@pytest.mark.parametrize(
    ("given", "extra"), [({"log_dir": "logs"}, "tensorboard"), ({"prometheus_port": 0}, "prometheus")]
)
def test_a_missing_package_is_named_with_its_remedy(given, extra, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"pip install 'tfdist\[{extra}\]'"):
        tfdist.callbacks.Telemetry(**given)


@pytest.mark.slow
def test_tensorboard_returns_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(str(tmp_path))
    before = dataclasses.replace(FIGURES, step=100, steps=0, time=990.0)
    for figures in (before, FIGURES, FIGURES, dataclasses.replace(FIGURES, logs={"loss": 0.25})):
        sink.write(figures)
    sink.close()

    read = EventAccumulator(str(tmp_path)).Reload()
    expected = {tag for tag, _ in scalars(FIGURES, before)}
    assert set(read.Tags()["tensors"]) == expected and len(expected) == 33
    assert [event.step for event in read.Tensors("logs/loss")] == [150, 150]
    assert len(read.Tensors("step/compute_seconds")) == 1


def tensors(folder):
    """Returns the tags in a folder of TensorBoard, each with its last step and value."""
    import tensorflow as tf
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(folder)).Reload()
    events = {tag: read.Tensors(tag)[-1] for tag in read.Tags()["tensors"]}
    return {tag: (event.step, float(tf.make_ndarray(event.tensor_proto))) for tag, event in events.items()}


@pytest.mark.slow
def test_two_workers_record_their_rows_their_time_and_their_bytes(pools, tmp_path):
    parser = pytest.importorskip("prometheus_client.parser")
    answers = pools("2x1").run(telemetry_checks.trained, str(tmp_path))
    weights = 4 * (64 * 512 + 512 + 512 * 2 + 2)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["worker-0", "worker-1"]
    steps = telemetry_checks.EPOCHS * telemetry_checks.ROWS // telemetry_checks.BATCH
    rows = 0
    for worker, (text, seconds, sent, known) in enumerate(answers):
        samples = [each for family in parser.text_string_to_metric_families(text) for each in family.samples]
        assert {each.labels["worker"] for each in samples} == {str(worker)}
        own = {each.name: each.value for each in samples if len(each.labels) == 2}
        phases = {each.labels["phase"]: each.value for each in samples if "phase" in each.labels}
        memory = {each.labels["kind"]: each.value for each in samples if "kind" in each.labels}
        rows += own["tfdist_rows_total"]
        assert (memory["weights"], memory["gradients"]) == (weights, weights) and memory == known
        assert memory["residuals"] == 4 * 64 * 512 < own["tfdist_resident_memory_bytes"]
        assert own["tfdist_steps_total"] == own["tfdist_step"] == steps
        assert own["tfdist_share_ratio"] == pytest.approx(telemetry_checks.SHARES[worker], abs=0.05)
        assert own["tfdist_gradient_sent_bytes_total"] == sent
        assert own["tfdist_network_sent_bytes_total"] >= sent
        # The fit also reads the figures and ends, which is not counted yet.
        assert 0 < sum(phases.values()) < seconds and phases["compute"] > 0 and phases["validation"] > 0
        shown = tensors(tmp_path / f"worker-{worker}")
        assert shown["memory/weights_bytes"][1] == weights
        assert {"step/compute_seconds", "logs/loss", "logs/val_loss", "throughput/rows_per_second"} <= shown.keys()
        assert shown["logs/loss"][0] == steps
    assert rows == telemetry_checks.EPOCHS * telemetry_checks.ROWS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("placement", "transport", "sent"),
    [
        ("2x1", "tensorflow", 1),
        ("2x2", "auto", 1.5),  # A ring of four: each worker sends 2 (4 - 1) / 4 of the gradients.
        pytest.param("2x1", "auto", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_bytes_are_known_whatever_carries_them(placement, transport, sent, pools):
    for told in pools(placement).run(telemetry_checks.bytes_of_a_step, placement, transport):
        assert told == pytest.approx([sent, sent], rel=0.03)


@pytest.mark.slow
def test_a_worker_traces_the_next_steps_at_each_signal(pools, tmp_path):
    before, after = pools("2x1").run(telemetry_checks.traced_when_asked, str(tmp_path))
    assert before == after  # The tracing worker and its peer have equal weights.
    traces = list(tmp_path.rglob("*.xplane.pb"))
    assert len(traces) == 2 and {path.relative_to(tmp_path).parts[0] for path in traces} == {"worker-1"}
    assert all(path.stat().st_size for path in traces)


@pytest.mark.slow
@pytest.mark.parametrize("under", ["one device", "strategy"])
def test_a_fit_on_one_device_is_recorded_again_and_again(under, tmp_path):
    import keras

    scope = tfdist.MirroredStrategy(["CPU:0"]).scope() if under == "strategy" else contextlib.nullcontext()
    with scope:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    broken = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    telemetry = tfdist.callbacks.Telemetry(tmp_path, trace_steps=(2, 3))
    data = np.ones((32, 1)), np.ones(32)
    began = time.monotonic()
    model.fit(*data, batch_size=4, epochs=2, verbose=0, callbacks=[telemetry])
    with pytest.raises(ZeroDivisionError):
        model.fit(*data, batch_size=4, verbose=0, callbacks=[telemetry, broken])
    model.fit(*data, batch_size=4, verbose=0, callbacks=[telemetry])

    seconds, shown = time.monotonic() - began, tensors(tmp_path / "worker-0")
    assert shown["step/seconds"][0] == 25 and 0 < shown["step/seconds"][1] < seconds
    assert ("throughput/rows_per_second" in shown) == (under == "strategy")
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    assert eventually(lambda: "tfdist-telemetry" not in [thread.name for thread in threading.enumerate()])
    assert telemetry.endpoint is None
