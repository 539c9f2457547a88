"""The guarantees of the strategies beyond equality with one device."""

import numpy as np
import pytest
import tensorflow as tf

import strategy_checks as checks
from tfdist.faults.activity import TRAIN, Execution
from tfdist.strategies.not_finite import sampled
from tfdist.strategies.step_report import StepReports
from tfdist.testing import run_workers

PLACEMENTS = ["1x2", "2x1"]
ON_WORKERS = [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"]


def alternating(cases, placements=PLACEMENTS):
    """Returns parameters (placement, *case): each case on one of the placements, and `exhaustive` on the others."""
    return [
        pytest.param(placement, *case, marks=() if (number + place) % len(placements) == 0 else pytest.mark.exhaustive)
        for number, case in enumerate(cases)
        for place, placement in enumerate(placements)
    ]


@pytest.mark.parametrize(("placement", "late"), alternating([[False], [True]]))
def test_random_layers_differ_between_replicas_and_repeat_with_the_seed(placement, late, pools):
    def drawn(seed):
        workers = pools(placement).run(checks.masks, placement, seed, late)
        return np.concatenate(workers, axis=1)  # [step, replica, 20]

    first = drawn(7)

    np.testing.assert_array_equal(drawn(7), first)
    assert not np.array_equal(first[:, 0], first[:, 1]), "replicas draw the same masks"
    assert not np.array_equal(first[0], first[1]), "steps draw the same masks"
    np.testing.assert_array_equal(pools("single").run(checks.one_device_masks, 7, late)[0], first[:, 0])


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_a_step_is_traced_once(placement, pools):
    assert set(pools(placement).run(checks.traces_of_a_fit, placement)) == {1}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_lookup_does_not_read_the_whole_table(policy, pools):
    (kinds,) = pools("1x2").run(checks.lookups, "1x2", policy)

    assert kinds == {"ResourceGather"}


def test_workers_that_seed_differently_start_from_the_same_weights(pools):
    first, second = pools("2x1").run(checks.initial_weights, "2x1")

    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_unseeded_shuffled_epochs_have_each_row_once(placement, pools):
    for seen in pools(placement).run(checks.rows_of_an_epoch, placement):
        np.testing.assert_array_equal(seen, np.full(24, 2))


@pytest.mark.exhaustive
def test_saved_files_are_equal_on_all_workers(pools, tmp_path):
    first, second = pools("2x1").run(checks.saved_weights, "2x1", str(tmp_path))

    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "in_scope",
    [pytest.param(False, id="after the scope", marks=pytest.mark.exhaustive), pytest.param(True, id="in the scope")],
)
def test_the_chief_may_save_alone(in_scope, pools, tmp_path):
    pools("2x1").run(checks.only_chief_saves, "2x1", str(tmp_path), in_scope)

    saved = {"in_fit.keras", "board", "model.keras", "model.weights.h5", "exported"}
    assert {path.name for path in tmp_path.iterdir()} == saved


@pytest.mark.parametrize("placement", ON_WORKERS)
def test_a_checkpoint_continues_without_a_difference(placement, pools, tmp_path):
    for unbroken, resumed in pools(placement).run(checks.checkpoint_round_trip, placement, str(tmp_path)):
        for one, other in zip(unbroken, resumed, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_custom_reductions_are_exact(placement, pools):
    for result in pools(placement).run(checks.reductions, placement):
        np.testing.assert_array_equal(result["sum"], [10, 12])
        np.testing.assert_array_equal(result["mean"], [5, 6])
        assert result["mean over rows"] == 5.5
        np.testing.assert_array_equal(result["nested"], [[10, 12], [10, 12]])
        assert result["whole numbers"] == 1
        np.testing.assert_array_equal(result["gathered"], [0, 1, 10, 11])
        total, half, count, gathered = result["in replicas"]
        np.testing.assert_array_equal(total, [10, 12])
        np.testing.assert_array_equal(half, [10, 12])
        assert count == 2
        np.testing.assert_array_equal(gathered, [0, 1, 10, 11])


def test_scalar_variables_convert_to_python_numbers(pools):
    assert pools("1x2").run(checks.numbers_of_variables, "1x2") == [[0.25, 0, 3.0]]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_small_integers_and_complex_numbers_are_summed(placement, pools):
    for own, in_replicas, across in pools(placement).run(checks.reductions_of_types, placement):
        for value, *totals in zip(own, in_replicas, across, strict=True):
            for total in totals:
                assert total.dtype == value.dtype
                np.testing.assert_array_equal(total, value + value)  # wraps around after the largest value


@pytest.mark.parametrize(
    ("placement", "devices"),
    [("1x2", (2, 2)), ("2x1", (1, 2)), pytest.param("2x2", (2, 4), marks=pytest.mark.exhaustive)],
)
def test_all_devices_of_a_worker_are_used(placement, devices, pools):
    assert set(pools(placement).run(checks.number_of_devices, placement)) == {devices}


def test_workers_may_pass_their_own_rows_to_train_on_batch(pools):
    expected = pools("single").run(checks.one_device_on_batch)[0]
    for weights in pools("2x1").run(checks.train_with_bounds, "2x1"):
        for one, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("placement", "replicas"),
    [("1x2", 2), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("2x1", 2), ("2x2", 4)))],
)
def test_custom_loops_and_fit_may_alternate(placement, replicas, pools):
    for totals in pools(placement).run(checks.loop_and_fit_in_turns, placement):
        assert totals == [replicas] * 4


@pytest.mark.parametrize("placement", ON_WORKERS)
def test_autograph_converts_a_custom_loop_without_warnings(placement, pools):
    for said, converted, total in pools(placement).run(checks.said_of_a_loop, placement):
        assert said == [] and total == 2, "the branch on data was taken on each replica"
        assert converted == {"tf__step", "tf__update"}, "no code of tfdist, since this takes a second"


@pytest.mark.parametrize(("placement", "kind"), alternating([["run"], ["reduce"]], ["1x2", "2x2", "2x1"]))
def test_a_step_without_data_counts_no_collectives(placement, kind, pools):
    for before, after in pools(placement).run(checks.counts_around_the_end_of_data, placement, kind):
        assert len(set(before)) == len(set(after)) == 1
        assert after == before, "all workers' data end in the same step: nobody asks who has any"


@pytest.mark.parametrize(("placement", "replicas"), [("1x2", 2), pytest.param("2x2", 4, marks=pytest.mark.exhaustive)])
def test_replicas_exchange_again_after_a_step_failed_halfway(placement, replicas, pools):
    for totals in pools(placement).run(checks.reductions_after_unequal_counts, placement):
        assert totals == [replicas] * 4


def test_a_lone_replica_counts_nothing(pools):
    assert pools("single").run(checks.captured_by_a_lone_replica) == [[]]


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_the_states_of_rows_stay_on_their_replica(placement, pools):
    states = [state for worker in pools(placement).run(checks.states_of_rows, placement) for state in worker]

    assert not np.allclose(states[0], states[1])


def test_a_lone_replica_may_be_compiled_unless_its_data_needs_reports(pools):
    ((alone, under_strategy), error) = pools("single").run(checks.compiled_alone)[0]

    for one, other in zip(alone, under_strategy, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    assert "jit_compile=False" in error and "BalancedSharding" in error


@pytest.mark.parametrize(("kind", "tuned"), [("arrays", False), ("dataset", None)])
def test_only_pipelines_of_users_are_tuned(kind, tuned, pools):
    assert pools("1x2").run(checks.is_tuned, kind) == [(tuned, [False, False], 2)]


@pytest.mark.parametrize("placement", [pytest.param("single", marks=pytest.mark.exhaustive), "2x1"])
def test_a_replica_reports_compute_time_without_waiting(placement, pools):
    for compute, own, delay in pools(placement).run(checks.seconds_of_replicas, placement):
        assert np.all(compute[:, -1] >= delay)
        # In the quickest step after the first, since any step may be slow on a busy machine.
        assert np.all(compute[1:, :-1].min(axis=0) < delay), "waiting for the last replica is not computing"
        assert np.all(own >= compute)
        before = delay if placement == "2x1" else 0  # a lone replica has no peers to wait for
        assert np.all(own[1:, -1] >= compute[1:, -1] + before), "others wait for a callback too"
        assert np.all(own[1:, :-1].min(axis=0) < delay), "nor is that waiting anything of one's own"


def test_time_before_a_step_counts_for_all_replicas_of_the_process(pools):
    ((compute, own, delay),) = pools("1x2").run(checks.seconds_of_replicas, "1x2")
    assert np.all(own[1:] >= compute[1:] + delay)


@pytest.mark.parametrize(
    ("moments", "section"),
    [
        ((3, 1, 1, 1, 2), "compute"),  # BEGIN, LOSS, SHARE, GRADIENTS and END; values below BEGIN are of older steps
        ((3, 4, 1, 1, 2), "exchange"),
        ((3, 4, 5, 1, 2), "compute"),
        ((3, 1, 4, 1, 2), "compute"),
        ((3, 4, 5, 6, 2), "exchange"),
        ((3, 4, 5, 6, 7), "input or exchange"),
        ((2, 1, 1, 1, 2), "input"),
    ],
)
@pytest.mark.parametrize("is_single", [True, False])
def test_a_step_that_waits_for_peers_reports_it(moments, section, is_single):
    if section == "input or exchange":  # A function with several steps goes on with the next one.
        section = "exchange" if is_single else "input"
    execution = Execution(TRAIN, reads=True, is_single=is_single)
    execution.since = 3 - 0.5
    for replicas, expected in ((2, section), (1, section.replace("exchange", "compute"))):  # One waits for no peer.
        reports = StepReports(["/device:CPU:0"], replicas)
        reports.clock(0).times.assign([*moments, *[0] * 6])
        assert reports.part_of(execution) == expected


def test_only_the_chief_runs_the_hooks_of_a_callback(pools):
    assert pools("2x1").run(checks.hooks_run_by, "2x1") == [[0, ["loss"], "end"] * 2, []]


@pytest.mark.parametrize("placement", ON_WORKERS)
def test_a_model_that_was_never_compiled_predicts(placement, pools):
    for predicted, called in pools(placement).run(checks.predicted_without_compile, placement):
        np.testing.assert_allclose(predicted, called, rtol=1e-5)


@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_files_of_the_chief_exist_when_fit_returns_or_all_workers_raise(fails, pools, tmp_path):
    (_, of_chief), (is_there, of_other) = pools("2x1").run(checks.found_after_fit, "2x1", str(tmp_path), fails)

    assert is_there
    if not fails:
        assert of_chief is of_other is None
    else:
        assert of_chief == ("OSError", "the disk is full")
        assert of_other[0] == "WorkerLostError" and "'Slow'" in of_other[1] and of_chief[1] in of_other[1]


def test_a_chief_only_callback_that_needs_all_workers_raises_at_once(pools):
    chief, other = pools("2x1").run(checks.asked_for_on_the_chief_alone, "2x1")

    assert chief[0] == 1 and len(chief[1]) == 5
    assert all("'Asks'" in message and "self.model(x)" in message for message in chief[1])
    assert other[:2] == (0, [])
    assert chief[2] == other[2] == (8, 1), "together they may"


@pytest.mark.parametrize(
    ("placement", "kind"),
    [
        pytest.param("1x2", "MirroredStrategy", marks=pytest.mark.exhaustive),
        ("2x1", "MultiWorkerMirroredStrategy"),
    ],
)
def test_two_strategies_in_a_process_are_independent(placement, kind, pools):
    for totals in pools(placement).run(checks.two_strategies, kind):
        assert totals == [2.0, 2.0, 2.0]


def test_other_cross_device_ops_are_used(pools):
    expected = pools("single").run(checks.one_device_on_batch)[0]
    for one, other in zip(pools("1x2").run(checks.other_cross_device_ops)[0], expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_single_device_that_is_not_the_host_trains_as_without_a_strategy(pools):
    (own,), (plain,) = (pools("1x2").run(checks.normalized_on, device) for device in ("CPU:1", None))
    for weight, expected in zip(own, plain, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=1e-6)


def test_a_sharding_that_another_strategy_has_distributed_is_refused(pools):
    (error,) = pools("1x2").run(checks.sharding_of_another_strategy)
    for text in ("its own strategy", "'sequential", "distribute_datasets_from_function"):
        assert text in error


def test_whole_numbers_on_gpus_are_reduced_on_the_host(pools):
    assert pools("1x2").run(checks.on_gpus) == [["Collectives", "Collectives", "ReductionToOneDevice"]]


def test_different_numbers_of_devices_are_named():
    for message in run_workers(checks.unequal_devices, num_workers=2, timeout_seconds=300):
        assert "worker 0 has 1, worker 1 has 2" in message


def test_deterministic_operations_alone_suffice():
    assert run_workers(checks.deterministic_fit, 1, devices_per_worker=2, timeout_seconds=300) == [[9.0]]


@pytest.mark.parametrize(
    ("placement", "mistake", "error", "words"),
    alternating(
        [
            ("jit_compile", "CompiledCollectivesError", "jit_compile=False"),
            ("jit_compile of a function", "CompiledCollectivesError", "jit_compile=False"),
            ("jit_compile of a part", "CompiledCollectivesError", "jit_compile=False"),
            ("outside scope", "ScopeError", "strategy.scope()"),
            ("all outside scope", "ScopeError", "strategy.scope()"),
            ("compiled alone in scope", "ScopeError", "Make the model inside"),
            ("sum and penalty in a step", "LossReductionError", "`tf.reduce_mean(losses)` instead of"),
            ("gradients summed by hand", "LossReductionError", "Leave out the all-reduce"),
            ("mean over replicas by hand", "LossReductionError", "all_reduce('MEAN', value)"),
            ("metric outside scope", "ScopeError", "its metrics must be made inside"),
            ("metric that keeps a Keras variable", "ValueError", "self.add_variable"),
            ("metric that keeps a tf.Variable", "ValueError", "self.add_variable"),
            ("compression", "ValueError", "'powersgd'"),
            ("loss scaling", "LossScaleError", "strategy.distributed_optimizer"),
            ("optimizer that exchanges nothing", "ValueError", "`update_step`"),
            ("gradients of other variables", "ValueError", "gradients of 'even', 'odd' are None, or sparse, on some"),
        ]
    ),
)
def test_a_mistake_is_named_on_every_worker(placement, mistake, error, words, pools):
    for kind, message in pools(placement).run(checks.message_of, placement, mistake):
        assert kind == error
        assert words in message


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_features_without_tf_keras_support_raise_before_the_first_update(placement, pools):
    for untrained, trained, said in pools(placement).run(checks.uses_tf_keras, placement):
        np.testing.assert_array_equal(untrained[0], np.ones((4, 1)))
        np.testing.assert_allclose(trained[0], np.full((4, 1), 0.2), rtol=1e-5)  # 1 - 0.1 * 2 * 4
        assert len(said) == 5 and "ValueError" in said[0] and "leave `compression` out" in said[0]
        assert all("TypeError" in each and "tf_keras" in each for each in said[1:])


def test_a_model_outside_the_scope_is_refused_on_workers_and_gets_a_warning_on_devices(pools):
    for (refused, alone), _ in pools("2x1").run(checks.trains_outside, "2x1"):
        assert "'sequential" in refused and "OneDeviceStrategy" in refused
        assert alone == "trained"
    ((messages, said),) = pools("1x2").run(checks.trains_outside, "1x2")
    assert messages == ["trained", "trained"] and len(said) == 1


@pytest.mark.parametrize(
    "source", ["generator", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("PyDataset", "dataset"))]
)
def test_array_views_from_python_code_are_not_written_to(source, pools):
    assert pools("1x2").run(checks.labels_after_training, "1x2", source) == [list(range(48))]


def test_devices_count_equally_if_data_ends_unexpectedly(pools):
    ((iterations, draws),) = pools("1x2").run(checks.counters_after_data_of_unknown_length, "1x2", 5)

    assert iterations[0] == iterations[1] and draws[0] == draws[1]


@pytest.mark.parametrize(("kind", "batches"), [("rows", (2, 1)), ("batch_size", (2, 4))])
def test_workers_with_different_numbers_of_batches_are_named(kind, batches, pools):
    for message in pools("2x1").run(checks.reads_other_batches_than_others, "2x1", kind):
        assert "worker 0 has {}, worker 1 has {}".format(*batches) in message


@pytest.mark.parametrize("policy", ["OFF", pytest.param("HINT", marks=pytest.mark.exhaustive)])
def test_separate_data_of_each_worker_is_read_to_the_end(policy, pools):
    workers = pools("2x1").run(checks.own_data_of_each, policy)

    for results, errors, _ in workers:
        for kind in ("known", "unknown", "distributed"):
            steps, *means = results[kind]
            np.testing.assert_allclose(means, 47.5, rtol=1e-6, err_msg=kind)
            assert steps == workers[0][0][kind][0], kind
        if policy == "OFF":
            assert results["known"][0] == 2 * 6, "two for each of the three batches of the longest"
        assert results["infinite"][0] == 2 * 4
        assert len(errors) == 2 and all(policy in error and "AutoShardPolicy.DATA" in error for error in errors)
    np.testing.assert_array_equal(np.sort(np.concatenate([rows for *_, rows in workers])), np.arange(96))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("epochs", "worker 0 has epochs=2, worker 1 has epochs=3"),
        ("validation", "worker 0 has no validation_data, worker 1 has validation_data"),
        ("backup", "worker 0 has BackupAndRestore of the callbacks that run on all workers, worker 1 has none"),
    ],
)
def test_workers_with_different_arguments_of_fit_are_named(kind, words, pools, tmp_path):
    for message in pools("2x1").run(checks.fits_unlike_others, "2x1", str(tmp_path / "backup"), kind):
        assert words in message


def test_the_chief_warns_of_callbacks_that_write_the_same_file_on_all_workers(pools, tmp_path):
    (said,), of_other = pools("2x1").run(checks.warnings_of_callbacks, "2x1", str(tmp_path))
    assert "CSVLogger" in said and of_other == []


@pytest.mark.parametrize(
    ("used", "bias", "named"),
    [
        ("fit", 1.0, "kernel"),
        ("evaluate", 1.0, "kernel"),
        ("fit again", 100.0, "bias"),
        pytest.param("fit again", float("nan"), "bias", marks=pytest.mark.exhaustive),
    ],
)
def test_weights_that_only_the_chief_has_set_are_named_on_every_worker(used, bias, named, pools):
    for kind, message in pools("2x1").run(checks.chief_loads_alone, "2x1", used, bias):
        assert kind == "ClusterError"
        assert "the same values in a model" in message and f"/{named}'" in message


def test_rounding_and_draws_on_one_worker_do_not_end_training(pools):
    assert pools("2x1").run(checks.chief_rounds_and_draws, "2x1") == [3, 3]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_random_operations_of_tensorflow_differ_between_replicas(placement, pools):
    drawn = [value for of_worker in pools(placement).run(checks.drawn_in_a_step, placement) for value in of_worker]
    assert len(set(drawn)) == 2


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_a_custom_loop_with_a_short_last_batch_leaves_what_fit_leaves(placement, pools):
    for looped, fitted in pools(placement).run(checks.loop_and_fit, placement):
        for one, other in zip(looped, fitted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("placement", ["single", "1x2"])
def test_an_optimizer_made_outside_the_scope_is_named(placement, pools):
    ((kind, message),) = pools(placement).run(checks.message_of, placement, "optimizer outside scope")
    assert kind == "ScopeError" and "strategy.scope()" in message


@pytest.mark.parametrize(
    ("placement", "case"),
    [
        *alternating([["a gradient of rows"], ["an input"]]),
        *(
            pytest.param(placement, case, marks=pytest.mark.exhaustive)
            for case in ("an input that the forward pass hides", "a gradient")
            for placement in PLACEMENTS
        ),
    ],
)
def test_all_workers_log_a_loss_or_gradient_that_is_not_finite_on_one(placement, case, pools):
    for told in pools(placement).run(checks.told_of_not_finite, placement, case):
        assert [ended for ended, _ in told] == [1], told  # in the step of the second batch, and only once
        assert "gradients of replica 1" in told[0][1] and "replica 0" not in told[0][1]
        assert ("the loss and" in told[0][1]) == (case == "an input")
        assert ("(worker 1)" in told[0][1]) == (placement == "2x1")


@pytest.mark.parametrize(("placement", "case"), alternating([["a step that is skipped"], ["a replica without rows"]]))
def test_unused_values_that_are_not_finite_get_no_warning(placement, case, pools):
    assert not any(pools(placement).run(checks.told_of_not_finite, placement, case))


@pytest.mark.parametrize("shape", [(), (7,), (1, 9), (6, 4), (4, 6), (8, 8), (3, 3, 4, 10), (1000, 3)])
def test_each_row_and_column_of_a_matrix_is_sampled(shape):
    columns = shape[-1] if shape else 1
    (places,) = sampled([tf.reshape(tf.range(np.prod(shape), dtype=tf.float32), shape)])
    rows, seen = np.divmod(places.numpy().astype(int), columns)
    assert set(rows) == set(range(int(np.prod(shape)) // columns)) and set(seen) == set(range(columns))
    assert len(places) <= 2 * max(len(set(rows)), columns) + 16
