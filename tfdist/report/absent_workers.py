"""Text about workers that were lost, in a job that went on without them and started them again alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfdist.launch.absences import Absence
from tfdist.readable_numbers import clock, counted


def absences_of(attempts: Sequence[Mapping[str, Any]]) -> list[Absence]:
    """Returns the absences that the supervisors of an attempt have recorded, oldest first.

    Raises:
      TypeError: If a record is damaged; also `LookupError` and `ValueError`.
    """
    found = [Absence(**each) for attempt in attempts for each in attempt.get("absences") or ()]
    return sorted(found, key=lambda absence: absence.time)


def lines_of_absences(absences: Sequence[Absence]) -> Iterator[str]:
    """Yields a line about each absence."""
    for each in absences:
        first, *later = each.reasons
        parts = [f"started again alone {_times(len(each.starts))}" if each.starts else "not started again"]
        if later:
            parts.append(f"failed {_times(len(later))} while it started")
        parts.append("has joined again" if each.has_joined else "has not joined again")
        missed = f"the weights lack {counted(each.missed_steps, 'step')} of it"
        yield f"{first}; {', '.join(parts)}; {missed} [{clock(each.time)} on {each.host}]"


def _times(count: int) -> str:
    return "once" if count == 1 else counted(count, "time")
