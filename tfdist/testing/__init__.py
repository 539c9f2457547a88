"""Helpers for tests of distributed code: many devices in one process, many workers on one machine, fault injection."""

import importlib
from typing import TYPE_CHECKING, Any

from tfdist.testing import faults
from tfdist.testing.local_devices import virtual_devices
from tfdist.testing.workers import WorkerPool, run_workers

if TYPE_CHECKING:
    from tfdist.testing.drills import Fault

__all__ = ["Fault", "WorkerPool", "faults", "run_workers", "virtual_devices"]


def __getattr__(name: str) -> Any:
    if name == "Fault":  # Imported late, so that the parent of workers does not load Keras.
        return importlib.import_module("tfdist.testing.drills").Fault
    raise AttributeError(f"module 'tfdist.testing' has no attribute {name!r}; it has {', '.join(__all__)}")
