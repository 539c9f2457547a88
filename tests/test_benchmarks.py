"""What `benchmarks.train_step` reports, and one short run of it."""

import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # benchmarks are not installed; behind all else, since `data` stands there too

from benchmarks import models, netlab, report, train_step  # noqa: E402
from benchmarks.peers.group import Group, GroupError  # noqa: E402
from benchmarks.peers.messages import Answer  # noqa: E402
from tfdist.cluster import free_ports  # noqa: E402

RUN_SECONDS = 300
MARK = "TFDIST_TEST_RUN"  # by which a run's processes are found
TIMED = report.Row("mlp", 2, "1gbit", "stock", 1e9, None, (0.3, 0.4, 0.5), 0.1, 25e6, (0.4, 0.38))
FAILED = report.Row("mlp", 2, "1gbit", "ddp", 1e9, "ImportError: a | b")
RESULT = {
    "command": "python -m benchmarks.train_step",
    "date": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "network": "netlab",
    "settings": {"steps": 3},
    "machine": {"cores": 2},
    "versions": {"python": "3.11"},
    "rows": [TIMED.to_json(), FAILED.to_json()],
}


@pytest.mark.parametrize(
    ("compute", "traffic", "rate", "expected"),
    [(0.1, 25e6, 1e9, 0.2), (0.3, 25e6, 1e9, 0.3), (0.1, 25e6, None, 0.1), (0.1, 0, 1e9, 0.1)],
)
def test_floor_is_the_longer_of_compute_and_transfer(compute, traffic, rate, expected):
    assert report.floor(compute, traffic, rate) == pytest.approx(expected)


def test_row_splits_a_step_and_holds_it_against_its_floor():
    assert TIMED.waiting_seconds == pytest.approx(0.3)
    assert TIMED.floor_seconds == pytest.approx(0.2)
    assert TIMED.over_floor == pytest.approx(2.0)
    assert (FAILED.waiting_seconds, FAILED.floor_seconds, FAILED.over_floor) == (None, None, None)


def test_row_survives_json():
    for row in (TIMED, FAILED):
        again = report.Row.from_json(json.loads(json.dumps(row.to_json())))
        assert again.to_json() == json.loads(json.dumps(row.to_json())) | {
            "step_seconds": again.step_seconds,
            "block_seconds": again.block_seconds,
        }
        assert report.cells(again) == report.cells(row)


def test_table_has_a_line_of_equal_width_for_each_row_and_says_what_failed():
    text = report.markdown(RESULT)
    lines = [re.split(r"(?<!\\)\|", line) for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(RESULT["rows"])
    assert {len(line) for line in lines} == {len(report.COLUMNS) + 2}
    assert "400 [300 to 500]" in text and "failed: ImportError: a" in text and "1gbit (1000 Mbit/s)" in text
    assert "Horovod" in text and "abc" in text


def test_variants_are_compared_within_rounds():
    slower = report.Row("mlp", 2, "1gbit", "tfdist-loop", 1e9, None, (0, 1, 2), 0.1, 25e6, (0.8, 0.38))
    elsewhere = report.Row("mlp", 4, "1gbit", "tfdist-loop", 1e9, None, (0, 1, 2), 0.1, 25e6, (9.0, 9.0))
    compared = list(report.ratios([TIMED, FAILED, slower, elsewhere], "tfdist-loop", "stock"))
    assert [row.workers for row, _ in compared] == [2]
    assert compared[0][1] == pytest.approx(statistics.median([0.8 / 0.4, 0.38 / 0.38]))


def test_slowest_worker_counts_step_by_step_and_the_busiest_by_bytes():
    answers = [Answer([1.0, 2.0], 10, 30), Answer([3.0, 1.0], 20, 10)]
    assert train_step.slowest(answers) == [3.0, 2.0]
    assert train_step.busiest(answers) == 15


def test_report_is_written_beside_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "train_step.json"
    path.write_text(json.dumps(RESULT))
    written = report.write_report(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *written])
    assert {each.suffix for each in written} == {".md", ".svg"}
    assert all(each.stat().st_size for each in written)


def test_file_that_cannot_be_written_whole_is_left_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")

    def half(to):
        to.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        report.write_whole(path, half)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "before"


@pytest.mark.parametrize("name", models.MODELS)
def test_frameworks_train_the_same_number_of_parameters(name):
    import keras

    weights = models.keras_model(name, keras).trainable_weights
    assert sum(math.prod(weight.shape) for weight in weights) == pytest.approx(models.MODELS[name].parameters, rel=0.01)
    torch = pytest.importorskip("torch", reason="benchmarks compare with PyTorch: pip install torch==2.13.0")
    network = models.torch_model(name)
    assert isinstance(network, torch.nn.Module)
    assert sum(each.numel() for each in network.parameters()) == pytest.approx(models.MODELS[name].parameters, rel=0.01)


def test_failed_group_says_why_in_one_line_and_is_gone():
    hosts = [train_step.Loopback()] * 2
    with Group(hosts, free_ports(2), "no_such_peer", {}) as group:
        with pytest.raises(GroupError, match="no_such_peer") as caught:
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=60)
    assert "\n" not in str(caught.value)


def test_late_group_is_ended():
    with Group([train_step.Loopback()] * 2, free_ports(2), "keras_fit", {}) as group:
        begin = time.monotonic()
        with pytest.raises(GroupError, match=r"0 of 2 workers answered in 0\.5 s"):
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=0.5)
        assert time.monotonic() - begin < 20


def run(*flags):
    command = [sys.executable, "-m", "benchmarks.train_step", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: str(os.getpid())}, **pipes)


def test_unknown_names_are_refused_with_those_known():
    with run("--variants", "horse") as process:
        out, _ = process.communicate(timeout=RUN_SECONDS)
    assert process.returncode == 1 and "horse" in out and "tfdist-loop" in out, out


def test_short_run_in_the_lab_reports_all_and_leaves_nothing(tmp_path):
    if why := netlab.why_not():
        pytest.skip(why)
    path = tmp_path / "train_step.json"
    flags = ["--quick", "--models=embedding", "--variants=stock,tfdist", "--steps=3", "--rounds=1"]
    with run(*flags, "--links=200mbit", f"--json={path}") as process:
        try:
            out, _ = process.communicate(timeout=RUN_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0, out
    result = json.loads(path.read_text())
    assert result.keys() == RESULT.keys()
    rows = [report.Row.from_json(values) for values in result["rows"]]
    if busy := [row.error for row in rows if row.error and "off by more than" in row.error]:
        pytest.skip(f"the lab cannot measure here now: {busy[0]}")
    assert [(row.variant, row.link, row.error) for row in rows] == [
        (name, "200mbit", None) for name in ("stock", "tfdist")
    ]
    for row in rows:
        assert row.link_bits_per_second == pytest.approx(200e6, rel=0.1)
        # What a step must send: the rows of the batch that the embedding has, to one other worker.
        assert row.bytes_per_step > 4 * models.ITEM_WIDTH * models.ITEMS_PER_ROW * models.MODELS["embedding"].batch_size
        assert row.compute_seconds > 0 and row.over_floor > 0.5
    assert list(tmp_path.iterdir()) == [path]
    assert not children_left()


def test_killed_run_leaves_no_workers():
    with run("--nolab", "--quick", "--variants=stock") as process:
        started = eventually(lambda: len(children_left()) == 2)
        process.kill()
        out, _ = process.communicate(timeout=RUN_SECONDS)
    assert started, out
    assert eventually(lambda: not children_left()), children_left()


def children_left():
    """Workers that this test run started."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if b"benchmarks.peers.worker" in command and f"{MARK}={os.getpid()}".encode() in environ.split(b"\0"):
            found.append(path.name)
    return found


def eventually(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    return condition()
