"""The command `tfdist data-service`: starts the servers of a tf.data service for `BalancedSharding(service=...)`."""

import argparse
import contextlib
import faulthandler
import functools
import os
import pathlib
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator

from absl import logging

from tfdist.cluster.address import check_answers, checked_port, is_loopback
from tfdist.errors import ClusterError
from tfdist.launch.stop_signals import stop_signals
from tfdist.readable_numbers import counted

_START_SECONDS = 40.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tfdist data-service` to its parser."""
    parser.add_argument(
        "--port", type=int, default=5050, metavar="P", help="port of the new dispatcher (default: 5050)"
    )
    parser.add_argument(
        "--dispatcher",
        metavar="HOST:PORT",
        help="start one more server for the dispatcher at this address (default: start a dispatcher and a server)",
    )
    parser.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="NAME",
        help="name or address by which other hosts reach this host; TensorFlow's servers listen at all addresses of "
        "the host, whatever NAME is, see docs/how_to/security.md (default: %(default)s)",
    )
    parser.add_argument(
        "--work-dir",
        type=pathlib.Path,
        metavar="DIR",
        help="folder where the dispatcher stores the requested datasets (default: a temporary directory)",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the servers of `tfdist data-service` until a signal asks the process to stop.

    Raises:
      ClusterError: If a server cannot start: the port is in use, the dispatcher does not answer, or the folder is not
        writable.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    what = f"a server for the dispatcher at {args.dispatcher}" if args.dispatcher else f"servers on port {args.port}"
    temporary = functools.partial(tempfile.TemporaryDirectory, prefix="tfdist-service-", ignore_cleanup_errors=True)
    with contextlib.ExitStack() as stack:
        try:
            work_dir = args.work_dir or pathlib.Path(stack.enter_context(temporary()))
            _check(args, work_dir)
            import tensorflow  # noqa: F401 (may take longer than the deadline on a busy machine)

            with _deadline(what):
                servers = _start(args, work_dir)
        except (OSError, ValueError) as error:
            problem = str(error).partition("\n")[0]
            raise ClusterError(
                f"A tf.data service needs a free port, a writable folder and a dispatcher that answers, but on "
                f"{args.host} it cannot start {what}: {problem}. Give another --port, --work-dir or --dispatcher."
            ) from error
        stopped = threading.Event()
        for signum in stop_signals():
            signal.signal(signum, lambda *_: stopped.set())
        if args.dispatcher:
            logging.info("started one more server on %s for the tf.data service at %s", args.host, args.dispatcher)
        else:
            logging.info("tf.data service at %s:%d, with one server", args.host, args.port)
        if is_loopback(args.host):
            logging.warning(
                "TensorFlow's servers listen at all addresses of this host, not at %s alone: close their ports in a "
                "firewall, or start the service and the job in one network namespace (docs/how_to/security.md).",
                args.host,
            )
        while not stopped.wait(1.0):  # Short waits, so that signals are handled.
            pass
        logging.info("tf.data service stopped; it had %s here", counted(len(servers), "server"))
    logging.flush()
    os._exit(0)  # A normal exit may wait for clients, which can go on without servers: they make batches themselves.


def _check(args: argparse.Namespace, work_dir: pathlib.Path) -> None:
    """Checks the port, folder or dispatcher that the tf.data servers need, before the slow import of TensorFlow."""
    if args.dispatcher is None:
        with socket.socket() as probe:  # TensorFlow would share a port that is in use.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", checked_port(args.port)))
        work_dir.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work_dir).close()
    else:
        check_answers(args.dispatcher)


@contextlib.contextmanager
def _deadline(what: str) -> Iterator[None]:
    """Ends this process if the block takes too long, since TensorFlow tries to reach a tf.data dispatcher forever.

    TensorFlow holds the GIL meanwhile, so Ctrl-C must end the process without a Python handler.
    """
    if signal.SIGINT in stop_signals():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    logging.info(
        "starting %s; if it does not start within %g s, for example because no dispatcher is at its address, this "
        "process ends with exit code 1",
        *(what, _START_SECONDS),
    )
    with open(os.devnull, "w") as nowhere:  # The line above explains the exit; a stack would not help.
        faulthandler.dump_traceback_later(_START_SECONDS, exit=True, file=nowhere)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def _start(args: argparse.Namespace, work_dir: pathlib.Path) -> list[object]:
    import tensorflow as tf

    service = tf.data.experimental.service
    servers: list[object] = []
    dispatcher = args.dispatcher
    try:
        if dispatcher is None:
            config = service.DispatcherConfig(port=args.port, work_dir=str(work_dir))
            servers.append(service.DispatchServer(config))
            dispatcher = f"localhost:{args.port}"
        # TensorFlow replaces `%port%` by the port.
        worker = service.WorkerConfig(dispatcher_address=dispatcher, worker_address=f"{args.host}:%port%")
        servers.append(service.WorkerServer(worker))
    except tf.errors.OpError as error:
        raise OSError(error.message) from error
    return servers
