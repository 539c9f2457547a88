"""Every Keras feature gives one device's result on several replicas, with the same bits on all replicas."""

import keras
import numpy as np
import pytest

from keras_features import ROWS, run_row

# Rows with special exchanges if workers have several devices; under 2x2 all other rows are `exhaustive`.
HIERARCHY = (
    "fit_numpy",
    "input_last_batch_of_one_row",
    "batch_normalization",
    "embedding_adam_sparse",
)
# Rows about gradients that one device adds up. A replica's graph shows this, and is equal in a process and on a worker.
ROWS_ADDED_UP = (
    "embedding_of_positions_in_texts_of_any_length",
    "embedding_of_positions_by_a_constant",
    "embedding_of_positions_for_each_row",
    "embedding_of_places_drawn_in_a_function",
    "embedding_of_places_by_the_replica",
    "embedding_of_one_kind_for_all",
    "embedding_of_positions_for_each_of_so_many_rows",
    "embedding_of_all_items_beside_those_of_the_batch",
    "embedding_of_each_token_once",
    "embedding_of_places_counted_from_the_last_row",
)
# One row of each kind of decision runs on two devices by default.
ROWS_ADDED_UP_BY_DEFAULT = (
    "embedding_of_positions_in_texts_of_any_length",
    "embedding_of_positions_for_each_row",
    "embedding_of_one_kind_for_all",
    "embedding_of_all_items_beside_those_of_the_batch",
)
# Rows that run differently when replicas share a graph or take turns in one process; on two devices all other rows are
# `exhaustive`.
IN_ONE_PROCESS = (
    "fit_numpy",
    "run_eagerly",
    "steps_per_execution",
    "input_last_batch_of_one_row",
    "input_unequal_rows_per_worker",
    "optimizer_adam_gradient_accumulation_steps_global_clipnorm",
    "add_loss_around_exchanges_eagerly",
    "loss_scaling_skips_inf",
    "losses_by_sums_and_by_weights_eagerly",
    "dropout",
    "unseeded_noise",
    "embedding_adam_sparse",
    "updates_in_a_loop",
    "adversarial_models_without_a_call",
    "autoencoder_with_losses_of_its_input",
    "custom_loop_with_a_traced_step",
    "means_of_steps_as_on_one_device",
    "sums_by_the_global_batch",
    "steps_of_a_static_number_of_rows",
    "losses_of_what_replicas_exchange",
    "a_mean_in_compute_loss",
    "python_functions",
    "predict_other_than_rows",
    "predict_outputs_as_long_as_the_longest_of_a_batch",
    "predict_tokens_of_padded_texts",
    "values_looked_at_eagerly",
    "parts_of_unlike_kinds_for_some_rows_eagerly",
    "an_output_more_in_training",
    "input_words",
    "input_that_is_parsed_and_checked",
    "input_that_is_parsed_and_checked_eagerly",
    *ROWS_ADDED_UP_BY_DEFAULT,
)
# Replicas exchange gradients before the optimizer's own update, so the other optimizers are `exhaustive`.
OPTIMIZERS = (
    "optimizer_adam",
    "optimizer_adam_gradient_accumulation_steps_global_clipnorm",
    "optimizer_multi",
    "optimizer_that_delegates",
)
# Between workers, these rows act like other rows or differ only before the exchange; they are `exhaustive` as well.
ALIKE_ON_WORKERS = (
    "steps_of_a_static_number_of_rows",
    "step_under_a_decorator",
    "batch_normalization",
    "convolutions_and_a_replica_without_rows",
    "custom_loop",
    "input_of_unlike_lengths_that_ends_early",
    "losses_left_unreduced",
    "a_masked_loss_by_weights_without_weights",
    "mixed_float16",
    "gradients_accumulated_eagerly",
    "fit_shuffled_two_epochs",
    "input_tf_data",
    "input_tf_data_infinite",
    "input_last_batch_short",
    "input_first_batch_does_not_divide",
    "input_py_dataset",
    "input_nested",
    "validation_split",
    "class_weight",
    "sample_weight",
    "learning_rate_schedule",
    "loss_scaling",
    "mixed_bfloat16",
    "losses_by_sums_and_by_weights_eagerly",
    "add_loss_around_exchanges_eagerly",
    "functional",
    "subclassed",
    "python_functions",
    "recurrent_over_embedding",
    "embedding_sgd_sparse_clipped",
    "metrics_with_state",
    "custom_loop_clips_and_scales",
    "weight_constraints",
    "two_models",
    "variational_model_without_a_call",
    "input_words",
    "input_that_is_parsed_and_checked_eagerly",
    "parts_for_some_rows_eagerly",
    *ROWS_ADDED_UP,
    # Two devices run these by default, and workers only carry what these exchange.
    "input_that_is_parsed_and_checked",
    "means_of_steps_as_on_one_device",
    "autoencoder_with_losses_of_its_input",
    "sums_by_the_global_batch",
    "custom_loop_with_a_traced_step",
    "an_output_more_in_training",
    "a_mean_in_compute_loss",
    "updates_in_a_loop",
    "adversarial_models_without_a_call",
    "parts_of_unlike_kinds_for_some_rows_eagerly",
    "run_eagerly",
    # Workers act in these as in rows of nearly the same name, which run by default.
    "input_that_a_step_parses_and_checks",
    "input_that_is_parsed_and_ends_early",
    "batch_normalization_synchronized",
    "float8_layers",
)
assert {*HIERARCHY, *IN_ONE_PROCESS, *OPTIMIZERS, *ALIKE_ON_WORKERS} <= ROWS.keys()
WORKERS = [
    name for name in ROWS if name in OPTIMIZERS or (not name.startswith("optimizer_") and name not in ALIKE_ON_WORKERS)
]


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


@pytest.mark.parametrize("name", by_default(WORKERS))
def test_two_workers_equal_one_device(name, results):
    assert_equals_one_device(name, "2x1", results)


@pytest.mark.parametrize("name", by_default(IN_ONE_PROCESS))
def test_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "1x2", results)


@pytest.mark.parametrize("name", by_default(HIERARCHY))
def test_two_workers_of_two_devices_equal_one_device(name, results):
    assert_equals_one_device(name, "2x2", results)


@pytest.mark.parametrize("name", by_default(IN_ONE_PROCESS, [name for name, row in ROWS.items() if row.same_bits]))
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
