"""Provides pools of worker processes that live as long as the test session, and orders the test files."""

import functools
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys

import pytest

from tfdist.launch.worker_group import describe_exit
from tfdist.testing import WorkerPool, virtual_devices
from untuned_pipelines import untune_pipelines

# Every process that tests start runs the code in this folder first.
QUICK_START = pathlib.Path(__file__).parent / "quick_start"
os.environ["PYTHONPATH"] = os.pathsep.join([str(QUICK_START), *filter(None, [os.environ.get("PYTHONPATH")])])
# Hides a pod or a task of Slurm or MPI in which the tests may run, so that tfdist does not read its environment.
for name in list(os.environ):
    if name == "KUBERNETES_SERVICE_HOST" or name.startswith(("SLURM_", "OMPI_", "PMI_", "MV2_")):
        del os.environ[name]

# A shell starts background commands with SIGINT ignored. Worker processes of tests would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `--no-loadscope-reorder` starts these files first, in this order: files that compute beside files that wait.
LONGEST = (
    *("test_keras_features", "test_supervise", "test_faults", "test_watchdog", "test_compressed_training"),
    *("test_examples", "test_gallery", "test_readme", "test_backup_and_restore", "test_balanced", "test_strategies"),
    "test_compression",
)
# Tests in these files need neither other processes nor a training step, except tests with the marker `slow`.
UNIT = {
    *(
        "test_adaptive",
        "test_backup_store",
        "test_batch_assignment",
        "test_batch_plan",
        "test_buckets",
        "test_cache_locks",
    ),
    "test_doctor_checks",
    *(
        "test_cluster",
        "test_codec_groups",
        "test_compression",
        "test_failure_kinds",
        "test_goodput",
        "test_live_table",
        "test_model_sharding_parts",
        "test_output",
        "test_private_names",
        "test_replica_speed",
        "test_report",
        "test_report_page",
        "test_row_routes",
        "test_run_words",
        "test_stragglers",
    ),
    *(
        "test_deploy",
        "test_documentation",
        "test_offline_bundle",
        "test_sources",
        "test_symlink_safe_files",
        "test_weight_gathers",
        "test_telemetry",
        "test_times_on_gpu",
        "test_traffic",
    ),
    "test_troubleshooting",
}


def pytest_collection_modifyitems(items):
    """Puts the longest files first, so that short files keep all processes busy until the end; marks unit tests."""
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    for item in items:
        if item.path.stem in UNIT and not any(item.get_closest_marker(name) for name in ("slow", "exhaustive")):
            item.add_marker(pytest.mark.unit)


def pytest_collection_finish():
    if "tensorflow" in sys.modules:
        untune_pipelines()


def sizes(placement):
    """Returns the number of workers of a placement such as "2x1", and of devices in each worker."""
    return (1, 1) if placement == "single" else tuple(map(int, placement.split("x")))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Says how a test process of pytest-xdist has ended, if it has ended by itself: its own output is lost."""
    if error:
        process = node.gateway._io.popen
        end = subprocess_end(process)
        print(f"\nThe test process {node.gateway.id}, {process.pid}, {end}.", file=sys.__stderr__, flush=True)


def subprocess_end(process):
    try:
        return describe_exit(process.wait(10))
    except subprocess.TimeoutExpired:
        return "still runs, but its connection is closed"


class QuickPool(WorkerPool):
    """A pool of workers that train a tenth faster, because they skip garbage collections."""

    def __init__(self, placement):
        num_workers, self._devices = sizes(placement)
        super().__init__(num_workers, timeout_seconds=400)

    def run(self, fn, *args, **kwargs):
        super().run(prepare, self._devices)  # at each call, since a failure replaces the workers
        return super().run(fn, *args, **kwargs)


def prepare(devices):
    """Makes a worker quick, and gives all workers equal random states, whatever earlier tests have drawn on them."""
    make_quick(devices)
    import numpy as np

    random.seed(1)
    np.random.seed(1)


def make_quick(devices):
    """Prepares a new worker: creates devices, imports Keras, and exempts existing objects from garbage collection.

    Pipelines have no tuner; see `untune_pipelines`.
    """
    if "keras" in sys.modules:
        return
    if devices > 1:
        virtual_devices(devices)
    import keras  # noqa: F401 (for its side effects)

    untune_pipelines()
    # `clear_session` collects garbage; skip the objects that stay anyway.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Returns a folder for the data sets of the examples, so that only the first example prepares them."""
    return str(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def pools():
    """Returns a function: `pools(placement)` is the pool of a placement, started at its first use."""
    yield from opened_once(QuickPool)


@pytest.fixture(scope="session")
def gpu_pools():
    """Returns a function: `gpu_pools(workers, devices)` is a pool whose processes share a GPU, started at first use."""
    from gpu_devices import GpuPool

    yield from opened_once(GpuPool)


def opened_once(make):
    """Yields a function that makes a pool of its arguments at the first call. Closes the pools in the end."""
    opened = []

    @functools.cache
    def pool(*args):
        opened.append(make(*args))
        return opened[-1]

    yield pool
    for pool in opened:
        pool.close()
