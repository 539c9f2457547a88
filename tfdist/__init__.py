"""Distributed training for Keras 3 on TensorFlow.

Change `tf.distribute.` to `tfdist.` and Keras 3 trains on many workers. Names are handed on lazily (PEP 562), so that
`import tfdist` and `tfdist run` start without loading TensorFlow.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist import callbacks, cluster, compression, data, errors, exit_codes, testing
    from tfdist.faults import FaultTolerance
    from tfdist.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, step_losses_are

__version__ = "0.1.0"

__all__ = [
    "FaultTolerance",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "callbacks",
    "cluster",
    "compression",
    "data",
    "errors",
    "exit_codes",
    "step_losses_are",
    "testing",
]

_MODULES = ("callbacks", "cluster", "compression", "data", "errors", "exit_codes", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name == "FaultTolerance":
        return importlib.import_module("tfdist.faults").FaultTolerance
    if name in __all__:
        if name == "MultiWorkerMirroredStrategy" and "tensorflow" not in sys.modules:
            importlib.import_module(
                "tfdist.cluster"
            ).ClusterSpec.from_env()  # A faulty TF_CONFIG is named before the seconds that TensorFlow takes.
        return getattr(importlib.import_module("tfdist.strategies"), name)
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if "TFDIST_RUN_DIR" in os.environ:  # a worker of `tfdist run`, which asks why it failed
    importlib.import_module("tfdist.failure_report").install_hook()
