"""The command `tfdist bench`, which times the gradient exchange: its arguments, timeout and results."""

import argparse
import json
import os
import pathlib
import shlex
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE, ClusterSpec
from tfdist.launch import arguments
from tfdist.launch.worker_group import SLOT
from tfdist.readable_numbers import counted
from tfdist.symlink_safe_file import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist bench` to its parser."""
    parser.add_argument(
        "--workers",
        type=arguments.positive_int,
        metavar="N",
        help="number of workers to start on this machine (default: join the cluster in TF_CONFIG; start the same "
        "command on every host)",
    )
    parser.add_argument(
        "--sizes",
        type=arguments.sizes,
        default="1KiB,16KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB",
        metavar="S,...",
        help="sizes of the summed tensors, in bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        "--codecs",
        type=arguments.names,
        metavar="NAME,...",
        help="codecs to measure; `none` is the exchange without a codec (default: `none` and all codecs)",
    )
    parser.add_argument(
        "--parameters",
        type=arguments.parameters,
        default="25M",
        metavar="P",
        help="number of float32 parameters of the model, to predict its exchange (default: %(default)s)",
    )
    parser.add_argument(
        "--compute-ms",
        type=arguments.milliseconds,
        metavar="MS",
        help="milliseconds of the model's step without the exchange, to predict the step",
    )
    parser.add_argument(
        "--link",
        type=arguments.bit_rate,
        metavar="RATE",
        help="rate of the links for which to recommend a codec, such as 100mbit. The measured time of coding and the "
        "bytes that each codec sends decide. Measure on one machine, or on a network that is faster than RATE",
    )
    parser.add_argument(
        "--seconds",
        type=arguments.seconds,
        default=1.0,
        metavar="S",
        help="time limit for each size and codec, in seconds; each is measured 3 to 50 times (default: 1)",
    )
    parser.add_argument(
        "--devices-per-worker",
        type=arguments.positive_int,
        metavar="D",
        help="number of logical devices of each worker (default: all GPUs, or all logical CPUs)",
    )
    parser.add_argument(
        "--gpus-per-worker",
        type=arguments.count,
        metavar="G",
        help="with --workers: give each worker G GPUs of its own, as in `tfdist run`; 0 hides all GPUs (default: every "
        "worker sees all GPUs)",
    )
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="file to which the chief writes the results")
    parser.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=600.0,
        metavar="S",
        help="seconds after which the command ends and prints the results so far; after all workers have joined, the "
        "chief's value holds for all (default: 600)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `tfdist bench`: measures and prints the times of exchanges, or starts workers that do.

    Raises:
      ClusterError: If workers do not join or were started with unequal commands, or if an exchange fails.
      TFConfigError: If TF_CONFIG is wrong.
    """
    spec = _cluster_of(args)
    if args.json and (spec is None or spec.is_chief):
        if args.json.is_dir():
            args.parser.error(f"--json needs a file, but {args.json} is a directory")
        try:
            tempfile.TemporaryFile(dir=args.json.parent).close()
        except OSError as error:
            args.parser.error(f"--json {args.json} cannot be written: {error}")
    if spec is None:
        gpus = [] if args.gpus_per_worker is None else ["--gpus-per-worker", str(args.gpus_per_worker)]
        in_workers = ["-m", "tfdist.launch.cli", *args.argv]
        return int(args.main(["run", "--workers", str(args.workers), "--max-restarts", "0", *gpus, *in_workers]))
    if args.devices_per_worker:
        os.environ[DEVICES_PER_WORKER_VARIABLE] = str(args.devices_per_worker)
    deadline = time.monotonic() + args.timeout
    results = _Results(args, spec)
    failure: BaseException | None = None
    _end_at_sigterm(results.end)
    with _Timeout(args.timeout, results.end) as timeout:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # Keeps the table readable.
        from tfdist.launch import bench  # Loads TensorFlow.

        unknown = [name for name in args.compression or () if name not in bench.COMPRESSIONS]
        if unknown:
            args.parser.error(f"--compression takes {', '.join(bench.COMPRESSIONS)}; got {unknown[0]!r}")
        plan = bench.BenchPlan(args.sizes, args.compression, args.seconds, deadline)
        try:
            bench.measure_aloud(plan, spec, results.rows.append, timeout.end_in)
        except BaseException as error:
            failure = error
    results.tell(None if failure is None else str(failure) or type(failure).__name__)
    if failure:
        raise failure
    return 0


class _Results:
    """The results of `tfdist bench`, complete or incomplete, which the chief prints once."""

    def __init__(self, args: argparse.Namespace, spec: ClusterSpec):
        self.rows: list[Any] = []
        self._args, self._spec = args, spec
        self._is_told, self._lock = False, threading.Lock()

    def tell(self, error: str | None) -> None:
        """Prints the results of `tfdist bench` and writes them as JSON, with the reason if they are incomplete."""
        with self._lock:
            if self._is_told or not self.rows or not self._spec.is_chief:
                return
            self._is_told = True
            from tfdist.launch import bench

            args, command = self._args, shlex.join(["tfdist", *self._args.argv])
            model = bench.ModelExchange(args.parameters, args.compute_ms, args.link)
            report = bench.report(self.rows, self._spec, command, model) | {"error": error}
            bench.print_tables(self.rows, report["expectations"])
            sys.stdout.flush()
            if args.json:
                write_whole(args.json, json.dumps(report, indent=2) + "\n")

    def end(self, why: str, exit_code: int) -> None:
        """Ends this process without clean-up, because a normal exit may wait for an exchange."""
        try:
            logging.error("%s", why)
            self.tell(why)
        finally:
            os._exit(exit_code)


def _end_at_sigterm(end: Callable[[str, int], None]) -> None:
    """Calls `end` at SIGTERM, in a thread: the main thread may be in an exchange. Call it before starting threads."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def hear() -> None:
        signum = signal.sigwait({signal.SIGTERM})
        end("ended by SIGTERM", 128 + signum)

    threading.Thread(target=hear, daemon=True).start()


def _cluster_of(args: argparse.Namespace) -> ClusterSpec | None:
    """Returns the cluster that `tfdist bench` joins by TF_CONFIG, or None to start workers on this machine."""
    spec = ClusterSpec.from_env()
    if spec is None and args.workers is None:
        args.parser.error(
            "TF_CONFIG names no cluster to measure; start this command on every host with its TF_CONFIG, or give "
            "--workers 2 to start two workers on this machine"
        )
    if spec is not None and args.gpus_per_worker is not None and SLOT not in os.environ:
        args.parser.error(
            "--gpus-per-worker is for workers that this command starts, but TF_CONFIG names this process as a worker; "
            "set its CUDA_VISIBLE_DEVICES instead"
        )
    workers = args.workers if spec is None else spec.num_workers
    if args.workers not in (None, workers):
        args.parser.error(
            f"TF_CONFIG names {counted(workers, 'worker')}, but --workers is {args.workers}; leave --workers out to "
            "measure that cluster, or unset TF_CONFIG to start workers on this machine"
        )
    if workers < 2:
        where = "--workers is" if spec is None else "TF_CONFIG names"
        args.parser.error(f"an exchange needs at least two workers, but {where} 1; on one machine give --workers 2")
    return spec


class _Timeout:
    """Ends this process if a block takes too long. Signals and exceptions do not interrupt TensorFlow in an exchange.

    Args:
      seconds: Time limit of the block.
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
        """Sets a new time limit for the block, counted from now."""
        self._cancel()
        why = (
            f"the measurement did not finish within --timeout {self._seconds:g} s; check that every worker runs and "
            f"can be reached, or give a longer --timeout or smaller --sizes"
        )
        self._timer = threading.Timer(seconds, self._end, [why, 1])
        self._timer.daemon = True
        self._timer.start()

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
