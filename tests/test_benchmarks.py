"""Reports of the benchmarks, and short runs of them."""

import dataclasses
import json
import math
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
from absl import app
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # Benchmarks are not installed. Appended last, since the root also has a folder `data`.

from benchmarks import accuracy, choice_table, models, netlab, record, report, train_step, turns  # noqa: E402
from benchmarks.peers.group import Group, GroupError, last_words  # noqa: E402
from benchmarks.peers.messages import Answer, Trials  # noqa: E402
from launched import eventually  # noqa: E402
from tfdist.cluster import free_ports  # noqa: E402

RUN_SECONDS = 600
MARK = "TFDIST_TEST_RUN"  # environment variable that marks the processes of a run
TIMED = report.Row("mlp", 2, "1gbit", "stock", 1e9, None, (0.3, 0.4, 0.5), 0.1, 25e6, (0.4, 0.38), (0.4, 0.38))
FAILED = report.Row("mlp", 2, "1gbit", "ddp", 1e9, "ImportError: a | b")
CRASHED = dataclasses.replace(TIMED, variant="ddp+fp16", error="crashed after 1 of 3 rounds: it broke")
RESULT = {
    "commands": ["python -m benchmarks.train_step"],
    "date": "2026-01-01T00:00:00+00:00",
    "commit": "abc",
    "machine": {"cores": 2},
    "versions": {"python": "3.11"},
    "settings": {"steps": 3, "network": "netlab"},
    "rows": [TIMED.to_json(), FAILED.to_json(), CRASHED.to_json()],
}


@pytest.mark.parametrize(
    ("compute", "traffic", "rate", "expected"),
    [(0.1, 25e6, 1e9, 0.2), (0.3, 25e6, 1e9, 0.3), (0.1, 25e6, None, 0.1), (0.1, 0, 1e9, 0.1)],
)
def test_floor_is_the_longer_of_compute_and_transfer(compute, traffic, rate, expected):
    assert report.floor(compute, traffic, rate) == pytest.approx(expected)


def test_row_divides_a_step_and_compares_it_with_its_floor():
    assert TIMED.waiting_seconds == pytest.approx(0.3)
    assert TIMED.floor_seconds == pytest.approx(0.2)
    assert TIMED.over_floor == pytest.approx(2.0)
    assert (FAILED.waiting_seconds, FAILED.floor_seconds, FAILED.over_floor) == (None, None, None)


def test_row_survives_json():
    for row in (TIMED, FAILED, CRASHED):
        again = report.Row.from_json(json.loads(json.dumps(row.to_json())))
        assert again.to_json() == json.loads(json.dumps(row.to_json())) | {
            "step_seconds": again.step_seconds,
            "block_seconds": again.block_seconds,
            "stock_block_seconds": again.stock_block_seconds,
        }
        assert report.cells(again) == report.cells(row)


def test_table_has_a_line_of_equal_width_for_each_row_and_shows_failures():
    text = report.markdown(RESULT)
    table = text[text.index("## Every row") :]
    lines = [re.split(r"(?<!\\)\|", line) for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + len(RESULT["rows"])
    assert {len(line) for line in lines} == {len(report.COLUMNS) + 2}
    assert "400 [300 to 500]" in text and "failed: ImportError: a" in text and "1gbit (1000 Mbit/s)" in text
    assert "| crashed after 1 of 3 rounds: it broke |" in text and text.count("400") == 2
    assert "Horovod" in text and "abc" in text


def test_overview_has_a_column_for_each_link_and_blanks_where_nothing_was_measured():
    faster = report.Row("mlp", 2, "100mbit", "tfdist", 1e8, None, (1, 2, 3), 0.1, 20e6, (2.0,), (3.0,))
    rows = report.in_order([TIMED, FAILED, faster])
    assert report.overview(rows)[2:] == ["| stock |  | 400 (1.00) | 25 |", "| tfdist | 2000 (1.50) |  | 20 |"]


def test_variants_are_compared_with_stock_in_the_same_round():
    slower = report.Row("mlp", 2, "1gbit", "tfdist-loop", 1e9, None, (0, 1, 2), 0.1, 25e6, (0.8, 0.4), (0.4, 0.38))
    assert slower.times_stock == pytest.approx(statistics.median([0.4 / 0.8, 0.38 / 0.4]))
    assert (TIMED.times_stock, FAILED.times_stock) == (1.0, None)
    once = dataclasses.replace(slower, stock_block_seconds=(None, 0.38))  # stock failed in the first round
    assert once.times_stock == pytest.approx(0.38 / 0.4)


def test_every_cast_has_the_reference_and_missing_variants():
    missing = {"1gbit": ["stock", "a", "b", "c"], "unshaped": ["d"]}
    assert turns.casts(missing, True, 3) == [["stock", "a", "b"], ["stock", "c", "d"]]
    assert turns.casts({"1gbit": ["a"]}, True, 3) == [["stock", "a"]]
    assert turns.casts({"1gbit": ["a", "b"]}, False, 1) == [["a"], ["b"]]
    assert turns.casts({"1gbit": ["stock"]}, True, 3) == [["stock"]]
    assert turns.casts({"1gbit": []}, True, 3) == []


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("workers", ["2", "1"], "from 2 to 200, got 2,1"),
        ("workers", ["two"], "got two"),
        ("workers", ["300"], "got 300"),
        ("workers", [], "got nothing"),
        ("links", ["none", "fast"], "100mbit, or none; got 'fast'"),
        ("links", ["1kbit"], "from 100kbit to 100gbit, got '1kbit'"),
        ("links", [], "got nothing"),
        ("models", [], "got nothing"),
        ("variants", [], "got nothing"),
        ("json", str(ROOT), "got .*: Is a directory"),
        ("json", "/proc/here/a.json", "got /proc/here/a.json: No such file"),
        ("nolab", True, "--links needs the lab"),
        ("codecs", ["int9"], "--codecs takes float16; got int9"),
        ("variants", ["horse"], "--variants takes stock, tfdist-loop, .*; got horse"),
        ("other_packages", "/no-such-folder", "--other_packages takes a folder"),
        ("other_environment", ["A=1", "=2"], "--other_environment takes NAME=VALUE, got =2"),
    ],
)
def test_wrong_flags_raise_before_work_begins(flag, value, words, monkeypatch):
    monkeypatch.setattr(train_step, "available_codecs", lambda: ["float16"])
    train_step.FLAGS.mark_as_parsed()
    flags = {"codecs": [], "workers": ["2"], "links": ["1GBIT"], flag: value}
    with flagsaver.flagsaver(**flags), pytest.raises(app.UsageError, match=words):
        train_step.main(["train_step"])


class FakeGroup:
    """Trains in no time. Groups with a number in `failing` fail after `blocks` blocks."""

    failing = ()
    blocks = 0
    made = 0
    seconds = 0.1
    longest = 0.0

    def __init__(self, *_):
        self._left = 2 * self.blocks if FakeGroup.made in self.failing else math.inf
        FakeGroup.made += 1

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def train(self, model, *, alone, warmup, steps, timeout_seconds, dilation=1.0):
        self._left -= steps > 1
        if self._left < 0:
            raise GroupError("it broke")
        FakeGroup.longest = max(self.longest, timeout_seconds)
        return [Answer([self.seconds * step for step in range(steps + 1)], 1, 1)]


def measured(monkeypatch, links, plan, failing, blocks=0):
    """Returns the rows of one variant with the given failures of its groups."""
    monkeypatch.setattr(turns, "Group", FakeGroup)
    for name, value in {"failing": failing, "blocks": blocks, "made": 0}.items():
        monkeypatch.setattr(FakeGroup, name, value)
    rows = record.Record(None, {}, report.KEY)
    turns.measure(rows, "mlp", turns.Network(None, 2), {"stock": turns.Variant("none")}, list(links), plan)
    return rows


@pytest.mark.parametrize(
    ("failing", "errors"),
    [
        ([0, 1], {"100mbit": "it broke", "1gbit": "not tried: failed on 100mbit (it broke)"}),
        ([0], {"100mbit": None, "1gbit": None}),
        ([1], {"100mbit": None, "1gbit": None}),
    ],
    ids=["both starts", "the first", "the second"],
)
def test_a_failure_is_reported_for_its_link_unless_another_start_succeeded(failing, errors, monkeypatch):
    rows = measured(monkeypatch, errors, turns.Plan(steps=3, seconds=1, rounds=1, starts=2), failing)
    assert {row["link"]: row["error"] for row in rows.rows} == errors


def test_a_variant_that_crashes_after_some_rounds_is_not_measured(monkeypatch):
    rows = measured(monkeypatch, ["1gbit"], turns.Plan(steps=3, seconds=1, rounds=3, starts=1), [0], blocks=1)
    row = report.Row.from_json(rows.rows[0])
    assert row.error == "crashed after 1 of 3 rounds: it broke" and len(row.block_seconds) == 1
    assert report.cells(row)[4] == row.error and not rows.has("mlp", 2, "1gbit", "stock", 1.0)


@pytest.mark.parametrize(("seconds", "longest"), [(0.1, 300), (60, 10 * 6 * 60)])
def test_slow_steps_have_time(seconds, longest, monkeypatch):
    monkeypatch.setattr(FakeGroup, "seconds", seconds)
    monkeypatch.setattr(FakeGroup, "longest", 0.0)
    measured(monkeypatch, ["1gbit"], turns.Plan(steps=3, seconds=1, rounds=1, starts=1), [])
    assert FakeGroup.longest == longest


class ChoosingGroup(FakeGroup):
    """Notes the orders to make models anew, and answers them with trials."""

    renewed = 0

    def train(self, model, *, renew=False, **order):
        ChoosingGroup.renewed += renew
        answer = super().train(model, **order)[0]
        return [dataclasses.replace(answer, trials=Trials(2.5, 20, "int8 is fast") if renew else None)]


def test_an_automatic_choice_begins_anew_on_each_link(monkeypatch):
    monkeypatch.setattr(turns, "Group", ChoosingGroup)
    monkeypatch.setattr(ChoosingGroup, "renewed", 0)
    rows = record.Record(None, {}, report.KEY)
    variants = {"tfdist": turns.Variant("none"), "tfdist-auto": turns.Variant("none", {"compression": "auto"})}
    plan = turns.Plan(steps=3, seconds=1, rounds=2, starts=1)
    turns.measure(rows, "mlp", turns.Network(None, 2), variants, ["100mbit", "1gbit"], plan)
    found = [report.Row.from_json(row) for row in rows.rows]
    assert ChoosingGroup.renewed == 2
    assert [row.trial_steps for row in found] == [None, 20, None, 20] and found[1].trial_seconds == 2.5
    assert found[3].reason == "int8 is fast"


def test_an_automatic_choice_is_compared_with_the_best_codec_in_each_round():
    def row(variant, *milliseconds, **more):
        blocks = tuple(each / 1e3 for each in milliseconds)
        return dataclasses.replace(TIMED, variant=variant, step_seconds=(blocks[1],) * 3, block_seconds=blocks, **more)

    auto = row("tfdist-auto", 102, 104, 90, trial_seconds=20.0, trial_steps=100)
    (cell,) = choice_table.cells_of([row("tfdist", 200, 200, 200), row("tfdist+int8", 102, 100, 90), auto, FAILED])
    assert cell.best == "int8" and cell.ratio("int8") == 1 and cell.ratio("none") == pytest.approx(0.51)
    assert cell.with_trials() == pytest.approx((20 + 900 * 0.102) / 200)
    head, _, line = choice_table.markdown_table([cell]).splitlines()
    assert "float16" not in head and "K" not in head.split() and head.count("|") == line.count("|")
    assert "1.00 (int8)" in line and "100 steps, 20.0 s" in line


def test_rows_stay_in_order_of_model_workers_and_rate():
    def row(model, workers, link, rate, error=None):
        return report.Row(model, workers, link, "stock", rate, error)

    wanted = [row("mlp", 2, "1gbit", 1e9), row("mlp", 2, "10gbit", 1e10), row("mlp", 4, "1gbit", 1e9)]
    wanted += [row("mlp", 4, "1gbit", None, "it broke"), row("cnn", 2, "1gbit", 1e9)]
    assert report.in_order([wanted[at] for at in (1, 3, 0, 4, 2)]) == wanted


def test_record_continues_an_earlier_run(tmp_path):
    path = tmp_path / "rows.json"
    first = record.Record(path, {"rounds": 2}, ("name",))
    first.add({"name": "a", "value": 1}, {"name": "b", "error": "it broke"})
    again = record.Record(path, {"rounds": 2}, ("name",))
    assert (again.has("a"), again.has("b"), again.has("c")) == (True, False, False)
    again.add({"name": "b", "value": 2}, {"name": "c", "value": 3})
    assert [row.get("value") for row in json.loads(path.read_text())["rows"]] == [1, 2, 3]
    for rounds in (3, 4):
        other = record.Record(path, {"rounds": rounds}, ("name",))
        assert other.rows == []
        other.add({"name": "a", "value": rounds})
    asides = [json.loads((tmp_path / f"rows.before-{number}.json").read_text()) for number in (1, 2)]
    assert [len(aside["rows"]) for aside in asides] == [3, 1], "hours of work are not lost"
    assert len(list(tmp_path.iterdir())) == 3


def test_record_keeps_the_origin_of_each_row(tmp_path):
    rows = record.Record(tmp_path / "rows.json", {}, ("name",))
    rows.add({"name": "a"})
    (row,) = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["commit"] == rows.document["commit"] and row["command"] in rows.document["commands"] and row["date"]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{}]}', '{"rows": 1}'])
def test_record_renames_files_that_are_not_records(tmp_path, text):
    path = tmp_path / "rows.json"
    path.write_text(text)
    assert record.Record(path, {}, ("name",)).rows == []
    assert [each.name for each in tmp_path.iterdir()] == ["rows.before-1.json"]


def test_record_does_not_continue_with_another_tree(tmp_path, monkeypatch):
    """A tree with uncommitted changes of measured code counts as another tree."""
    tree = tmp_path / "tree"
    (tree / "benchmarks").mkdir(parents=True)
    git = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    code = tree / "benchmarks" / "a.py"
    code.write_text("1")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "a"], check=True)
    monkeypatch.setattr(record, "_ROOT", tree)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # as in a container

    def goes_on():
        rows = record.Record(tree / "benchmarks" / "rows.json", {}, ("name",))
        known = rows.has("a")
        rows.add({"name": "a"})
        return known

    assert (goes_on(), goes_on()) == (False, True)  # The result file itself does not count as a change.
    assert "+dirty" not in record.describe_commit()
    for path, text in ((code, "2"), (code, "3"), (tree / "benchmarks" / "b.py", "4")):
        path.write_text(text)
        assert (goes_on(), goes_on()) == (False, True)
    assert re.fullmatch(r"[0-9a-f]+\+dirty\.[0-9a-f]{8}", record.describe_commit())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert record.describe_commit() == "unknown"
    assert (goes_on(), goes_on()) == (False, False)


def test_a_step_lasts_until_the_last_worker_ends_it_and_the_busiest_counts_by_bytes():
    answers = [Answer([0.0, 1.0, 5.0], 10, 30), Answer([1.0, 3.0, 4.0], 20, 10)]
    assert [answer.step_seconds for answer in answers] == [[1.0, 4.0], [2.0, 1.0]]
    assert turns.periods(answers) == [2.0, 2.0]
    assert turns.busiest(answers) == 15


def test_report_is_written_beside_the_results(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "train_step.json"
    path.write_text(json.dumps(RESULT))
    written = report.write_report(path)
    assert sorted(tmp_path.iterdir()) == sorted([path, *written])
    assert {each.suffix for each in written} == {".md", ".png"}
    assert all(each.stat().st_size for each in written)


PARTIAL = {
    "all failed": [FAILED],
    "all crashed": [CRASHED],
    "not measured": [dataclasses.replace(FAILED, error=None)],
    "no compute": [dataclasses.replace(TIMED, compute_seconds=None, bytes_per_step=None)],
    "many": [dataclasses.replace(TIMED, variant=f"tfdist+{number}") for number in range(25)],
}


@pytest.mark.parametrize("name", PARTIAL)
def test_partial_results_are_reported(name, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "a.json"
    rows = [{name: value for name, value in row.to_json().items() if value is not None} for row in PARTIAL[name]]
    path.write_text(json.dumps({"rows": [{"link_bits_per_second": None, **row} for row in rows]}))
    assert tmp_path / "a.md" in report.write_report(path)


NO_RESULTS = {
    "no rows": ('{"rows": []}', "no rows"),
    "another benchmark": (json.dumps({"rows": [{"model": "digits", "codec": "none"}]}), "not written by benchmarks"),
    "a list": ("[1]", "not written by benchmarks.train"),
    "half": ("{", "not JSON"),
    "nothing": (None, "cannot be read: No such file"),
}


@pytest.mark.parametrize("name", NO_RESULTS)
def test_files_that_cannot_be_reported_raise_one_line(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    text, words = NO_RESULTS[name]
    if text is not None:
        (tmp_path / "a.json").write_text(text)
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "a.json")])
    with pytest.raises(SystemExit, match=words) as ended:
        report.main()
    assert "\n" not in str(ended.value)


def test_file_that_cannot_be_written_whole_is_left_as_it_was(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("before")

    def half(to):
        to.write_text("ha")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        record.write_whole(path, half)
    assert [each.name for each in tmp_path.iterdir()] == ["a.json"] and path.read_text() == "before"


def trained(model, codec, seed, reached, min_elements=256, synchronization="none"):
    elements = min_elements if codec != "none" else 0
    return accuracy.Run(model, "sgd", codec, elements, seed, reached, 1.0, (2.0, 1.0), 9.0, synchronization)


def test_codecs_and_local_steps_are_compared_with_exact_runs_of_the_same_seed():
    runs = [trained("digits", "none", seed, 0.9 + seed / 100) for seed in range(3)]
    runs += [trained("digits", "int8", seed, 0.9 + seed / 100 - 0.005) for seed in (1, 2)]
    runs += [trained("digits", "int8", 0, 0.9, min_elements=0), trained("digits", "sign", 9, 0.5)]
    runs += [trained("char_lm", "none", 0, 2.0), trained("char_lm", "int8", 0, 2.02)]
    runs += [trained("char_lm", "none", 0, 2.04, synchronization="local_sgd(8)")]
    against = {line[:1] + line[2:5]: line[7] for line in accuracy.summary(runs)}
    assert against == {
        ("digits", "none", "", ""): "",
        ("digits", "int8", "", "256"): "-0.50 points",
        ("digits", "int8", "", "default"): "+0.00 points",
        ("digits", "sign", "", "256"): "",
        ("char_lm", "none", "", ""): "",
        ("char_lm", "int8", "", "256"): "+1.00 %",
        ("char_lm", "none", "local_sgd(8)", ""): "+2.00 %",
    }


def test_accuracy_is_reported_beside_its_results(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [dataclasses.asdict(trained("digits", codec, 0, 0.9)) for codec in ("none", "int8")]
    settings = {"devices": 4, "epochs": 15, "steps_per_epoch": None}
    accuracy.write_report(tmp_path / "convergence.json", {**RESULT, "settings": settings, "rows": rows})
    assert {path.name for path in tmp_path.iterdir()} == {"convergence.md", "convergence.png"}
    text = (tmp_path / "convergence.md").read_text()
    assert "| digits | sgd | int8 |  | 256 | 0.9000 | 0.9000 | +0.00 points | 1.0x |" in text and "abc" in text


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_curves_are_drawn_for_an_existing_seed_and_for_defaults_alone(codec):
    pytest.importorskip("matplotlib")
    figure = accuracy.plot([trained("digits", codec, 2, 0.9, min_elements=0)])
    assert [line.get_label() for axis in figure.axes for line in axis.lines] == [codec]


@pytest.mark.parametrize("name", models.MODELS)
def test_frameworks_train_the_same_number_of_parameters(name):
    import keras

    weights = models.keras_model(name, keras).trainable_weights
    assert sum(math.prod(weight.shape) for weight in weights) == pytest.approx(models.MODELS[name].parameters, rel=0.01)
    torch = pytest.importorskip("torch", reason="benchmarks compare with PyTorch: pip install torch==2.13.0")
    network = models.torch_model(name)
    assert isinstance(network, torch.nn.Module)
    assert sum(each.numel() for each in network.parameters()) == pytest.approx(models.MODELS[name].parameters, rel=0.01)


def test_a_batch_that_is_never_full_raises():
    import tensorflow as tf

    sys.path.append(str(ROOT / "examples"))
    import common

    rows = tf.data.Dataset.range(10)
    assert [len(common.batches(rows, size, seed)) for size, seed in ((10, 0), (11, None))] == [1, 1]
    with pytest.raises(app.UsageError, match=r"at most the number of rows, 10, .* got 11"):
        common.batches(rows, 11, seed=0)


def test_failed_group_gives_its_reason_in_one_line_and_ends():
    hosts = [turns.Loopback()] * 2
    with Group(hosts, free_ports(2), "no_such_peer", {}) as group:
        with pytest.raises(GroupError, match="no_such_peer") as caught:
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=RUN_SECONDS)
    assert "\n" not in str(caught.value)


def test_abort_is_reported_by_the_line_before_its_stacks():
    stacks = "Fatal Python error: Aborted\n\nThread 0x1:\n  File a\n\nExtension modules: h5py._errors (total: 1)\n"
    assert last_words(f"E0000 Terminating: an error was found\n{stacks}") == "E0000 Terminating: an error was found"
    assert last_words(stacks) == "Fatal Python error: Aborted"
    assert last_words("step 1\nKeyError: 'a'\nended\n") == "KeyError: 'a'"


def test_other_packages_precede_the_installed_ones(tmp_path):
    (tmp_path / "keras.py").write_text("raise RuntimeError('another Keras')")
    with Group([turns.Loopback()], free_ports(1), "keras_fit", {}, str(tmp_path)) as group:
        with pytest.raises(GroupError, match="another Keras"):
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=RUN_SECONDS)


def test_workers_get_their_environment_variables(tmp_path):
    (tmp_path / "keras.py").write_text("import os; raise RuntimeError(os.environ['MALLOC_TOP_PAD_'])")
    environment = {"MALLOC_TOP_PAD_": "4711"}
    with Group([turns.Loopback()], free_ports(1), "keras_fit", {}, str(tmp_path), environment) as group:
        with pytest.raises(GroupError, match="4711"):
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=RUN_SECONDS)


def test_variants_of_tfdist_are_added_with_other_packages_and_variables(tmp_path):
    variants = train_step.make_variants(["int8"])
    found = train_step.with_others(variants, str(tmp_path), ["A=1", "B=x=y"])
    assert found["other-tfdist+int8"] == dataclasses.replace(found["tfdist+int8"], packages=str(tmp_path))
    assert found["env-tfdist-auto"] == dataclasses.replace(found["tfdist-auto"], environment={"A": "1", "B": "x=y"})
    assert not {"other-stock", "env-stock", "env-ddp", "env-other-tfdist"} & set(found)
    assert train_step.with_others(variants, None, []) == variants


def test_late_group_is_ended_and_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Group([turns.Loopback()] * 2, free_ports(2), "keras_fit", {}) as group:
        begin = time.monotonic()
        with pytest.raises(GroupError, match=r"0 of 2 workers answered in 0\.5 s"):
            group.train("mlp", alone=True, warmup=1, steps=1, timeout_seconds=0.5)
        assert time.monotonic() - begin < 20
    assert list(tmp_path.iterdir()) == []


def run(*flags, **environ):
    command = [sys.executable, "-m", "benchmarks.train_step", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: str(os.getpid()), **environ}, **pipes)


@pytest.mark.parametrize(
    ("benchmark", "flag", "words"),
    [
        ("drill", "--signals=kill", "must be KILL and STOP, or CUT"),
        pytest.param("convergence", "--codecs=none,int9", "got 'int9'", marks=pytest.mark.exhaustive),
        pytest.param("convergence", "--synchronizations=diloco", "got 'diloco'", marks=pytest.mark.exhaustive),
    ],
)
def test_an_unknown_name_raises_before_training(benchmark, flag, words):
    command = [sys.executable, "-m", f"benchmarks.{benchmark}", flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 1 and words in done.stderr and not done.stdout, done.stderr


def test_a_column_without_its_keras_says_not_installed():
    code = """
    from benchmarks import what_works
    what_works.SETUPS[:] = [what_works.Setup("Keras 9", "no_such_keras", "tfdist")]
    print(what_works.run_all(["`fit`"])["`fit`"]["Keras 9"].text)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.stdout == "not installed\n", done.stderr


def test_an_embedding_trains_under_a_memory_limit():
    if os.geteuid() or not os.access("/sys/fs/cgroup/memory/memory.limit_in_bytes", os.W_OK):
        pytest.skip("needs root and control groups of version 1")
    command = [sys.executable, "-m", "benchmarks.memory_limit", "--table=20000", "--workers=2", "--steps=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS)
    assert done.returncode == 0 and "exit code 0, 2 workers, limit 1500 MiB" in done.stdout, done.stdout + done.stderr
    losses = [float(loss) for loss in re.findall("'loss': ([0-9.e-]+)", done.stdout)]
    assert len(losses) == 2 and losses[1] < losses[0]


# Each variant starts two more workers, which takes most of the time.
@pytest.mark.parametrize(
    "variants", [["tfdist"], pytest.param(["stock", "tfdist"], marks=pytest.mark.exhaustive)], ids=",".join
)
def test_short_run_in_the_lab_reports_all_and_leaves_nothing(variants, tmp_path):
    if why := netlab.why_not():
        pytest.skip(why)
    path = tmp_path / "train_step.json"
    flags = [
        "--quick",
        "--codecs=",
        "--models=embedding",
        f"--variants={','.join(variants)}",
        "--steps=3",
        "--rounds=1",
    ]
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
    assert [(row.variant, row.link, row.error) for row in rows] == [(name, "200mbit", None) for name in variants]
    for row in rows:
        assert row.link_bits_per_second == pytest.approx(200e6, rel=0.1) or "this machine's limit" in out
        # A step must send at least the embedding rows of its batch, to one other worker.
        assert row.bytes_per_step > 4 * models.ITEM_WIDTH * models.ITEMS_PER_ROW * models.MODELS["embedding"].batch_size
        # The floor of a step is also that of its computation, whose time depends on what else this machine does.
        transfer = report.floor(0.0, row.bytes_per_step, row.link_bits_per_second)
        assert row.compute_seconds > 0 and row.over_floor > 0 and row.step_seconds[1] > 0.5 * transfer
    assert list(tmp_path.iterdir()) == [path]
    assert not children_left()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags", [["--signals=CUT"], ["--workers=4", "--shrink", "--epochs=16"], ["--kills=10", "--epochs=20"]]
)
def test_a_drill_has_the_results_of_the_undisturbed_run(flags):
    if flags == ["--signals=CUT"] and (why := netlab.why_not()):
        pytest.skip(why)
    command = [sys.executable, "-m", "benchmarks.drill", "--kills=1", "--epochs=12", *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, MARK: str(os.getpid())}, **pipes) as process:
        try:
            out, _ = process.communicate(timeout=3 * RUN_SECONDS)
        finally:
            process.terminate()  # It ends its child processes.
    assert process.returncode == 0 and "equal to" in out, out
    assert not children_left()


@pytest.mark.parametrize(
    ("signum", "code"), [pytest.param(signal.SIGKILL, -9, marks=pytest.mark.exhaustive), (signal.SIGTERM, 143)]
)
def test_ended_run_leaves_no_workers(signum, code, tmp_path):
    with run("--nolab", "--quick", "--codecs=", "--variants=stock", TMPDIR=str(tmp_path)) as process:
        started = eventually(lambda: len(children_left()) == 2)
        process.send_signal(signum)
        out, _ = process.communicate(timeout=RUN_SECONDS)
    assert started and process.returncode == code and "Traceback" not in out, out
    assert eventually(lambda: not children_left()), children_left()
    assert signum == signal.SIGKILL or list(tmp_path.iterdir()) == []


def children_left():
    """Returns the process ids of benchmark workers that this test run has started."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            command, environ = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
        except OSError:
            continue
        if b"benchmarks.peers.worker" in command and f"{MARK}={os.getpid()}".encode() in environ.split(b"\0"):
            found.append(path.name)
    return found
