"""One worker process of a `WorkerPool`, as the parent sees it: calls, replies, output and end."""

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

from tfdist.cluster import DEVICES_PER_WORKER_VARIABLE, ClusterSpec
from tfdist.launch.worker_group import has_ended
from tfdist.testing.worker_replies import Died, Reply

GRACE_SECONDS = 1.0  # Time for a process to end by itself with its own exit code.

_OUTPUT_LINES = 100
_END_OF_STACKS = b", line 1 in <module>\n"  # The outermost call of the main thread, whose stack is printed last.


class WorkerHandle:
    """A worker process of a `WorkerPool`, as the parent sees it: a fresh interpreter that waits for calls.

    The output of the process goes to an unnamed temporary file that needs no clean-up.
    """

    def __init__(self, spec: ClusterSpec, num_devices: int, env: Mapping[str, str]):
        self.index = spec.worker_id
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        self._size_before_stacks = 0
        self.connection, remote = Pipe()
        with remote:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", _start_code(remote.fileno(), num_devices)],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                pass_fds=[remote.fileno()],
                start_new_session=True,  # Ctrl-C reaches only the parent, and one kill all the worker's children.
                env=_worker_env(spec, num_devices, env),
            )
        program = multiprocessing.spawn.get_preparation_data(f"worker {self.index}")
        program.pop("authkey")  # Can be pickled only while multiprocessing itself starts a process.
        if not os.path.exists(program.get("init_main_from_path", "")):  # From standard input: no file.
            program.pop("init_main_from_path", None)
        self.send(pickle.dumps(program))

    def send(self, message: bytes) -> None:
        """Sends a message, such as a function to call, if the worker process still runs."""
        with contextlib.suppress(OSError):  # The worker has died; `receive` returns how.
            self.connection.send_bytes(message)

    def receive(self) -> Reply:
        """Returns the worker's reply to a call, or how the worker died."""
        with contextlib.suppress(EOFError, OSError):
            if self.connection.poll():
                reply: Reply = pickle.loads(self.connection.recv_bytes())
                return reply
        self.kill(after_seconds=GRACE_SECONDS)
        return Died(self.index, self.process.wait())

    def dump_stacks(self) -> None:
        """Makes the worker print the stacks of all its threads, to explain a timeout."""
        self._size_before_stacks = self._output_size()
        os.kill(self.process.pid, signal.SIGUSR1)

    def has_dumped_stacks(self) -> bool:
        """Returns whether the output has all stacks since `dump_stacks`. Stays false if the last stack is too deep."""
        size = self._output_size() - self._size_before_stacks
        return _END_OF_STACKS in os.pread(self._output.fileno(), size, self._size_before_stacks)

    def output_tail(self) -> str:
        """Returns the last lines of the worker's output, for an error message."""
        size = self._output_size()
        # Not `seek`, because the worker shares the file position and writes at it.
        tail = os.pread(self._output.fileno(), 1 << 16, max(0, size - (1 << 16)))
        return "\n".join(tail.decode(errors="replace").splitlines()[-_OUTPUT_LINES:])

    def _output_size(self) -> int:
        return os.fstat(self._output.fileno()).st_size

    def kill(self, after_seconds: float = 0.0) -> None:
        """Kills the worker and its child processes after waiting `after_seconds` for the worker to end by itself."""
        if self.process.returncode is not None:
            return
        deadline = time.monotonic() + after_seconds
        while not has_ended(self.process) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Waits for the end of a worker that was killed or ends by itself, and releases its resources."""
        self.process.wait()
        self.connection.close()
        self._output.close()


def _worker_env(spec: ClusterSpec, num_devices: int, more: Mapping[str, str]) -> dict[str, str]:
    env = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", **os.environ}
    env.pop(DEVICES_PER_WORKER_VARIABLE, None)  # This variable is meant for this process, not for its children.
    if num_devices > 1:
        env[DEVICES_PER_WORKER_VARIABLE] = str(num_devices)
    return {**env, **more, "TF_CONFIG": spec.to_json()}


def _start_code(fd: int, num_devices: int) -> str:
    deadly_parent = os.getpid() if threading.current_thread() is threading.main_thread() else None
    # Sets the parent's path first, since tfdist may be found only through that path.
    return (
        f"import sys; sys.path[:] = {[str(path) for path in sys.path]!r}; from tfdist.testing import pool_worker; "
        f"pool_worker.serve({fd}, {num_devices}, {deadly_parent})"
    )
