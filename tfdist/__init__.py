"""Distributed training for Keras 3 on TensorFlow.

Change `tf.distribute.` to `tfdist.` and Keras 3 trains on many workers. Public names are imported lazily (PEP 562), so
`import tfdist` and `tfdist run` start without loading TensorFlow.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist import callbacks, cluster, compression, data, errors, exit_codes, layers, testing
    from tfdist.faults import FaultTolerance
    from tfdist.strategies import (
        DiLoCo,
        LocalSGD,
        MirroredStrategy,
        MultiWorkerMirroredStrategy,
        estimate_memory,
        step_losses_are,
    )

__version__ = "0.1.0"

__all__ = [
    "DiLoCo",
    "FaultTolerance",
    "LocalSGD",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "callbacks",
    "cluster",
    "compression",
    "data",
    "errors",
    "estimate_memory",
    "exit_codes",
    "layers",
    "step_losses_are",
    "testing",
]

_MODULES = ("callbacks", "cluster", "compression", "data", "errors", "exit_codes", "layers", "testing")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name == "FaultTolerance":
        return importlib.import_module("tfdist.faults").FaultTolerance
    if name in __all__:
        if name == "MultiWorkerMirroredStrategy" and "tensorflow" not in sys.modules:
            importlib.import_module(
                "tfdist.cluster"
            ).ClusterSpec.from_env()  # Reports a wrong TF_CONFIG before TensorFlow loads, which takes seconds.
        return getattr(importlib.import_module("tfdist.strategies"), name)
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


if "TFDIST_RUN_DIR" in os.environ:  # A worker of `tfdist run` reports why it failed.
    importlib.import_module("tfdist.failure_report").install_hook()
