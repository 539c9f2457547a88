"""Makes the memory of freed tensors leave the process, so that whole weights do not add up."""

import ctypes
import os
from typing import Any

_MMAP_THRESHOLD = -3  # glibc's name for it is M_MMAP_THRESHOLD.
_LEAST_BYTES = 1 << 20


def return_freed_memory() -> None:
    """Lets the process return the memory of each freed tensor of 1 MiB and more to the system at once.

    A step gathers whole weights one after another and frees each of them. By default TensorFlow's allocator for oneDNN
    keeps all memory that it ever had, and glibc keeps freed blocks of up to 32 MiB. Costs the time to map memory anew.

    Settings of the user have priority: the environment variables TF_ONEDNN_USE_SYSTEM_ALLOCATOR and
    MALLOC_MMAP_THRESHOLD_. The former must be set before TensorFlow makes its devices.
    """
    os.environ.setdefault("TF_ONEDNN_USE_SYSTEM_ALLOCATOR", "1")
    mallopt = _function_of_libc("mallopt")
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_MMAP_THRESHOLD, _LEAST_BYTES)


def return_small_blocks() -> None:
    """Returns the memory of freed small blocks to the system, such as those of the optimizer of TensorFlow's graphs.

    Its blocks lie between others, so glibc keeps them. Takes some 10 ms for each 100 MiB.
    """
    trim = _function_of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _function_of_libc(name: str) -> Any:
    """Returns a function of the C library; `None` if it lacks it, since only glibc has all of them."""
    return getattr(ctypes.CDLL(None), name, None)
