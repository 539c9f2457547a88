"""Help for tests of distributed code: many devices in one process, many workers on one machine."""

from tfdist.testing.devices import virtual_devices
from tfdist.testing.workers import WorkerPool, run_workers

__all__ = ["WorkerPool", "run_workers", "virtual_devices"]
