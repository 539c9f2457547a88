"""The section of the page of `tfdist report` with all attempts over time: a drawing, and a table."""

from collections.abc import Iterator

from tfdist.readable_numbers import clock, counted, duration, percent, rounded, step_time
from tfdist.report.html_markup import Child, Markup, element, paragraph, table
from tfdist.report.report_figures import AttemptFigures, RunFigures

_MOST_DRAWN = 100
_COLUMNS = (
    *("Attempt", "Workers", "Began", "Lasted", "Ended as", "Steps", "Newest backup"),
    *("Typical step", "Mean step", "Rows/s", "Efficiency"),
)


def attempts_section(figures: RunFigures) -> Iterator[Child]:
    """Yields the drawing and the table of attempts."""
    start, seconds = figures.start, figures.seconds
    if start is not None and seconds:
        drawn = figures.attempts[:_MOST_DRAWN]
        yield element("div", [_lane(each, start, seconds) for each in drawn], aria_hidden="true")
        yield element("div", element("span", clock(start)), element("span", f"+ {duration(seconds)}"), class_="axis")
        yield paragraph(_LEGEND, "soft")
    yield table("Attempts", _COLUMNS, [_row(each) for each in figures.attempts])
    yield paragraph(_EXPLANATION, "soft")


_LEGEND = (
    "One bar for each attempt, that is each start of all workers; a gray bar ended with a failure. "
    "\N{MULTIPLICATION SIGN} marks the first failure, a vertical line a backup."
)
_EXPLANATION = (
    "Steps are those of the model, from the first to the last of the attempt. The section on speed explains the last "
    "four columns."
)


def _lane(attempt: AttemptFigures, start: float, seconds: float) -> Markup:
    """Returns the bar of an attempt, placed by its time in the run."""
    if attempt.start is None or attempt.seconds is None:
        return Markup("")

    def place(moment: float) -> str:
        return f"{min(max((moment - start) / seconds, 0.0), 1.0) * 100:.2f}%"

    width = f"{min(max(attempt.seconds / seconds, 0.0), 1.0) * 100:.2f}%"
    style = f"left:{place(attempt.start)};width:{width}"
    marks = [element("i", class_="failed" if attempt.failure else None, style=style)]
    marks += [element("s", style=f"left:{place(moment)}") for moment in attempt.saves]
    if attempt.failure is not None:
        cross = "\N{MULTIPLICATION SIGN}"
        marks.append(element("b", cross, class_="cross", style=f"left:{place(attempt.failure.time)}"))
    size, outcome = counted(attempt.workers, "worker"), attempt.outcome or "outcome unknown"
    name = element("div", f"Attempt {attempt.number}: {size}, {outcome}")
    return element("div", name, element("div", marks, class_="lane"))


def _row(attempt: AttemptFigures) -> list[Child]:
    speed = attempt.speed
    first, last = attempt.steps
    return [
        str(attempt.number),
        str(attempt.workers),
        clock(attempt.start) if attempt.start is not None else "unknown",
        duration(attempt.seconds) if attempt.seconds is not None else "unknown",
        attempt.outcome or "unknown",
        f"{first + 1:,} to {last:,}" if last > first else "unknown" if attempt.hides_steps else "none",
        "none" if attempt.committed is None else f"step-{attempt.committed}",
        step_time(speed.typical_seconds) if speed else "",
        step_time(speed.step_seconds) if speed else "",
        rounded(speed.rows_per_second) if speed else "",
        percent(speed.efficiency) if speed else "",
    ]
