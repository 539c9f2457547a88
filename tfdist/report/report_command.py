"""The command `tfdist report`: says in the terminal and in a page what happened in a run, from its folder."""

import argparse
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from absl import logging

from tfdist.readable_numbers import rounded, step_time
from tfdist.report.attempt_text import AttemptText, text_of
from tfdist.report.goodput_table import account_of, lines_of_account
from tfdist.report.recorded_failure import line_of
from tfdist.report.recorded_run import DAMAGED, RecordedRun, read_all_telemetry, read_run
from tfdist.report.report_figures import figures_of
from tfdist.report.report_page import page_of
from tfdist.run_files import PAGE
from tfdist.symlink_safe_file import write_whole

_NO_FAILURE_REPORT = "no failure.json, so it still goes on, had no failure, lost its supervisor, or had none"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist report`."""
    parser.add_argument(
        "run_dir",
        type=pathlib.Path,
        metavar="RUN_DIR",
        help="folder of the run: that of --log-dir, or the one that `tfdist run` has named",
    )
    parser.add_argument("--stacks", action="store_true", help="print the stacks of all threads of all workers")
    page = parser.add_mutually_exclusive_group()
    page.add_argument(
        "--html",
        type=pathlib.Path,
        metavar="FILE",
        help=f"file for the page with figures and charts (default: {PAGE} in RUN_DIR)",
    )
    page.add_argument("--no-html", action="store_true", help="write no page")


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist report`, and returns its exit code: 1 if the folder is no folder of a run."""
    try:
        recorded = read_run(args.run_dir)
    except (OSError, ValueError) as error:
        logging.error("%s", error)
        return 1
    for line in lines_of(recorded, stacks=args.stacks):
        _print(line)
    if not args.no_html:
        _print("")
        _print(_write_page(recorded, args.html or args.run_dir / PAGE))
    return 0


def _print(line: str) -> None:
    """Prints a line. Damaged files and names of folders may have half characters, which become "?"."""
    print(line.encode("utf-8", "replace").decode())


def _write_page(recorded: RecordedRun, path: pathlib.Path) -> str:
    """Writes the page, and returns a line for the terminal."""
    page = page_of(recorded, time.time())
    try:
        write_whole(path, page)
    except OSError as error:
        return f"no page was written: {error.strerror}: {path}; give another file by --html FILE"
    return f"page with charts: {path}"


def lines_of(recorded: RecordedRun, *, stacks: bool = False) -> Iterator[str]:
    """Yields the lines of the report of a run.

    Args:
      recorded: Content of the run's folder.
      stacks: Whether to add the stacks of all threads.
    """
    told = [_outcome(each) for each in recorded.summaries]
    yield f"run in {recorded.folder}: {'; '.join(dict.fromkeys(told)) or _NO_FAILURE_REPORT}"
    yield from _time_of(recorded)
    yield from _speed_of(recorded)
    for number, workers in recorded.attempts.items():
        yield ""
        try:
            slow = recorded.stragglers.get(number, ())
            yield from list(_lines(text_of(number, workers, recorded.summaries, stragglers=slow, stacks=stacks)))
        except DAMAGED as error:
            yield f"attempt {number}: its files are damaged, and have values of another type than expected ({error})"
    if recorded.problems:
        yield ""
        yield from (f"problem: {problem}" for problem in recorded.problems)


def _outcome(summary: Mapping[str, Any]) -> str:
    if summary.get("outcome") == "running" and summary.get("run_exit_code") is None:
        return "running, or its supervisor was killed"
    return f"{summary.get('outcome')}, exit code {summary.get('run_exit_code')}"


def _time_of(recorded: RecordedRun) -> Iterator[str]:
    """Yields lines about goodput, and about the parts of the time."""
    try:
        account = account_of(recorded)
        lines = list(lines_of_account(account)) if account else []
    except DAMAGED as error:
        lines = [f"the time of the run is unknown: its files have values of another type than expected ({error})"]
    if lines:
        yield ""
        yield from lines


def _speed_of(recorded: RecordedRun) -> Iterator[str]:
    """Yields a line about the time of a step, if the workers have trained."""
    try:
        speed = figures_of(recorded, read_all_telemetry(recorded)[0]).speed
    except DAMAGED:
        return  # The page names the damage.
    if speed is None:
        return
    rows = "" if speed.rows_per_second is None else f", {rounded(speed.rows_per_second)} rows/s"
    typical = speed.typical_seconds
    median = "" if typical is None else f"typical step {step_time(typical)} (median), "
    yield f"{median}mean step {step_time(speed.step_seconds)}{rows}"


def _lines(text: AttemptText) -> Iterator[str]:
    yield text.title
    if text.failure is not None:
        yield f"  first failure: {line_of(text.failure)}"
    yield from (f"  {line}" for line in (*text.absent, *text.missing, *text.positions, *text.slow))
