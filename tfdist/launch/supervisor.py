"""Runs a job of `tfdist run` until it is done: starts all workers, and starts them again after a failure."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
import time
from collections.abc import Callable, Sequence

from absl import logging

from tfdist.backup import backup_cleanup
from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE, ClusterSpec, check_bindable
from tfdist.cluster.ports import HeldPorts, hold_ports
from tfdist.errors import ClusterError, TFConfigError, TfdistError
from tfdist.exit_codes import PREEMPTED
from tfdist.failure_kinds import FailureKind
from tfdist.launch.attempt_watch import AttemptWatch
from tfdist.launch.attempts import Attempt, Attempts
from tfdist.launch.cache_locks import describe, is_left_behind, lock_named_in, locks_in, remove
from tfdist.launch.first_failure import (
    Failure,
    first_failure,
    not_started,
    reported_messages,
    reported_since,
    reported_stack,
    with_step,
)
from tfdist.launch.gpu_discovery import VISIBLE_DEVICES
from tfdist.launch.late_workers import LateWorkers
from tfdist.launch.lone_restarts import LoneRestarts
from tfdist.launch.lost_workers import LostWorkers
from tfdist.launch.restart_policy import Chance, Commits, Restarts, Size, chance_of
from tfdist.launch.run_summary import details_of, named, outcome_line
from tfdist.launch.run_terminal import RunTerminal
from tfdist.launch.stopped_workers import SECONDS, StoppedWorkers
from tfdist.launch.survivor_events import ask_for_events
from tfdist.launch.worker_group import WorkerGroup
from tfdist.network.secret import SECRET, new_secret, secret_is_given
from tfdist.readable_numbers import counted
from tfdist.run_files import ATTEMPT, RUN_DIR, RunFiles
from tfdist.symlink_safe_file import write_whole

_FAILURE_GRACE_SECONDS = 2.0
_CAUSE_SECONDS = 1.5
_PORT_SECONDS, _FIRST_PORT_SECONDS = 10.0, 3.0  # Workers of the previous attempt may exit slowly.
_POLL_SECONDS, _LOOK_SECONDS = 0.05, 0.2


@dataclasses.dataclass(frozen=True)
class SupervisorOptions:
    """Options of the supervisor, the process of `tfdist run` that starts workers.

    Attributes:
      workers: Number of workers to start here.
      min_workers: Smallest number of workers with which to continue if some workers cannot come back.
      max_restarts: Largest number of restarts without a commit in between.
      restart_window_seconds: Time after which a restart no longer counts.
      grace_seconds: Time for workers to save and leave.
      regrow_seconds: Time that a reduced job runs before it tries all workers again, after its next commit.
      devices_per_worker: Number of logical devices per worker; None leaves the environment unchanged.
      visible_gpus: Value of CUDA_VISIBLE_DEVICES for each slot of this machine; None leaves the environment unchanged.
      tee: Whether to print the lines of all workers, each after the worker's name.
      quiet: Whether to print no output of workers, and only warnings, failures and the outcome.
    """

    workers: int
    min_workers: int
    max_restarts: int = 3
    restart_window_seconds: float = 600.0
    grace_seconds: float = 30.0
    regrow_seconds: float = 300.0
    devices_per_worker: int | None = None
    visible_gpus: Sequence[str] | None = None
    tee: bool = False
    quiet: bool = False


class Supervisor:
    """Starts the workers of a job for `tfdist run`, and starts them again after a failure.

    Args:
      command: Command that each worker runs.
      options: Options of the supervisor.
      run_dir: Folder of this run, with the logs and reports of each attempt, the newest commit and `failure.json`.
      caught: List that grows with the signals that ask this process to end. One request adds one signal.
      spec: Cluster spec of the one worker to start here, in a cluster of several hosts; None to start all workers
        here, on free ports.
      terminal: Shows the output of the workers and their progress.
    """

    def __init__(
        self,
        command: Sequence[str],
        options: SupervisorOptions,
        *,
        run_dir: pathlib.Path,
        caught: Sequence[int],
        spec: ClusterSpec | None = None,
        terminal: RunTerminal | None = None,
    ):
        self._command = command
        self._options = options
        self._run_dir = run_dir
        self._files = RunFiles(run_dir)
        self._caught = caught
        self._spec = spec
        self._terminal = terminal or RunTerminal()
        self._restarts = Restarts(options.max_restarts, options.restart_window_seconds)
        self._size = Size(options.workers, options.min_workers, options.regrow_seconds)
        self._attempts = Attempts(self._files)
        self._commits = Commits()
        # Workers of several hosts need one secret that the user gives to all hosts.
        self._secret = {} if spec or secret_is_given() else {SECRET: new_secret()}
        self._cache_folders: set[pathlib.Path] = set()
        self._has_told_of_backups = False
        self._ports: HeldPorts | None = None

    def run(self) -> int:
        """Runs the job until it is done, has failed for good or is stopped by a signal.

        Call it in the main thread.

        Returns:
          0 if the job is done, even if a signal asked it to end. `tfdist.exit_codes.PREEMPTED` if the job was asked to
          end and saved, or if its workers exit with that code again and again. 128 + n if signal n ended the job
          without a save. Otherwise the exit code of the last attempt's first failure.

        Raises:
          ClusterError: If a worker cannot be ended.
        """
        while True:
            try:
                attempt = self._run_attempt(len(self._attempts.ended))
            except ClusterError:
                self._attempts.write("failed", 1)
                self._attempts.write_failures("failed", 1)
                raise
            self._release_ports()
            self._attempts.add(attempt)
            size = self._size.current
            pause = self._pause_after(attempt)
            if pause is None:
                return self._finish(attempt.exit_code)
            self._tell_restart(attempt, pause, is_smaller=self._size.current < size)
            self._attempts.write("running", None)
            self._attempts.write_failures("running", None)
            _sleep(pause, until=lambda: bool(self._caught))
            if self._caught:
                return self._finish(PREEMPTED if attempt.outcome != "failed" else 128 + self._caught[0])

    def _run_attempt(self, number: int) -> Attempt:
        """Makes one attempt: starts the workers, waits for their end and returns the result."""
        directory, workers, start = self._files.attempt(number), self._size.current, time.time()
        running = {"number": number, "workers": workers, "time": start}
        self._attempts.write("running", None, running)
        self._commits.see(self._files.committed)
        self._remove_cache_locks(start)
        commits = self._commits = Commits(self._commits)

        def ended(
            outcome: str, exit_code: int = 0, failure: Failure | None = None, others: Sequence[int] = ()
        ) -> Attempt:
            commits.see(self._files.committed)
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
                absences=lone.absences if lone else (),
            )

        group: WorkerGroup | None = None
        lone: LoneRestarts | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            group = WorkerGroup(
                self._command,
                self._specs(workers),
                log_dir=directory,
                env=self._env(number),
                slots=[self._spec.slot] if self._spec else self._size.slots,
                env_of_slot=self._env_of_slot,
                tee=self._options.tee,
                quiet=self._options.quiet,
                reported_stack=functools.partial(reported_stack, self._run_dir, number),
                target=self._terminal.target,
            )
            group.start()
        except (OSError, TfdistError) as error:
            failure = not_started(number, group.not_started if group else None, error, time.time())
            return ended("failed", failure.exit_code, failure)
        if number == 0:
            self._tell_start(workers, directory)
        lone = LoneRestarts(
            *(group, self._files, number),
            LostWorkers(self._options.max_restarts, self._options.restart_window_seconds),
            lambda absences: self._attempts.write("running", None, running, absences),
        )
        run_start = self._attempts.run_start(start)
        try:
            with self._terminal.watching(AttemptWatch(self._files, number, group, run_start)):
                return self._watch(group, number, start, commits, lone, ended)
        finally:
            group.kill()
            with contextlib.suppress(OSError):
                self._files.room(number).unlink(missing_ok=True)

    def _watch(
        self,
        group: WorkerGroup,
        number: int,
        start: float,
        commits: Commits,
        lone: LoneRestarts,
        ended: Callable[..., Attempt],
    ) -> Attempt:
        options, caught, stragglers, stopped = self._options, self._caught, LateWorkers(), StoppedWorkers()
        looked, wants_room = 0.0, False

        def look() -> bool:
            nonlocal looked, wants_room
            now = time.time()
            if caught or abs(now - looked) < _LOOK_SECONDS:  # The code below reads files.
                return bool(caught)
            looked = now
            commits.see(self._files.committed)
            self._kill_stopped(group, stopped.see(group.pids, now))
            told = stragglers.tell(group.exits, group.running, now)
            if told:
                logging.info("%s", told)
            if not wants_room and self._size.is_due(now - start):
                wants_room = True
                self._ask_for_room(number)
            return bool(lone.look(time.monotonic()) or lone.end_stuck(self._stuck(group, number)))

        while True:
            group.wait(until=look)
            if caught or not lone.goes_on() or lone.end_stuck(self._stuck(group, number)):
                break
        codes = {each.returncode for each in group.exits}
        stuck = lone.end_stuck(self._stuck(group, number))
        if caught:
            exit_code = self._stop_by_signal(group)
            return ended("stopped" if exit_code else "done", exit_code)
        if codes <= {0} and not stuck:
            return ended("done")
        if PREEMPTED in codes and codes <= {0, PREEMPTED}:  # All leave together, so the rest follow soon.
            group.stop(None, grace_seconds=options.grace_seconds, hurry=lambda: len(caught) > 1)
            return ended("resized" if wants_room else "preempted", PREEMPTED)
        if stuck:
            logging.error("%s reported a failure %g s ago, but still runs", named(stuck), options.grace_seconds)
        else:
            self._wait_for_the_cause(group, number)
        by_themselves, others, since = group.exits, group.running, time.time()
        ask_for_events(self._files, number, group, hurry=lambda: bool(caught))
        # Short, since most workers are stuck in an exchange with the failed worker and cannot save any more.
        grace_seconds = min(options.grace_seconds, _FAILURE_GRACE_SECONDS)
        group.stop(signal.SIGTERM, grace_seconds=grace_seconds, hurry=lambda: bool(caught))
        asked = group.exits[len(by_themselves) :]
        failure = first_failure(self._run_dir, number, by_themselves, asked, since)
        failure = with_step(failure, self._run_dir, [each.index for each in group.exits])
        failure = self._with_cache_lock(failure, number, start)
        return ended("failed", failure.exit_code, failure, [index for index in others if index != failure.worker])

    def _with_cache_lock(self, failure: Failure, number: int, start: float) -> Failure:
        """Removes lock files of data caches that killed workers left. Names any other lock and the remedy."""
        path = lock_named_in(failure.message or "")
        if path is None:
            return failure
        self._cache_folders.add(path.parent)
        self._cache_folders |= {
            each.parent for each in map(lock_named_in, reported_messages(self._run_dir, number)) if each
        }
        removed = self._remove_cache_locks(start)
        if path in removed:
            reason = f"a killed worker had left the lock file {path} of a data cache behind; tfdist has removed it"
            return dataclasses.replace(failure, reason=reason, category=FailureKind.ENVIRONMENT)
        return dataclasses.replace(failure, reason=describe(path, start), category=FailureKind.CONFIGURATION)

    def _remove_cache_locks(self, attempt_start: float) -> list[pathlib.Path]:
        """Removes lock files of data caches from earlier attempts, in folders where such a lock caused a failure."""
        run_start = self._attempts.run_start(attempt_start)
        return [
            lock
            for folder in self._cache_folders
            for lock in locks_in(folder)
            if is_left_behind(lock, run_start, attempt_start) and remove(lock)
        ]

    def _kill_stopped(self, group: WorkerGroup, stopped: Sequence[int]) -> None:
        for worker in stopped:
            logging.error("worker %d has been stopped (SIGSTOP) for %g s; killing it", worker, SECONDS)
            os.kill(group.pids[worker], signal.SIGKILL)

    def _ask_for_room(self, number: int) -> None:
        """Asks the workers to leave after their next commit, so that the next attempt can have all workers.

        Uses a file, because a signal may arrive when no `fit` handles it, say in an evaluation after a `fit`. By then
        the `fit` has removed its backups if they are on remote storage.
        """
        logging.info("trying all %d workers again: workers leave after their next commit", self._options.workers)
        with contextlib.suppress(OSError):  # Without the file, the workers just continue.
            write_whole(self._files.room(number), "")

    def _stuck(self, group: WorkerGroup, number: int) -> list[int]:
        """Returns the workers that reported a failure but still run, say because of a thread that never ends."""
        latest = time.time() - self._options.grace_seconds
        reports = reported_since(self._run_dir, number, group.pids)
        return [worker for worker, told in reports.items() if told < latest]

    def _wait_for_the_cause(self, group: WorkerGroup, number: int) -> None:
        """Waits a moment for the worker that made all others fail, if it still runs: a large process exits slowly."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while group.running and not self._caught and time.monotonic() < deadline:
            if not first_failure(self._run_dir, number, group.exits, [], time.time()).doubt:
                return
            time.sleep(_POLL_SECONDS)
            group.poll()

    def _stop_by_signal(self, group: WorkerGroup) -> int:
        """Asks the workers to end, waits for them to save, and returns the exit code."""
        signum, seen = self._caught[0], len(self._caught)
        name = signal.Signals(signum).name
        logging.info("%s: ending the workers; to kill them at once, send it again after a second or later", name)
        # In a `fit` with backups, workers save at SIGINT and SIGTERM. Elsewhere Ctrl-C interrupts workers as usual.
        asks = signum if signum == signal.SIGINT else signal.SIGTERM
        group.stop(asks, grace_seconds=self._options.grace_seconds, hurry=lambda: len(self._caught) > seen)
        codes = {each.returncode for each in group.exits}
        chief = next((each.returncode for each in group.exits if each.index == 0), None)
        if chief is not None and self._files.members(len(self._attempts.ended)) is not None:
            codes = {chief}  # The others need not save.
        if codes <= {0}:  # All workers finished, so no restart is needed.
            return 0
        return PREEMPTED if codes <= {0, PREEMPTED} else 128 + signum

    def _pause_after(self, attempt: Attempt) -> float | None:
        """Returns the seconds until the next attempt, or None for no next attempt."""
        failure = attempt.failure
        if attempt.progressed:
            # A commit between two failures at the same place is no progress if the attempt repeated committed steps,
            # or if the place includes a step.
            is_same = failure is not None and (attempt.again or failure.place_has_step)
            self._restarts.progress(but=failure.place if failure and is_same else None)
        if attempt.outcome in ("done", "stopped"):
            return None
        if attempt.outcome == "resized":
            self._size.regrow()
            return 0.0
        if failure is None:  # Preempted.
            if attempt.progressed:
                self._size.regrow()
                return 0.0
            return self._restarts.pause(time.monotonic())
        chance = self._chance(attempt, failure)
        if chance != Chance.NEVER and self._size.failed(
            failure.culprit, started=failure.kind != "start", progressed=attempt.progressed
        ):
            self._restarts.progress()  # A smaller job gets its own number of restarts.
        return self._restarts.pause(time.monotonic(), failure.place, chance)

    def _chance(self, attempt: Attempt, failure: Failure) -> Chance:
        """Returns how often to restart the job after this failure."""
        if attempt.number == 0 and failure.exception == TFConfigError.__name__ and failure.kind == "start":
            return Chance.NEVER  # In the first attempt no earlier worker holds the address, so it is wrong.
        chance = chance_of(
            failure.category, is_exception=failure.kind == "exception", has_commit=self._has_backup(attempt)
        )
        is_again = attempt.again and failure.signal is None  # A signal may have any cause.
        return Chance.ELSEWHERE if chance == Chance.OFTEN and is_again else chance

    def _has_backup(self, attempt: Attempt) -> bool:
        """Returns whether a restart resumes from a backup, of this run or an earlier run."""
        return attempt.committed is not None or self._files.restored.exists()

    def _specs(self, workers: int) -> list[ClusterSpec]:
        """Returns the cluster spec of each worker to be started here."""
        if self._spec:
            _wait_for_port(self._spec, _PORT_SECONDS if self._attempts.ended else _FIRST_PORT_SECONDS)
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
            env[DEVICES_PER_WORKER_VARIABLE] = str(self._options.devices_per_worker)
        return env

    def _env_of_slot(self, slot: int) -> dict[str, str]:
        gpus = self._options.visible_gpus
        return {} if gpus is None else {VISIBLE_DEVICES: gpus[slot]}

    def _tell_start(self, workers: int, directory: pathlib.Path) -> None:
        what = f"{counted(workers, 'worker')} on this machine"
        if self._spec:
            what = self._spec.describe()
        slots = [self._spec.slot] if self._spec else self._size.slots
        gpus = [self._env_of_slot(slot).get(VISIBLE_DEVICES) for slot in slots]
        seen = f", {VISIBLE_DEVICES} {' | '.join(filter(None, gpus))}" if any(gpus) else ""
        logging.info("%s%s; logs in %s", what, seen, directory)

    def _tell_restart(self, attempt: Attempt, pause: float, *, is_smaller: bool) -> None:
        if attempt.failure:
            log = f" (its log: {attempt.failure.log})" if attempt.failure.log else ""
            logging.error("%s%s", attempt.failure.describe(), log)
        if is_smaller and attempt.failure:
            logging.warning(
                "worker %d does not come back; continuing with %s, TFDIST_SLOT %s",
                attempt.failure.culprit,
                counted(self._size.current, "worker"),
                ", ".join(map(str, self._size.slots)),
            )
        if attempt.outcome != "resized":
            logging.info("starting again%s: attempt %d", f" in {pause:g} s" if pause else "", attempt.number + 1)
        is_start = attempt.failure is not None and attempt.failure.kind == "start"
        if not is_start and not self._has_backup(attempt) and not self._has_told_of_backups:
            self._has_told_of_backups = True
            logging.warning(
                "this job has no backup yet, so training starts over at epoch 1, unless the script restores it. "
                "Give `fit` the callback tfdist.callbacks.BackupAndRestore; its save_freq sets how often to save."
            )

    def _finish(self, exit_code: int) -> int:
        """Logs a summary of the run that ends with the reason of a failure. Returns the exit code."""
        last = self._attempts.last
        if last.outcome == "done":
            backup_cleanup.remove(self._run_dir)
        outcome = "stopped" if self._caught and last.outcome != "done" else last.outcome
        self._attempts.write(outcome, exit_code)
        self._attempts.write_failures(outcome, exit_code)
        if last.failure:
            self._tell_details(last.failure)
        if len(self._attempts.ended) > 1:
            for attempt in self._attempts.ended:
                logging.info("%s", attempt.describe(reason=attempt is not last))
        seconds = time.time() - self._attempts.run_start(last.time)
        line = outcome_line(outcome, exit_code, seconds, len(self._attempts.ended))
        files = "logs and failure.json" if any(attempt.failure for attempt in self._attempts.ended) else "logs"
        why = f"; {last.failure.describe()}{self._why_not_again(last)}" if last.failure else ""
        level = logging.WARNING if self._options.quiet else logging.INFO  # `--quiet` shows no lower levels.
        logging.log(level, "%s; %s in %s%s", line, files, self._run_dir, why)
        return exit_code

    def _tell_details(self, failure: Failure) -> None:
        """Logs the traceback or the last lines of the failed worker, unless the terminal already shows them."""
        if failure.worker is None or self._options.tee:
            return
        is_shown = not self._options.quiet and failure.worker == (self._spec.worker_id if self._spec else 0)
        is_reported = bool(reported_stack(self._run_dir, failure.attempt, failure.worker))
        if details := details_of(failure, is_shown=is_shown, is_reported=is_reported):
            logging.error("worker %d, from %s:\n%s", failure.worker, failure.log, details)

    def _why_not_again(self, last: Attempt) -> str:
        """Returns why no restart follows a failure, to end a message with; empty if the job's limits are the reason."""
        failure = last.failure
        if failure is None:
            return ""
        if failure.category in (FailureKind.CONFIGURATION, FailureKind.PROGRAM):
            return f". A restart does not fix a {failure.category} error."
        if failure.category != FailureKind.DATA:
            return ""
        if not self._has_backup(last):
            return ". A restart would read the same data again, and there is no backup to continue from."
        before = self._attempts.ended[-2].failure if len(self._attempts.ended) > 1 else None
        is_same = before is not None and before.place == failure.place
        return ". A restart read the same data again and failed again." if is_same else ""


def _wait_for_port(spec: ClusterSpec, seconds: float) -> None:
    """Waits until the previous attempt's worker has released this worker's port.

    Raises:
      TFConfigError: If the port is not released in time, or the host name does not resolve.
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
