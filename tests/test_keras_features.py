"""Every Keras feature gives one device's result on several replicas, with the same bits on all replicas."""

import keras
import numpy as np
import pytest

from keras_features import ROWS, run_row
from tfdist.errors import WorkerError


def test_every_optimizer_of_keras_has_a_row():
    exported = [value for value in vars(keras.optimizers).values() if isinstance(value, type)]
    kinds = {value.__name__ for value in exported if issubclass(value, keras.Optimizer)} - {"Optimizer"}
    others = {"LossScaleOptimizer": "loss_scaling", "MultiOptimizer": "optimizer_multi"}
    wanted = {others.get(kind, f"optimizer_{kind.lower()}") for kind in kinds}

    assert len(kinds) > 10 and not [
        name for name in wanted if not any(f"{row}_".startswith(f"{name}_") for row in ROWS)
    ]


def rows(*placements, of=tuple(ROWS)):
    """Returns names `of` rows as parameters, `exhaustive` unless the row runs on all `placements` by default."""
    return [
        pytest.param(name, marks=() if {*placements} <= {*ROWS[name].placements} else pytest.mark.exhaustive)
        for name in of
    ]


@pytest.fixture(scope="session")
def results(pools, tmp_path_factory):
    """Returns a function: `results(name, placement)` has the result of each worker; a row runs once per placement."""
    known = {}

    def run(name, placement, **options):
        key = (name, placement, *options.items())
        if key not in known:
            folder = str(tmp_path_factory.mktemp(name))
            known[key] = pools(placement).run(run_row, name, placement, folder, **options)
        return known[key]

    return run


def assert_equals_one_device(name, placement, results, **options):
    workers = results(name, placement, **options)

    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"
    for result in workers[1:]:
        assert_same(result, workers[0], tolerance=0)
    if not ROWS[name].exempt:
        assert_same(workers[0], results(name, "single")[0], ROWS[name].tolerance)


@pytest.mark.parametrize("name", rows("2x1"))
def test_two_workers_equal_one_device(name, results):
    assert_equals_one_device(name, "2x1", results)


@pytest.mark.parametrize("name", rows("1x2"))
def test_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "1x2", results)


@pytest.mark.parametrize("name", rows("2x2"))
def test_two_workers_of_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "2x2", results)


@pytest.mark.parametrize("name", rows("2x1", "1x2", of=[name for name, row in ROWS.items() if row.same_bits]))
def test_two_workers_and_two_devices_give_the_same_bits(name, results):
    two_workers, two_devices = results(name, "2x1")[0], results(name, "1x2")[0]

    assert two_workers["digest"] == two_devices["digest"]
    assert_same(two_workers, two_devices, tolerance=0)


# Rows with sharded state that differ from unsharded ones by rounding; docs/limits.md has the reasons.
ROUNDED = (
    *("clip", "loss_scaling", "norm", "optimizer_adadelta", "optimizer_adagrad", "optimizer_rmsprop"),
    *("optimizer_ftrl", "embedding_of_positions_under_loss_scaling"),
)


# Rows that call `apply` of an optimizer of which tfdist makes no view: in a loop, hidden in a function or an optimizer.
REFUSED = ("batches_of_many_parts", "custom_loop", "optimizer_that_delegates")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("placement", ["1x2", "2x1", "2x2"])
def test_sharded_optimizer_state_changes_no_result(name, placement, results):
    if name in REFUSED:
        with pytest.raises(WorkerError, match=r"Call `apply` on `strategy.distributed_optimizer\(optimizer\)`"):
            results(name, placement, model_sharding="optimizer")
        return
    assert_equals_one_device(name, placement, results, model_sharding="optimizer")
    if placement == "1x2":
        sharded, whole = results(name, placement, model_sharding="optimizer")[0], results(name, placement)[0]
        assert_same(sharded, whole, tolerance=1e-6 if any(part in name for part in ROUNDED) else 0)


# Rows that weights in parts do not allow, with the error; docs/limits.md has the reasons.
NOT_IN_PARTS = {
    **dict.fromkeys(
        [*REFUSED, "batches_of_which_replicas_know_unlike_shapes"],
        r"Call `apply` on `strategy.distributed_optimizer\(optimizer\)`",
    ),
    **dict.fromkeys(["optimizer_adafactor", "optimizer_lamb"], "Use an optimizer that updates each element by itself"),
    "float8_layers": r"Call `tfdist.step_losses_are\('mean'\)`",
    "gradient_penalty_in_a_step": "Call `tape.gradient` outside of `with tape:`",
    "save_and_load": "load it outside of the strategy's scope, and export it there",
    **dict.fromkeys(
        ["parts_for_some_rows_eagerly", "parts_of_unlike_kinds_for_some_rows_eagerly"],
        "All replicas must read the same divided weights in the same order",
    ),
    "weights_assigned_in_a_step": "Dimensions must be equal",  # The step computes with gradients, which are parts.
}
# The chief alone writes histograms of weights.
NOT_IN_PARTS_ON_WORKERS = {"callbacks_that_write": "the callback 'TensorBoard' runs on the chief alone"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("placement", ["1x2", "2x1", "2x2"])
def test_weights_in_parts_change_no_result(name, placement, results):
    errors = NOT_IN_PARTS | ({} if placement == "1x2" else NOT_IN_PARTS_ON_WORKERS)
    if name in errors:
        with pytest.raises(WorkerError, match=errors[name]):
            results(name, placement, model_sharding="parameters")
        return
    assert_equals_one_device(name, placement, results, model_sharding="parameters")


# Rows that divide state or weights in another way each.
IN_GROUPS = (
    *("optimizer_multi", "loss_scaling", "mixed_bfloat16", "steps_per_execution", "run_eagerly"),
    *("custom_train_step", "batch_normalization_synchronized", "model_that_fit_builds"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", IN_GROUPS)
@pytest.mark.parametrize("sharding", ["optimizer", "parameters"])
def test_models_in_groups_of_devices_change_no_result(name, sharding, results):
    assert_equals_one_device(name, "2x2", results, model_sharding=sharding, shard_group_size=2)


def assert_same(result, expected, tolerance):
    for kind in ("history", "values"):
        assert result[kind].keys() == expected[kind].keys()
    pairs = [(f"weight {i}", *pair) for i, pair in enumerate(zip(result["weights"], expected["weights"], strict=True))]
    for kind in ("history", "values"):
        pairs += [(f"{kind} {name}", value, expected[kind][name]) for name, value in result[kind].items()]
    for what, got, wanted in pairs:
        assert np.all(np.isfinite(got)), f"{what} is not finite"
        scale = np.max(np.abs(wanted), initial=0)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale, err_msg=what)
