"""Policy: the sentences of the page of `tfdist report` for readers without knowledge of the run."""

import itertools
from collections.abc import Sequence

from tfdist.events.straggler_file import pairs_of
from tfdist.events.time_record import BEGINNING
from tfdist.launch.run_summary import outcome_line
from tfdist.readable_numbers import clock, counted, duration, percent, rounded, size, step_time
from tfdist.report.attempt_text import verdict_text
from tfdist.report.goodput_table import AT_MOST, UNKNOWN_LOSS
from tfdist.report.report_figures import AttemptFigures, RunFigures
from tfdist.report.worker_totals import WorkerTotals, slow_workers, summed

_MOST_SLOW = 3


def lead_of(figures: RunFigures) -> str:
    """Returns the sentence with the outcome of the run."""
    count, seconds = len(figures.attempts), figures.seconds
    if figures.outcome == "running":
        return f"The run still goes on, or its supervisor was killed. So far: {counted(count, 'attempt')}."
    if not figures.outcome or seconds is None:
        return f"The outcome of the run is not recorded. Its files tell of {counted(count, 'attempt')}."
    codes = [each.get("run_exit_code") for each in figures.recorded.summaries]
    code = next((each for each in codes if isinstance(each, int) and each), 0)
    line = outcome_line(figures.outcome, code, seconds, count)
    return f"{line[:1].upper()}{line[1:]}{f' (exit code {code})' if code else ''}."


def tiles_of(figures: RunFigures, totals: Sequence[WorkerTotals]) -> list[tuple[str, str]]:
    """Returns the most important figures, each with its name."""
    speed = figures.speed
    raw, sent = summed(totals, "raw_bytes"), summed(totals, "sent_bytes")
    at_most = "at most " if figures.account and figures.account.is_at_most else ""
    tiles = [("Goodput", f"{at_most}{percent(figures.account.goodput if figures.account else None)}")]
    if speed is not None:
        is_known = speed.typical_seconds is not None
        name, seconds = ("Typical step", speed.typical_seconds) if is_known else ("Mean step", speed.step_seconds)
        tiles.append((name, step_time(seconds)))
        if speed.rows_per_second is not None:
            tiles.append(("Rows per second", rounded(speed.rows_per_second)))
        tiles.append(("Scaling efficiency", percent(speed.efficiency)))
    if raw and sent:
        tiles.append(("Compression", f"{raw / sent:.3g} times"))
    failed = sum(each.failure is not None for each in figures.attempts)
    return [*tiles, ("Failures", str(failed))]


def facts_of(figures: RunFigures, totals: Sequence[WorkerTotals]) -> list[str]:
    """Returns sentences about the whole run, beside those about its failures."""
    facts = [_time(figures), *_sizes(figures.attempts), _training(figures), *_slow(figures, totals), _traffic(totals)]
    return [fact for fact in facts if fact]


def _time(figures: RunFigures) -> str:
    account = figures.account
    if account is None or account.goodput is None:
        return "How the time was used is not recorded."
    most = "At most " if account.is_at_most else ""
    kept = (
        f"{most}{percent(account.goodput)} of the time went into training steps whose results were kept: the goodput."
    )
    if account.is_at_most:
        kept += f" {AT_MOST}"
    failed = [each for each in figures.attempts if each.cost]
    cost = sum(each.cost.seconds for each in failed if each.cost)
    least = "at least " if any(hides_loss(each, figures) for each in failed) else ""
    return f"{kept} Failures cost {least}{duration(cost)}." if cost else kept


def _sizes(attempts: Sequence[AttemptFigures]) -> list[str]:
    """Returns sentences about the number of workers, and about each change of it."""
    if not attempts:
        return []
    sentences = [f"It began with {counted(attempts[0].workers, 'worker')}."]
    for place, (before, now) in enumerate(itertools.pairwise(attempts), 1):
        if now.workers != before.workers:
            when = f" at {clock(now.start)}" if now.start is not None else ""
            told = f"{counted(now.workers, 'worker')} instead of {before.workers}{_why(attempts[:place])}"
            sentences.append(f"Attempt {now.number}{when}: {told}.")
    return sentences if len(sentences) > 1 else [f"It had {counted(attempts[0].workers, 'worker')}."]


def _why(attempts: Sequence[AttemptFigures]) -> str:
    """Returns why the number of workers changed after these attempts."""
    if attempts[-1].outcome == "resized":
        return ", as the job had saved and left to try all workers again"
    culprits = [each.failure.culprit if each.failure else None for each in attempts[-2:]]
    if culprits[-1] is None:
        return ""
    again = " again, without a backup in between" if len(culprits) == 2 and culprits[0] == culprits[1] else ""
    return f", after worker {culprits[-1]} had failed{again}"


def _training(figures: RunFigures) -> str:
    steps = max((each.steps[1] for each in figures.attempts), default=0)
    if not steps:
        return ""
    told = f"The model was trained for {counted(steps, 'step')}"
    if figures.kept_rows:
        told += f" on {counted(round(figures.kept_rows), 'row')}"
    repeated = (
        f" Steps with {counted(round(figures.repeated_rows), 'more row')} were lost." if figures.repeated_rows else ""
    )
    lost = cost.steps if (cost := figures.attempts[-1].cost) else 0
    unsaved = (
        f" The last {counted(lost, 'step')} came after the newest backup, and were lost at the end." if lost else ""
    )
    return f"{told}.{repeated}{unsaved}"


def _slow(figures: RunFigures, totals: Sequence[WorkerTotals]) -> list[str]:
    """Returns sentences about slow workers: by the verdicts of the run, or else by its telemetry."""
    told = verdicts_of(figures)
    if told:
        more = [f"The section on slow workers has {len(told) - _MOST_SLOW} more."] if len(told) > _MOST_SLOW else []
        return [*(f"Slow: {verdict}." for _, verdict, _ in told[:_MOST_SLOW]), *more]
    return slow_by_telemetry(totals)


def slow_by_telemetry(totals: Sequence[WorkerTotals]) -> list[str]:
    """Returns sentences about the workers that were slow over the whole run, the slowest first."""
    slow = sorted(slow_workers(totals), key=lambda each: -each[1])[:_MOST_SLOW]
    return [
        f"Worker {worker} computed {times:.1f} times slower per row than the median of the others."
        for worker, times in slow
    ]


def verdicts_of(figures: RunFigures) -> list[tuple[str, str, str]]:
    """Returns each verdict about a slow worker or link: when and in which attempt, the verdict, and the remedy."""
    found = []
    for number, records in sorted(figures.recorded.stragglers.items()):
        for record, end in pairs_of(records):
            found.append((f"{clock(record.time)}, attempt {number}", verdict_text(record, end), record.remedy))
    return found


def _traffic(totals: Sequence[WorkerTotals]) -> str:
    raw, sent = summed(totals, "raw_bytes"), summed(totals, "sent_bytes")
    if not raw or not sent:
        return ""
    if sent >= raw:
        return f"All workers together sent {size(sent)} of gradients."
    return f"Compression reduced the gradients that all workers sent from {size(raw)} to {size(sent)}."


def failure_title(attempt: AttemptFigures) -> str:
    """Returns what failed in an attempt; it has failed."""
    return f"Attempt {attempt.number}: {attempt.failure.describe() if attempt.failure else 'failed'}"


def cost_of(attempt: AttemptFigures, figures: RunFigures) -> str:
    """Returns the sentence about the cost of a failed attempt."""
    cost = attempt.cost
    if cost is None:
        return "What it cost is not recorded."
    parts = []
    if cost.steps:
        parts.append(f"{duration(cost.lost_seconds)} of training ({counted(cost.steps, 'step')}) were lost")
    until = "the end" if attempt is figures.attempts[-1] else "the next start"
    parts.append(f"{duration(cost.restart_seconds)} passed until {until}")
    if cost.again_seconds:
        parts.append(f"{duration(cost.again_seconds)} went into starting, tracing and restoring again")
    if hides_loss(attempt, figures):
        loss = f"{UNKNOWN_LOSS[:1].upper()}{UNKNOWN_LOSS[1:]}"
        return f"At least {duration(cost.seconds)} in all: {', '.join(parts)}. {loss}."
    return f"{duration(cost.seconds)} in all: {', '.join(parts)}.{_origin(attempt, figures)}"


def hides_loss(attempt: AttemptFigures, figures: RunFigures) -> bool:
    """Returns whether it is not known how much work an attempt lost, so that it cost more than its known parts."""
    return figures.account is not None and attempt.number in figures.account.unknown


def _origin(attempt: AttemptFigures, figures: RunFigures) -> str:
    lost = [each for each in figures.account.lost if each.attempt == attempt.number] if figures.account else []
    if not lost:
        return ""
    last, commit = lost[0].last_step, lost[0].commit
    origin = "the beginning" if commit == BEGINNING else f"backup step-{commit}"
    is_last = attempt is figures.attempts[-1]
    goes_on = "A new start would continue" if is_last else "Training continued"
    return f" Step {last} was finished. {goes_on} from {origin}."
