"""Reads the folder of a run: the summary of its supervisor, and the reports and events of its workers.

Damaged and missing files are named, and the others are used.
"""

import dataclasses
import json
import pathlib
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.events.asked_by_signal import process_start
from tfdist.events.event_file import EventFile, read_events
from tfdist.events.straggler_file import StragglerRecord, read_records
from tfdist.events.time_record import TimeRecord, read_time_record
from tfdist.report.earlier_runs import FolderSpan, earlier_runs
from tfdist.run_files import RunFiles
from tfdist.telemetry.telemetry_file import TelemetryFile, read_telemetry

DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of figures and texts that are made of damaged files, which have values of other types than expected."""

_MOST_WORKERS = 10_000


@dataclasses.dataclass(frozen=True)
class WorkerFiles:
    """The files of one worker in one attempt.

    Attributes:
      failure: Its failure report; empty if it wrote none.
      events: Its events; `None` if it wrote none.
      log: Path of its log.
      times: Its seconds by phase; `None` if it wrote none.
      attempt: The entry of the attempt in the list of its supervisor; empty if there is none.
      telemetry: Path of its figures; `None` without `tfdist.callbacks.Telemetry`. Only the page reads them.
      seen: When its process was seen to run on this host, in seconds since the epoch; `None` if it does not.
    """

    failure: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    events: EventFile | None = None
    log: str | None = None
    times: TimeRecord | None = None
    attempt: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    telemetry: pathlib.Path | None = None
    seen: float | None = None


@dataclasses.dataclass(frozen=True)
class RecordedRun:
    """The files in the folder of a run.

    Attributes:
      folder: The folder.
      summaries: The content of `failure.json`, if there was a failure, with that of `run.json`, which also has the
        attempt that runs: of one supervisor, or of those of several hosts.
      attempts: By number of the attempt, the files of each worker.
      problems: One line for each file that could not be read, and one for the folders of an earlier run, which are
        left out.
      stragglers: By number of the attempt, the verdicts about slow workers, oldest first.
    """

    folder: pathlib.Path
    summaries: Sequence[Mapping[str, Any]]
    attempts: Mapping[int, Mapping[int, WorkerFiles]]
    problems: Sequence[str]
    stragglers: Mapping[int, Sequence[StragglerRecord]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _FolderContent:
    """The files of a supervisor and its workers in its folder."""

    summary: Mapping[str, Any]
    attempts: Mapping[int, Mapping[int, WorkerFiles]]
    stragglers: Mapping[int, Sequence[StragglerRecord]]
    problems: Sequence[str]


def read_run(folder: pathlib.Path) -> RecordedRun:
    """Reads the folder of a run, or a folder with a folder `worker-<i>` of each host.

    Raises:
      ValueError: If the folder is no folder of a run.
    """
    folders = [each for each in (folder, *sorted(folder.glob("worker-*"))) if _attempts_in(each)]
    if not folders:
        what = "does not exist" if not folder.exists() else "has no attempt-0, so no run has written to it"
        raise ValueError(f"RUN_DIR must be the folder of a run of `tfdist run`, but {folder} {what}.")
    contents = {each: _content_of(each) for each in folders}
    earlier = earlier_runs({each: _span(content, each, folder) for each, content in contents.items()})
    left_out = ", ".join(f"{each}/attempt-*" for each in earlier)
    problems = [f"files of an earlier run are left out: {left_out}"] if earlier else []
    summaries: list[Mapping[str, Any]] = []
    attempts: dict[int, dict[int, WorkerFiles]] = {}
    stragglers: dict[int, list[StragglerRecord]] = {}
    for content in (contents[each] for each in folders if each not in earlier):
        problems.extend(content.problems)
        summaries.extend([content.summary] if content.summary else [])
        for number, workers in content.attempts.items():
            attempts.setdefault(number, {}).update(workers)
            stragglers.setdefault(number, []).extend(content.stragglers[number])
    return RecordedRun(folder, summaries, dict(sorted(attempts.items())), problems, stragglers)


def _content_of(folder: pathlib.Path) -> _FolderContent:
    problems: list[str] = []
    attempts: dict[int, Mapping[int, WorkerFiles]] = {}
    stragglers: dict[int, Sequence[StragglerRecord]] = {}
    files = RunFiles(folder)
    older, newer = _by_age(_json(files.summary, problems), _json(files.outcome, problems))
    for number in _attempts_in(folder):
        told = attempt_in(newer, number) or attempt_in(older, number) or {}
        attempts[number] = _workers_of(files, number, told, problems)
        stragglers[number] = _stragglers(files.stragglers(number), problems)
    return _FolderContent({**older, **newer}, attempts, stragglers, problems)


def _span(content: _FolderContent, folder: pathlib.Path, run: pathlib.Path) -> FolderSpan:
    """Returns what the content of a folder tells of its run, to recognize an earlier run than that of other folders."""
    number = re.fullmatch(r"worker-(\d+)", folder.name)
    begin = _progress(content.summary)[0]
    if not begin or (number is None and folder != run):
        return FolderSpan(None, None, None, None)
    worker = int(number[1]) if number and folder != run else None
    told = [workers for attempt in content.attempts.values() for workers in _told_numbers(attempt)]
    return FolderSpan(worker, begin, _end_of(content.summary), max(told, default=None))


def _end_of(summary: Mapping[str, Any]) -> float | None:
    """Returns when a run ended, in seconds since the epoch; `None` if it goes on or the summary is damaged."""
    last = (_attempts_of(summary) or [{}])[-1]
    start, seconds = last.get("time"), last.get("seconds")
    if summary.get("outcome") == "running" or not isinstance(start, float) or not isinstance(seconds, float):
        return None
    return start + seconds


def read_all_telemetry(recorded: RecordedRun) -> tuple[dict[int, dict[int, TelemetryFile]], list[str]]:
    """Reads the figures of all workers.

    Returns:
      The files by number of the attempt and by worker, and a line for each that is damaged.
    """
    found: dict[int, dict[int, TelemetryFile]] = {}
    problems = []
    for number, workers in recorded.attempts.items():
        for worker, files in workers.items():
            if files.telemetry is None:
                continue
            try:
                file = read_telemetry(files.telemetry)
            except OSError as error:
                problems.append(f"{files.telemetry} cannot be read: {error.strerror}")
                continue
            if file.damaged:
                problems.append(f"{files.telemetry} is damaged: {file.damaged} of its lines cannot be read")
            found.setdefault(number, {})[worker] = file
    return found, problems


def attempt_in(summary: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """Returns the entry of an attempt in the summary of a supervisor."""
    return next((each for each in _attempts_of(summary) if each.get("number") == number), None)


def _attempts_of(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    attempts = summary.get("attempts")
    return [each for each in attempts if isinstance(each, dict)] if isinstance(attempts, list) else []


def _by_age(summary: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Returns `failure.json` and `run.json` with the newer one last. A full disk may have kept one of them old.

    The content tells, since a copy of the folder may have other times. A file of another run, whose first attempt began
    earlier, has nothing to say about this one, so it is empty then.
    """
    older, newer = sorted((summary, run), key=_progress)
    is_other_run = 0 < _progress(older)[0] < _progress(newer)[0]
    return ({} if is_other_run else older), newer


def _progress(summary: Mapping[str, Any]) -> tuple[float, int, bool]:
    """Returns how far a run had come when a file was written: its begin, its attempts, and whether the last had ended.

    If all are equal, `sorted` leaves `run.json` last.
    """
    found = _attempts_of(summary)
    begin = found[0].get("time") if found else None
    has_ended = bool(found) and isinstance(found[-1].get("seconds"), int | float)
    return begin if isinstance(begin, int | float) else 0.0, len(found), has_ended


def number_of_workers(workers: Mapping[int, WorkerFiles]) -> int:
    """Returns the number of workers of an attempt, as its files tell, which may be damaged."""
    return max([*_told_numbers(workers), *(worker + 1 for worker in workers)], default=0)


def _told_numbers(workers: Mapping[int, WorkerFiles]) -> list[int]:
    """Returns the credible numbers of workers that the events of workers tell."""
    told = [each.events.header.get("workers") for each in workers.values() if each.events]
    return [value for value in told if type(value) is int and 0 < value <= _MOST_WORKERS]


def _attempts_in(folder: pathlib.Path) -> list[int]:
    found = [(path, re.fullmatch(r"attempt-(0|[1-9]\d*)", path.name)) for path in folder.glob("attempt-*")]
    return [int(match[1]) for path, match in found if match and path.is_dir()]


def _workers_of(
    files: RunFiles, number: int, attempt: Mapping[str, Any], problems: list[str]
) -> dict[int, WorkerFiles]:
    names = [path.name for path in files.attempt(number).iterdir()]
    matches = [
        re.fullmatch(r"(?:worker|failure|events|times|telemetry)-(\d+)\.(?:log|json|jsonl|bin)", name) for name in names
    ]
    found = {}
    for worker in sorted({int(match[1]) for match in matches if match}):
        log, telemetry = files.attempt(number) / f"worker-{worker}.log", files.telemetry(number, worker)
        events = _events(files.events(number, worker), problems)
        found[worker] = WorkerFiles(
            _json(files.report(number, worker), problems),
            events,
            str(log) if log.exists() else None,
            _times(files.times(number, worker), problems),
            attempt,
            telemetry if telemetry.exists() else None,
            time.time() if events and _runs_here(events.header) else None,
        )
    return found


def _runs_here(header: Mapping[str, Any]) -> bool:
    """Whether the process of a worker, and not a later one with its number, runs on this host."""
    pid, start = header.get("pid"), header.get("process_start")
    if not isinstance(pid, int) or start is None or header.get("host") != socket.gethostname():
        return False
    return bool(process_start(pid) == start)


def _json(path: pathlib.Path, problems: list[str]) -> Mapping[str, Any]:
    """Returns the content of a JSON file; empty if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(errors="replace"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        problems.append(f"{path} is damaged: it is no JSON object")
        return {}
    return content


def _times(path: pathlib.Path, problems: list[str]) -> TimeRecord | None:
    try:
        return read_time_record(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
    except ValueError as error:
        problems.append(f"{path} is damaged: it {error}")
    return None


def _stragglers(path: pathlib.Path, problems: list[str]) -> Sequence[StragglerRecord]:
    try:
        records, damaged = read_records(path)
    except FileNotFoundError:
        return ()
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return ()
    if damaged:
        problems.append(f"{path} is damaged: {damaged} of its lines cannot be read")
    return records


def _events(path: pathlib.Path, problems: list[str]) -> EventFile | None:
    try:
        events = read_events(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}")
        return None
    except ValueError as error:
        problems.append(f"{path} is damaged: it {error}")
        return None
    if events.damaged:
        problems.append(f"{path} is damaged: {events.damaged} of its lines cannot be read")
    return events
