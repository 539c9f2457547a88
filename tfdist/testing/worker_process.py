"""The parent's side of one process of a `WorkerPool`."""

import contextlib
import multiprocessing.spawn
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Pipe
from typing import IO

from tfdist.cluster import DEVICES_PER_WORKER, ClusterSpec
from tfdist.testing.worker_replies import Died, Reply

GRACE_SECONDS = 1.0  # For a process that may end by itself, and say how.

_OUTPUT_LINES = 100


class WorkerProcess:
    """A fresh interpreter that waits for calls. Its output goes to a nameless file, which needs no clean-up."""

    def __init__(self, spec: ClusterSpec, num_devices: int, env: Mapping[str, str]):
        self.index = spec.worker_id
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self.connection, remote = Pipe()
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _start_code(remote.fileno(), num_devices)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,  # Ctrl-C is the parent's; and one kill reaches what the worker started
                env=_worker_env(spec, num_devices, env),
            )
        program = multiprocessing.spawn.get_preparation_data(f"worker {self.index}")
        program.pop("authkey")  # refuses to be pickled outside multiprocessing's own start
        if not os.path.exists(program.get("init_main_from_path", "")):  # standard input: nothing to import
            program.pop("init_main_from_path", None)
        self.send(pickle.dumps(program))

    def send(self, message: bytes) -> None:
        """Sends a message, if there is still anybody to read it."""
        with contextlib.suppress(OSError):  # the worker is gone; `receive` says how
            self.connection.send_bytes(message)

    def receive(self) -> Reply:
        """The worker's reply, or how it died."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                reply: Reply = pickle.loads(self.connection.recv_bytes())
                return reply
        self.kill(after_seconds=GRACE_SECONDS)
        return Died(self.index, self.process.wait())

    def has_ended(self) -> bool:
        """Whether the worker is gone, without taking note: its number stays reserved, so that `kill` is safe."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def dump_stacks(self) -> None:
        """Lets the worker write where each of its threads is."""
        os.kill(self.process.pid, signal.SIGUSR1)

    def output_tail(self) -> str:
        """The last lines of what the worker wrote."""
        size = os.fstat(self._output.fileno()).st_size
        # Not `seek`: the position is shared with the worker, which writes there.
        tail = os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16)))
        return "\n".join(tail.decode(errors="replace").splitlines()[-_OUTPUT_LINES:])

    def kill(self, after_seconds: float = 0.0) -> None:
        """Kills the worker and all that it started, unless it ends by itself in time."""
        if self.process.returncode is not None:
            return
        deadline = time.monotonic() + after_seconds
        while not self.has_ended() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Lets go of a worker that is killed or ends by itself."""
        self.process.wait()
        self.connection.close()
        self._output.close()


def _worker_env(spec: ClusterSpec, num_devices: int, more: Mapping[str, str]) -> dict[str, str]:
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
    env.pop(DEVICES_PER_WORKER, None)  # meant for this process, not for those it starts
    if num_devices > 1:
        env[DEVICES_PER_WORKER] = str(num_devices)
    return {**env, **more, "TF_CONFIG": spec.to_json()}


def _start_code(fd: int, num_devices: int) -> str:
    deadly_parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    # The parent's path first, since tfdist may be found only through it.
    return (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; from tfdist.testing import serving; "
        f"serving.serve({fd}, {num_devices}, {deadly_parent})"
    )
