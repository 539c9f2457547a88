"""Processes that use a GPU, and the marks of tests that need one.

One GPU is enough: two logical devices share it, or two worker processes. To try the code of these tests without a GPU,
set TFDIST_GPU_TESTS_ON=CPU, which takes CPU devices in the place of GPUs.
"""

import functools
import os
import pathlib
import subprocess
import sys

import pytest

from tfdist.testing import WorkerPool

KIND = os.environ.get("TFDIST_GPU_TESTS_ON", "GPU")
_COUNT = "import tensorflow as tf; print('GPUs:', len(tf.config.list_physical_devices('GPU')))"


@functools.cache
def why_no_gpu() -> str | None:
    """Returns the reason why the tests cannot use a GPU, or `None`."""
    if KIND == "CPU":
        return None
    if not list(pathlib.Path("/dev").glob("nvidia[0-9]*")) and not pathlib.Path("/dev/dxg").exists():
        return "this machine has no NVIDIA GPU (no /dev/nvidia0)"
    counted = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=120)
    if "GPUs: 0" in counted.stdout:
        return f"TensorFlow sees no GPU: {counted.stderr[-500:]}"
    return None if "GPUs:" in counted.stdout else f"TensorFlow does not start: {counted.stderr[-500:]}"


NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(why_no_gpu() is not None, reason=str(why_no_gpu()))]


class GpuPool(WorkerPool):
    """Processes that share one GPU. Each splits its part of the GPU into logical devices."""

    def __init__(self, workers=1, devices=1):
        self._devices = devices
        visible = {} if KIND == "CPU" else {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0")}
        super().__init__(workers, timeout_seconds=240, env={"TF_FORCE_GPU_ALLOW_GROWTH": "true", **visible})

    def run(self, fn, *args, **kwargs):
        super().run(make_devices, KIND, self._devices)  # at each call, since a failure replaces the processes
        return super().run(fn, *args, **kwargs)


def make_devices(kind, count):
    """Makes logical devices before TensorFlow starts. Float32 products keep all bits, so that results can be compared.

    Args:
      kind: "GPU", or "CPU" to take CPU devices in the place of GPUs.
      count: Number of logical devices of this process.
    """
    import tensorflow as tf

    os.environ["TFDIST_GPU_TESTS_ON"] = kind
    physical = tf.config.list_physical_devices(kind)[0]
    if count > 1 and tf.config.get_logical_device_configuration(physical) is None:
        part = tf.config.LogicalDeviceConfiguration(memory_limit=4096 if kind == "GPU" else None)
        tf.config.set_logical_device_configuration(physical, [part] * count)
    tf.config.experimental.enable_tensor_float_32_execution(False)
