"""Starts lost workers again alone, in an attempt that goes on without them."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence

from absl import logging

from tfdist.errors import ClusterError
from tfdist.exit_codes import PREEMPTED
from tfdist.launch.absences import Absence, Absences
from tfdist.launch.first_failure import Failure, first_failure, not_started
from tfdist.launch.lost_workers import LostWorkers
from tfdist.launch.restart_policy import chance_of
from tfdist.launch.worker_group import WorkerExit, WorkerGroup
from tfdist.members_record import MembersRecord
from tfdist.run_files import RunFiles


class LoneRestarts:
    """The lost workers of an attempt, and their restarts. Does nothing in a job that needs all workers.

    Args:
      group: The workers of this machine.
      files: The files of the run.
      number: Number of the attempt.
      policy: Decides which workers start again.
      on_change: Called with all absences of workers when a worker is lost, starts or joins.
    """

    def __init__(
        self,
        group: WorkerGroup,
        files: RunFiles,
        number: int,
        policy: LostWorkers,
        on_change: Callable[[tuple[Absence, ...]], None],
    ):
        self._group, self._files, self._number = group, files, number
        self._policy, self._on_change, self._absences = policy, on_change, Absences()

    @property
    def absences(self) -> tuple[Absence, ...]:
        """The absences of workers so far."""
        told = self._files.members(self._number)
        if told is not None:
            self._absences.see(told)
        return self._absences.all

    def goes_on(self) -> bool:
        """Whether the attempt goes on after workers have ended. Starts those again that are due."""
        told = self._files.members(self._number)
        if told is None:
            return False
        for each in self._group.exits:
            if not each.returncode:
                continue
            if each.returncode == PREEMPTED:  # As in other jobs.
                return False
            failure = first_failure(self._files.run_dir, self._number, [each], [], time.time())
            if self._concerns_all(each, failure):
                return False
            self._forget(each.index)
            self._lose(each.index, failure, told)
        due = [] if self._chief_is_done else self._policy.start_due(time.monotonic(), told)
        for worker in due:
            self._start_again(worker, told)
        if due:
            self._on_change(self.absences)
        return bool(self._group.running)

    def look(self, now: float) -> bool:
        """Ends workers that are too late, and returns whether a worker is to start at `now`, on the monotonic clock."""
        told = self._files.members(self._number)
        if told is None:
            return False
        if self._absences.see(told):
            self._on_change(self._absences.all)
        if self._chief_is_done:  # Nothing is left that these workers could join.
            self._kill(self._policy.outside(told))
            return False
        for worker in self._kill(self._policy.overdue(now, told)):
            logging.error(
                "worker %d has not connected to worker 0 within %g s of its start; killing it. See its log, or raise "
                "start_timeout_seconds of tfdist.FaultTolerance",
                *(worker, told.start_seconds),
            )
        return self._policy.is_due(now)

    def end_stuck(self, stuck: Sequence[int]) -> list[int]:
        """Kills workers that reported a failure but still run, if the others go on. Returns those that all need."""
        if self._files.members(self._number) is None:
            return list(stuck)
        for worker in self._kill([worker for worker in stuck if worker]):
            logging.error("worker %d reported a failure, but still runs; killing it", worker)
        return [worker for worker in stuck if not worker]

    @property
    def _chief_is_done(self) -> bool:
        return any(each.index == 0 and each.returncode == 0 for each in self._group.exits)

    def _concerns_all(self, exited: WorkerExit, failure: Failure) -> bool:
        is_exception = failure.kind == "exception"
        concerns_all = LostWorkers.concerns_all(exited.index, failure.category, is_exception=is_exception)
        return concerns_all and not self._chief_is_done

    def _forget(self, worker: int) -> None:
        """Removes the exit and the failure report of a worker that has ended, as its next process makes its own."""
        self._group.forget(worker)
        with contextlib.suppress(OSError):
            self._files.report(self._number, worker).rename(self._files.earlier_report(self._number, worker))

    def _start_again(self, worker: int, told: MembersRecord) -> None:
        """Starts a worker again alone. If its process cannot be started, the job goes on without it."""
        try:
            self._group.start_again(worker)
        except ClusterError as error:
            self._lose(worker, not_started(self._number, worker, error, time.time()), told)
        else:
            self._absences.start(worker, time.time())

    def _lose(self, worker: int, failure: Failure, told: MembersRecord) -> None:
        """Records the end of a worker, or a start that failed, and plans its next start."""
        logging.error("%s; the others go on without it", failure.describe())
        if self._chief_is_done:
            logging.warning("worker 0 is done, so worker %d does not start again", worker)
            return
        was_killed = failure.kind == "signal"
        chance = chance_of(failure.category, is_exception=failure.kind == "exception", has_commit=True)
        pause = self._policy.lose(worker, time.monotonic(), failure.place, told, was_killed=was_killed, chance=chance)
        self._absences.lose(worker, failure.host, failure.time, failure.describe(), told)
        if pause is None:
            logging.error("worker %d has no restarts left; the job goes on without it", worker)
        else:
            logging.info("starting worker %d again%s", worker, f" in {pause:g} s" if pause else "")
        self._on_change(self.absences)

    def _kill(self, workers: list[int]) -> list[int]:
        """Kills those of the workers that run, and returns them."""
        running = [worker for worker in workers if worker in self._group.pids]
        for worker in running:
            os.kill(self._group.pids[worker], signal.SIGKILL)
        return running
