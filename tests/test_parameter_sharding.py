"""Training with weights that are divided among replicas equals training without."""

import numpy as np
import pytest

import parameter_checks as checks
import tfdist
from test_model_sharding import placements
from tfdist.errors import WorkerError

# Each needs another way of reading a weight, or of updating it.
MODELS = ["mlp", "conv", "attention", "recurrent", "embedding", "mixed", "own_step", "run_eagerly", "several_steps"]
OPTIMIZERS = ["sgd", "clipvalue", "average", "average_at_end", "loss_scale", "muon"]
# Gradients are summed over replicas before they are accumulated, and norms are summed in another order.
ROUNDED = ["accumulation", "rmsprop", "clipnorm", "global_clipnorm"]


def assert_close(result, expected, tolerance):
    for kind in ("losses", "weights", "state", "predicted"):
        for own, other in zip(result.get(kind, ()), expected.get(kind, ()), strict=True):
            np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("placement", "name"), placements(MODELS, ["recurrent", "embedding", "own_step"]))
def test_divided_weights_give_the_same_bits(placement, name, pools):
    whole = pools(placement).run(checks.trained, placement, name, None)
    divided = pools(placement).run(checks.trained, placement, name, "parameters")

    for result, expected in zip(divided, whole, strict=True):
        assert_close(result, expected, tolerance=1e-5 if placement == "2x2" else 0)
        assert result["divided"] >= 2 and not expected["divided"]


@pytest.mark.parametrize("name", ["shared", pytest.param("constrained", marks=pytest.mark.exhaustive)])
def test_weights_that_are_read_several_times_give_the_same_results(name, pools):
    """Each read has a sum of its own, so the sums are added in another order."""
    (whole,) = pools("1x2").run(checks.trained, "1x2", name, None)
    (divided,) = pools("1x2").run(checks.trained, "1x2", name, "parameters")

    assert_close(divided, whole, tolerance=1e-5)


@pytest.mark.parametrize(("placement", "optimizer"), placements(OPTIMIZERS, ["average", "loss_scale", "muon"]))
def test_optimizers_give_the_same_bits(placement, optimizer, pools):
    whole = pools(placement).run(checks.trained_with, placement, optimizer, None)
    divided = pools(placement).run(checks.trained_with, placement, optimizer, "parameters")

    for result, expected in zip(divided, whole, strict=True):
        assert_close(result, expected, tolerance=1e-5 if placement == "2x2" else 0)


@pytest.mark.parametrize(("placement", "optimizer"), placements(ROUNDED, ["accumulation"]))
def test_optimizers_give_the_same_results(placement, optimizer, pools):
    whole = pools(placement).run(checks.trained_with, placement, optimizer, None)
    divided = pools(placement).run(checks.trained_with, placement, optimizer, "parameters")

    for result, expected in zip(divided, whole, strict=True):
        assert_close(result, expected, tolerance=1e-5)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_unequal_shares_count_by_their_rows(placement, pools):
    whole = pools(placement).run(checks.unequal_shares, placement, None)
    divided = pools(placement).run(checks.unequal_shares, placement, "parameters")

    for result, expected in zip(divided, whole, strict=True):
        for own, other in zip(result, expected, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("saved_with", ["parameters", pytest.param(None, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("loaded_with", ["parameters", pytest.param("optimizer", marks=pytest.mark.exhaustive), None])
@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_files_do_not_depend_on_sharding(placement, saved_with, loaded_with, pools, tmp_path):
    for result, expected in pools(placement).run(checks.round_trip, placement, str(tmp_path), saved_with, loaded_with):
        assert_close(result, expected, tolerance=0)


def test_model_checkpoint_saves_weights_of_all_workers(pools, tmp_path):
    for weights, loaded in pools("2x1").run(checks.saved_by_callback, str(tmp_path)):
        for own, other in zip(loaded, weights, strict=True):
            np.testing.assert_array_equal(own, other)


def test_each_replica_keeps_its_share(pools):
    ((taken, whole, report),) = pools("1x2").run(checks.reported, "1x2")

    assert max(taken) <= 1.03 * whole / 2
    assert report.whole_weights > 1.5 * report.weights
    assert report.whole_total > 1.5 * report.total


@pytest.mark.parametrize(("sharding", "times"), [("parameters", 1), (None, 0)])
def test_memory_of_small_blocks_leaves_the_process_after_the_first_step(sharding, times, pools):
    assert pools("1x2").run(checks.returns_of_small_blocks, sharding) == [times]


def test_a_weight_is_gathered_once_for_each_pass(pools):
    """The last weight stays until its gradient, and the first is not needed in the backward pass."""
    ((gathers, sums),) = pools("1x2").run(checks.exchanges, 5)

    assert sums and gathers * 5 == sums * (5 + 3)  # However often Keras traces the step.


def test_few_whole_weights_and_gradients_are_in_memory_at_once(pools):
    """However many layers a model has: the next weight arrives, and the last gradients are summed, meanwhile."""
    (of_few,), (of_many,) = (pools("1x2").run(checks.alive, number) for number in (6, 9))

    assert of_few == of_many
    assert max(of_many) <= 3, of_many


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (checks.refused_branch, "Call the layer outside of the branch"),
        (checks.refused_unknown_loss, "tfdist.step_losses_are('mean')"),
        (checks.refused_gradients_of_gradients, "a tape records it"),
        (checks.refused_optimizer, "updates whole weights"),
        (checks.refused_apply, "strategy.distributed_optimizer(optimizer)"),
        (checks.refused_export, "export it there"),
    ],
)
def test_what_cannot_work_is_refused(check, text, pools):
    with pytest.raises(WorkerError) as error:
        pools("1x2").run(check)
    assert text in str(error.value.__cause__)


@pytest.mark.parametrize(
    ("placement", "reads_both", "text"),
    [
        (
            "1x2",
            False,
            "gather the weight 'routed/dense/kernel', and replica 1 to gather the weight 'routed/dense_1/kernel'",
        ),
        pytest.param("1x2", True, "replica 0 is about to sum the gradient", marks=pytest.mark.exhaustive),
        ("2x1", True, "sum the gradient of 'routed/dense/kernel', and replica 1 to sum"),
        pytest.param("2x1", False, "replica 1 to gather the weight", marks=pytest.mark.exhaustive),
        pytest.param("2x2", False, "to gather the weight 'routed/dense_1/kernel'", marks=pytest.mark.exhaustive),
    ],
)
def test_parts_of_unlike_weights_are_never_put_together(placement, reads_both, text, pools):
    """An eager step may take another branch on each replica."""
    with pytest.raises(WorkerError) as error:
        pools(placement).run(checks.refused_unlike_branches, placement, reads_both)
    assert "All replicas must read the same divided weights" in str(error.value.__cause__)
    assert text in str(error.value.__cause__)


def test_compression_is_refused():
    with pytest.raises(ValueError, match="Leave compression out"):
        tfdist.MirroredStrategy(["CPU:0"], model_sharding="parameters", compression="int8")
