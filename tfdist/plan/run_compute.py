"""The time of a step of a replica alone, from the folder of a run that trains or has trained."""

import pathlib
import statistics

from tfdist.events.phase_names import COMPUTE
from tfdist.events.time_record import TimeRecord
from tfdist.report.recorded_run import read_run

_FEWEST_STEPS = 10  # First steps are slower than later ones.


def compute_seconds_of(folder: pathlib.Path) -> float:
    """Returns the seconds that a step of a run computes, without exchanges and waits: the median over its workers.

    Takes the newest attempt in which workers have trained at least 10 steps.

    Args:
      folder: The folder of a run of `tfdist run`, which may still go on.

    Raises:
      ValueError: If the folder is no folder of a run, or has no such attempt.
    """
    attempts = read_run(folder).attempts
    for number in sorted(attempts, reverse=True):
        records = [files.times for files in attempts[number].values() if files.times is not None]
        if known := [_compute_seconds(each) for each in records if _own_steps(each) >= _FEWEST_STEPS]:
            return statistics.median(known)
    raise ValueError(
        f"The run must have trained {_FEWEST_STEPS} steps with `fit`, but no worker has done so in {folder}. Wait for "
        "that, or give the time of a step of one replica alone to --compute-ms."
    )


def _own_steps(record: TimeRecord) -> int:
    return record.steps - max(record.resumed_steps, 0) if record.seconds[COMPUTE] else 0


def _compute_seconds(record: TimeRecord) -> float:
    return record.seconds[COMPUTE] / _own_steps(record)
