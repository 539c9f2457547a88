"""Lines of `tfdist report` about the time of a run: the time by part, and the work that attempts lost."""

from collections.abc import Iterator, Mapping

from tfdist.events.time_record import BEGINNING
from tfdist.readable_numbers import counted, duration
from tfdist.report.goodput import LOST, PARTS, SMALLEST, UNRECORDED, LostWork, TimeAccount, WorkerAttempt, account_for
from tfdist.report.recorded_run import RecordedRun, WorkerFiles

AT_MOST = "A training loop of your own does not tell its steps, so its evaluations and other code count too."
UNKNOWN_LOSS = "how much work was lost is not known, since its training loop has no tfdist.callbacks.BackupAndRestore"

_UNLIKE = 0.1  # Workers whose shares of a part differ by more are listed one by one.


def account_of(recorded: RecordedRun) -> TimeAccount | None:
    """Divides the time of a run into parts; `None` if no supervisor has recorded the times of its attempts."""
    attempts = [
        attempt
        for number, workers in recorded.attempts.items()
        for worker, files in workers.items()
        if (attempt := _worker_attempt(number, worker, files)) is not None
    ]
    return account_for(attempts) if attempts else None


def _worker_attempt(number: int, worker: int, files: WorkerFiles) -> WorkerAttempt | None:
    told, record = files.attempt, files.times
    start, seconds, failure = told.get("time"), told.get("seconds"), told.get("failure")
    if not isinstance(start, int | float):
        return None
    if not isinstance(seconds, int | float):  # The attempt goes on, or its supervisor was killed.
        end = files.seen or (record.time if record else start)
        seconds = max(end - start, 0.0)
    failed_at = failure.get("time") if isinstance(failure, dict) else None
    committed = told.get("committed")
    return WorkerAttempt(
        worker,
        number,
        start,
        seconds,
        str(told.get("outcome")),
        failed_at if isinstance(failed_at, int | float) else None,
        committed if isinstance(committed, int) else None,
        record,
    )


def lines_of_account(account: TimeAccount) -> Iterator[str]:
    """Yields the lines about the time of a run."""
    if not account.seconds or account.parts.get(UNRECORDED, 0.0) > 0.99 * account.seconds:
        return
    goodput = account.goodput
    told = "unknown" if goodput is None else f"{'at most ' if account.is_at_most else ''}{goodput:.1%}"
    yield f"goodput {told}: the share of training steps that were kept in {duration(account.seconds)}"
    yield from (f"  {line}" for line in _table(account))
    if account.is_at_most:
        yield f"  at most: {AT_MOST[:1].lower()}{AT_MOST[1:-1]}"
    yield from (f"  {_lost(each)}" for each in account.lost)
    yield from (f"  attempt {number}: {UNKNOWN_LOSS}" for number in account.unknown)


def _table(account: TimeAccount) -> Iterator[str]:
    listed = [part for part, seconds in account.parts.items() if _is_listed(part, seconds / account.seconds)]
    width = max((len(PARTS[part]) for part in listed), default=0)
    for part in listed:
        seconds = account.parts[part]
        line = f"{PARTS[part]:{width}}  {duration(seconds):>12}  {seconds / account.seconds:6.1%}"
        yield f"{line}{_by_worker(part, account.workers)}"


def _is_listed(part: str, share: float) -> bool:
    return abs(share) >= SMALLEST or part == LOST


def _by_worker(part: str, workers: Mapping[int, Mapping[str, float]]) -> str:
    """Returns the shares of the workers in a part, if they differ much."""
    shares = {
        worker: spent.get(part, 0.0) / total for worker, spent in workers.items() if (total := sum(spent.values()))
    }
    if len(shares) < 2 or max(shares.values()) - min(shares.values()) < _UNLIKE:
        return ""
    by_share = sorted(shares, key=lambda worker: -shares[worker])
    named = by_share if len(shares) <= 4 else [by_share[0], by_share[-1]]
    return f"  ({', '.join(f'worker {worker}: {shares[worker]:.0%}' for worker in named)})"


def _lost(each: LostWork) -> str:
    origin = "the beginning" if each.commit == BEGINNING else f"backup step-{each.commit}"
    steps = counted(each.steps, "step")
    return (
        f"attempt {each.attempt} lost {steps}: it had finished step {each.last_step}, training continues from {origin}"
    )
