"""Runs a job until it is done: attempts of a group of workers, each after the failure of the one before."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import signal
import time
from collections.abc import Callable, Sequence

from absl import logging

from tfdist.backup import backup_cleanup
from tfdist.cluster import DEVICES_PER_WORKER, ClusterSpec, check_bindable
from tfdist.cluster.ports import HeldPorts, hold_ports
from tfdist.errors import TFConfigError, TfdistError
from tfdist.exit_codes import PREEMPTED
from tfdist.failure_kinds import FailureKind
from tfdist.failure_report import ATTEMPT, RUN_DIR, restored_path, room_path, write_whole
from tfdist.launch.cache_locks import describe, is_left_behind, lock_named_in, locks_in, remove
from tfdist.launch.first_failure import (
    Failure,
    first_failure,
    not_started,
    reported_messages,
    reported_since,
    reported_stack,
)
from tfdist.launch.restarts import Chance, Commits, Restarts, Size, chance_of
from tfdist.launch.run_summary import details_of, outcome_line
from tfdist.launch.stopped_workers import SECONDS, StoppedWorkers
from tfdist.launch.worker_group import WorkerExit, WorkerGroup
from tfdist.network.secret import SECRET, new_secret, secret_is_given

__all__ = ["Stragglers", "Supervisor", "SupervisorOptions"]

_FAILURE_GRACE_SECONDS = 2.0
_CAUSE_SECONDS = 1.5
_PORT_SECONDS, _FIRST_PORT_SECONDS = 10.0, 3.0  # A worker of the attempt before takes longer to be gone.
_POLL_SECONDS, _LOOK_SECONDS = 0.05, 0.2
_ALONE_SECONDS, _ALONE_AGAIN_SECONDS = 10.0, 60.0


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """How a job is supervised.

    Attributes:
      workers: How many workers to start here.
      min_workers: With how many to go on if others cannot come back.
      max_restarts: How many restarts without a commit in between.
      restart_window_seconds: After which time a restart counts no more.
      grace_seconds: How long workers may take to save and leave.
      regrow_seconds: How long a reduced job runs before all workers are tried again, after its next commit.
      devices_per_worker: Logical devices that the strategy makes in each worker; None leaves the environment as it is.
      tee: Whether to print all workers' lines, with the worker's name in front.
    """

    workers: int
    min_workers: int
    max_restarts: int = 3
    restart_window_seconds: float = 600.0
    grace_seconds: float = 30.0
    regrow_seconds: float = 300.0
    devices_per_worker: int | None = None
    tee: bool = False


@dataclasses.dataclass(frozen=True)
class Attempt:
    """One start of the workers, and what came of it.

    Attributes:
      number: How many came before.
      workers: How many workers were started here.
      time: When they were, in seconds since the epoch.
      seconds: How long it took.
      outcome: "done", "failed", "preempted" (saved, and to be started again), "resized" (saved, to go on with more
        workers), "stopped" (by a signal).
      exit_code: What it would be to a shell.
      committed: The step of the newest commit, None before the first.
      progressed: Whether there was a commit in this attempt.
      again: Whether its commits are of steps that were committed before.
      failure: The first failure, of one that failed.
      ended: The workers that still ran when another failed, and were ended.
    """

    number: int
    workers: int
    time: float
    seconds: float
    outcome: str
    exit_code: int
    committed: int | None
    progressed: bool
    again: bool
    failure: Failure | None = None
    ended: tuple[int, ...] = ()

    def describe(self, *, reason: bool = True) -> str:
        """The attempt in a line, with the reason of a failure or without."""
        workers = f"{self.workers} worker{'s' if self.workers > 1 else ''}"
        committed = "" if self.committed is None else f", newest backup step-{self.committed}"
        why = f": {self.failure.describe()}" if self.failure and reason else ""
        return f"attempt {self.number}: {workers}, {self.seconds:.1f} s{committed}, {self.outcome}{why}"


class Stragglers:
    """Workers that still run while others are done: told after 10 s, and then every minute."""

    def __init__(self) -> None:
        self._due: float | None = None

    def tell(self, exits: Sequence[WorkerExit], running: Sequence[int], now: float) -> str | None:
        """What is to be said of them now, in seconds since the epoch."""
        if not exits or not running or now < (self._due or exits[-1].time + _ALONE_SECONDS):
            return None
        self._due = now + _ALONE_AGAIN_SECONDS
        ended = _named([each.index for each in exits])
        return f"{ended} ended with exit code {exits[-1].returncode}; still running: {_named(running)}"


class Supervisor:
    """Starts workers, and starts them again.

    Args:
      command: What each worker runs.
      options: How.
      run_dir: The folder of this run: logs and reports of each attempt, what the newest commit is, `failure.json`.
      caught: The signals that asked this process to end, as they come; those of one request once.
      spec: The place of the one worker to start here in a cluster of several hosts; None if all workers are started
        here, on ports that are free.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: SupervisorOptions,
        *,
        run_dir: pathlib.Path,
        caught: Sequence[int],
        spec: ClusterSpec | None = None,
    ):
        self._command = command
        self._options = options
        self._run_dir = run_dir
        self._caught = caught
        self._spec = spec
        self._restarts = Restarts(options.max_restarts, options.restart_window_seconds)
        self._size = Size(options.workers, options.min_workers, options.regrow_seconds)
        self._attempts: list[Attempt] = []
        self._commits = Commits()
        # Workers of several hosts need one that all are given.
        self._secret = {} if spec or secret_is_given() else {SECRET: new_secret()}
        self._cache_folders: set[pathlib.Path] = set()
        self._has_told_of_backups = False
        self._ports: HeldPorts | None = None

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """What was tried so far."""
        return tuple(self._attempts)

    def run(self) -> int:
        """Runs the job until it is done, failed for good or stopped by a signal.

        Call it in the main thread.

        Returns:
          0 if it is done, asked to end or not; `tfdist.exit_codes.PREEMPTED` if it was asked to end and saved, or if
          the workers leave again and again as if they had; 128 + n if it was ended by signal n and did not save; else
          the exit code of the last attempt's first failure.

        Raises:
          ClusterError: If a worker cannot be ended.
        """
        while True:
            attempt = self._run_attempt(len(self._attempts))
            self._release_ports()
            self._attempts.append(attempt)
            size = self._size.current
            pause = self._pause_after(attempt)
            if pause is None:
                return self._finish(attempt.exit_code)
            self._tell_restart(attempt, pause, is_smaller=self._size.current < size)
            self._write_failures("running", None)
            _sleep(pause, until=lambda: bool(self._caught))
            if self._caught:
                return self._finish(PREEMPTED if attempt.outcome != "failed" else 128 + self._caught[0])

    def _run_attempt(self, number: int) -> Attempt:
        """Starts the workers and sees them to their end."""
        directory, workers, start = self._run_dir / f"attempt-{number}", self._size.current, time.time()
        self._commits.see(self._committed())
        self._remove_cache_locks(start)
        commits = self._commits = Commits(self._commits)

        def ended(
            outcome: str, exit_code: int = 0, failure: Failure | None = None, others: Sequence[int] = ()
        ) -> Attempt:
            commits.see(self._committed())
            return Attempt(
                number=number,
                workers=workers,
                time=start,
                seconds=time.time() - start,
                outcome=outcome,
                exit_code=exit_code,
                committed=commits.newest[0] if commits.newest else None,
                progressed=commits.any,
                again=commits.again,
                failure=failure,
                ended=tuple(others),
            )

        group: WorkerGroup | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            group = WorkerGroup(
                self._command,
                self._specs(workers),
                log_dir=directory,
                env=self._env(number),
                slots=[self._spec.slot] if self._spec else self._size.slots,
                tee=self._options.tee,
                reported_stack=functools.partial(reported_stack, self._run_dir, number),
            )
            group.start()
        except (OSError, TfdistError) as error:
            failure = not_started(number, group.not_started if group else None, error, time.time())
            return ended("failed", failure.exit_code, failure)
        if number == 0:
            self._tell_start(workers, directory)
        try:
            return self._watch(group, number, start, commits, ended)
        finally:
            group.kill()
            with contextlib.suppress(OSError):
                room_path(self._run_dir, number).unlink(missing_ok=True)

    def _watch(
        self, group: WorkerGroup, number: int, start: float, commits: Commits, ended: Callable[..., Attempt]
    ) -> Attempt:
        options, caught, stragglers, stopped = self._options, self._caught, Stragglers(), StoppedWorkers()
        looked, wants_room = 0.0, False

        def look() -> bool:
            nonlocal looked, wants_room
            now = time.time()
            if caught or abs(now - looked) < _LOOK_SECONDS:  # what follows asks the disk
                return bool(caught)
            looked = now
            commits.see(self._committed())
            self._kill_stopped(group, stopped.see(group.pids, now))
            told = stragglers.tell(group.exits, group.running, now)
            if told:
                logging.info("%s", told)
            if not wants_room and self._size.is_due(now - start):
                wants_room = True
                self._ask_for_room(number)
            return bool(self._stuck(group, number))

        group.wait(until=look)
        codes = {each.returncode for each in group.exits}
        stuck = self._stuck(group, number)
        if caught:
            exit_code = self._stop_by_signal(group)
            return ended("stopped" if exit_code else "done", exit_code)
        if codes <= {0} and not stuck:
            return ended("done")
        if PREEMPTED in codes and codes <= {0, PREEMPTED}:  # they save and leave together; one is only the first
            group.stop(None, grace_seconds=options.grace_seconds, hurry=lambda: len(caught) > 1)
            return ended("resized" if wants_room else "preempted", PREEMPTED)
        if stuck:
            logging.error("%s said why it ends %g s ago, but does not", _named(stuck), options.grace_seconds)
        else:
            self._wait_for_the_cause(group, number)
        by_themselves, others, since = group.exits, group.running, time.time()
        # Short: most are stuck in an exchange with the one that failed, and nobody can save any more.
        grace_seconds = min(options.grace_seconds, _FAILURE_GRACE_SECONDS)
        group.stop(signal.SIGTERM, grace_seconds=grace_seconds, hurry=lambda: bool(caught))
        asked = group.exits[len(by_themselves) :]
        failure = first_failure(self._run_dir, number, by_themselves, asked, since)
        failure = self._with_cache_lock(failure, number, start)
        return ended("failed", failure.exit_code, failure, [index for index in others if index != failure.worker])

    def _with_cache_lock(self, failure: Failure, number: int, start: float) -> Failure:
        """Removes locks of data caches that killed workers have left; names the others, and the remedy."""
        path = lock_named_in(failure.message or "")
        if path is None:
            return failure
        self._cache_folders.add(path.parent)
        self._cache_folders |= {
            each.parent for each in map(lock_named_in, reported_messages(self._run_dir, number)) if each
        }
        removed = self._remove_cache_locks(start)
        if path in removed:
            reason = f"the lock {path} of a data cache was left by a worker that was killed, and is removed"
            return dataclasses.replace(failure, reason=reason, category=FailureKind.ENVIRONMENT)
        return dataclasses.replace(failure, reason=describe(path, start), category=FailureKind.CONFIGURATION)

    def _remove_cache_locks(self, attempt_start: float) -> list[pathlib.Path]:
        """Removes locks that workers of attempts before this one have left, in folders where one was in the way."""
        run_start = self._attempts[0].time if self._attempts else attempt_start
        return [
            lock
            for folder in self._cache_folders
            for lock in locks_in(folder)
            if is_left_behind(lock, run_start, attempt_start) and remove(lock)
        ]

    def _kill_stopped(self, group: WorkerGroup, stopped: Sequence[int]) -> None:
        for worker in stopped:
            logging.error("worker %d is stopped (SIGSTOP) for %g s, and is killed", worker, SECONDS)
            os.kill(group.pids[worker], signal.SIGKILL)

    def _ask_for_room(self, number: int) -> None:
        """Asks the workers to leave after their next commit.

        By no signal, which may come when nobody listens: in an evaluation after a `fit`, say, which has removed its
        backups if they are on other storage than a disk.
        """
        logging.info("a try with all %d workers again: the others leave after their next commit", self._options.workers)
        with contextlib.suppress(OSError):  # they go on as they are
            write_whole(room_path(self._run_dir, number), "")

    def _stuck(self, group: WorkerGroup, number: int) -> list[int]:
        """The workers that have failed by their own word and still run: a thread, say, that nobody ends."""
        latest = time.time() - self._options.grace_seconds
        reports = reported_since(self._run_dir, number, group.pids)
        return [worker for worker, told in reports.items() if told < latest]

    def _wait_for_the_cause(self, group: WorkerGroup, number: int) -> None:
        """If all failures may come of another, a moment for that one: a large process takes longer to be gone."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while group.running and not self._caught and time.monotonic() < deadline:
            if not first_failure(self._run_dir, number, group.exits, [], time.time()).doubt:
                return
            time.sleep(_POLL_SECONDS)
            group.poll()

    def _stop_by_signal(self, group: WorkerGroup) -> int:
        """Asks the workers to end, waits for them to save, and gives the exit code."""
        signum, seen = self._caught[0], len(self._caught)
        name = signal.Signals(signum).name
        logging.info("%s: ending the workers; once more, a second from now or later, to kill them at once", name)
        # In a `fit` that is backed up, workers save at both. Elsewhere Ctrl-C interrupts them as usual.
        asks = signum if signum == signal.SIGINT else signal.SIGTERM
        group.stop(asks, grace_seconds=self._options.grace_seconds, hurry=lambda: len(self._caught) > seen)
        codes = {each.returncode for each in group.exits}
        if codes <= {0}:  # done by then, or with the last of it: not to be started again
            return 0
        return PREEMPTED if codes <= {0, PREEMPTED} else 128 + signum

    def _pause_after(self, attempt: Attempt) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        failure = attempt.failure
        if attempt.progressed:
            # A commit between two failures at one place is no progress where all is trained again up to there, or
            # where the place is a step.
            is_same = failure is not None and (attempt.again or failure.step is not None)
            self._restarts.progress(but=failure.place if failure and is_same else None)
        if attempt.outcome in ("done", "stopped"):
            return None
        if attempt.outcome == "resized":
            self._size.regrow()
            return 0.0
        if failure is None:  # preempted
            if attempt.progressed:
                self._size.regrow()
                return 0.0
            return self._restarts.pause(time.time())
        chance = self._chance(attempt, failure)
        if chance != Chance.NEVER and self._size.failed(
            failure.culprit, started=failure.kind != "start", progressed=attempt.progressed
        ):
            self._restarts.progress()  # another job, in a way: it deserves tries of its own
        return self._restarts.pause(time.time(), failure.place, chance)

    def _chance(self, attempt: Attempt, failure: Failure) -> Chance:
        """How often to try again after this failure."""
        if attempt.number == 0 and failure.exception == TFConfigError.__name__ and failure.kind == "start":
            return Chance.NEVER  # Nobody has used this address before: it is wrong, and will be.
        chance = chance_of(
            failure.category, is_exception=failure.kind == "exception", has_commit=self._has_backup(attempt)
        )
        is_again = attempt.again and failure.signal is None  # a signal may have come from anywhere
        return Chance.ELSEWHERE if chance == Chance.OFTEN and is_again else chance

    def _has_backup(self, attempt: Attempt) -> bool:
        """Whether a restart goes on from a backup, of this run or one before."""
        return attempt.committed is not None or restored_path(self._run_dir).exists()

    def _specs(self, workers: int) -> list[ClusterSpec]:
        """The cluster as each worker to be started here sees it."""
        if self._spec:
            _wait_for_port(self._spec, _PORT_SECONDS if self._attempts else _FIRST_PORT_SECONDS)
            return [self._spec]
        self._ports = hold_ports(workers)
        return [ClusterSpec.local(workers, index, self._ports.numbers) for index in range(workers)]

    def _release_ports(self) -> None:
        if self._ports:
            self._ports.close()
            self._ports = None

    def _env(self, number: int) -> dict[str, str]:
        held = self._ports.env if self._ports else {}
        env = {RUN_DIR: str(self._run_dir), ATTEMPT: str(number), **self._secret, **held}
        if self._options.devices_per_worker is not None:
            env[DEVICES_PER_WORKER] = str(self._options.devices_per_worker)
        return env

    def _committed(self) -> tuple[int, str] | None:
        """The step of the newest commit and its folder, as the workers wrote them."""
        try:
            step, _, folder = (self._run_dir / "committed").read_text().partition("\n")
            return int(step), folder
        except (OSError, ValueError):
            return None

    def _tell_start(self, workers: int, directory: pathlib.Path) -> None:
        what = f"{workers} worker{'s' if workers > 1 else ''} on this machine"
        if self._spec:
            what = self._spec.describe()
        logging.info("%s; logs in %s", what, directory)

    def _tell_restart(self, attempt: Attempt, pause: float, *, is_smaller: bool) -> None:
        if attempt.failure:
            log = f" (its log: {attempt.failure.log})" if attempt.failure.log else ""
            logging.error("%s%s", attempt.failure.describe(), log)
        if is_smaller and attempt.failure:
            logging.warning(
                "worker %d does not come back; going on with %d workers, TFDIST_SLOT %s",
                attempt.failure.culprit,
                self._size.current,
                ", ".join(map(str, self._size.slots)),
            )
        if attempt.outcome != "resized":
            logging.info("starting again%s: attempt %d", f" in {pause:g} s" if pause else "", attempt.number + 1)
        is_start = attempt.failure is not None and attempt.failure.kind == "start"
        if not is_start and not self._has_backup(attempt) and not self._has_told_of_backups:
            self._has_told_of_backups = True
            logging.warning(
                "this job has no backup yet, so training begins anew at epoch 1, unless the script itself restores it. "
                "Give `fit` tfdist.callbacks.BackupAndRestore; its save_freq says how often to save."
            )

    def _finish(self, exit_code: int) -> int:
        """Sums the run up; the reason of a failure comes last."""
        last = self._attempts[-1]
        if last.outcome == "done":
            backup_cleanup.remove(self._run_dir)
        outcome = "stopped" if self._caught and last.outcome != "done" else last.outcome
        self._write_failures(outcome, exit_code)
        if last.failure:
            self._tell_details(last.failure)
        if len(self._attempts) > 1:
            for attempt in self._attempts:
                logging.info("%s", attempt.describe(reason=attempt is not last))
        seconds = time.time() - self._attempts[0].time
        line = outcome_line(outcome, exit_code, seconds, len(self._attempts))
        files = "logs and failure.json" if any(attempt.failure for attempt in self._attempts) else "logs"
        why = f"; {last.failure.describe()}{self._why_not_again(last)}" if last.failure else ""
        logging.info("%s; %s in %s%s", line, files, self._run_dir, why)
        return exit_code

    def _tell_details(self, failure: Failure) -> None:
        """Shows the traceback or the last lines of the worker that failed, unless the terminal has them already."""
        if failure.worker is None or self._options.tee:
            return
        is_shown = failure.worker == (self._spec.worker_id if self._spec else 0)
        is_reported = bool(reported_stack(self._run_dir, failure.attempt, failure.worker))
        if details := details_of(failure, is_shown=is_shown, is_reported=is_reported):
            logging.error("worker %d, from %s:\n%s", failure.worker, failure.log, details)

    def _why_not_again(self, last: Attempt) -> str:
        """Why a failed attempt was the last, for the end of a message; nothing if the limits of the job say so."""
        failure = last.failure
        if failure is None:
            return ""
        if failure.category in (FailureKind.CONFIGURATION, FailureKind.PROGRAM):
            return f". A restart does not heal a {failure.category} error."
        if failure.category != FailureKind.DATA:
            return ""
        if not self._has_backup(last):
            return ". Wrong data come again, and there is no backup to go on from."
        before = self._attempts[-2].failure if len(self._attempts) > 1 else None
        is_same = before is not None and before.place == failure.place
        return ". Wrong data come again: they failed again after a restart." if is_same else ""

    def _write_failures(self, outcome: str, exit_code: int | None) -> None:
        """Writes `failure.json`, if there was a failure: that of the last attempt that failed, and all attempts."""
        failures = [attempt.failure for attempt in self._attempts if attempt.failure]
        if not failures:
            return
        run = {"outcome": outcome, "run_exit_code": exit_code}
        attempts = [dataclasses.asdict(attempt) for attempt in self._attempts]
        try:
            text = json.dumps({**run, **failures[-1].to_json(), "attempts": attempts}, indent=1)
            write_whole(self._run_dir / "failure.json", text)
        except OSError as error:
            logging.error("failure.json could not be written: %s", error)  # no reason to end the job


def _named(workers: Sequence[int]) -> str:
    return ", ".join(f"worker {worker}" for worker in workers)


def _wait_for_port(spec: ClusterSpec, seconds: float) -> None:
    """Waits until this worker's port is free again after the one before it.

    Raises:
      TFConfigError: If it is not, or the host name does not resolve.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            check_bindable(spec)
            return
        except TFConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_SECONDS)


def _sleep(seconds: float, until: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
