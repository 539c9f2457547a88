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

# A strategy trains a model. Then a thread makes and frees an array of 16 MiB ten times. The arrays that it holds before
# fill most of its region of 64 MiB. It prints the page faults of the last five times.
TRAINS = """
import resource, threading
import keras, numpy as np, tfdist

strategy = tfdist.MirroredStrategy(["CPU:0"])
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones([4, 2]), np.ones([4, 1]), verbose=0)

def work():
    held = [np.ones(1 << 21) for _ in range(3)]
    faults = []
    for _ in range(10):
        np.ones(1 << 21)
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt)
    print(faults[-1] - faults[4])

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""

ONLY_GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")


def page_faults(program: str, **environment: str) -> int:
    """Runs a program without settings of the user, and returns the number of page faults that it prints."""
    environ = {name: value for name, value in os.environ.items() if name not in VARIABLES} | environment
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


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

    freed_memory.return_if_divided(model_sharding)
    freed_memory.keep_unless_sharded(model_sharding)

    assert {parameter for parameter, _ in calls} == expected


@pytest.mark.parametrize("strategy", [tfdist.MirroredStrategy, tfdist.MultiWorkerMirroredStrategy])
def test_a_strategy_without_sharding_keeps_freed_memory(calls, strategy):
    strategy()

    has_gpu = bool(tf.config.get_visible_devices("GPU"))
    assert {parameter for parameter, _ in calls} == (set() if has_gpu else {TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD})


@ONLY_GLIBC
def test_a_process_that_keeps_freed_memory_maps_none_again():
    faults = {}
    for arrange in ("keep_freed_memory", "return_freed_memory"):
        faults[arrange] = page_faults(ALLOCATES, ARRANGE=arrange)

    assert faults["keep_freed_memory"] < 100  # It is 512 with a top pad of 32 MiB.
    assert 10 * faults["keep_freed_memory"] < faults["return_freed_memory"]


@ONLY_GLIBC
@pytest.mark.skipif(bool(tf.config.list_physical_devices("GPU")), reason="with GPUs a strategy sets nothing")
def test_a_process_keeps_freed_memory_after_a_fit():
    assert page_faults(TRAINS) < 100  # It is thousands with the threshold that TensorFlow sets.
