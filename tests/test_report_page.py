"""The page of `tfdist report`: its figures are those of the files, it needs nothing else, and no text breaks it."""

import contextlib
import dataclasses
import html.parser
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import textwrap

import pytest

from benchmarks.netlab import Netlab, why_not
from launched import DEADLINE_SECONDS, PREAMBLE, nothing_left
from recorded_runs import BEGUN, RAW, ROWS_PER_STEP, killed, write_run
from tfdist.launch import cli
from tfdist.readable_numbers import clock, size
from tfdist.report import report_charts, report_page
from tfdist.report.html_markup import Markup, element, table
from tfdist.report.recorded_run import read_all_telemetry, read_run
from tfdist.report.report_figures import figures_of
from tfdist.report.report_page import page_of
from tfdist.report.report_style import COLORS
from tfdist.report.telemetry_series import at_step, growth, level, rate, thinned
from tfdist.report.training_speed import StepSpeed, combined, rows_of
from tfdist.report.worker_totals import WorkerTotals, slow_workers, summed, totals_of
from tfdist.telemetry.json_lines_sink import JsonLinesSink
from tfdist.telemetry.metrics_sink import WorkerIdentity
from tfdist.telemetry.telemetry_file import FitTelemetry, TelemetryFile, read_telemetry
from tfdist.telemetry.worker_metrics import WorkerMetrics

VOID = {"meta", "br"}
EVIL = "</pre></td><script>alert(1)</script><img src=http://evil.example/x onerror=alert(1)>'\"&\x00\ud800"


def metrics(time, steps, **given):
    told = {"step": steps, "epoch": 0, "restarts": 0, "resident_bytes": 1, "cpu_seconds": 1.0}
    return WorkerMetrics(time=time, steps=steps, **{**told, **given})


# Figures.


def test_a_total_that_begins_again_goes_on_growing():
    def of(*rows):
        return growth([metrics(i, i, rows=each) for i, each in enumerate(rows)], lambda each: each.rows)

    assert of(5, 10, 3, 4) == 14 and of(7) == 7 and of(None, 2) == 2 and of(None) is None


@pytest.mark.parametrize("first", [4, 12], ids=["before the old count", "beyond the old count"])
def test_rows_go_on_if_the_callback_of_a_second_fit_counts_from_0(first):
    once = [metrics(i, i, rows=10 * i, global_rows=30 * i) for i in (5, 10)]
    again = [metrics(20 + i, i, step=10 + i, rows=20 * i, global_rows=60 * i) for i in (first, 15, 20)]
    file = TelemetryFile([FitTelemetry({"start": 0.0}, once), FitTelemetry({"start": 20.0}, again)])
    assert rows_of((0, 30), 0, {0: file}) == (30 * 10 + 60 * 20, 0)
    assert rows_of((100, 130), 10, {0: file}) == (30 * 10 + 60 * 10, 60 * 10)
    assert growth(file.figures, lambda each: each.rows) == 10 * 10 + 20 * 20
    assert [[y for _, y in curve] for curve in rate(file, lambda each: each.rows)] == [[10, 10], [20, 20, 20]]


def test_rows_go_on_if_one_callback_counts_in_both_fits():
    once = [metrics(i, i, step=7 + i, global_rows=30 * i) for i in (5, 10)]
    again = [metrics(20 + i, i, step=7 + i, global_rows=30 * i) for i in (15, 30)]
    file = TelemetryFile([FitTelemetry({"start": 0.0}, once), FitTelemetry({"start": 20.0}, again)])
    assert rows_of((7, 37), 0, {0: file}) == (30 * 30, 0)


def totals_with(worker, rows_per_second, computing):
    figures = dict.fromkeys(field.name for field in dataclasses.fields(WorkerTotals))
    told = {"worker": worker, "hosts": [], "rows_per_second": rows_per_second, "computing": computing}
    return WorkerTotals(**{**figures, **told})


def test_a_worker_is_slow_by_the_telemetry_if_the_others_wait_for_it():
    def slow(*given):
        return slow_workers([totals_with(worker, *each) for worker, each in enumerate(given)])

    assert slow((100, 0.5), (50, 0.9), (100, 0.5)) == [(1, 2.0)] and slow((100, 0.5), (100, 0.9)) == []
    assert slow((100, 0.8), (50, 0.85), (100, 0.8)) == [], "it gets fewer rows"
    assert slow((100, 0.5)) == slow() == slow((100, 0.5), (50, None)) == slow((None, 0.5), (50, 0.9)) == []


def test_rates_are_between_figures_and_begin_with_the_fit():
    fits = [
        FitTelemetry({"start": 10.0}, [metrics(12, 1, rows=20), metrics(14, 2, rows=60)]),
        FitTelemetry({"start": 20.0}, [metrics(30, 3, rows=160)]),
    ]
    file = TelemetryFile(fits)
    assert rate(file, lambda each: each.rows) == [[(12, 10.0), (14, 20.0)], [(30, 10.0)]]
    assert level(file, lambda each: each.rows, by=lambda each: each.step) == [[(1, 20), (2, 60)], [(3, 160)]]
    assert rate(file, lambda each: each.raw_bytes) == [] and level(file, lambda each: each.share) == []


def test_a_total_at_a_step_is_between_or_beyond_its_points():
    points = [(0.0, 0.0), (10.0, 600.0), (20.0, 1400.0)]
    assert [at_step(points, step) for step in (0, 5, 10, 15, 25)] == [0, 300, 600, 1000, 1800]
    assert at_step(points[:1], 3) is None and at_step([], 3) is None and at_step([(1, 2), (1, 3)], 1) is None


def test_thinned_points_keep_both_ends():
    points = [(float(x), 0.0) for x in range(12345)]
    few = thinned(points)
    assert len(few) < 300 and (few[0], few[-1]) == (points[0], points[-1]) and thinned(few[:3]) == few[:3]


def test_speeds_of_attempts_are_combined_by_their_time():
    speeds = [StepSpeed(10, 2.0, 0.5, 100.0), StepSpeed(30, 6.0, 0.9, 300.0)]
    both = combined(speeds)
    assert both == StepSpeed(40, 8.0, pytest.approx(0.8), 400.0)
    assert (both.step_seconds, both.rows_per_second) == (0.2, 50.0)
    assert combined([speeds[0], StepSpeed(5, 1.0, None, None, 0.1)]) == StepSpeed(15, 3.0, 0.5, None, 0.1)
    assert combined([]) is None


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123456, "123 kB"), (1.5e6, "1.5 MB"), (2e9, "2 GB"), (3e12, "3 TB")],
)
def test_bytes_have_a_unit(count, told):
    assert size(count) == told


@pytest.mark.parametrize("seconds", [1e17, -1e17, 1e300, float("inf"), float("nan")])
def test_an_absurd_time_is_an_unknown_one(seconds):
    assert clock(seconds) == "an unknown time"


def test_the_figures_are_those_of_the_files(tmp_path):
    write_run(tmp_path)
    recorded = read_run(tmp_path)
    telemetry, problems = read_all_telemetry(recorded)
    figures = figures_of(recorded, telemetry)
    first, second = figures.attempts
    assert problems == [] and (first.workers, second.workers) == (3, 2)
    assert (first.steps, second.steps) == ((0, 20), (10, 40))
    assert (figures.kept_rows, figures.repeated_rows) == (40 * ROWS_PER_STEP, 10 * ROWS_PER_STEP)
    cost = first.cost
    assert (cost.steps, second.cost) == (10, None)
    assert (cost.lost_seconds, cost.restart_seconds, cost.again_seconds) == pytest.approx((3.0, 3.0, 5.0))
    assert first.speed.efficiency == pytest.approx(0.75) and first.speed.step_seconds == pytest.approx(0.2)
    assert first.speed.typical_seconds == pytest.approx(0.15)
    assert first.speed.rows_per_second == pytest.approx(ROWS_PER_STEP / 0.2)
    assert (figures.outcome, figures.start, figures.seconds) == ("done", BEGUN, 25.0)
    totals = totals_of(telemetry)
    assert [each.rows for each in totals] == [24 * 20 + 30 * 30, 24 * 20 + 30 * 30, 12 * 20]
    assert summed(totals, "raw_bytes") == RAW * (20 * 3 + 30 * 2) == 4 * summed(totals, "sent_bytes")
    assert slow_workers(totals) == [] and summed([], "rows") is None


def test_a_file_of_figures_has_what_was_written(tmp_path):
    path = tmp_path / "telemetry-0.jsonl"
    written = [metrics(5.0, 1, rows=3, logs={"loss": float("nan")}), metrics(6.0, 2, phase_seconds={"input": 1.0})]
    sink = JsonLinesSink(path, WorkerIdentity(0, 1, "a", 7, 0), {"every_seconds": 5.0})
    for each in written:
        sink.write(each)
    read = read_telemetry(path)
    assert read.damaged == 0 and read.figures[1] == written[1] and len(read.fits) == 1
    assert str(read.figures[0].logs["loss"]) == "nan" and read.figures[0].rows == 3
    damage = ["x", "[]", "null", '{"steps": 1}', '{"time": 1, "step": 1, "epoch": 0, "steps": "1"}']
    path.write_text(path.read_text() + "\n".join(damage))
    assert read_telemetry(path).damaged == len(damage) and read_telemetry(path).figures[1:] == written[1:]


def test_of_a_long_file_evenly_spaced_lines_are_read(tmp_path):
    path = tmp_path / "telemetry-0.jsonl"
    line = {"epoch": 0, "restarts": 0, "resident_bytes": 1, "cpu_seconds": 1.0}
    lines = [{"worker": 0, "every_seconds": 5.0}, *({**line, "time": i, "step": i, "steps": i} for i in range(1, 9999))]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    figures = read_telemetry(path).figures
    assert 1500 < len(figures) < 4100 and figures[-1].step == 9998


# Markup.


def test_text_is_escaped_and_markup_is_not():
    assert element("p", "<a> & 'b'", Markup("<b>x</b>"), None, ["c", ["d"]], title='"<') == (
        '<p title="&quot;&lt;">&lt;a&gt; &amp; &#x27;b&#x27;<b>x</b>cd</p>'
    )
    assert '<th scope="row">&lt;</th><td>&gt;</td>' in table("t", ["a", "b"], [["<", ">"]])


def test_a_number_stays_on_the_line_of_its_unit():
    shown = element("p", "38 s, 12 min 5 s, 1.2 MB, 45.1 %, 35 ms; 3 steps", element("pre", "38 s"))
    assert shown == "<p>38_s, 12_min 5_s, 1.2_MB, 45.1_%, 35_ms; 3 steps<pre>38 s</pre></p>".replace("_", "\xa0")


def luminance(color):
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", COLORS)
@pytest.mark.parametrize("ground", ["back", "box"])
def test_all_colors_have_contrast(scheme, ground):
    colors = COLORS[scheme]
    low = []
    for name, color in colors.items():
        dark, light = sorted((luminance(color), luminance(colors[ground])))
        if name not in ("back", "box", "line") and (light + 0.05) / (dark + 0.05) < 4.5:
            low.append(name)
    assert low == []


# The page.


class Page(html.parser.HTMLParser):
    """Reads a page strictly, and collects what is in it."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text, self.styles = [], [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that do not end"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        given = dict(attributes)
        assert len(given) == len(attributes), "an attribute twice"
        self.ids += [given["id"]] if "id" in given else []
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href", "srcset", "data")]
        self.links += [f"#{name}" for name in (given.get("aria-labelledby"),) if name]
        self.styles += [given["style"]] if "style" in given else []
        assert not any(name.startswith("on") for name in given), "a script"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} ends in {self.open}"

    def handle_data(self, data):
        (self.styles if "style" in self.open else self.text).append(data)


def read_page(text):
    """Checks what holds for each page, and returns its text."""
    page = Page(text)
    assert len(page.ids) == len(set(page.ids)), "an id twice"
    assert [link for link in page.links if link[:1] != "#" or link[1:] not in page.ids] == []
    assert {"script", "img", "iframe", "link", "object", "form"} & set(page.tags) == set()
    assert re.findall(r"url\((?!#)|@import|http", "".join(page.styles)) == []
    assert page.tags.count("table") == page.tags.count("caption") and page.tags.count("h1") == 1
    assert text.count("<svg") == text.count('role="img" aria-label="') - text.count('class="bar"')
    return re.sub(r"\s+", " ", " ".join(page.text))


def page_in(folder):
    return page_of(read_run(folder), BEGUN + 100)


@pytest.fixture
def no_charts(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_svg", None)


@pytest.mark.parametrize("has_telemetry", [True, False])
def test_a_stranger_learns_what_failed_when_why_and_the_cost(tmp_path, has_telemetry):
    write_run(tmp_path, has_telemetry)
    page = page_in(tmp_path)
    text = read_page(page)
    for told in (
        "Done in 25 s, 2 attempts.",
        "of attempt 0: worker 1 was killed by SIGKILL at 2025-",
        "on host host-a. It cost 11 s and 10 training steps that were lost.",
        "2 workers instead of 3, after worker 1 had failed.",
        "Why: SIGKILL comes from outside of the program",
        "Worker 1 was missing from exchange 12",
        "3.0 s of training (10 steps) were lost",
        "Training continued from backup step-10.",
        "32.0 % of the time went into training steps",
        "1 to 20 step-10",
        "Slow: worker 2 on host-a computes slowly since step 10.",
        "attempt 0: worker 2 on host-a computes slowly since step 10. Look for another job.",
    ):
        assert told in re.sub(r" +([.,])", r"\1", text.replace("\N{NO-BREAK SPACE}", " ")), told
    assert ("To record them, give" in text) != has_telemetry and ("2,400 rows" in text) == has_telemetry
    assert ("from 480 kB to 120 kB" in text) == has_telemetry
    assert ("Optimizer state" in text and "All of these" in text) == has_telemetry
    assert page.count("<svg") == (4 if has_telemetry else 0)


def test_without_matplotlib_the_page_has_all_tables_and_says_how_to_get_charts(tmp_path, no_charts):
    write_run(tmp_path)
    page = page_in(tmp_path)
    assert "<svg" not in page and page.count(report_charts.INSTALL.replace("'", "&#x27;")) == 1
    assert page.count("<table") == 8 and "480 kB" in read_page(page)


@pytest.mark.parametrize("error", [ValueError, RuntimeError, OSError])
def test_a_chart_that_cannot_be_drawn_costs_no_table(tmp_path, monkeypatch, error):
    def fail(chart):
        raise error(f"no {chart.name}")

    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report_page, "drawn", fail)
    write_run(tmp_path)
    page = page_in(tmp_path)
    text = read_page(page)
    for name in ("throughput", "loss", "traffic", "shares"):
        assert f"This chart cannot be drawn ({error.__name__}: no {name})." in text
    assert page.count("<table") == 8 and "damaged" not in text


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
def test_a_matplotlib_that_cannot_be_imported_is_like_none(tmp_path, monkeypatch, error):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text(f"raise {error}('broken')")
    for name in [each for each in sys.modules if each.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    assert not report_charts.can_draw()


def test_charts_have_the_colors_of_the_page(tmp_path):
    pytest.importorskip("matplotlib")
    curves = [report_charts.Curve(f"worker {i}", [[(0, 1), (1, 2), (2, float("inf"))]]) for i in range(12)]
    chart = report_charts.Chart("name", "Title", "About & <this>", "x", "y", curves, marks=[1.0])
    svg = report_charts.drawn(chart)
    assert set(re.findall(r"(?<![&\w])#[0-9a-fA-F]{6}\b", svg)) <= {"#ffffff"}, svg
    assert "var(--c1)" in svg and "var(--bad)" in svg and "About &amp; &lt;this&gt;" in svg and ">x</text>" in svg
    read_page(f"<html><h1>x</h1>{svg}</html>")


FIXED = ("signal", "exchange", "lost peer")  # Words by which the files are understood.
NAMES = ("loss", "MainThread")


def spoiled(value, text):
    """Appends a text to each text in a value, and to names of metrics and threads."""
    if isinstance(value, dict):
        return {f"{name}{text}" if name in NAMES else name: spoiled(each, text) for name, each in value.items()}
    if isinstance(value, list):
        return [spoiled(each, text) for each in value]
    return f"{value}{text}" if isinstance(value, str) and value not in FIXED else value


def damage(folder, text):
    """Puts a text into each place of the files that holds text."""
    for path in [*folder.glob("*.json"), *folder.glob("attempt-*/*.jsonl")]:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        path.write_text("".join(json.dumps(spoiled(json.loads(line), text)) + "\n" for line in lines))


def test_no_text_of_a_run_becomes_markup(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    folder.mkdir()
    write_run(folder)
    raised = {**killed(0, 1, 10.0), "kind": "exception", **dict.fromkeys(("exception", "message", "stack"), EVIL)}
    run = json.loads((folder / "run.json").read_text())
    run["attempts"][0]["failure"] = raised
    for name in ("run.json", "failure.json"):
        (folder / name).write_text(json.dumps(run))
    damage(folder, EVIL)
    page = page_in(folder)
    assert "alert(1)" in read_page(page) and "<script" not in page and "\x00" not in page
    page.encode()


def test_damaged_files_never_end_the_page(tmp_path, no_charts):
    draw = random.Random(2)
    for _ in range(80):
        write_run(tmp_path)
        paths = [path for path in tmp_path.rglob("*") if path.is_file()]
        for path in draw.sample(paths, 2):
            content = bytearray(path.read_bytes())
            for _ in range(draw.randrange(20)):
                content[draw.randrange(len(content))] = draw.choice([*b'0"{}[]:,-x', draw.randrange(256)])
            path.write_bytes(content[: draw.randrange(len(content))] if draw.random() < 0.3 else content)
        read_page(page_in(tmp_path))


@pytest.mark.parametrize(
    "value", [None, "x", [], {}, True, -1, 1e308, float("inf"), float("nan"), 10**400], ids=lambda value: str(value)[:9]
)
def test_values_of_wrong_types_never_end_the_page(tmp_path, value, no_charts):
    write_run(tmp_path)
    names = ("time", "seconds", "workers", "committed", "failure", "outcome")
    whole = (tmp_path / "run.json").read_text()
    for name in names:
        run = json.loads(whole)
        run["attempts"][0][name] = value
        (tmp_path / "run.json").write_text(json.dumps(run))
        (tmp_path / "failure.json").write_text(json.dumps(run))
        read_page(page_in(tmp_path))
    (tmp_path / "run.json").write_text(json.dumps({"outcome": value, "run_exit_code": value, "attempts": value}))
    (tmp_path / "failure.json").unlink()
    read_page(page_in(tmp_path))


def test_damaged_figures_are_named_and_the_others_are_shown(tmp_path):
    write_run(tmp_path)
    path = tmp_path / "attempt-0" / "telemetry-1.jsonl"
    path.write_text(path.read_text()[:-40])
    text = read_page(page_in(tmp_path))
    assert f"{path} is damaged: 1 of its lines cannot be read" in text and "2,400 rows" in text


def test_an_attempt_without_a_time_has_a_failure_without_cost(tmp_path):
    write_run(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    del run["attempts"][0]["time"]
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "failure.json").write_text(json.dumps(run))
    text = read_page(page_in(tmp_path))
    assert "damaged" not in text and "worker 1 was killed by SIGKILL" in text
    assert "What it cost is not recorded." in text


def test_without_verdicts_the_page_says_who_is_judged_and_what_the_telemetry_tells(tmp_path):
    write_run(tmp_path)
    (tmp_path / "attempt-0" / "stragglers.jsonl").unlink()
    told, slow = "No verdict is recorded.", "Worker 2 computed 3.5 times slower per row than the median of the others."
    text = read_page(page_in(tmp_path))
    assert told in text and "slower" not in text, "worker 2 gets fewer rows"
    path = tmp_path / "attempt-0" / "telemetry-2.jsonl"
    head, *lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["phase_seconds"] |= {"compute": 0.15 * line["steps"], "exchange": 0.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    text = read_page(page_in(tmp_path))
    assert told in text and text.count(slow) == 2, "in the summary and in its section"


def test_a_run_that_goes_on_and_one_that_has_only_a_log(tmp_path):
    write_run(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    last = run["attempts"][-1]
    run["attempts"][-1] = {name: last[name] for name in ("number", "workers", "time")} | {"outcome": "running"}
    (tmp_path / "run.json").write_text(json.dumps({**run, "outcome": "running", "run_exit_code": None}))
    (tmp_path / "failure.json").unlink()
    assert "The run still goes on, or its supervisor was killed." in read_page(page_in(tmp_path))
    other = tmp_path / "other"
    (other / "attempt-0").mkdir(parents=True)
    (other / "attempt-0" / "worker-0.log").write_text("")
    text = read_page(page_in(other))
    assert "The outcome of the run is not recorded." in text and "No failure is recorded." in text


# The command.


def test_the_command_writes_the_page_and_names_it(tmp_path, capsys):
    write_run(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\npage with charts: {tmp_path}/report.html\n")
    assert re.search(r"^typical step 150 ms \(median\), mean step .* ms, .* rows/s$", out, re.MULTILINE), out
    whole = (tmp_path / "report.html").read_text()
    assert "Done in 25 s" in read_page(whole)
    other = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), "--html", str(other)]) == 0 and "Done in 25 s" in read_page(
        other.read_text()
    )
    other.unlink()
    assert cli.main(["report", str(tmp_path), "--no-html"]) == 0
    assert "page" not in capsys.readouterr().out.splitlines()[-1] and not other.exists()


def test_a_page_that_cannot_be_written_is_no_failure_and_leaves_nothing(tmp_path, capsys):
    write_run(tmp_path)
    for path in (tmp_path / "none" / "page.html", tmp_path / "attempt-0"):
        assert cli.main(["report", str(tmp_path), "--html", str(path)]) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last.startswith("no page was written: ") and f"{path}; give another file by --html FILE" in last
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_folder_whose_name_is_no_text_has_a_report(tmp_path, capsys):
    folder = tmp_path / os.fsdecode(b"run-\xff")
    folder.mkdir()
    write_run(folder)
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.endswith(f"\npage with charts: {tmp_path}/run-?/report.html\n")
    assert "Done in 25 s" in read_page((folder / "report.html").read_text())


def test_an_absurd_time_of_a_failure_never_ends_the_report(tmp_path, capsys):
    write_run(tmp_path)
    run = json.loads((tmp_path / "run.json").read_text())
    run["attempts"][0]["failure"]["time"] = 1e17
    (tmp_path / "run.json").write_text(json.dumps(run))
    (tmp_path / "failure.json").write_text(json.dumps(run))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "worker 1 was killed by SIGKILL [an unknown time on host-a]" in capsys.readouterr().out
    assert "SIGKILL at an unknown time on host host-a" in read_page((tmp_path / "report.html").read_text())


@pytest.mark.slow
def test_the_command_loads_no_tensorflow(tmp_path):
    write_run(tmp_path)
    code = f"""
        import sys
        from tfdist.launch import cli
        assert cli.main(["report", {str(tmp_path)!r}]) == 0
        assert not {{"tensorflow", "keras"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)


TRAIN = """
import keras, numpy as np
import tfdist
strategy = tfdist.MultiWorkerMirroredStrategy(compression="int8")
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
rng = np.random.default_rng(0)
x, y = rng.normal(size=(480, 64)).astype("float32"), rng.integers(0, 2, 480)
data = strategy.distribute_datasets_from_function(tfdist.data.BalancedSharding((x, y), global_batch_size=24, seed=0))
class Killer(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
        if worker == 1 and self.params["epochs"] and batch == 15 and os.environ["TFDIST_ATTEMPT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
backup = tfdist.callbacks.BackupAndRestore(here / "backup", save_freq=5)
telemetry = tfdist.callbacks.Telemetry(every_seconds=0.1)
model.fit(data, epochs=2, verbose=0, callbacks=[backup, telemetry, Killer()])
"""


@pytest.mark.slow
def test_the_page_of_a_real_run_tells_of_the_kill_and_its_rows_are_those_of_the_data(tmp_path):
    secret = "s3cret-0f-the-env1ronment"
    with nothing_left(tmp_path) as run:
        script = run.script(TRAIN)
        env = {"DB_PASSWORD": secret, "TFDIST_SECRET": secret}
        code, _, err = run.finish("--workers", 2, "--log-dir", tmp_path / "logs", script, restarts=2, env=env)
        assert code == 0, err
    page = page_in(tmp_path / "logs")
    text = read_page(page)
    assert "of attempt 0: worker 1 was killed by SIGKILL" in text and "trained for 40 steps on 960 rows" in text
    assert "Worker 1 was missing from exchange" in text and "Compression reduced the gradients" in text
    assert "Problems with files" not in text
    recorded = read_run(tmp_path / "logs")
    telemetry = read_all_telemetry(recorded)[0]
    figures = figures_of(recorded, telemetry)
    assert figures.kept_rows == pytest.approx(2 * 480) and figures.attempts[0].cost.steps > 0
    ends = [telemetry[attempt][0].figures[-1] for attempt in range(2)]
    assert ends[0].raw_bytes / ends[0].steps == pytest.approx(ends[1].raw_bytes / ends[1].steps, rel=0.2)
    told = "".join(path.read_text(errors="replace") for path in (tmp_path / "logs").rglob("*") if path.is_file())
    assert secret not in page and secret not in told


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FRAMES = """<!DOCTYPE html><body><script>
onload = () => setTimeout(() => {
  const wide = [...document.querySelectorAll("iframe")].filter(
    each => each.contentDocument.documentElement.scrollWidth > each.clientWidth)
  document.title = "too wide: " + wide.map(each => each.width).join(" ") + "."
}, 500)
</script>
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on PATH")
def test_the_page_does_not_scroll_sideways(tmp_path):
    write_run(tmp_path)
    page = page_in(tmp_path).replace("Content-Security-Policy", "x-none")
    frames = "".join(element("iframe", width=str(width), height="900", srcdoc=page) for width in (400, 800, 1600))
    (tmp_path / "frames.html").write_text(FRAMES + frames)
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    command = [BROWSER, *options, (tmp_path / "frames.html").as_uri()]
    done = subprocess.run(command, env=home, capture_output=True, text=True, timeout=300)
    assert "<title>too wide: .</title>" in done.stdout, done.stderr


AGREES = """
import keras, numpy as np
import tfdist
strategy = tfdist.MultiWorkerMirroredStrategy(compression=os.environ.get("CODEC"))
with strategy.scope():
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(1024)])
    model.compile("sgd", "mse")
rng = np.random.default_rng(0)
x = rng.normal(size=(4800, 256)).astype("float32")
data = strategy.distribute_datasets_from_function(
    tfdist.data.BalancedSharding((x, np.tile(x, 4)), global_batch_size=48, seed=0))
class Clock(keras.callbacks.Callback):
    ends = []
    def on_train_batch_end(self, batch, logs=None):
        self.ends.append(time.monotonic())
clock = Clock()
model.fit(data, epochs=4, verbose=0, callbacks=[tfdist.callbacks.Telemetry(every_seconds=1.0), clock])
(here / f"ends-{worker}").write_text(json.dumps(clock.ends))
"""


@pytest.mark.exhaustive
@pytest.mark.privileged
@pytest.mark.parametrize(
    "told",
    [{"CODEC": "int8"}, {"TFDIST_DEVICES_PER_WORKER": "2"}, {"TFDIST_DEVICES_PER_WORKER": "2", "CODEC": "int8"}],
    ids=["own connections", "TensorFlow", "both"],
)
def test_bytes_are_those_of_the_interfaces_and_step_times_those_of_the_clock(told, tmp_path):
    if reason := why_not():
        pytest.skip(reason)
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + AGREES)
    with Netlab(hosts=2, rate=None) as lab, contextlib.ExitStack() as stack:
        cluster = {"worker": [f"{host.address}:2222" for host in lab.hosts]}
        before = [host.counters() for host in lab.hosts]
        runs = []
        for index, host in enumerate(lab.hosts):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            arguments = ["run", "--log-dir", str(tmp_path / "logs"), str(script)]
            command = host.command([sys.executable, "-m", "tfdist.launch.cli", *arguments])
            env = {**os.environ, "TF_CONFIG": config, "CUDA_VISIBLE_DEVICES": "-1", **told}
            run = stack.enter_context(subprocess.Popen(command, env=env, cwd=tmp_path))
            stack.callback(run.kill)
            runs.append(run)
        assert [run.wait(DEADLINE_SECONDS) for run in runs] == [0, 0]
        after = [host.counters() for host in lab.hosts]
    telemetry = read_all_telemetry(read_run(tmp_path / "logs"))[0]
    for each, begin, end in zip(totals_of(telemetry), before, after, strict=True):
        assert each.network_sent_bytes == pytest.approx(end.sent_bytes - begin.sent_bytes, rel=0.02)
        assert each.network_received_bytes == pytest.approx(end.received_bytes - begin.received_bytes, rel=0.02)
    assert summed(totals_of(telemetry), "rows") == 4 * 4800
    for worker, file in telemetry[0].items():
        ends, recorded, timed = json.loads((tmp_path / f"ends-{worker}").read_text()), [], []
        for old, now in itertools.pairwise(file.figures):
            if 0 < old.steps < now.steps <= len(ends):
                recorded.append(now.step_seconds)
                timed.append((ends[now.steps - 1] - ends[old.steps - 1]) / (now.steps - old.steps))
        assert len(recorded) > 5 and statistics.median(recorded) == pytest.approx(statistics.median(timed), rel=0.02)
