"""Replicas that train by local steps on a GPU learn, agree, and do the same as devices and as workers."""

import gpu_checks as checks
import numpy as np
import pytest
from gpu_devices import NEEDS_GPU
from test_gpu_training import TOLERANCE, assert_equal, trained

pytestmark = NEEDS_GPU

SEVERAL = ["two devices", "two workers"]


@pytest.mark.parametrize("kind", ["LocalSGD of each step", "DiLoCo of each step"])
@pytest.mark.parametrize("placement", SEVERAL)
def test_synchronizing_each_step_equals_plain_keras_on_the_gpu(gpu_pools, placement, kind):
    (plain,) = gpu_pools().run(checks.train, "plain")
    assert_equal(trained(gpu_pools, placement, local_steps=kind), plain, TOLERANCE["float32"])


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo", "streaming DiLoCo"])
def test_local_steps_learn_and_are_the_same_on_devices_and_workers(gpu_pools, kind):
    on_devices, on_workers = (trained(gpu_pools, placement, local_steps=kind, epochs=3) for placement in SEVERAL)
    assert_equal(on_devices, on_workers, TOLERANCE["float32"])
    losses = on_devices["history"]["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
