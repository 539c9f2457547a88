"""Measures the processor speed of a worker, by products of matrices."""

import os
import threading
import time

_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_SIZE = 384


def prepare() -> None:
    """Loads NumPy with one thread for each product, so that the measurement decides how many threads compute."""
    for name in _THREAD_VARIABLES:
        os.environ[name] = "1"  # Read when NumPy is loaded.
    import numpy as np

    np.ones((_SIZE, _SIZE), np.float32) @ np.ones((_SIZE, _SIZE), np.float32)


def measure(seconds: float, threads: int) -> float:
    """Returns the floating-point operations per second of products of matrices in `threads` threads.

    The time is that of the clock. A limit on the processor time of this worker, or another program, reduces the result.
    """
    import numpy as np

    matrix = np.full((_SIZE, _SIZE), 1 / _SIZE, np.float32)
    products = [0] * threads
    start = time.perf_counter()

    def multiply(place: int) -> None:
        result = np.empty_like(matrix)
        while time.perf_counter() - start < seconds:
            np.matmul(matrix, matrix, out=result)
            products[place] += 1

    helpers = [threading.Thread(target=multiply, args=(place,), daemon=True) for place in range(1, threads)]
    for helper in helpers:
        helper.start()
    multiply(0)
    for helper in helpers:
        helper.join()
    return 2.0 * _SIZE**3 * sum(products) / (time.perf_counter() - start)
