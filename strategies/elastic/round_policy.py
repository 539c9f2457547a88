"""Policy of rounds: which steps a slow worker trains, averages by rows, and the count of rows. No clock, no network."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The work of one worker in a round.

    Attributes:
      rows: Rows that it has trained on.
      steps: Steps that it has trained.
      skipped: Rows of batches that it has skipped, to be done at the same time as the fastest worker.
      seconds: Time that its steps took.
    """

    rows: int = 0
    steps: int = 0
    skipped: int = 0
    seconds: float = 0.0


def trains(step: int, trained: int, every: int) -> bool:
    """Whether a worker trains in a step of a round, counted from 0, if it trains in `trained` of `every` steps.

    The trained steps are spread evenly over the round, so that the skipped batches are not neighbors.
    """
    return (step + 1) * trained // every > step * trained // every


def steps_of_equal_time(done: Mapping[int, Contribution], every: int) -> dict[int, int]:
    """Returns how many of `every` steps each worker trains in the next round, so that all take about equally long.

    Args:
      done: The work of each worker in the round before.
      every: Number of steps of a round, which the fastest worker trains.
    """
    seconds = {worker: each.seconds / each.steps for worker, each in done.items() if each.steps and each.seconds > 0}
    fastest = min(seconds.values(), default=0.0)
    return {
        worker: max(1, min(every, round(every * fastest / seconds[worker]))) if worker in seconds else every
        for worker in done
    }


def average_by_rows(arrays: Mapping[int, np.ndarray], rows: Mapping[int, int]) -> np.ndarray:
    """Returns the average over workers, weighted by rows, in the order of workers and the type of the arrays.

    If no worker has rows, all count alike.
    """
    total = sum(rows[worker] for worker in arrays)
    kind = next(iter(arrays.values())).dtype
    wide = np.float32 if kind.itemsize < 4 else kind
    average: Any = None
    for worker in sorted(arrays):
        share = rows[worker] / total if total else 1 / len(arrays)
        if share == 0:  # An Inf or NaN of a worker without rows does not count.
            continue
        part = arrays[worker].astype(wide) * np.asarray(share, wide)
        average = part if average is None else average + part
    return average.astype(kind)


class RowLedger:
    """Counts the rows of each worker: those that the weights have learned from, and those that are lost."""

    def __init__(self) -> None:
        self.rounds = 0
        self._trained: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._skipped: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()

    def close_round(self, done: Mapping[int, Contribution], workers: int) -> None:
        """Counts a round in which these workers took part, of `workers` workers of the job."""
        self.rounds += 1
        for worker in range(workers):
            if worker not in done:
                self._missed[worker] += 1
                continue
            self._trained[worker] += done[worker].rows
            self._skipped[worker] += done[worker].skipped

    def lose(self, worker: int, rows: int) -> None:
        """Counts the rows that a lost worker had trained on since the last synchronization."""
        self._lost[worker] += rows

    def to_json(self) -> dict[str, Any]:
        """Returns all counts as JSON."""
        counts = {"trained": self._trained, "lost": self._lost, "skipped": self._skipped, "missed": self._missed}
        return {"rounds": self.rounds, **{name: sorted(each.items()) for name, each in counts.items()}}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "RowLedger":
        """Returns the ledger of which `to_json` returned the JSON."""
        made = cls()
        made.rounds = saved["rounds"]
        for name in ("trained", "lost", "skipped", "missed"):
            getattr(made, f"_{name}").update(dict(map(tuple, saved[name])))
        return made

    def report(self, workers: int) -> "RowReport":
        """Returns the counts of all workers of the job."""

        def of(counts: Counter[int]) -> tuple[int, ...]:
            return tuple(counts[worker] for worker in range(workers))

        return RowReport(self.rounds, of(self._trained), of(self._lost), of(self._skipped), of(self._missed))


@dataclasses.dataclass(frozen=True)
class RowReport:
    """The rows that each worker has trained on, until the last synchronization.

    Attributes:
      rounds: Number of synchronizations.
      trained: Rows of each worker that the weights have learned from.
      lost: Rows that each worker trained on before it was lost, after its last synchronization. The weights have not
        learned from them. A worker tells of them every 0.2 s, so those of its last moment may be missing.
      skipped: Rows of the batches that each worker skipped by `equal_time`.
      missed_rounds: Synchronizations in which each worker did not take part. Its rows were not trained on there.
    """

    rounds: int
    trained: Sequence[int]
    lost: Sequence[int]
    skipped: Sequence[int]
    missed_rounds: Sequence[int]

    def describe(self) -> str:
        """Describes the counts in one line."""
        parts = [f"rows in the weights by worker {', '.join(map(str, self.trained))}"]
        for name, counts in [("lost", self.lost), ("skipped", self.skipped), ("missed rounds", self.missed_rounds)]:
            if any(counts):
                parts.append(f"{name} {', '.join(map(str, counts))}")
        return f"{self.rounds} synchronizations: {'; '.join(parts)}"
