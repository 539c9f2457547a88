"""Trainings on a GPU equal those of plain Keras on the same GPU: one replica, two replicas, two worker processes."""

import gpu_checks as checks
import numpy as np
import pytest
from gpu_devices import NEEDS_GPU

import tfdist

pytestmark = NEEDS_GPU

PLACEMENTS = {"one replica": (1, 1, "mirrored"), "two devices": (1, 2, "mirrored"), "two workers": (2, 1, "workers")}
# Largest difference between weights after 12 steps. Sums over replicas round in another order, and some kernels of
# cuDNN add in an order that changes from run to run.
TOLERANCE = {"float32": 2e-5, "mixed_bfloat16": 2e-2, "mixed_float16": 2e-2}


def trained(gpu_pools, placement, **options):
    workers, devices, kind = PLACEMENTS[placement]
    results = gpu_pools(workers, devices).run(checks.train, kind, **options)
    for other in results[1:]:
        for own, first in zip(other["weights"], results[0]["weights"], strict=True):
            np.testing.assert_array_equal(own, first)
    assert all(result["replicas_agree"] for result in results)
    return results[0]


def assert_equal(one, other, tolerance):
    for own, expected in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)
    np.testing.assert_allclose(one["history"]["loss"], other["history"]["loss"], rtol=10 * tolerance)
    np.testing.assert_allclose(one["evaluated"][0], other["evaluated"][0], rtol=10 * tolerance)
    np.testing.assert_allclose(one["predicted"], other["predicted"], rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("policy", TOLERANCE)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_equals_plain_keras_on_the_gpu(gpu_pools, placement, policy):
    (plain,) = gpu_pools().run(checks.train, "plain", policy=policy)
    own = trained(gpu_pools, placement, policy=policy)
    assert_equal(own, plain, TOLERANCE[policy])
    assert own["scale"] == plain["scale"]


def test_adam_equals_plain_keras_on_the_gpu(gpu_pools):
    (plain,) = gpu_pools().run(checks.train, "plain", optimizer="adam")
    assert_equal(trained(gpu_pools, "two devices", optimizer="adam"), plain, 2e-3)


def test_hierarchical_copies_equal_plain_keras(gpu_pools):
    (plain,) = gpu_pools().run(checks.train, "plain")
    assert_equal(trained(gpu_pools, "two devices", hierarchical=True), plain, TOLERANCE["float32"])


def test_several_steps_per_execution_equal_plain_keras(gpu_pools):
    (plain,) = gpu_pools().run(checks.train, "plain")
    for placement in PLACEMENTS:
        assert_equal(trained(gpu_pools, placement, compiled={"steps_per_execution": 3}), plain, TOLERANCE["float32"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_overflow_in_float16_skips_the_update_and_halves_the_loss_scale(gpu_pools, placement):
    workers, devices, kind = PLACEMENTS[placement]
    (plain,) = gpu_pools().run(checks.overflow, "plain")
    for before, after, is_kept in gpu_pools(workers, devices).run(checks.overflow, kind):
        assert (before, after) == plain[:2]
        assert after == before / 2
        assert is_kept


@pytest.mark.parametrize("codec", checks.CODECS)
@pytest.mark.parametrize("placement", ["two devices", "two workers"])
def test_compressed_training_keeps_replicas_equal_and_learns(gpu_pools, placement, codec):
    result = trained(gpu_pools, placement, codec=codec, epochs=3)
    losses = result["history"]["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "convolutions"])
def test_a_compiled_step_of_one_replica_equals_compiled_keras(gpu_pools, dense):
    options = {"compiled": {"jit_compile": True}, "dense": dense}
    (plain,) = gpu_pools().run(checks.train, "plain", **options)
    assert_equal(trained(gpu_pools, "one replica", **options), plain, TOLERANCE["float32"])


@pytest.mark.parametrize("placement", ["two devices", "two workers"])
def test_a_compiled_step_of_several_replicas_is_refused(gpu_pools, placement):
    workers, devices, kind = PLACEMENTS[placement]
    with pytest.raises(tfdist.errors.WorkerError) as caught:
        gpu_pools(workers, devices).run(checks.train, kind, compiled={"jit_compile": True})
    for text in ("jit_compile=True", "XLA", "Pass jit_compile=False"):
        assert text in str(caught.value)


@pytest.mark.parametrize("placement", ["two devices", "two workers"])
def test_balanced_sharding_trains_on_all_rows(gpu_pools, placement):
    workers, devices, kind = PLACEMENTS[placement]
    for weights, seen in gpu_pools(workers, devices).run(checks.balanced, kind):
        assert all(np.isfinite(weight).all() for weight in weights)
        assert [sum(of_replicas) for of_replicas in seen] == [checks.BATCH] * (2 * checks.STEPS)
