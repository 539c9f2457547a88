"""Runs `tfdist run` in a process of its own, with a script made for the test, and checks that no worker is left."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time

from tfdist.cluster import free_ports

DEADLINE_SECONDS = 150
SCRIPTS = pathlib.Path(__file__).parent / "scripts"

# Every worker writes its process number to a file in the directory of the test.
PREAMBLE = """
import json, os, pathlib, signal, subprocess, sys, time
worker = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
here = pathlib.Path(__file__).parent
def leave(name, pid):
    (here / "writing").mkdir(exist_ok=True)
    (here / "writing" / name).write_text(str(pid))
    (here / "writing" / name).rename(here / name)
"""
ARRIVE = 'leave(f"pid-{worker}", os.getpid())\n'


class Run:
    """Starts `tfdist run` in a process of its own, with a script made for the test."""

    def __init__(self, directory):
        self.directory = directory
        (directory / "tmp").mkdir()

    def script(self, body):
        path = self.directory / "script.py"
        path.write_text(PREAMBLE + textwrap.dedent(body) + "\n")
        return str(path)

    def start(self, *arguments, env=(), restarts=0, **options):
        def undisturbed():  # A test run in the background may ignore these signals.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

        command = [sys.executable, "-m", "tfdist.launch.cli", "run", f"--max-restarts={restarts}", *map(str, arguments)]
        environ = {**os.environ, "TMPDIR": str(self.directory / "tmp"), **dict(env)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "preexec_fn": undisturbed}
        return subprocess.Popen(command, env=environ, cwd=self.directory, **{**pipes, **options})

    def finish(self, *arguments, **options):
        with self.start(*arguments, **options) as process:
            try:
                out, err = process.communicate(timeout=DEADLINE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, err

    def pids(self):
        return {path.name: int(path.read_text()) for path in self.directory.glob("pid-*")}

    def wait_for_pids(self, count):
        assert eventually(lambda: len(self.pids()) == count), self.pids()
        return self.pids()

    def log_dirs(self):
        return list((self.directory / "tmp").iterdir())

    def gone(self):
        return eventually(lambda: not any(is_alive(pid) for pid in self.pids().values()))


@contextlib.contextmanager
def nothing_left(directory):
    """Yields a `Run`, and checks that no worker of the run is alive at the end."""
    run = Run(directory)
    yield run
    left = [pid for pid in run.pids().values() if is_alive(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert left == []


def beside_progress(text, *printed):
    """Returns the lines of a run's output other than Keras' progress and lines that start with `printed`.

    Also leaves out what workers say on a busy machine: that they wait for others, and that a worker is slow.
    """
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\x08", "", text)
    lines = [line.strip() for line in plain.splitlines()]
    progress = re.compile(r"Epoch \d+/\d+$|.*\d[mu]?s/(?:step|epoch)\b")
    late = r"workers have joined; waiting |is done, and waits up to |Waiting for .*, which prepares |No progress for "
    busy = re.compile(rf".*(?:{late}|Slow training: |No longer slow: )")
    beside = [line for line in lines if line and not progress.match(line) and not busy.match(line)]
    return [line for line in beside if not line.startswith(printed)]


def first_of_free_ports(n):
    """Returns a port that is free on this machine, and so are the `n` - 1 ports after it."""
    while True:
        (port,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as held:
            for number in range(port, port + n):
                held.enter_context(socket.create_server(("", number)))
            return port


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # The process may end while the file is open.
        return False


def eventually(condition, seconds=DEADLINE_SECONDS):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()
