"""A worker process of a benchmark: trains as ordered, and answers with times and bytes.

    python -m benchmarks.peers.worker <file descriptor> [<folder of packages that precede the installed ones>]

The starter (`group.py`) holds the other end of the socket. A peer is a module with one function,

    prepare(model: str, alone: bool, **options) -> train,    train(steps, tick)

where `train` calls `tick()` after each step, once its loss was read. If `alone`, workers train without an exchange. If
steps that choose codecs came before these steps, `train` returns them as `Trials`.
"""

import functools
import importlib
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import models
from benchmarks.peers.messages import Answer, Failure, Order, Trials


class _Meter:
    """Records the time, the interface's counters and the processor time at the end of each step."""

    def __init__(self, interface: str):
        folder = pathlib.Path("/sys/class/net", interface, "statistics")
        self._counters = [folder / "tx_bytes", folder / "rx_bytes"]
        self._marks: list[tuple[float, int, int, float, float]] = []

    def tick(self) -> None:
        sent, received = (int(path.read_bytes()) for path in self._counters)
        self._marks.append((time.monotonic(), sent, received, time.process_time(), _busy_seconds()))

    def answer(self, steps: int, trials: Trials | None) -> Answer:
        """The measurements of the last `steps` steps."""
        marks = self._marks[-steps - 1 :]
        sent, received, own, busy = (marks[-1][column] - marks[0][column] for column in range(1, 5))
        memory = _memory("VmRSS") - _bytes_before_models(), _memory("VmHWM") - _bytes_before_models()
        return Answer([mark[0] for mark in marks], int(sent), int(received), *memory, own, busy, trials)


def _busy_seconds() -> float:
    """Returns the time in which the machine's processors were not idle, since its start, added over the processors."""
    fields = pathlib.Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return (sum(map(int, fields[:8])) - int(fields[3]) - int(fields[4])) / os.sysconf("SC_CLK_TCK")


def _memory(name: str) -> int:
    """Returns an entry in kB of this process's status, in bytes."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@functools.cache
def _bytes_before_models() -> int:
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # Lets VmHWM, the peak, begin anew.
    return _memory("VmRSS")


@functools.cache
def _prepared(peer: str, options: tuple[tuple[str, Any], ...], model: str, alone: bool) -> Callable[..., Trials | None]:
    prepare = importlib.import_module(f"benchmarks.peers.{peer}").prepare
    _bytes_before_models()  # After the packages are loaded.
    train: Callable[..., Trials | None] = prepare(model, alone, **dict(options))
    return train


def _follow(order: Order) -> Answer:
    if order.renew:
        _prepared.cache_clear()
    train = _prepared(order.peer, order.options, order.model, order.alone)
    models.set_dilation(order.dilation)
    meter = _Meter(os.environ["BENCHMARK_INTERFACE"])
    trials = train(order.warmup + order.steps, meter.tick)
    return meter.answer(order.steps, trials)


def main() -> None:
    fd = int(sys.argv[1])
    sys.path[:0] = sys.argv[2:]
    os.set_inheritable(fd, False)
    with Connection(fd) as connection:
        while True:
            try:
                order = connection.recv()
            except (EOFError, ConnectionResetError):
                os._exit(0)  # TensorFlow's shutdown can wait for peers that have ended.
            try:
                connection.send(_follow(order))
            except Exception as error:
                summary = "".join(traceback.format_exception_only(error)).strip()
                connection.send(Failure(summary, traceback.format_exc()))


if __name__ == "__main__":
    main()
