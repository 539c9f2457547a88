"""Sharded state, weights and tables on a GPU: results equal plain Keras, and each replica needs less memory."""

import gpu_checks as checks
import numpy as np
import pytest
from gpu_devices import NEEDS_GPU
from test_gpu_training import PLACEMENTS, TOLERANCE, assert_equal, trained

pytestmark = NEEDS_GPU

REPLICAS = 4
# The allocator takes memory in units of 256 bytes, and may give a tensor a free block of up to twice its size.
SPARE = 1.6
SEVERAL = ["two devices", "two workers"]
NEEDS_ALLOCATOR = pytest.mark.skipif(checks.KIND == "CPU", reason="TensorFlow counts the memory of GPUs only")


@pytest.mark.parametrize("mode", ["optimizer", "parameters"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("placement", SEVERAL)
def test_a_sharded_model_equals_plain_keras_on_the_gpu(gpu_pools, placement, optimizer, mode):
    (plain,) = gpu_pools().run(checks.train, "plain", optimizer=optimizer)
    own = trained(gpu_pools, placement, optimizer=optimizer, sharding=mode)
    assert_equal(own, plain, 2e-3 if optimizer == "adam" else TOLERANCE["float32"])


@pytest.mark.parametrize("mode", ["optimizer", "parameters"])
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_a_sharded_model_equals_plain_keras_in_mixed_precision(gpu_pools, policy, mode):
    (plain,) = gpu_pools().run(checks.train, "plain", policy=policy)
    own = trained(gpu_pools, "two devices", policy=policy, sharding=mode)
    assert_equal(own, plain, TOLERANCE[policy])
    assert own["scale"] == plain["scale"]


@pytest.mark.parametrize("placement", SEVERAL)
def test_a_sharded_table_equals_an_embedding_on_one_gpu(gpu_pools, placement):
    ((expected, expected_losses),) = gpu_pools().run(checks.table_training, "plain")
    workers, devices, kind = PLACEMENTS[placement]
    for weights, losses in gpu_pools(workers, devices).run(checks.table_training, kind):
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
        for own, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=2e-5)


@NEEDS_ALLOCATOR
@pytest.mark.parametrize("model", ["mlp", "transformer", "cnn"])
@pytest.mark.parametrize("optimizer", checks.OPTIMIZERS)
def test_the_allocator_holds_a_quarter_of_the_state_on_each_of_four_replicas(gpu_pools, optimizer, model):
    ((_, whole),) = gpu_pools(1, REPLICAS).run(checks.memory, model, optimizer, None)
    for mode in "optimizer", "parameters":
        ((_, parts),) = gpu_pools(1, REPLICAS).run(checks.memory, model, optimizer, mode)
        ratios = [part * REPLICAS / one for part, one in zip(parts, whole, strict=True)]
        print(f"{model}, {optimizer}, {mode}: {max(whole)} bytes of state, times a quarter: {max(ratios):.4f}")
        assert max(ratios) <= SPARE


@NEEDS_ALLOCATOR
@pytest.mark.parametrize("model", ["mlp", "transformer", "cnn"])
def test_the_allocator_holds_a_quarter_of_the_weights_on_each_of_four_replicas(gpu_pools, model):
    ((whole, _),) = gpu_pools(1, REPLICAS).run(checks.memory, model, "adam", None)
    ((parts, _),) = gpu_pools(1, REPLICAS).run(checks.memory, model, "adam", "parameters")
    ratios = [part * REPLICAS / one for part, one in zip(parts, whole, strict=True)]
    print(f"{model}: {max(whole)} bytes of weights, times a quarter with 'parameters': {max(ratios):.4f}")
    assert max(ratios) <= SPARE
