"""The page of `tfdist report`: one HTML file without scripts and without references to other files."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfdist.launch.run_summary import details_of
from tfdist.package_version import version_of
from tfdist.readable_numbers import clock, counted, duration
from tfdist.report.absent_workers import absences_of, lines_of_absences
from tfdist.report.attempt_text import AttemptText, text_of
from tfdist.report.html_markup import Child, Markup, element, joined, paragraph, table
from tfdist.report.recorded_failure import cause_of
from tfdist.report.recorded_run import DAMAGED, RecordedRun, attempt_in, read_all_telemetry
from tfdist.report.report_charts import INSTALL, Chart, can_draw, drawn
from tfdist.report.report_curves import loss_chart, shares_chart, throughput_chart, traffic_chart
from tfdist.report.report_figures import AttemptFigures, RunFigures, figures_of
from tfdist.report.report_sections import NO_TELEMETRY, speed_section, time_section, traffic_section, workers_section
from tfdist.report.report_style import STYLE
from tfdist.report.report_summary import (
    cost_of,
    facts_of,
    failure_title,
    hides_loss,
    lead_of,
    slow_by_telemetry,
    tiles_of,
    verdicts_of,
)
from tfdist.report.report_timeline import attempts_section
from tfdist.report.telemetry_series import longest
from tfdist.report.worker_totals import WorkerTotals, totals_of

_MOST_FAILURES = 50
_MOST_LINES = 200
_MOST_VERDICTS = 100
# Nothing is loaded, whatever text of a run gets into the page.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_NO_CHARTS = f"This page has no charts, since matplotlib is missing or does not work: {INSTALL}"


def page_of(recorded: RecordedRun, now: float) -> str:
    """Returns the page of a run.

    Args:
      recorded: Content of the run's folder.
      now: The present time, in seconds since the epoch.
    """
    try:
        telemetry, damaged = read_all_telemetry(recorded)
        figures = figures_of(recorded, telemetry)
    except DAMAGED as error:
        return _document(recorded, now, element("p", _damage(error)))
    problems = [*recorded.problems, *damaged]
    totals = totals_of(telemetry)
    sections: list[tuple[str, Callable[[], Iterable[Child]]]] = [
        ("Attempts and backups", lambda: attempts_section(figures)),
        ("Failures", lambda: _failures(figures)),
        ("Slow workers", lambda: _slow(figures, totals)),
        ("Time and goodput", lambda: time_section(figures)),
        ("Speed and scaling efficiency", lambda: [*speed_section(figures), _drawn(throughput_chart, figures)]),
        ("Loss", lambda: _loss(figures)),
        ("Traffic", lambda: [*traffic_section(totals), _drawn(traffic_chart, figures)]),
        ("Shares and speeds of workers", lambda: [*workers_section(totals), _drawn(shares_chart, figures)]),
    ]
    if problems:
        sections.append(("Problems with files", lambda: [_list(problems)]))
    summary = [
        element("h2", "Summary", id="summary"),
        _guarded(lambda: [element("p", lead_of(figures), class_="lead")]),
        _guarded(lambda: [element("dl", [_tile(*each) for each in tiles_of(figures, totals)], class_="tiles")]),
        _guarded(lambda: [_list(_sentences(figures, facts_of(figures, totals)))]),
    ]
    body = [
        element("section", summary, class_="box", aria_labelledby="summary"),
        element("nav", element("ul", [element("li", _link(title)) for title, _ in sections]), aria_label="Sections"),
        None if can_draw() else element("p", _NO_CHARTS),
        *(_section(title, content) for title, content in sections),
    ]
    return _document(recorded, now, body)


def _document(recorded: RecordedRun, now: float, body: Child) -> str:
    title = f"Run in {recorded.folder.absolute()}"
    made = f"Made by tfdist {version_of('tfdist')} at {clock(now)}. Times are local times ({time.strftime('%Z')})."
    head = [
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", title),
        Markup(f"<style>{STYLE}</style>"),
    ]
    content = element("body", element("main", element("h1", title), body), element("footer", element("p", made)))
    page = f"<!DOCTYPE html>\n{element('html', element('head', head), content, lang='en')}\n"
    return page.encode("ascii", "xmlcharrefreplace").decode()  # Files may have any encoding here.


def _section(title: str, content: Callable[[], Iterable[Child]]) -> Markup:
    return element(
        "section", element("h2", title, id=_anchor(title)), _guarded(content), aria_labelledby=_anchor(title)
    )


def _guarded(content: Callable[[], Iterable[Child]]) -> Markup:
    """Returns content, or a sentence if damaged files have values of another type than expected."""
    try:
        return joined(content())
    except DAMAGED as error:
        return element("p", _damage(error))


def _damage(error: Exception) -> str:
    return f"The files are damaged, and have values of another type than expected ({error})."


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _link(title: str) -> Markup:
    return element("a", title, href=f"#{_anchor(title)}")


def _list(items: Iterable[Child]) -> Markup:
    return element("ul", [element("li", item) for item in items])


def _tile(name: str, value: str) -> Markup:
    return element("div", element("dt", name), element("dd", value))


def _sentences(figures: RunFigures, facts: Sequence[str]) -> Iterator[Child]:
    """Yields a sentence for each failure, and those about the whole run."""
    for each in figures.attempts:
        failure = each.failure
        if failure is not None:
            told = f" of attempt {each.number}: {failure.describe()} at {clock(failure.time)} on host {failure.host}."
            least = "at least " if hides_loss(each, figures) else ""
            cost = f" It cost {least}{duration(each.cost.seconds)}{_lost(each)}." if each.cost else ""
            yield [element("span", "Failure", class_="bad"), told, cost]
    yield from facts


def _lost(attempt: AttemptFigures) -> str:
    steps = attempt.cost.steps if attempt.cost else 0
    return f" and {counted(steps, 'training step')} that were lost" if steps else ""


def _failures(figures: RunFigures) -> Iterator[Child]:
    failed = [each for each in figures.attempts if each.failure is not None]
    absent = [line for each in figures.attempts for line in _absent(each, figures)]
    if not failed and not absent:
        yield element("p", "No failure is recorded.")
    if absent:
        yield paragraph("The job went on without these workers:")
        yield _list(absent[:_MOST_FAILURES])
    if len(absent) > _MOST_FAILURES:
        yield paragraph(f"And {len(absent) - _MOST_FAILURES} more; `tfdist report --no-html` prints all.")
    for attempt in failed[:_MOST_FAILURES]:
        yield _guarded(functools.partial(_failure, attempt, figures))
    if len(failed) > _MOST_FAILURES:
        yield paragraph(f"And {len(failed) - _MOST_FAILURES} more; `tfdist report --no-html` prints all.")


def _absent(attempt: AttemptFigures, figures: RunFigures) -> Iterator[str]:
    """Yields lines about workers that were lost while the attempt went on."""
    entries = [entry for each in figures.recorded.summaries if (entry := attempt_in(each, attempt.number))]
    yield from lines_of_absences(absences_of(entries))


def _failure(attempt: AttemptFigures, figures: RunFigures) -> Iterator[Child]:
    """Yields the failure of an attempt: its time, place, cause and cost."""
    failure = attempt.failure
    if failure is None:
        return
    text = text_of(attempt.number, figures.recorded.attempts[attempt.number], figures.recorded.summaries)
    begun = "" if attempt.start is None else f", {duration(failure.time - attempt.start)} after the attempt began"
    step = "" if failure.step is None else f", after step {failure.step}"
    who = "" if failure.worker is None else f"worker {failure.worker} on host "
    # The first line says who was missing, the last where that worker was seen last; there may be one line only.
    signs = (*text.missing[:1], *text.missing[1:][-1:])
    missing = [f"{line[:1].upper()}{line[1:]}." for line in signs]
    why = [cause_of(failure), *missing]
    rows = [
        ("When", f"{clock(failure.time)}{begun}"),
        ("Where", f"{who}{failure.host}{step}"),
        ("Why", [element("div", each) for each in why if each] or "No more is known; see its log."),
        ("Cost", cost_of(attempt, figures)),
        ("Log", failure.log),
    ]
    yield element("h3", failure_title(attempt))
    yield element("ul", [element("li", element("strong", f"{name}: "), told) for name, told in rows if told])
    yield from _details(attempt, text)


_NO_VERDICT = (
    "No verdict is recorded. Workers and their links are judged while several workers train by `fit`. Custom loops and "
    "steps that XLA compiles are not judged."
)


def _slow(figures: RunFigures, totals: Sequence[WorkerTotals]) -> Iterator[Child]:
    """Yields the verdicts about slow workers and links; without one, what the telemetry tells."""
    told = verdicts_of(figures)
    if not told:
        yield paragraph(_NO_VERDICT)
        if sentences := slow_by_telemetry(totals):
            yield paragraph("The telemetry of the whole run tells this:")
            yield _list(sentences)
        return
    items = [
        [element("strong", f"{when}: "), f"{verdict}. {remedy}"] for when, verdict, remedy in told[:_MOST_VERDICTS]
    ]
    yield _list(items)
    if len(told) > _MOST_VERDICTS:
        yield paragraph(f"And {len(told) - _MOST_VERDICTS} more; `tfdist report --no-html` prints all.")


def _details(attempt: AttemptFigures, text: AttemptText) -> Iterator[Child]:
    """Yields texts that are shown on demand: the stack or the end of the log, and the positions of workers."""
    failure = attempt.failure
    shown = details_of(failure, is_shown=False, is_reported=True) if failure else ""
    if shown:
        title = "Traceback" if failure and failure.kind == "exception" else "End of the log"
        yield _folded(f"{title} of worker {failure.worker if failure else ''}", shown.splitlines()[-_MOST_LINES:])
    if text.positions:
        yield _folded("Where each worker was", text.positions[:_MOST_LINES])


def _folded(title: str, lines: Sequence[str]) -> Markup:
    return element("details", element("summary", title), element("pre", "\n".join(lines), tabindex="0"))


def _drawn(make: Callable[[RunFigures], Chart], figures: RunFigures) -> Markup:
    """Returns a chart; nothing if it has no curves or there is no matplotlib, a sentence if it cannot be drawn."""
    if not can_draw():
        return Markup("")
    try:
        chart = make(figures)
        return element("div", drawn(chart), class_="charts") if chart.curves else Markup("")
    except Exception as error:  # matplotlib may raise any. The tables beside the chart are worth more.
        return element("p", f"This chart cannot be drawn ({type(error).__name__}: {error}).")


def _loss(figures: RunFigures) -> Iterator[Child]:
    """Yields the loss by step, and the first and newest value of each metric."""
    told = [each for file in longest(figures.telemetry) for each in file.figures if each.logs]
    if not told:
        yield paragraph(NO_TELEMETRY)
        return
    yield _drawn(loss_chart, figures)
    first = {name: value for each in reversed(told) for name, value in each.logs.items()}
    newest = {name: value for each in told for name, value in each.logs.items()}
    rows = [[name, f"{first[name]:.4g}", f"{newest[name]:.4g}"] for name in sorted(newest)]
    yield table("Loss and metrics, as Keras logs them", ("Name", "First", "Newest"), rows)
    yield paragraph(f"The newest are of step {told[-1].step:,}.", "soft")
