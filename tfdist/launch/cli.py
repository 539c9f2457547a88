"""The `tfdist` command: parses the command line of `tfdist run`, `tfdist bench` and others, and runs them."""

import argparse
import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import logging as std_logging
import os
import pathlib
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence

from absl import flags, logging

import tfdist
from tfdist.cluster import ClusterSpec
from tfdist.cluster.launch_check import warn_if_one_of_many
from tfdist.doctor import doctor_command
from tfdist.doctor.start_checks import warn_at_start
from tfdist.errors import ClusterError, TfdistError
from tfdist.launch import (
    arguments,
    bench_command,
    data_service,
    estimate_command,
    gpu_assignment,
    gpu_discovery,
    private_network,
    worker_script,
)
from tfdist.launch.closed_pipe import run_while_read
from tfdist.launch.run_dir import KEPT_RUNS, folder_of_run
from tfdist.launch.run_terminal import RunTerminal, can_draw_table
from tfdist.launch.stop_signals import stop_signals
from tfdist.launch.supervisor import Supervisor, SupervisorOptions
from tfdist.launch.worker_count_limit import WorkerLimits, refusal
from tfdist.plan import plan_command
from tfdist.report import report_command

_SAME_REQUEST_SECONDS = 1.0
_STARTING_OPTIONS = ("--workers", "-n", "--slurm", "--mpi")


@dataclasses.dataclass(frozen=True)
class _Command:
    name: str
    help: str
    examples: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command `tfdist`.

    Args:
      argv: Arguments of the command, by default the arguments of this process.

    Returns:
      The exit code.

    Raises:
      SystemExit: With code 2 for a wrong command line, with code 0 after `--help` and `--version`.
    """
    _open_standard_streams()
    return run_while_read(lambda: _main(sys.argv[1:] if argv is None else list(argv)))


def _main(argv: list[str]) -> int:
    flags.FLAGS(["tfdist"])  # absl's logging needs parsed flags; argparse parses the command line.
    logging.use_absl_handler()
    logging.get_absl_handler().setFormatter(std_logging.Formatter("tfdist: %(message)s"))
    logging.set_verbosity(logging.INFO)
    parser = arguments.CommandParser(prog="tfdist", description="Distributed training for Keras 3 on TensorFlow.")
    parser.add_argument("--version", action="version", version=f"tfdist {tfdist.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=command.help,
            epilog=f"examples:\n{textwrap.indent(textwrap.dedent(command.examples).strip(), '  ')}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser, argv=argv, main=main)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(args.run(args))
    except TfdistError as error:
        logging.error("%s", error)
        return 1


def _open_standard_streams() -> None:
    """Opens the descriptors 0 to 2 if closed. Otherwise a file opened later could get them and receive printed text."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--workers",
        "-n",
        type=arguments.positive_int,
        metavar="N",
        help="number of workers to start on this machine (default: only the worker that TF_CONFIG names; start the "
        "same command on every host)",
    )
    who.add_argument("--slurm", action="store_true", help="start the worker of this Slurm task, under `srun`")
    who.add_argument(
        "--mpi",
        metavar="HOST[:N],...",
        help="start the worker of this MPI process, under `mpirun`; give the hosts of `mpirun -H` in the same order",
    )
    parser.add_argument(
        "--base-port",
        type=arguments.positive_int,
        metavar="P",
        help="with --slurm and --mpi: port of the first worker on each host; the next workers get the next ports "
        "(default: 12345; with --slurm plus an offset that depends on the number of the job)",
    )
    parser.add_argument(
        "--min-workers",
        type=arguments.positive_int,
        metavar="M",
        help="continue with fewer workers, but at least M, if some cannot come back (default: the value of --workers)",
    )
    parser.add_argument(
        "--max-restarts",
        type=arguments.count,
        default=3,
        metavar="R",
        help="largest number of restarts without a commit in between; then the job ends (default: 3)",
    )
    parser.add_argument(
        "--restart-window-seconds",
        type=arguments.seconds,
        default=600.0,
        metavar="S",
        help="seconds after which a restart no longer counts (default: 600)",
    )
    parser.add_argument(
        "--regrow-seconds",
        type=arguments.seconds,
        default=300.0,
        metavar="S",
        help="seconds that a job with fewer workers runs before it tries all workers again, after its next commit "
        "(default: 300)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=arguments.positive_int,
        metavar="D",
        help="number of logical devices that the strategy makes in each worker",
    )
    parser.add_argument(
        "--gpus-per-worker",
        type=arguments.count,
        metavar="G",
        help="give each worker of this machine G GPUs of its own, of those in CUDA_VISIBLE_DEVICES if it is set; 0 "
        "hides all GPUs (default: every worker sees all GPUs)",
    )
    parser.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="folder for the files of this run: attempt-0/worker-0.log and so on, and failure.json; earlier/ keeps the "
        f"files of the run before (default: a new folder in the temporary directory, which keeps {KEPT_RUNS} runs)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--tee", action="store_true", help="print the lines of all workers, each after the worker's name"
    )
    shown.add_argument(
        "--quiet",
        action="store_true",
        help="print only warnings of tfdist, the first failure and the outcome; the output of workers is in their logs",
    )
    parser.add_argument(
        "--grace-seconds",
        type=arguments.seconds,
        default=30.0,
        metavar="S",
        help="seconds that workers have to save and leave before they are killed (default: 30)",
    )
    parser.add_argument(
        "--private-network",
        action="store_true",
        help="with --workers: give the workers a network of their own; nothing outside can reach them, and they can "
        "reach nothing outside",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("script", metavar="script.py", help="script that each worker runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def _run(args: argparse.Namespace) -> int:
    if args.quiet:
        logging.set_verbosity(logging.WARNING)
    command = _worker_command(args)
    spec = _own_place(args)
    options = _run_options(args, spec)
    own = [option for option in args.parser.options() if option.startswith("--") and option != "--help"]
    if args.script != "tfdist.launch.cli" and (stray := arguments.stray_option(args.script_args, own)):
        logging.info("%s", _misplaced(stray, args))
    warn_at_start(spec, args.log_dir, len(spec.workers_on_host) if spec else args.workers or 1)
    if args.private_network:
        private_network.enter()
    with folder_of_run(args, spec) as run_dir, _caught_signals() as caught, _terminal(args, spec) as terminal:
        return Supervisor(command, options, run_dir=run_dir, caught=caught, spec=spec, terminal=terminal).run()


@contextlib.contextmanager
def _terminal(args: argparse.Namespace, spec: ClusterSpec | None) -> Iterator[RunTerminal]:
    """Yields what shows the output: a live table, or plain lines without a terminal or if several commands share it."""
    is_shared = args.slurm or args.mpi is not None or (spec is not None and len(spec.workers_on_host) > 1)
    is_terminal = sys.stdout is not None and sys.stdout.isatty() and not is_shared
    if args.quiet or args.tee or not can_draw_table(os.environ, is_terminal=is_terminal):
        yield RunTerminal(tells_progress=not args.quiet and (spec is None or spec.worker_id == 0))
        return
    from tfdist.launch.live_terminal import LiveTerminal  # Loads `rich`.

    terminal = LiveTerminal()
    with terminal.shared():
        yield terminal


def _own_place(args: argparse.Namespace) -> ClusterSpec | None:
    """Returns the cluster spec of the worker to start in a cluster of several hosts; None to start all workers here."""
    is_told = args.slurm or args.mpi is not None
    if args.base_port and not is_told:
        args.parser.error("--base-port needs --slurm or --mpi: TF_CONFIG has its ports, and --workers finds free ones")
    text = os.environ.get("TF_CONFIG", "")
    if text.strip() and (is_told or args.workers is not None):
        logging.info("TF_CONFIG is set; each worker gets its own instead")
    if args.workers is not None:
        warn_if_one_of_many(starts_workers=True)
        return None
    if args.slurm:
        return ClusterSpec.from_slurm(base_port=args.base_port)
    if args.mpi is not None:
        return ClusterSpec.from_mpi(args.mpi, base_port=args.base_port)
    if not text.strip():
        if stray := arguments.stray_option(args.script_args, _STARTING_OPTIONS):
            args.parser.error(_misplaced(stray, args))
        args.parser.error(
            "give --workers 2 to start two workers on this machine; to start one worker on each host, set TF_CONFIG, "
            "or give --slurm or --mpi"
        )
    return ClusterSpec.from_json(text)


def _misplaced(stray: str, args: argparse.Namespace) -> str:
    return (
        f"{stray} comes after the script, so it is an argument of the script; put options of tfdist before the script: "
        f"tfdist run {stray} {'-m ' if args.is_module else ''}{args.script}"
    )


def _run_options(args: argparse.Namespace, spec: ClusterSpec | None) -> SupervisorOptions:
    workers = args.workers or 1
    least = args.min_workers or workers
    if args.private_network and args.workers is None:
        args.parser.error("--private-network needs --workers: workers of several hosts need a network between them")
    if args.min_workers and args.workers is None:
        args.parser.error("--min-workers needs --workers: otherwise the number of workers is fixed")
    if args.workers is not None and (why := refusal(workers, WorkerLimits.of_this_machine())):
        args.parser.error(f"--workers: {why}")
    if least > workers:
        args.parser.error(f"--min-workers needs a number from 1 to --workers {workers}, got {least}")
    return SupervisorOptions(
        workers=workers,
        min_workers=least,
        max_restarts=args.max_restarts,
        restart_window_seconds=args.restart_window_seconds,
        grace_seconds=args.grace_seconds,
        regrow_seconds=args.regrow_seconds,
        devices_per_worker=args.devices_per_worker,
        visible_gpus=_visible_gpus(args, spec),
        tee=args.tee,
        quiet=args.quiet,
    )


def _visible_gpus(args: argparse.Namespace, spec: ClusterSpec | None) -> Sequence[str] | None:
    """Returns the GPUs of each slot of this machine, or None to leave CUDA_VISIBLE_DEVICES as it is."""
    here = len(spec.workers_on_host) if spec else args.workers
    if args.gpus_per_worker is None:
        warning = gpu_assignment.sharing_warning(os.environ, workers=here, gpus=gpu_discovery.count_device_files())
        if warning and not (spec and spec.slot):  # Several commands on one machine warn once.
            logging.warning("%s", warning)
        return None
    assigned: Sequence[str] = ()
    try:
        found = gpu_discovery.find_gpus(os.environ) if args.gpus_per_worker else gpu_discovery.FoundGpus((), "")
        assigned = gpu_assignment.assign_gpus(
            found, workers=here, gpus_per_worker=args.gpus_per_worker, is_by_scheduler=spec is not None
        )
    except ClusterError as error:
        args.parser.error(f"--gpus-per-worker: {error}")
    return assigned


def _worker_command(args: argparse.Namespace) -> list[str]:
    """Returns the command of a worker. Checks it here, so that a mistake is reported once and not by every worker."""
    if args.is_module:
        # Checks only the outermost package: finding an inner module would import its parent packages.
        package = args.script.partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)
        if not found:
            args.parser.error(
                f"there is no module {args.script!r} to run; install it, or change to the directory that holds it"
            )
        return [sys.executable, worker_script.__file__, "-m", args.script, *_script_args(args)]
    if not os.path.exists(args.script):
        args.parser.error(f"there is no script {args.script!r} to run; to run a module, put -m before its name")
    if not (args.script.endswith(".py") and os.path.isfile(args.script)):
        return [sys.executable, args.script, *_script_args(args)]
    with contextlib.suppress(OSError, ValueError):  # Python's own error says more.
        try:
            compile(pathlib.Path(args.script).read_bytes(), args.script, "exec", dont_inherit=True)
        except SyntaxError as error:
            args.parser.error(f"{args.script} has a syntax error at line {error.lineno}: {error.msg}. Correct it.")
    return [sys.executable, worker_script.__file__, args.script, *_script_args(args)]


def _script_args(args: argparse.Namespace) -> list[str]:
    """Returns the arguments for the script: all after it, including a `--` next to it, which argparse may remove."""
    before = args.argv[: len(args.argv) - len(args.script_args)]
    return [*(["--"] if before[-1] == "--" else []), *args.script_args]


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collects the signals that ask `tfdist run` to stop during the block, so that the supervisor can act on them.

    Signals within a second of the first are the same request, for example sent to this process and to its group.
    """
    caught: list[int] = []
    first = 0.0

    def catch(signum: int, _: object) -> None:
        nonlocal first
        now = time.monotonic()
        first = first or now
        if not caught or now - first >= _SAME_REQUEST_SECONDS:
            caught.append(signum)

    before = {signum: signal.signal(signum, catch) for signum in stop_signals()}
    try:
        yield caught
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


_COMMANDS = (
    _Command(
        "run",
        "run a script in several workers, and restart it after a failure",
        """
        tfdist run -n 4 train.py --epochs 10           four workers on this machine; --epochs is the script's
        tfdist run -n 4 --log-dir logs -m package.train    a module; logs in a folder of your choice
        tfdist run --workers 4 --min-workers 3 train.py    continue with three if one cannot come back
        tfdist run -n 4 --gpus-per-worker 1 train.py   a GPU of its own for each worker
        TF_CONFIG=... tfdist run train.py              this host's worker of a cluster of several hosts
        srun --ntasks-per-node=1 tfdist run --slurm train.py
        """,
        _add_run_arguments,
        _run,
    ),
    _Command(
        "bench",
        "measure the exchange of tensors between workers, by size",
        """
        tfdist bench --workers 2                       two workers on this machine
        tfdist bench --workers 2 --link 100mbit        recommend a codec for such a link
        tfdist bench --workers 2 --compression none,int8 --parameters 60M --compute-ms 120
        TF_CONFIG=... tfdist bench --json result.json  on each host of a cluster
        """,
        bench_command.add_arguments,
        bench_command.run,
    ),
    _Command(
        "doctor",
        "check before a job whether its workers can start, connect and compute",
        """
        tfdist doctor --workers 4                      four workers on this machine
        TF_CONFIG=... tfdist doctor --script train.py  on each host of a cluster
        srun tfdist doctor --backup-dir /shared/backup     all tasks of a Slurm step
        """,
        doctor_command.add_arguments,
        doctor_command.run,
    ),
    _Command(
        "estimate",
        "estimate the memory of each replica before a job, and name the option that makes the model fit",
        """
        tfdist estimate model.keras --replicas 4       a model that was saved with its optimizer
        tfdist estimate train.py:make_model -n 8 --memory 16GB    a function that returns a compiled model
        """,
        estimate_command.add_arguments,
        estimate_command.run,
    ),
    _Command(
        "plan",
        "predict the time of a step with any number of replicas, and recommend a codec",
        """
        tfdist plan model.keras -n 256 --link 10gbit --compute-ms 120 --exchange-group-size auto
        tfdist plan train.py:make_model -n 8 --link 1gbit --compute-ms 300 --calibration bench.json --memory 16GB
        """,
        plan_command.add_arguments,
        plan_command.run,
    ),
    _Command(
        "data-service",
        "start servers that read, decode and map examples for the workers",
        """
        tfdist data-service --port 5050                a dispatcher and a server
        tfdist data-service --dispatcher host-1:5050   one more server, on another host
        """,
        data_service.add_arguments,
        data_service.run,
    ),
    _Command(
        "report",
        "say what happened in a run: failures, where each worker was, and who was missing from which exchange",
        """
        tfdist report logs                             the folder of --log-dir, or the one that the run has named
        tfdist report --stacks logs                    with the stacks of all threads
        """,
        report_command.add_arguments,
        report_command.run,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
