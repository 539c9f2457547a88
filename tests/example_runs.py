"""Runs an example in one of the four ways that its header names, and reads the numbers that it prints."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

import pytest

from tfdist.cluster import free_ports

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
DEADLINE_SECONDS = 800  # A busy machine takes several times as long as an idle one.


def one_process(script, flags):
    return [([sys.executable, script, *flags], {})]


def two_devices(script, flags):
    return [([sys.executable, script, *flags, "--devices", "2"], {})]


def launcher(script, flags):
    command = [os.path.join(sysconfig.get_path("scripts"), "tfdist"), "run", "--workers", "2", script, *flags]
    return [(command, {"TF_CPP_MIN_LOG_LEVEL": "0"})]  # the default level, as for users


def by_hand(script, flags):
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    configs = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}) for i in range(2)]
    return [([sys.executable, script, *flags], {"TF_CONFIG": config}) for config in configs]


def by_default(*ways):
    """Returns all ways, marked `exhaustive` unless they are in `ways`; together the examples cover all ways."""
    every = (one_process, two_devices, launcher, by_hand)
    return [pytest.param(way, marks=() if way in ways else pytest.mark.exhaustive) for way in every]


@contextlib.contextmanager
def runs(tmp_path):
    """Yields a function that runs an example in one way, and returns the output of its processes if all succeed."""
    processes = []

    def run(way, example, *flags):
        env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        env |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "TMPDIR": str(tmp_path)}
        paths = []
        for command, extra in way(str(EXAMPLES / example), flags):
            paths.append(tmp_path / f"output-{len(paths)}")
            with paths[-1].open("w") as output:
                process = subprocess.Popen(
                    command, env=env | extra, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            processes.append(process)
        wait(processes)
        text = "\n".join(path.read_text() for path in paths)
        assert [process.poll() for process in processes] == [0] * len(processes), text
        return text

    try:
        yield run
    finally:
        for process in processes:
            end(process)


def wait(processes):
    """Waits until all processes have ended, one has failed, or the deadline has passed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    codes = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.1)
        codes = [process.poll() for process in processes]


def end(process):
    """Ends the launcher first by SIGTERM, so that it can end workers outside this process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def printed(name, text):
    """Returns the number after `name:`, which the processes must have printed exactly once."""
    numbers = re.findall(rf"{name}: (\d+\.\d+)", text)
    assert len(numbers) == 1, text
    return float(numbers[0])
