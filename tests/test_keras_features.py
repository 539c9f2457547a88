"""Every Keras feature gives one device's result on several replicas, with the same bits on all replicas."""

import keras
import numpy as np
import pytest

from keras_features import ROWS, run_row

# A row takes seconds on each placement, so that each placement has a selection; all other rows are `exhaustive`.
# Rows whose data, outputs or files depend on the number of workers, and one row of each other kind.
ON_WORKERS = (
    "fit_numpy",
    "input_fewer_files_than_workers",
    "input_files_of_unlike_lengths_in_no_order",
    "input_that_is_parsed_from_a_sharding",
    "input_last_batch_of_one_row",
    "input_unequal_rows_per_worker",
    "input_one_worker_ends_early",
    "input_padded_by_each_replica",
    "input_generator",
    "validation_data",
    "dropout",
    "unseeded_noise",
    "embedding_adam_sparse",
    "ragged_input_and_a_replica_without_rows",
    "predict_other_than_rows",
    "predict_words_and_other_types",
    "predict_tokens_of_padded_texts",
    "callbacks_that_decide",
    "callbacks_that_write",
    "save_and_load",
    "evaluate_uneven",
    "predict_uneven",
    "on_batch",
    "logs_other_than_metrics",
    "batches_of_which_replicas_know_unlike_shapes",
    "losses_of_what_replicas_exchange",
    "optimizer_adam_gradient_accumulation_steps_global_clipnorm",
)
# Rows about models, losses, gradients and optimizers: replicas of a process compute them as replicas on workers do.
IN_ONE_PROCESS = (
    "fit_numpy",
    "run_eagerly",
    "steps_per_execution",
    "input_last_batch_of_one_row",
    "input_unequal_rows_per_worker",
    "input_words",
    "bfloat16_weights_and_small_integers",
    "batch_normalization_synchronized_in_a_custom_step",
    "model_that_fit_builds",
    "dropout",
    "unseeded_noise",
    "embedding_adam_sparse",
    "embedding_of_positions_in_texts_of_any_length",
    "embedding_of_positions_for_each_row",
    "embedding_of_one_kind_for_all",
    "embedding_of_all_items_beside_those_of_the_batch",
    "parts_of_unlike_kinds_for_some_rows_eagerly",
    "an_output_more_in_training",
    "predict_outputs_as_long_as_the_longest_of_a_batch",
    "metrics_of_vectors",
    "custom_train_step",
    "custom_loop_with_a_traced_step",
    "updates_in_a_loop",
    "several_optimizers_in_a_custom_step",
    "weights_assigned_in_a_step",
    "gradient_penalty_in_a_step",
    "means_of_steps_as_on_one_device",
    "scaled_losses_of_steps",
    "a_mean_in_compute_loss",
    "masks_that_reach_the_loss",
    "losses_that_are_matched_in_a_custom_loop",
    "losses_by_sums_and_by_weights",
    "losses_of_some_outputs",
    "add_loss_and_regularizers",
    "add_loss_around_exchanges_eagerly",
    "loss_scaling_skips_inf",
    "optimizer_adam_gradient_accumulation_steps_global_clipnorm",
    "optimizer_multi",
)
HIERARCHY = ("fit_numpy", "embedding_adam_sparse")
# These rows also compare both placements bit by bit.
SAME_BITS = tuple(name for name in ON_WORKERS if name in IN_ONE_PROCESS)
assert {*ON_WORKERS, *IN_ONE_PROCESS, *HIERARCHY} <= ROWS.keys()


def test_every_optimizer_of_keras_has_a_row():
    exported = [value for value in vars(keras.optimizers).values() if isinstance(value, type)]
    kinds = {value.__name__ for value in exported if issubclass(value, keras.Optimizer)} - {"Optimizer"}
    others = {"LossScaleOptimizer": "loss_scaling", "MultiOptimizer": "optimizer_multi"}
    wanted = {others.get(kind, f"optimizer_{kind.lower()}") for kind in kinds}

    assert len(kinds) > 10 and not [
        name for name in wanted if not any(f"{row}_".startswith(f"{name}_") for row in ROWS)
    ]


def by_default(names, of=tuple(ROWS)):
    """Returns the rows `of` the table as parameters, marked `exhaustive` unless they are in `names`."""
    return [pytest.param(name, marks=() if name in names else pytest.mark.exhaustive) for name in of]


@pytest.fixture(scope="session")
def results(pools, tmp_path_factory):
    """Returns a function: `results(name, placement)` has the result of each worker; a row runs once per placement."""
    known = {}

    def run(name, placement):
        key = (name, placement)
        if key not in known:
            known[key] = pools(placement).run(run_row, name, placement, str(tmp_path_factory.mktemp(name)))
        return known[key]

    return run


def assert_equals_one_device(name, placement, results):
    workers = results(name, placement)

    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"
    for result in workers[1:]:
        assert_same(result, workers[0], tolerance=0)
    if not ROWS[name].exempt:
        assert_same(workers[0], results(name, "single")[0], ROWS[name].tolerance)


@pytest.mark.parametrize("name", by_default(ON_WORKERS))
def test_two_workers_equal_one_device(name, results):
    assert_equals_one_device(name, "2x1", results)


@pytest.mark.parametrize("name", by_default(IN_ONE_PROCESS))
def test_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "1x2", results)


@pytest.mark.parametrize("name", by_default(HIERARCHY))
def test_two_workers_of_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "2x2", results)


@pytest.mark.parametrize("name", by_default(SAME_BITS, [name for name, row in ROWS.items() if row.same_bits]))
def test_two_workers_and_two_devices_give_the_same_bits(name, results):
    two_workers, two_devices = results(name, "2x1")[0], results(name, "1x2")[0]

    assert two_workers["digest"] == two_devices["digest"]
    assert_same(two_workers, two_devices, tolerance=0)


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
