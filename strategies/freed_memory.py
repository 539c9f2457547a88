"""Decides how much memory of freed tensors a process keeps: more is faster, less leaves room for large models."""

import ctypes
import os
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfdist._compat import dataset_internals

# Parameters of glibc's `mallopt`, and the environment variables by which users set them.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_VARIABLES = {
    _TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
    _TOP_PAD: "MALLOC_TOP_PAD_",
    _MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_",
}
# The first two are glibc's own values. A strategy that keeps memory may have set others before.
_RETURNED = {_TRIM_THRESHOLD: 128 << 10, _TOP_PAD: 128 << 10, _MMAP_THRESHOLD: 1 << 20}
# The main thread has one region of blocks. glibc keeps as many free bytes at its end as the trim threshold. Other
# threads have regions of 64 MiB. glibc unmaps an empty one if the region before has more room than the top pad, so
# with a top pad of 64 MiB never.
_KEPT = {_TRIM_THRESHOLD: 256 << 20, _TOP_PAD: 64 << 20, _MMAP_THRESHOLD: 32 << 20}


def return_if_divided(model_sharding: str | None) -> None:
    """Lets the process return freed memory if a strategy divides weights; see `return_freed_memory`.

    Call it before TensorFlow makes its devices.
    """
    if model_sharding == "parameters":
        return_freed_memory()


def keep_unless_sharded(model_sharding: str | None) -> None:
    """Lets the process keep freed memory if a strategy has no `model_sharding` and no GPUs; see `keep_freed_memory`.

    Call it once TensorFlow has made its devices, since it reads a dataset.
    """
    if model_sharding is None and not tf.config.get_visible_devices("GPU"):
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Lets the process keep freed blocks of less than 32 MiB for the next step.

    By default glibc unmaps memory many times in a step on CPUs, and the kernel maps and clears it again. Costs memory:
    the main thread keeps up to 256 MiB that it does not use, and each other thread all its freed blocks of less than
    32 MiB. The first call reads an empty dataset, which takes about 0.1 s.

    Settings of the user have priority: the environment variables `MALLOC_TRIM_THRESHOLD_`, `MALLOC_TOP_PAD_` and
    `MALLOC_MMAP_THRESHOLD_`. With an entry for `glibc.malloc` in `GLIBC_TUNABLES` nothing is set.
    """
    dataset_internals.set_mmap_threshold_now()
    _set(_KEPT)


def return_freed_memory() -> None:
    """Lets the process return the memory of each freed tensor of 1 MiB and more to the system at once.

    A step gathers whole weights one after another and frees each of them. By default TensorFlow's allocator for oneDNN
    keeps all memory that it ever had, and glibc keeps freed blocks of up to 32 MiB. Costs the time to map memory anew.

    Settings of the user have priority: the environment variable `TF_ONEDNN_USE_SYSTEM_ALLOCATOR`, and those of
    `keep_freed_memory`. The former must be set before TensorFlow makes its devices.
    """
    os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    _set(_RETURNED)


def return_small_blocks() -> None:
    """Returns the memory of freed small blocks to the system, such as those of the optimizer of TensorFlow's graphs.

    Its blocks lie between others, so glibc keeps them. Takes some 10 ms for each 100 MiB.
    """
    trim = _function_of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _set(values: Mapping[int, int]) -> None:
    """Sets parameters of the allocator, except those that the user has set."""
    mallopt = _function_of_libc("mallopt")
    if mallopt is None or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    for parameter, value in values.items():
        if not os.environ.get(_VARIABLES[parameter]):
            mallopt(parameter, value)


def _function_of_libc(name: str) -> Any:
    """Returns a function of the C library; `None` if it lacks it, since only glibc has all of them."""
    return getattr(ctypes.CDLL(None), name, None)
