"""Pools of worker processes that live as long as the test session; the order of files."""

import functools
import gc
import os
import pathlib
import signal
import sys

import pytest

from tfdist.testing import WorkerPool, virtual_devices

# What every process that tests start does first; see there.
QUICK_START = pathlib.Path(__file__).parent / "quick_start"
os.environ["PYTHONPATH"] = os.pathsep.join([str(QUICK_START), *filter(None, [os.environ.get("PYTHONPATH")])])
# Tests are no process of what may have started them: a pod of a CI, a task of Slurm or MPI.
for name in list(os.environ):
    if name == "KUBERNETES_SERVICE_HOST" or name.startswith(("SLURM_", "OMPI_", "PMI_", "MV2_")):
        del os.environ[name]

# A shell starts background commands with SIGINT ignored, and the processes of tests would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Name: (workers, devices in each).
PLACEMENTS = {
    **{"single": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2)},
    **{"1x3": (1, 3), "1x4": (1, 4), "3x1": (3, 1)},
}
# Dealt out in this order by `--no-loadscope-reorder`, before all others: what computes beside what waits.
LONGEST = (
    *("test_keras_features", "test_supervise", "test_faults", "test_watchdog", "test_compressed_training"),
    *("test_examples", "test_readme", "test_backup_and_restore", "test_balanced", "test_strategies"),
    "test_compression",
)


def pytest_collection_modifyitems(items):
    """Puts the longest files first: what comes last keeps all processes busy to the end."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


class QuickPool(WorkerPool):
    """A pool whose workers take a tenth less time to train."""

    def __init__(self, num_workers, devices):
        super().__init__(num_workers, timeout_seconds=180)
        self._devices = devices

    def run(self, fn, *args, **kwargs):
        super().run(make_quick, self._devices)  # each time, since a failure replaces the workers
        return super().run(fn, *args, **kwargs)


def make_quick(devices):
    """Prepares a new worker."""
    if "keras" in sys.modules:
        return
    if devices > 1:
        virtual_devices(devices)
    import keras  # noqa: F401 (for what it brings along)

    # `clear_session` collects garbage: not among what stays anyway.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session")
def pools():
    """`pools(placement)` gives the pool of that placement, started when first asked for."""
    opened = []

    @functools.cache
    def pool(placement):
        opened.append(QuickPool(*PLACEMENTS[placement]))
        return opened[-1]

    yield pool
    for pool in opened:
        pool.close()
