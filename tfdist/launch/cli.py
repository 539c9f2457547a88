"""The `tfdist` command."""

import argparse
import contextlib
import dataclasses
import importlib.machinery
import importlib.util
import json
import logging as std_logging
import os
import pathlib
import re
import shlex
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from absl import flags, logging

import tfdist
from tfdist.backup import leftovers
from tfdist.cluster import DEVICES_PER_WORKER, ClusterSpec
from tfdist.cluster.alone import warn_if_one_of_many
from tfdist.errors import TfdistError
from tfdist.failure_report import write_whole
from tfdist.held_file import held, way_out
from tfdist.launch import data_service
from tfdist.launch.signals import stop_signals
from tfdist.launch.supervisor import Options, Supervisor

__all__ = ["main"]

_BYTES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_COUNTS = {"k": 10**3, "M": 10**6, "B": 10**9}
_SAME_REQUEST_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class _Command:
    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: The arguments, those of this process if None.

    Returns:
      The exit code.

    Raises:
      SystemExit: With code 2 if the command line is wrong, with 0 after `--help` and `--version`.
    """
    _open_standard_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    flags.FLAGS(["tfdist"])  # absl's logging wants its flags parsed; the command line is argparse's
    logging.use_absl_handler()
    logging.get_absl_handler().setFormatter(std_logging.Formatter("tfdist: %(message)s"))
    logging.set_verbosity(logging.INFO)
    parser = argparse.ArgumentParser(prog="tfdist", description="Distributed training for Keras 3 on TensorFlow.")
    parser.add_argument("--version", action="version", version=f"tfdist {tfdist.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="command")
    for command in _COMMANDS:
        subparser = subparsers.add_parser(command.name, help=command.help, description=command.help, allow_abbrev=False)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run, parser=subparser, argv=argv)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except TfdistError as error:
        logging.error("%s", error)
        return 1


def _open_standard_streams() -> None:
    """Lets nothing else have the descriptors 0 to 2, if they came closed: what is printed would go there."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _add_run_arguments(parser: argparse.ArgumentParser) -> None:
    who = parser.add_mutually_exclusive_group()
    who.add_argument(
        "--workers",
        type=_positive_int,
        metavar="N",
        help="how many processes to start (default: the one that TF_CONFIG names, where every host starts the same "
        "command)",
    )
    who.add_argument("--slurm", action="store_true", help="start the worker of this task, under `srun`")
    who.add_argument(
        "--mpi",
        metavar="HOST[:N],...",
        help="start the worker of this process, under `mpirun` on these hosts: those of `mpirun -H`, in its order",
    )
    parser.add_argument(
        "--base-port",
        type=_positive_int,
        metavar="P",
        help="under --slurm and --mpi the port of the first worker on each host, the next have the next (default: "
        "12345; for --slurm more, by the number of the job)",
    )
    parser.add_argument(
        "--min-workers",
        type=_positive_int,
        metavar="M",
        help="go on with fewer workers, M at least, when some cannot come back (default: as many as --workers)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=3,
        metavar="R",
        help="how many restarts without a commit in between, before the job has failed for good (default: 3)",
    )
    parser.add_argument(
        "--restart-window-seconds",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="after which time a restart counts no more (default: 600)",
    )
    parser.add_argument(
        "--regrow-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="how long a job with fewer workers runs before all are tried again, after its next commit (default: 300)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=_positive_int,
        metavar="D",
        help="logical devices that the strategy makes in each worker",
    )
    parser.add_argument(
        "--log-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="the folder of this run: attempt-0/worker-0.log and so on, and failure.json; earlier/ has those of the "
        "run before (default: a temporary directory, kept if a worker fails)",
    )
    parser.add_argument(
        "--tee", action="store_true", help="print every worker's lines, with the worker's name in front"
    )
    parser.add_argument(
        "--grace-seconds",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long workers may take to save and leave when asked to, before they are killed (default: 30)",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module, as `python -m` does")
    parser.add_argument("script", metavar="script.py", help="what each worker runs")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="the script's own arguments")


def _run(args: argparse.Namespace) -> int:
    command = _worker_command(args)
    spec = _own_place(args)
    options = _run_options(args)
    exit_code, attempts = 1, 0
    with _run_dir(args, spec) as run_dir:
        try:
            with _caught_signals() as caught:
                supervisor = Supervisor(command, options, run_dir=run_dir, caught=caught, spec=spec)
                exit_code = supervisor.run()
                attempts = len(supervisor.attempts)
        finally:
            if args.log_dir is None and exit_code == 0 and attempts == 1:
                shutil.rmtree(run_dir, ignore_errors=True)
    return exit_code


def _own_place(args: argparse.Namespace) -> ClusterSpec | None:
    """The place of the worker to start in the cluster of several hosts; None if all workers are started here."""
    is_told = args.slurm or args.mpi is not None
    if args.base_port and not is_told:
        args.parser.error("--base-port needs --slurm or --mpi: under TF_CONFIG ports are given, else found")
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
        args.parser.error(
            "give --workers 2 to start two workers on this machine; or, to start one worker on each host, set "
            "TF_CONFIG, or give --slurm or --mpi"
        )
    return ClusterSpec.from_json(text)


def _run_options(args: argparse.Namespace) -> Options:
    workers = args.workers or 1
    least = args.min_workers or workers
    if args.min_workers and args.workers is None:
        args.parser.error("--min-workers needs --workers: otherwise the number of workers is given")
    if least > workers:
        args.parser.error(f"--min-workers needs a number from 1 to --workers {workers}, got {least}")
    return Options(
        workers=workers,
        min_workers=least,
        max_restarts=args.max_restarts,
        restart_window_seconds=args.restart_window_seconds,
        grace_seconds=args.grace_seconds,
        regrow_seconds=args.regrow_seconds,
        devices_per_worker=args.devices_per_worker,
        tee=args.tee,
    )


def _worker_command(args: argparse.Namespace) -> list[str]:
    """The command of a worker, checked here so that a slip is told once and not by every worker."""
    if args.is_module:
        # Only the outermost package: finding an inner module would import those around it.
        package = args.script.partition(".")[0]
        found = importlib.machinery.PathFinder.find_spec(package, [os.getcwd()]) or importlib.util.find_spec(package)
        if not found:
            args.parser.error(
                f"there is no module {args.script!r} to run; is it in the current directory or installed?"
            )
        return [sys.executable, "-m", args.script, *_script_args(args)]
    if not os.path.exists(args.script):
        args.parser.error(f"there is no script {args.script!r} to run; to run a module, put -m before its name")
    return [sys.executable, args.script, *_script_args(args)]


def _script_args(args: argparse.Namespace) -> list[str]:
    """All that stands after the script, also a `--` next to it, which argparse may take for its own."""
    before = args.argv[: len(args.argv) - len(args.script_args)]
    return [*(["--"] if before[-1] == "--" else []), *args.script_args]


@contextlib.contextmanager
def _run_dir(args: argparse.Namespace, spec: ClusterSpec | None) -> Iterator[pathlib.Path]:
    """The folder of this run, this process's own."""
    if args.log_dir is None:
        try:
            temporary = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-run-"))
        except OSError as error:
            args.parser.error(f"no temporary directory can be written ({error}): give --log-dir")
        yield temporary
        return
    # Hosts may share a disk, but not a run's folder.
    run_dir: pathlib.Path = args.log_dir.absolute() / (f"worker-{spec.worker_id}" if spec else "")
    with contextlib.ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(held(run_dir / "tfdist-run.lock"))
            _set_aside(run_dir)
            tempfile.TemporaryFile(dir=run_dir).close()
        except BlockingIOError as error:
            args.parser.error(
                f"--log-dir {args.log_dir} serves one run at a time, and {error.strerror} is using {run_dir}; let it "
                f"finish or end it, or give another --log-dir.{way_out(error)}"
            )
        except OSError as error:
            args.parser.error(f"--log-dir {args.log_dir} cannot be written to: {error}")
        yield run_dir


def _set_aside(run_dir: pathlib.Path) -> None:
    """Moves what the run before left, which would mislead, to `earlier`, in place of what is there."""
    earlier = run_dir / "earlier"
    left = _files_of_run(run_dir)
    for path in _files_of_run(earlier) if left else ():
        path.unlink()
    for path in left:
        place = earlier / path.relative_to(run_dir)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.replace(place)
    for pattern in ("attempt-*/make-room", "committed", leftovers.NOTES):
        for path in run_dir.glob(pattern):
            path.unlink()
    for path in (*run_dir.glob("attempt-*"), *earlier.glob("attempt-*")):
        with contextlib.suppress(OSError):  # not empty: what else is in it is not ours
            path.rmdir()


def _files_of_run(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """What a run leaves for those who want to know how it went."""
    patterns = ("attempt-*/worker-*.log", "attempt-*/failure-*.json", "failure.json")
    return [path for pattern in patterns for path in run_dir.glob(pattern)]


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=_positive_int,
        metavar="N",
        help="start N workers on this machine (default: take part in the cluster of TF_CONFIG, where every host starts "
        "the same command)",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default="1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB",
        metavar="S,...",
        help="bytes of the tensors that are summed (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        "--codecs",
        type=_names,
        metavar="NAME,...",
        help="codecs, `none` for the plain exchange (default: that and all codecs)",
    )
    parser.add_argument(
        "--parameters",
        type=_parameters,
        default="25M",
        metavar="P",
        help="float32 parameters of the model whose exchange is predicted (default: %(default)s)",
    )
    parser.add_argument(
        "--compute-ms",
        type=_seconds,
        metavar="MS",
        help="milliseconds of its step without an exchange, to predict the step",
    )
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="how long one size and codec may take, 3 to 50 times (default: 1)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=_positive_int,
        metavar="D",
        help="logical devices of each worker (default: all GPUs, or all logical CPUs)",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the chief writes the results")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="seconds after which all ends, with what was measured by then; the chief's, once all have met (default: "
        "600)",
    )


def _bench(args: argparse.Namespace) -> int:
    spec = _bench_cluster(args)
    if args.json and (spec is None or spec.is_chief):
        if args.json.is_dir():
            args.parser.error(f"--json needs a file, but {args.json} is a directory")
        try:
            tempfile.TemporaryFile(dir=args.json.parent).close()
        except OSError as error:
            args.parser.error(f"--json {args.json} cannot be written: {error}")
    if spec is None:
        in_workers = ["-m", "tfdist.launch.cli", *args.argv]
        return main(["run", "--workers", str(args.workers), "--max-restarts", "0", *in_workers])
    if args.devices_per_worker:
        os.environ[DEVICES_PER_WORKER] = str(args.devices_per_worker)
    deadline = time.monotonic() + args.timeout
    results = _Results(args, spec)
    failure: BaseException | None = None
    _end_at_sigterm(results.end)
    with _Timeout(args.timeout, results.end) as timeout:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # the table is what is to be read
        from tfdist.launch import bench  # loads TensorFlow

        unknown = [name for name in args.compression or () if name not in bench.COMPRESSIONS]
        if unknown:
            args.parser.error(f"--compression takes {', '.join(bench.COMPRESSIONS)}; got {unknown[0]!r}")
        plan = bench.Plan(args.sizes, args.compression, args.seconds, deadline)
        try:
            bench.measure_aloud(plan, spec, results.rows.append, timeout.end_in)
        except BaseException as error:
            failure = error
    results.tell(None if failure is None else str(failure) or type(failure).__name__)
    if failure:
        raise failure
    return 0


class _Results:
    """What was measured, which the chief tells once, all or as much as there is."""

    def __init__(self, args: argparse.Namespace, spec: ClusterSpec):
        self.rows: list[Any] = []
        self._args, self._spec = args, spec
        self._is_told, self._lock = False, threading.Lock()

    def tell(self, error: str | None) -> None:
        """Prints the results, and writes them, with the reason if they are not all."""
        with self._lock:
            if self._is_told or not self.rows or not self._spec.is_chief:
                return
            self._is_told = True
            from tfdist.launch import bench

            args, command = self._args, shlex.join(["tfdist", *self._args.argv])
            report = bench.report(self.rows, self._spec, command, args.parameters, args.compute_ms) | {"error": error}
            bench.print_tables(self.rows, report["expectations"])
            sys.stdout.flush()
            if args.json:
                write_whole(args.json, json.dumps(report, indent=2) + "\n")

    def end(self, why: str, exit_code: int) -> None:
        """Ends this process: an orderly end may wait for an exchange."""
        try:
            logging.error("%s", why)
            self.tell(why)
        finally:
            os._exit(exit_code)


def _end_at_sigterm(end: Callable[[str, int], None]) -> None:
    """Lets a thread hear SIGTERM: the main thread hears nothing in an exchange. Called before others are started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def hear() -> None:
        signum = signal.sigwait({signal.SIGTERM})
        end("ended by SIGTERM", 128 + signum)

    threading.Thread(target=hear, daemon=True).start()


def _bench_cluster(args: argparse.Namespace) -> ClusterSpec | None:
    """The cluster to take part in; None if one is to be started here."""
    spec = ClusterSpec.from_env()
    if spec is None and args.workers is None:
        args.parser.error(
            "TF_CONFIG names no cluster to measure; start this command on every host with its TF_CONFIG, or give "
            "--workers 2 to start two workers on this machine"
        )
    workers = args.workers if spec is None else spec.num_workers
    if args.workers not in (None, workers):
        args.parser.error(
            f"TF_CONFIG names {workers} workers, but --workers is {args.workers}; leave --workers out to measure "
            "that cluster, or unset TF_CONFIG to start workers on this machine"
        )
    if workers < 2:
        where = "--workers is" if spec is None else "TF_CONFIG names"
        args.parser.error(f"an exchange needs two workers or more, but {where} 1; on one machine give --workers 2")
    return spec


class _Timeout:
    """Ends this process if a block takes longer: in an exchange TensorFlow hears no signal and no exception.

    Args:
      seconds: How long it may take.
      end: Called with the reason and the exit code, in another thread.
    """

    def __init__(self, seconds: float, end: Callable[[str, int], None]):
        self._seconds, self._end = seconds, end
        self._timer: threading.Timer | None = None

    def __enter__(self) -> "_Timeout":
        self.end_in(self._seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._cancel()

    def end_in(self, seconds: float) -> None:
        """Sets another time for the end, from this moment."""
        self._cancel()
        self._timer = threading.Timer(seconds, self._end, [self._why(), 1])
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()

    def _why(self) -> str:
        return (
            f"not done after --timeout {self._seconds:g} s; see that every worker runs and can be reached, or give "
            f"more --timeout or smaller --sizes"
        )


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """Collects the signals that ask this process to stop, instead of stopping.

    What comes within a second of the first is the same request: sent to this process and to its group, say.
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


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"needs a whole number from 1 up, got {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"needs a whole number from 0 up, got {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"needs seconds from 0 up, got {text}")
    return value


def _quantity(text: str, units: Mapping[str, int]) -> int:
    """Reads a whole number of things: "64KiB", "2.5M", "1000"."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text.strip())
    if match and match[2] in ("", *units):
        value = float(match[1]) * units.get(match[2], 1)
        if value >= 1 and value.is_integer():
            return int(value)
    raise argparse.ArgumentTypeError(f"needs a whole number, alone or with {', '.join(units)} after it, got {text!r}")


def _sizes(text: str) -> tuple[int, ...]:
    sizes = sorted({_quantity(part, _BYTES) for part in text.split(",")})
    odd = [size for size in sizes if size % 4]
    if odd:
        raise argparse.ArgumentTypeError(f"needs multiples of 4 bytes, the size of a float32, got {odd[0]} B")
    return tuple(sizes)


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _parameters(text: str) -> int:
    return _quantity(text, _COUNTS)


_COMMANDS = (
    _Command("run", "start a script in several workers, and again after a failure", _add_run_arguments, _run),
    _Command("bench", "measure the exchange between workers, by size", _add_bench_arguments, _bench),
    _Command(
        "data-service",
        "start servers that read, decode and map examples for the workers",
        data_service.add_arguments,
        data_service.run,
    ),
)

if __name__ == "__main__":
    sys.exit(main())
