"""`benchmarks.scaling`: dilated time, its variants and tables, predictions of its steps, and a short run."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import pytest
from absl import app
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # Benchmarks are not installed. Appended last, since the root also has a folder `data`.

from benchmarks import models, netlab, prediction, record, report, scaling, scaling_table, turns  # noqa: E402
from benchmarks.peers.messages import Answer  # noqa: E402
from tfdist.plan.exchange_costs import NONE, ExchangeCosts  # noqa: E402
from tfdist.plan.planned_buckets import Gradient  # noqa: E402

RUN_SECONDS = 600
ROW = report.Row(
    "emulated", 16, "1gbit", "tfdist", 958e6, None, (0.6, 0.65, 0.7), 0.1, 75e6, dilation=10.0, busy_share=0.4
)
ROW = dataclasses.replace(ROW, processor_seconds=4.0, worker_share=0.31)


@pytest.mark.parametrize(
    ("name", "peer", "options"),
    [
        ("stock", "keras_loop", {"library": "tensorflow"}),
        ("ddp", "torch_ddp", {}),
        ("ddp+fp16", "torch_ddp", {"hook": "fp16"}),
        ("tfdist", "keras_fit", {}),
        ("tfdist+powersgd(4)", "keras_fit", {"compression": "powersgd(4)"}),
        ("tfdist+groups", "keras_fit", {"exchange_group_size": "auto"}),
        ("tfdist+int8+groups", "keras_fit", {"compression": "int8", "exchange_group_size": "auto"}),
    ],
)
def test_a_name_is_a_peer_and_keyword_arguments(name, peer, options):
    assert scaling.variant_of(name) == turns.Variant(peer, options)


@pytest.mark.parametrize("name", ["horse", "stock+int8", "ddp+int8", "ddp+groups", "tfdist+int8+int4", ""])
def test_unknown_names_raise(name):
    with pytest.raises(app.UsageError, match="--variants takes names such as stock"):
        scaling.variant_of(name)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(["1"], {"1gbit": 1, "10gbit": 1}), (["8"], {"1gbit": 8, "10gbit": 8}), (["2", "40"], {"1gbit": 2, "10gbit": 40})],
)
def test_a_factor_of_time_counts_for_all_links_or_one(given, expected):
    scaling.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(dilation=given):
        assert scaling.chosen_dilations(["1gbit", "10gbit"]) == expected


@dataclasses.dataclass
class _ShapedLab:
    """Takes the place of a lab, and keeps what its links were asked for."""

    hosts: tuple = ()
    asked: tuple = ()
    bits_per_second: float = 95e6

    def shape(self, rate, dilation):
        self.asked = (rate, dilation)


def test_in_dilated_time_links_have_less_rate():
    lab = _ShapedLab()
    network = turns.Network(lab, 2, {"1gbit": 10.0})
    assert network.shape("1gbit") == pytest.approx(950e6)
    assert lab.asked == ("100000.000kbit", 10.0)
    network.shape("100mbit")
    assert lab.asked == ("100mbit", 1.0)


@pytest.mark.parametrize("given", [[], ["0.5"], ["fast"], ["1", "2", "3"]])
def test_wrong_factors_of_time_raise(given):
    scaling.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(dilation=given), pytest.raises(app.UsageError, match="--dilation takes"):
        scaling.chosen_dilations(["1gbit", "10gbit"])


@pytest.mark.parametrize(
    ("link", "factor", "rate"), [("1gbit", 1, 1e9), ("1gbit", 20, 5e7), ("100mbit", 40, 2.5e6), ("unshaped", 9, None)]
)
def test_a_dilated_link_has_a_part_of_its_rate(link, factor, rate):
    assert netlab.parse_rate(turns.dilated(link, factor)) == rate


class SlowGroup:
    """Takes 0.1 s for a step, times its dilation, and half of the processor time of one core."""

    def __init__(self, *_):
        self.dilations = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def train(self, model, *, alone, warmup, steps, timeout_seconds, dilation=1.0):
        seconds = 0.1 * dilation
        times = {"processor_seconds": 0.5 * seconds * steps, "busy_seconds": seconds * steps}
        return [Answer([seconds * step for step in range(steps + 1)], 1000 * steps, 1000 * steps, **times)]


def test_measured_times_are_divided_by_the_factor(monkeypatch):
    monkeypatch.setattr(turns, "Group", SlowGroup)
    monkeypatch.setattr(turns, "_CORES", 2)
    rows = record.Record(None, {}, report.KEY)
    network = turns.Network(None, 2, {"far": 10.0})
    plan = turns.Plan(steps=3, seconds=1, rounds=2, starts=1)
    turns.measure(rows, "emulated", network, {"tfdist": turns.Variant("none")}, ["near", "far"], plan)
    found = {row["link"]: report.Row.from_json(row) for row in rows.rows}
    assert [found[link].dilation for link in ("near", "far")] == [1, 10]
    for row in found.values():
        assert row.step_seconds == pytest.approx([0.1] * 3) and row.compute_seconds == pytest.approx(0.1)
        assert row.bytes_per_step == 500 and row.worker_share == pytest.approx(0.25)
        assert row.busy_share == pytest.approx(0.5)
    assert found["far"].processor_seconds == pytest.approx(0.5)
    assert rows.has("emulated", 2, "far", "tfdist", 10.0) and not rows.has("emulated", 2, "far", "tfdist", 1.0)


def test_an_emulated_accelerator_keeps_dilated_time(monkeypatch):
    times, slept = iter([5.0, 5.0]), []
    monkeypatch.setattr(models.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(models.time, "sleep", slept.append)
    monkeypatch.setattr(models._Accelerator, "dilation", 1.0)
    models.set_dilation(20.0)
    models._Accelerator().finish(models.EMULATED_LAYERS - 1)
    assert slept == [pytest.approx(20 * models.EMULATED_SECONDS / models.EMULATED_LAYERS)]


def test_the_table_has_efficiency_speed_and_processors():
    shown = dict(zip(scaling_table.COLUMNS, scaling_table.cells(ROW), strict=True))
    assert shown["step, ms [quartiles]"] == "650 [600 to 700]" and shown["exposed, ms"] == "550"
    assert shown["floor, ms"] == "626" and shown["step / floor"] == "1.04"
    assert shown["efficiency"] == "0.15" and shown["speed"] == "2.5"
    assert shown["processors: workers / all"] == "31% / 40%" and shown["K"] == "10"
    assert "9.0 with 16 workers" in scaling_table.published_note([ROW])


def test_a_failed_row_has_its_reason_and_all_columns():
    failed = report.Row("emulated", 2, "1gbit", "ddp", None, "ImportError: no torch")
    assert len(scaling_table.cells(failed)) == len(scaling_table.COLUMNS)
    table = scaling_table.markdown_table([ROW, failed])
    assert {line.count("|") for line in table.splitlines()} == {len(scaling_table.COLUMNS) + 1}
    assert "failed: ImportError: no torch" in table and scaling_table.published_note([failed]) == ""


@pytest.mark.parametrize(
    ("variant", "codec"),
    [("tfdist", NONE), ("tfdist+groups", NONE), ("tfdist+int8+groups", "int8"), ("tfdist+auto", None), ("ddp", None)],
)
def test_a_prediction_needs_the_codec_of_a_variant(variant, codec):
    assert prediction.codec_of(variant) == codec


def test_predictions_follow_link_and_factor_of_time():
    gradients = {NONE: [Gradient(4e6, 4e6)] * 10}
    rows = [ROW, dataclasses.replace(ROW, variant="ddp"), dataclasses.replace(ROW, error="it broke")]
    costs = ExchangeCosts(0.0, 0.0, {NONE: 0.0}, "nothing costs time but the link")
    (only,) = prediction.compare(rows, gradients, costs, cores=2)
    assert only.sent_bytes == pytest.approx(75e6)
    assert only.seconds == pytest.approx(0.01 + 75e6 * 8 / 958e6)
    assert only.ratio == pytest.approx(only.seconds / 0.65)
    assert prediction.summary([only]) == "1 of 1 predictions are within 15%; half are within 2.1%."
    slow = dataclasses.replace(costs, coding={NONE: 1e-8})
    (dilated,) = prediction.compare([ROW], gradients, slow, cores=2)
    (undilated,) = prediction.compare([dataclasses.replace(ROW, dilation=1.0)], gradients, slow, cores=2)
    # A worker has an eighth of a core, which stands for 1.25 cores if time is dilated by 10.
    assert dilated.seconds == pytest.approx(0.01 + 4e6 * 1e-8 / 1.25 + 75e6 * 8 / 958e6, rel=0.01)
    assert undilated.seconds > 40e6 * 1e-8 * 8


def test_short_run_in_the_lab_is_dilated(tmp_path):
    if why := netlab.why_not():
        pytest.skip(why)
    path = tmp_path / "scaling.json"
    flags = ["--workers=2", "--links=1gbit", "--dilation=2", "--variants=tfdist+int8", "--steps=3", "--rounds=1"]
    command = [sys.executable, "-m", "benchmarks.scaling", *flags, f"--json={path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, env={**os.environ})
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [report.Row.from_json(values) for values in json.loads(path.read_text())["rows"]]
    if row.error and "off by more than" in row.error:
        pytest.skip(f"the lab cannot measure here now: {row.error}")
    assert row.error is None and row.dilation == 2
    assert row.link_bits_per_second == pytest.approx(1e9, rel=0.1) or "this machine's limit" in done.stderr
    assert min(row.compute_seconds, row.step_seconds[1]) > models.EMULATED_SECONDS  # An accelerator sleeps so long.
    # 10 M numbers, a byte each and a scale for each block.
    assert row.bytes_per_step == pytest.approx(10.16e6, rel=0.05)
    assert row.worker_share > 0 and row.busy_share > 0
