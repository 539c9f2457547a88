"""Watches the reports of training steps for slow workers and links, and tells of them. `straggler_policy.py` decides.

Each worker judges by the reports alone, the same on all workers, and not by a clock of its own. So all workers come to
the same verdicts after the same step. The chief logs them, and writes them to the folder of the run.
"""

import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from tfdist.cluster.address import is_loopback, split_address
from tfdist.events.event_buffer import EVENTS
from tfdist.events.straggler_file import CAUSES, StragglerRecord, append_record
from tfdist.faults.coordination_store import CoordinationStore
from tfdist.faults.straggler_policy import Block, StragglerJudge, StragglerVerdict, WorkerLinks
from tfdist.faults.straggler_words import remedy_of, text_of
from tfdist.run_files import ATTEMPT, RunFiles, is_supervised

_STEPS, _SECONDS = 5, 0.5  # Least steps and seconds of a block. Four blocks are looked at, so 2 s at least.
_AFTER_TRACING = 2  # Steps after a trace that do not count: TensorFlow still optimizes.
_HOST = "host"  # Key of a worker's host in the coordination store.
_ASK_SECONDS = 0.5
_MOST_VERDICTS = 1000  # Limit for the log and the file, so that both stay small.
_LEAST_SECONDS = 1e-9


class Links(Protocol):
    """The links from this worker to its peers."""

    def look(self, step: int) -> None:
        """Looks at the connections after a training step."""

    def slowest(self) -> WorkerLinks | None:
        """Returns the slowest link; `None` if it is not known."""


class StragglerWatch:
    """Finds slow workers by the reports of training steps, and tells of them.

    Costs some operations on small arrays a step, and a look at up to eight connections.

    Args:
      store: The coordination store, in which workers tell their hosts.
      addresses: Addresses of the workers in TF_CONFIG.
      links: The links from this worker to its peers; `None` if they are not known.
      publish: Takes the slowest link of this worker, for the next reports to all workers.
    """

    def __init__(
        self,
        store: CoordinationStore,
        addresses: Sequence[str],
        links: Links | None,
        publish: Callable[[WorkerLinks | None], None],
    ) -> None:
        self._store, self._addresses, self._links, self._publish = store, addresses, links, publish
        self._judge = StragglerJudge()
        self._skipped, self._told, self._is_off = 0, 0, False
        self._sums = _Sums(store.workers)
        with contextlib.suppress(tf.errors.OpError):  # The worker has already published its host.
            store.say_once(_HOST, socket.gethostname())

    def own_causes(self) -> dict[str, float]:
        """Returns, by cause, 1 if this worker holds up the others, else 0. Callable in any thread."""
        own = [each for each in list(self._judge.verdicts.values()) if each.straggler.worker == self._store.worker]
        held = {verdict.straggler.cause for verdict in own if not verdict.is_balanced}
        return {cause: float(cause in held) for cause in CAUSES}

    def add(self, report: Any, is_measured: bool = False) -> None:
        """Adds a training step.

        Args:
          report: Its `StepReport`.
          is_measured: Whether a `BalancedSharding` measures the workers by the reports.
        """
        if self._is_off:
            return
        try:
            self._add(report, is_measured)
        except Exception:  # A verdict is not worth a failed step.
            self._is_off = True
            logging.exception("Slow workers are not looked for any more:")

    def _add(self, report: Any, is_measured: bool) -> None:
        if report.has_traced:
            self._skipped, self._sums = 0, _Sums(self._store.workers)
        self._skipped += 1
        if self._skipped <= _AFTER_TRACING:
            return
        sums = self._sums
        sums.add(report)
        if self._links is not None:
            self._links.look(report.number)
        if sums.steps < _STEPS or sums.whole_seconds < _SECONDS:
            return
        self._sums = _Sums(self._store.workers)
        for verdict in self._judge.add(sums.block(report, EVENTS.steps_before, is_measured)):
            self._tell(verdict)
        if self._links is not None:
            self._publish(self._links.slowest())

    def _tell(self, verdict: StragglerVerdict) -> None:
        self._told += 1
        if self._told == _MOST_VERDICTS + 1 and not self._store.worker:
            logging.warning("%d verdicts about slow workers were written. No more are.", _MOST_VERDICTS)
        if self._told > _MOST_VERDICTS:
            return
        straggler = verdict.straggler
        record = StragglerRecord(
            time=time.time(),
            step=verdict.step,
            since=verdict.since,
            is_over=verdict.is_over,
            is_balanced=verdict.is_balanced,
            cause=straggler.cause,
            worker=straggler.worker,
            host=self._host(straggler.worker),
            link=verdict.link,
            amount=round(verdict.amount, 3),
            text="",
            remedy=remedy_of(verdict),
        )
        record = dataclasses.replace(record, text=text_of(verdict, record.host))
        details = dataclasses.asdict(record)
        del details["step"]  # An event has its own.
        details["since_step"] = details.pop("since")  # `since` of an event is a time.
        EVENTS.note("straggler", **details)
        if self._store.worker:
            return
        if verdict.is_balanced or verdict.has_changed:
            logging.info("Unequal workers: %s. %s", record.text, record.remedy)
        elif verdict.is_over:
            logging.warning("No longer slow: %s.", record.text)
        else:
            logging.warning("Slow training: %s. %s", record.text, record.remedy)
        files = RunFiles.of_worker() if is_supervised() else None
        if files is not None:
            _write(files, record)

    def _host(self, worker: int) -> str:
        """Returns the host of a worker, as it calls itself; else as TF_CONFIG does."""
        if self._store.worker == 0:
            with contextlib.suppress(tf.errors.OpError):
                return str(self._store.hear(_HOST, worker, _ASK_SECONDS))
        host = split_address(self._addresses[worker])[0]
        return socket.gethostname() if is_loopback(host) else host


class _Sums:
    """Sums over the steps of a block."""

    def __init__(self, workers: int) -> None:
        self.steps, self.seconds, self.whole_seconds, self._workers = 0, 0.0, 0.0, workers
        self._rows, self._input = np.zeros(workers), np.zeros(workers)
        self._compute: list[Any] = []  # For each step, the seconds by worker.
        self._outside: list[Any] = []

    def add(self, report: Any) -> None:
        """Adds a step. A worker computes as long as the slowest of its replicas."""
        self.steps += 1
        # All wait for the worker with the longest pause between steps, so the step itself takes the rest.
        pause = float(np.max(report.outside_seconds))
        seconds = max(report.cycle_seconds - pause, 0.0)
        self.seconds += seconds
        self.whole_seconds += seconds + min(pause, _SECONDS / _STEPS)  # An evaluation must not end a block.
        self._outside.append(report.outside_seconds)
        rows, compute = report.rows, report.compute_seconds
        if len(rows) > self._workers:
            rows = rows.reshape(self._workers, -1).sum(axis=1)
            compute = compute.reshape(self._workers, -1).max(axis=1)
        self._rows += rows
        self._input += report.input_seconds
        self._compute.append(compute)

    def block(self, report: Any, steps_before: int, is_measured: bool) -> Block:
        """Returns the block that ends with the step of `report`."""
        compute = np.maximum(np.stack(self._compute), _LEAST_SECONDS)  # [steps, workers]
        return Block(
            first=steps_before + report.number - self.steps + 1,
            last=steps_before + report.number,
            seconds=self.seconds / self.steps,
            rows=self._rows.tolist(),
            compute=_usual(compute),
            input=(self._input / self.steps).tolist(),
            jitter=np.abs(np.diff(np.log(compute), axis=0)).mean(axis=0).tolist(),
            links=report.links,
            outside=_usual(np.stack(self._outside)),
            is_measured=is_measured,
        )


def _usual(seconds: Any) -> list[float]:
    """Returns the mean over the steps by worker, without the longest and the shortest quarter. [steps, workers]"""
    outer = len(seconds) // 4
    means: list[float] = np.sort(seconds, axis=0)[outer : len(seconds) - outer].mean(axis=0).tolist()
    return means


def _write(files: RunFiles, record: StragglerRecord) -> None:
    try:
        append_record(files.stragglers(int(os.environ.get(ATTEMPT) or 0)), record)
    except OSError as error:
        logging.warning("The verdicts about slow workers could not be written: %s", error)
