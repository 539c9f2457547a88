"""Pools of worker processes that live as long as the test session, one for each placement of replicas."""

import functools

import pytest

from tfdist.testing import WorkerPool

# Name: (workers, devices in each).
PLACEMENTS = {
    **{"single": (1, 1), "1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2)},
    **{"1x3": (1, 3), "1x4": (1, 4), "3x1": (3, 1)},
}


@pytest.fixture(scope="session")
def pools():
    """`pools(placement)` gives the pool of that placement, started when first asked for."""
    opened = []

    @functools.cache
    def pool(placement):
        workers, devices = PLACEMENTS[placement]
        opened.append(WorkerPool(workers, devices, timeout_seconds=180))
        return opened[-1]

    yield pool
    for pool in opened:
        pool.close()
