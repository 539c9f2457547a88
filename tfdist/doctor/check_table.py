"""Prints the results of `tfdist doctor`, and describes them as JSON."""

import sys
from collections.abc import Sequence
from typing import Any

import tfdist
from tfdist.doctor.check import FAILURE, OK, WARNING, Check, count
from tfdist.doctor.job_facts import JobFacts
from tfdist.readable_numbers import counted, counted_or_no

_STYLES = {OK: "green", WARNING: "bold yellow", FAILURE: "bold red"}


def print_table(checks: Sequence[Check], summary: str) -> None:
    """Prints one row for each check and a summary: a table on a terminal, otherwise one line for each row."""
    if sys.stdout.isatty():
        _print_on_terminal(checks)
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.verdict:<7}  {check.name:<{width}}  {_sentence(check)}")
    print(summary, flush=True)


def summary_of(checks: Sequence[Check], workers: int, seconds: float) -> str:
    """Returns the last line: the numbers of failures and warnings, and whether the job can start."""
    failures, warnings = count(checks, FAILURE), count(checks, WARNING)
    scope = f"{counted(len(checks), 'check')} of {counted(workers, 'worker')} in {seconds:.1f} s"
    found = f"{counted_or_no(failures, 'failure')}, {counted_or_no(warnings, 'warning')}"
    outcome = "not ready" if failures else "ready, with warnings" if warnings else "ready"
    return f"tfdist doctor: {outcome}; {found}; {scope}"


def to_json(checks: Sequence[Check], job: JobFacts | None, seconds: float) -> dict[str, Any]:
    """Returns the results as a JSON object. It has no values of environment variables."""
    result: dict[str, Any] = {
        "tfdist": tfdist.__version__,
        "seconds": round(seconds, 3),
        "failures": count(checks, FAILURE),
        "warnings": count(checks, WARNING),
        "checks": [check.to_json() for check in checks],
    }
    if job is None:
        return result
    workers = [
        {
            "worker": worker,
            "address": job.addresses[worker],
            "host": present.facts.host,
            "versions": dict(present.facts.versions),
            "gpus": present.facts.gpus,
            "processors": present.facts.cores,
            "free_memory_bytes": present.facts.free_memory,
            "floating_point_operations_per_second": job.speeds.get(worker),
        }
        for worker, present in sorted(job.seats.items())
    ]
    contacts = [
        {
            "from": worker,
            "to": contact.peer,
            "problem": contact.detail,
            "round_trip_seconds": contact.round_trip or None,
            "bits_per_second": job.links.get((worker, contact.peer)),
        }
        for worker, present in sorted(job.seats.items())
        for contact in present.contacts
        if contact.peer != worker
    ]
    return {**result, "workers": workers, "connections": contacts}


def _print_on_terminal(checks: Sequence[Check]) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for column in ("check", "verdict", "finding and remedy"):
        table.add_column(column, overflow="fold")
    for check in checks:
        verdict = rich.text.Text(check.verdict, style=_STYLES[check.verdict])
        table.add_row(rich.text.Text(check.name), verdict, rich.text.Text(_sentence(check)))
    rich.console.Console().print(table)


def _sentence(check: Check) -> str:
    return f"{check.text}. {check.remedy}." if check.remedy else check.text
