"""The command `tfdist doctor`: its arguments, the tasks that it starts on this machine, and its output."""

import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence

from absl import logging

from tfdist.cluster import ClusterSpec, free_ports
from tfdist.cluster.address import is_digits
from tfdist.cluster.ports import hold_ports
from tfdist.doctor.check import FAILURE, Check, count
from tfdist.doctor.check_table import print_table, summary_of, to_json
from tfdist.doctor.job_facts import JobFacts
from tfdist.errors import ClusterError, TFConfigError
from tfdist.launch import arguments
from tfdist.launch.worker_group import WorkerExit, WorkerGroup, describe_exit
from tfdist.network.secret import SECRET, new_secret, secret_is_given
from tfdist.run_files import log_path
from tfdist.symlink_safe_file import write_whole

_SECONDS, _LOCAL_SECONDS = 15.0, 60.0  # All tasks of one machine come, though late if it is busy.
_GRACE_SECONDS, _POLL_SECONDS = 2.0, 0.05
_TOLD_SECONDS = 5.0  # The chief tells the other tasks their exit code before it ends, so they may end first.
_SHOWN_LINES = 20
_STDOUT = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist doctor` to its parser."""
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--workers",
        "-n",
        type=arguments.positive_int,
        metavar="N",
        help="check this machine with N workers (default: join the cluster in TF_CONFIG, or that of `srun`; start the "
        "same command on every host. Without both, check this machine for one worker)",
    )
    who.add_argument("--slurm", action="store_true", help="be the task of this Slurm task, under `srun`")
    who.add_argument("--mpi", metavar="HOST[:N],...", help="be the task of this MPI process, as in `tfdist run --mpi`")
    parser.add_argument(
        "--base-port",
        type=arguments.positive_int,
        metavar="P",
        help="with --slurm and --mpi: port of the first worker on each host, as in `tfdist run`",
    )
    parser.add_argument("--script", type=pathlib.Path, metavar="FILE", help="script that must be equal on all hosts")
    parser.add_argument(
        "--backup-dir", metavar="DIR", help="backup folder, which all workers must share and write; no check of a URL"
    )
    parser.add_argument("--log-dir", type=pathlib.Path, metavar="DIR", help="folder for logs, which must be writable")
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        metavar="S",
        help="time limit of the whole check, in seconds. Tasks wait for each other in all but the last 9 of them, and "
        f"measure then (default: {_SECONDS:g}, and {_LOCAL_SECONDS:g} with --workers)",
    )
    parser.add_argument(
        "--json",
        type=pathlib.Path,
        nargs="?",
        const=pathlib.Path(_STDOUT),
        metavar="FILE",
        help="file to which the chief writes the results; without FILE, to standard output in place of the table",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist doctor`. Returns 1 if a check failed, on all tasks that the chief knows, otherwise 0.

    Raises:
      ClusterError: If the tasks of this machine cannot be started.
    """
    if args.base_port and not args.slurm and args.mpi is None:
        args.parser.error("--base-port needs --slurm or --mpi: TF_CONFIG has its ports, and --workers finds free ones")
    if args.workers is not None:
        return _run_here(args)
    try:
        spec = _spec_of(args)
    except TFConfigError as error:
        return _report_alone(Check("specification", FAILURE, str(error).rstrip(".")), args)
    return run_task(spec, args)


def run_task(spec: ClusterSpec, args: argparse.Namespace, clock: Callable[[], float] = time.time) -> int:
    """Takes part as one task, and prints the results on the chief or on a task without contact to it.

    Args:
      spec: The cluster, seen from this process.
      args: The parsed arguments.
      clock: The clock of this machine, in seconds since the epoch.

    Returns:
      The exit code.
    """
    from tfdist.doctor.chief_examination import ChiefExamination
    from tfdist.doctor.doctor_task import DoctorOptions, DoctorTask
    from tfdist.doctor.findings import findings
    from tfdist.doctor.machine_facts import FactRequest

    request = FactRequest(args.script, args.log_dir, args.backup_dir)
    start = time.monotonic()
    try:
        task = DoctorTask(spec, DoctorOptions(request, _SECONDS if args.timeout is None else args.timeout), clock)
    except ClusterError as error:
        return _report_alone(Check("secret and TLS", FAILURE, str(error).rstrip(".")), args)
    with task:
        if spec.worker_id:
            if task.wait_for_chief():
                logging.info("%s has told its facts to the chief, which prints the results", spec.describe())
                return int(task.exit_code or 0)
            job = JobFacts(spec.worker_id, spec.training_addresses, (task.alone(),), time.monotonic() - start)
            return _report(findings(job), job, args, start)
        examination = ChiefExamination(task)
        job = examination.run()
        exit_code = _report(findings(job), job, args, start)
        examination.tell_end(exit_code)
        return exit_code


def _report(checks: list[Check], job: JobFacts, args: argparse.Namespace, start: float) -> int:
    seconds = time.monotonic() - start
    failures = count(checks, FAILURE)
    if _shows_table(args) or not job.is_joint:
        print_table(checks, summary_of(checks, len(job.addresses), seconds))
    if job.is_joint:
        _write(args, json.dumps(to_json(checks, job, seconds), indent=2))
    return 1 if failures else 0


def _report_alone(check: Check, args: argparse.Namespace) -> int:
    """Reports a problem without which no other check is possible."""
    if _shows_table(args):
        print_table([check], summary_of([check], 1, 0.0))
    _write(args, json.dumps(to_json([check], None, 0.0), indent=2))
    return 1


def _shows_table(args: argparse.Namespace) -> bool:
    return bool(args.json != pathlib.Path(_STDOUT))


def _write(args: argparse.Namespace, text: str) -> None:
    if not _shows_table(args):
        print(text, flush=True)
    elif args.json:
        try:
            write_whole(args.json, text + "\n")
        except OSError as error:
            raise ClusterError(f"--json {args.json} must be a file that can be written, but: {error}.") from error


def _spec_of(args: argparse.Namespace) -> ClusterSpec:
    """Returns the cluster of this task, by its options, TF_CONFIG or Slurm; a cluster of one worker without all."""
    if args.mpi is not None:
        return ClusterSpec.from_mpi(args.mpi, base_port=args.base_port)
    if args.slurm:
        return ClusterSpec.from_slurm(base_port=args.base_port)
    spec = ClusterSpec.from_env()
    if spec is not None:
        return spec
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if is_digits(tasks) and int(tasks) > 1:
        return ClusterSpec.from_slurm()
    logging.info("TF_CONFIG is not set, so this checks one worker on this machine; --workers 2 checks it with two")
    return ClusterSpec.local(1, 0, free_ports(1))


def _run_here(args: argparse.Namespace) -> int:
    """Starts all tasks on this machine, and shows the output of the chief."""
    if os.environ.get("TF_CONFIG", "").strip():
        logging.info("TF_CONFIG is set; each worker gets its own instead")
    timeout = _LOCAL_SECONDS if args.timeout is None else args.timeout
    ports = hold_ports(args.workers)
    env = {**ports.env, **({} if secret_is_given() else {SECRET: new_secret()})}
    specs = [ClusterSpec.local(args.workers, index, ports.numbers) for index in range(args.workers)]
    with tempfile.TemporaryDirectory(prefix="tfdist-doctor-") as folder:
        logs = pathlib.Path(folder)
        group = WorkerGroup(_command_of_task(args, timeout), specs, log_dir=logs, env=env)
        try:
            group.start()
            seconds = 3 * timeout + _GRACE_SECONDS
            end = time.monotonic() + seconds
            has_ended = _wait(lambda: 0 not in group.running, group, end)
            chief = next((each for each in group.exits if each.index == 0), None)
            # After a check, tasks end by themselves, though late if the machine is busy. A chief that was killed tells
            # them nothing.
            is_over = chief is not None and chief.returncode >= 0
            _wait(lambda: not group.running, group, end if is_over else time.monotonic() + _GRACE_SECONDS)
            exits = group.exits  # Without those of tasks that are killed below.
            group.stop(None, grace_seconds=0)
        finally:
            group.kill()
            ports.close()
        if not has_ended:
            last = _end_of(log_path(logs, 0))
            logging.error("worker 0 did not end the check within %g s; its log ends with:\n%s", seconds, last)
        _tell_exits(exits, logs)
        return max((1 if each.returncode else 0 for each in group.exits), default=1)


def _command_of_task(args: argparse.Namespace, timeout: float) -> list[str]:
    from tfdist.doctor.machine_facts import is_url

    command = [sys.executable, "-m", "tfdist.launch.cli", "doctor", "--timeout", str(timeout)]
    for option in ("script", "backup_dir", "log_dir", "json"):
        if (value := getattr(args, option)) is not None:
            is_path = not is_url(str(value)) and str(value) != _STDOUT
            path = os.path.abspath(value) if is_path else str(value)
            command += [f"--{option.replace('_', '-')}", path]
    return command


def _wait(has_ended: Callable[[], bool], group: WorkerGroup, end: float) -> bool:
    """Waits until tasks have ended, at most until `end` of the monotonic clock. Returns whether they have."""
    group.poll()
    while not has_ended() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        group.poll()
    return has_ended()


def _tell_exits(exits: Sequence[WorkerExit], logs: pathlib.Path) -> None:
    """Logs the exits of tasks that the chief has not explained, with the last lines of their logs."""
    chief = next((each for each in exits if each.index == 0), None)
    for each in exits:
        is_told = chief and each.returncode == chief.returncode > 0 and each.time > chief.time - _TOLD_SECONDS
        if each.returncode and not is_told:
            how, end = describe_exit(each.returncode), _end_of(log_path(logs, each.index))
            logging.error("worker %d %s; its log ends with:\n%s", each.index, how, end)


def _end_of(log: pathlib.Path) -> str:
    """Returns the last lines of the log of a task, which are lost when its folder is removed."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return "\n".join(lines[-_SHOWN_LINES:]) or "(no lines)"
