"""Tests of the memory of freed tensors that a process keeps or returns."""

import os
import platform
import subprocess
import sys
import types

import pytest
import tensorflow as tf

import tfdist
from tfdist.strategies import freed_memory

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
VARIABLES = (
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
)

# A thread makes and frees arrays of 200 MiB in all, which take several regions of glibc, ten times. It prints the page
# faults of the last five times.
ALLOCATES = """
import os, resource, threading
import numpy as np
from tfdist.strategies import freed_memory

def work():
    faults = []
    for _ in range(10):
        arrays = [np.ones(1 << 18) for _ in range(100)]
        del arrays
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
    print(faults[-1] - faults[4])

getattr(freed_memory, os.environ["ARRANGE"])()
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


@pytest.fixture
def calls(monkeypatch):
    """The calls of `mallopt`, which have no effect, and no settings of the user."""
    for name in (*VARIABLES, "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"):
        monkeypatch.setenv(name, "")  # Afterwards the fixture also removes values that tests have set.
        monkeypatch.delenv(name)
    made: list = []
    library = types.SimpleNamespace(mallopt=lambda *each: made.append(each), malloc_trim=made.append)
    monkeypatch.setattr(freed_memory.ctypes, "CDLL", lambda name: library)
    return made


def test_small_blocks_leave_the_process(calls):
    freed_memory.return_small_blocks()

    assert calls == [0]


def test_freed_memory_leaves_the_process(calls):
    freed_memory.return_freed_memory()

    assert calls == [(TRIM_THRESHOLD, 128 << 10), (TOP_PAD, 128 << 10), (MMAP_THRESHOLD, 1 << 20)]
    assert os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] == "1"


def test_freed_memory_stays_for_the_next_step(calls):
    freed_memory.keep_freed_memory()

    assert calls == [(TRIM_THRESHOLD, 256 << 20), (TOP_PAD, 64 << 20), (MMAP_THRESHOLD, 32 << 20)]


@pytest.mark.parametrize("arrange", [freed_memory.keep_freed_memory, freed_memory.return_freed_memory])
def test_settings_of_the_user_stay(calls, monkeypatch, arrange):
    monkeypatch.setenv("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "4096")

    arrange()

    assert os.environ["TF_ONEDNN_USE_SYSTEM_ALLOCATOR"] == "0"
    assert MMAP_THRESHOLD not in [parameter for parameter, _ in calls]


def test_tunables_of_the_user_stay(calls, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.top_pad=1:glibc.rtld.nns=4")

    freed_memory.keep_freed_memory()
    freed_memory.return_freed_memory()

    assert not calls


@pytest.mark.parametrize(
    ("model_sharding", "gpus", "expected"),
    [
        (None, 0, {TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD}),
        (None, 1, set()),
        ("optimizer", 0, set()),
        ("parameters", 0, {TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD}),
    ],
)
def test_sharding_and_gpus_decide(calls, monkeypatch, model_sharding, gpus, expected):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [kind] * gpus)

    freed_memory.arrange_freed_memory(model_sharding)

    assert {parameter for parameter, _ in calls} == expected


@pytest.mark.parametrize("strategy", [tfdist.MirroredStrategy, tfdist.MultiWorkerMirroredStrategy])
def test_a_strategy_without_sharding_keeps_freed_memory(calls, strategy):
    strategy()

    has_gpu = bool(tf.config.get_visible_devices("GPU"))
    assert {parameter for parameter, _ in calls} == (set() if has_gpu else {TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD})


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_process_that_keeps_freed_memory_maps_none_again():
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    faults = {}
    for arrange in ("keep_freed_memory", "return_freed_memory"):
        command = [sys.executable, "-c", ALLOCATES]
        environ["ARRANGE"] = arrange
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        faults[arrange] = int(done.stdout)

    assert faults["keep_freed_memory"] < 100  # It is 512 with a top pad of 32 MiB.
    assert 10 * faults["keep_freed_memory"] < faults["return_freed_memory"]
