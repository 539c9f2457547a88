"""Training by local steps equals a plain reference of the algorithm, on devices and on workers, with few exchanges."""

import functools
import gc
import re
import types

import keras
import numpy as np
import pytest

import local_step_checks as checks
import tfdist
from local_step_checks import DILOCO, LOCAL, STREAMING
from tfdist.strategies.local_steps.fragments import deal_out, has_arrived, is_due
from tfdist.strategies.local_steps.local_training import LocalTraining
from tfdist.strategies.local_steps.synchronization import check_synchronization, described, remedy_of_early_start

KINDS = {"LocalSGD": LOCAL, "DiLoCo": DILOCO}


def synchronized(result, every, epochs):
    """The weights after each synchronization, and after all other steps, of one replica of a worker."""
    steps = len(result["copies"]) // epochs
    due = [step % steps % every == every - 1 for step in range(len(result["copies"]))]
    firsts = [[weight[0] for weight in copies] for copies in result["copies"]]
    return [first for first, is_due in zip(firsts, due, strict=True) if is_due]


def assert_close(weights, expected, atol=0.0):
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=max(atol, 1e-5 * np.abs(other).max()))


@pytest.mark.parametrize("kind", KINDS)
def test_devices_and_workers_equal_the_reference_and_each_other(kind, pools):
    options = {"epochs": 2, "extra": 5}  # The last batch has 5 rows for two replicas, and each epoch 12 steps.
    expected = pools("single").run(checks.reference, KINDS[kind], **options)[0]
    on_devices = pools("1x2").run(checks.trained, "1x2", KINDS[kind], **options)[0]
    first, second = pools("2x1").run(checks.trained, "2x1", KINDS[kind], **options)

    assert len(expected) == 6
    for result in (on_devices, first, second):
        for weights, of_reference in zip(synchronized(result, 4, epochs=2), expected, strict=True):
            assert_close(weights, of_reference)
    for step, copies in enumerate(on_devices["copies"]):
        for weight, of_devices in enumerate(copies):
            for copy, of_worker in zip(of_devices, (first, second), strict=True):
                np.testing.assert_array_equal(copy, of_worker["copies"][step][weight][0])
        are_equal = all(np.array_equal(*each) for each in copies)
        assert are_equal == (step % 4 == 3)
    assert first["history"] == second["history"]
    assert first["evaluated"] == second["evaluated"] == on_devices["evaluated"]


@pytest.mark.parametrize("placement", ["1x2", "2x1"])
def test_fragments_synchronize_one_after_another(placement, pools):
    in_turn = tfdist.DiLoCo(every=4, fragments=2)
    expected = pools("single").run(checks.reference, in_turn, steps=9, epochs=2)[0]
    assert len(expected) == 2 * (2 + 2 + 2)  # In steps 2 and 6, 4 and 8, and at the end of each of two epochs.
    for result in pools(placement).run(checks.trained, placement, in_turn, steps=9, epochs=2):
        assert_close(result["weights"], expected[-1])
        assert_close([weight[0] for weight in result["ends"][0]], expected[5])


def test_steps_overlap_with_exchanges_as_in_the_reference(pools):
    options = {"epochs": 2, "steps": 11, "optimizer": "sgd"}  # Each epoch ends while fragments travel.
    after_steps, at_ends = pools("single").run(checks.reference, STREAMING, **options)[0]
    on_devices = pools("1x2").run(checks.trained, "1x2", STREAMING, **options)[0]
    first, second = pools("2x1").run(checks.trained, "2x1", STREAMING, **options)

    assert len(on_devices["copies"]) == len(after_steps) == 22
    for step, copies in enumerate(on_devices["copies"]):
        for replica, (of_worker, of_reference) in enumerate(zip((first, second), after_steps[step], strict=True)):
            # The bias before the BatchNormalization has gradients of rounding errors only.
            assert_close([weight[replica] for weight in copies], of_reference, atol=1e-6)
            for weight, of_devices in zip(of_worker["copies"][step], copies, strict=True):
                np.testing.assert_array_equal(weight[0], of_devices[replica])
    for end, of_one, of_other, of_reference in zip(
        on_devices["ends"], first["ends"], second["ends"], at_ends, strict=True
    ):
        assert_close([weight[0] for weight in end], of_reference, atol=1e-6)
        for copies in (of_one, of_other):
            for weight, (copy, other) in zip(copies, end, strict=True):
                np.testing.assert_array_equal(weight[0], copy)
                np.testing.assert_array_equal(copy, other)
    assert first["evaluated"] == second["evaluated"] == on_devices["evaluated"]


def test_a_worker_goes_on_before_its_peer_lets_the_fragment_depart(pools, tmp_path):
    overlapped = tfdist.DiLoCo(every=4, overlap_steps=3)  # Departs after step 4, arrives after step 7.
    check = checks.steps_while_the_peer_waits
    first, second = pools("2x1").run(check, "2x1", overlapped, until=6, path=str(tmp_path / "signal"))
    assert first[0] == second[0] == list(range(1, 9))
    np.testing.assert_equal(first[1], second[1])


class Dropped:
    """An object that only the garbage collector frees, as a model."""

    def __init__(self):
        self.itself = self


class OfTwoWorkers:
    """What local training asks of a strategy while it has nothing to synchronize."""

    extended = types.SimpleNamespace(reducer=None, reducer_beside=None, worker_devices=["CPU:0"], _num_workers=2)


def test_a_dropped_model_is_synchronized_on_no_worker_whether_or_not_it_was_collected():
    strategy, model = OfTwoWorkers(), Dropped()
    training = LocalTraining(LOCAL, strategy)
    gc.disable()
    try:
        trained = training.of_step(types.SimpleNamespace(trained=None, model=model))
        trained.steps[0].assign([1])
        assert trained.has_stepped
        del trained, model
        assert not training.synchronize(lambda *given: pytest.fail("it is synchronized"), 0.0)
    finally:
        gc.enable()


@pytest.mark.unit
@pytest.mark.parametrize("fragments", [1, 2, 3, 7])
def test_fragments_have_all_weights_and_about_equal_sizes(fragments):
    sizes = [400, 20, 400, 20, 30, 1, 0, 5]
    places = deal_out(sizes, fragments)
    assert sorted(place for each in places for place in each) == list(range(len(sizes)))
    filled = [sum(sizes[place] for place in each) for each in places]
    assert min(map(len, places)) > 0
    assert max(filled) - min(filled) <= max(sizes)


@pytest.mark.unit
@pytest.mark.parametrize(("every", "fragments"), [(1, 1), (4, 2), (7, 3), (5, 5), (100, 8)])
def test_each_fragment_is_due_once_in_a_period(every, fragments):
    steps = range(1, 3 * every + 1)
    due = [[step for step in steps if is_due(step, fragment, fragments, every)] for fragment in range(fragments)]
    assert all(np.diff(each).tolist() == [every] * 2 for each in due)
    assert due[-1][0] == every
    assert len({step for each in due for step in each}) == 3 * fragments  # No step synchronizes two fragments.


@pytest.mark.unit
@pytest.mark.parametrize(("every", "fragments", "overlap_steps"), [(4, 2, 1), (7, 3, 6), (100, 8, 20)])
def test_each_fragment_arrives_the_given_steps_after_it_departs(every, fragments, overlap_steps):
    for fragment in range(fragments):
        departed = [step for step in range(1, 3 * every + 1) if is_due(step, fragment, fragments, every)]
        steps = range(1, 3 * every + 1 + overlap_steps)
        arrived = [step for step in steps if has_arrived(step, fragment, fragments, every, overlap_steps)]
        assert arrived == [step + overlap_steps for step in departed]


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_ends_with_synchronized_weights(kind, pools):
    first, second = pools("2x1").run(checks.trained, "2x1", KINDS[kind], steps=6, epochs=2)
    expected = pools("single").run(checks.reference, KINDS[kind], steps=6, epochs=2)[0]
    assert len(expected) == 4  # After steps 4 and 6 of each epoch.
    for one, other, of_reference in zip(first["ends"], second["ends"], expected[1::2], strict=True):
        assert_close([weight[0] for weight in one], of_reference)
        for mine, others in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine[0], others[0])
    np.testing.assert_equal(first["weights"], [weight[0] for weight in first["ends"][-1]])


@pytest.mark.parametrize(
    ("optimizer", "kind"), [("loss_scale", "LocalSGD"), ("accumulation", "DiLoCo"), ("global_clipnorm", "DiLoCo")]
)
def test_optimizers_step_locally(optimizer, kind, pools):
    result = pools("1x2").run(checks.trained, "1x2", KINDS[kind], optimizer=optimizer)[0]
    expected = pools("single").run(checks.reference, KINDS[kind], optimizer=optimizer)[0]
    for weights, of_reference in zip(synchronized(result, 4, epochs=1), expected, strict=True):
        assert_close(weights, of_reference)


@pytest.mark.parametrize("options", [{"steps_per_execution": 3}, {"run_eagerly": True}], ids=["executions", "eager"])
def test_executions_and_eager_steps_equal_the_reference(options, pools):
    result = pools("1x2").run(checks.trained, "1x2", DILOCO, **options)[0]
    expected = pools("single").run(checks.reference, DILOCO)[0]
    assert_close(result["weights"], expected[-1])


@pytest.mark.parametrize(("placement", "viewed"), [("1x2", False), ("2x1", True)])
def test_custom_loops_train_locally(placement, viewed, pools):
    expected = pools("single").run(checks.reference, DILOCO, steps=checks.STEPS, until=checks.STEPS - 2)[0]
    for weights in pools(placement).run(checks.loop, placement, DILOCO, viewed=viewed):
        assert_close(weights, expected[-1])


def test_first_steps_average_gradients(pools):
    result = pools("1x2").run(checks.trained, "1x2", tfdist.LocalSGD(every=4, start_step=6))[0]
    trainable = [0, 1, 2, 3]  # Before the statistics of BatchNormalization.
    equal = [all(np.array_equal(*copies[i]) for i in trainable) for copies in result["copies"]]
    assert equal == [True] * 6 + [False, True] + [False] * 3 + [True]


def test_an_outer_optimizer_begins_after_the_first_steps(pools):
    """An outer learning rate of 1 without momentum takes the average of the weights, as LocalSGD does."""
    averaged = pools("2x1").run(checks.trained, "2x1", tfdist.LocalSGD(every=4, start_step=6), epochs=2)
    outer = functools.partial(keras.optimizers.SGD, 1.0)  # An optimizer would start the runtime of a real worker.
    applied = pools("2x1").run(checks.trained, "2x1", tfdist.DiLoCo(4, outer, start_step=6), epochs=2)
    for mine, theirs in zip(applied, averaged, strict=True):
        for own, other in zip(mine["copies"], theirs["copies"], strict=True):
            assert_close([weight[0] for weight in own], [weight[0] for weight in other])


def test_first_steps_apply_nothing_at_the_end_of_an_epoch(pools):
    """An epoch that ends within the first steps leaves nothing to an outer optimizer."""
    synchronization = tfdist.DiLoCo(every=4, fragments=2, start_step=20)
    result = pools("1x2").run(checks.trained, "1x2", synchronization, epochs=2)[0]
    exact = pools("1x2").run(checks.trained, "1x2", tfdist.LocalSGD(every=4, start_step=20), epochs=2)[0]
    for step, (own, other) in enumerate(zip(result["copies"], exact["copies"], strict=True)):
        if step < 20:
            assert_close([weight[0] for weight in own[:4]], [weight[0] for weight in other[:4]])
            assert all(np.array_equal(*weight) for weight in own[:4])
    assert not np.array_equal(*result["copies"][20][0])


@pytest.mark.parametrize("data", ["arrays", "repeated", "pipeline", "balanced"])
def test_workers_exchange_nothing_between_synchronizations(data, pools):
    for counts in pools("2x1").run(checks.exchanges_of_fit, "2x1", data, DILOCO):
        others = [count for step, count in enumerate(counts, start=1) if step % 4]
        assert max(others) == 0, counts


def test_all_workers_hear_of_a_request_to_stop_at_the_same_synchronization(pools):
    heard = pools("2x1").run(checks.requests_to_stop, "2x1", tfdist.LocalSGD(every=5), asker=1)
    for worker, reports in enumerate(heard):
        stops, rows = zip(*reports, strict=True)
        assert stops.index(True) == 4
        assert all(of_step[worker] == checks.BATCH // 2 and of_step[1 - worker] == 0 for of_step in rows)


def test_synchronizations_send_the_weights_once(pools):
    def sent(synchronization, compression=None):
        return max(pools("2x1").run(checks.bytes_of_fit, "2x1", synchronization, compression, 200))

    whole = sent(None)
    assert sent(tfdist.LocalSGD(every=8)) <= whole / 7.9
    assert sent(tfdist.DiLoCo(every=100)) <= whole / 95
    assert sent(tfdist.DiLoCo(every=100), "int8") <= whole / 370


def test_more_fragments_than_weights_are_refused_before_training(pools):
    too_many = tfdist.DiLoCo(every=9, fragments=7)
    words = "at most the number of weights .* got fragments=7 and 6 weights. Give a smaller number"
    training, model = LocalTraining(too_many, OfTwoWorkers()), checks.compiled()
    for _ in ("by the weights of the model", "by those of its optimizer"):
        with pytest.raises(ValueError, match=words):
            training.check_model(model)
        model.optimizer.build(model.trainable_variables)
    LocalTraining(STREAMING, OfTwoWorkers()).check_model(model)
    refusal, has_begun = pools("1x2").run(checks.refusal_of_fit, "1x2", too_many)[0]
    assert re.search(words, refusal) and not has_begun


def test_a_compiled_model_inside_another_may_have_fewer_weights_than_fragments():
    inner = keras.Sequential([keras.Input([8]), keras.layers.Dense(4)])
    outer = keras.Sequential([keras.Input([8]), inner, keras.layers.Dense(4), keras.layers.Dense(4)])
    for model in (inner, outer):
        model.compile("adam", "mse")
    inner.optimizer.build(inner.trainable_variables)
    training = LocalTraining(tfdist.DiLoCo(every=9, fragments=6), OfTwoWorkers())
    training.check_model(outer)
    outer.optimizer.build(outer.trainable_variables)
    training.check_model(outer)
    with pytest.raises(ValueError, match="got fragments=6 and 2 weights"):
        training.check_model(inner)
    too_many = LocalTraining(tfdist.DiLoCo(every=9, fragments=7), OfTwoWorkers())
    with pytest.raises(ValueError, match="got fragments=7 and 6 weights"):
        too_many.check_model(outer)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tfdist.LocalSGD(every=0), "`every` of LocalSGD must be an integer of at least 1, got 0"),
        (lambda: tfdist.LocalSGD(start_step=-1), "`start_step` of LocalSGD"),
        (lambda: tfdist.DiLoCo(every=2.5), "`every` of DiLoCo must be an integer of at least 1, got 2.5"),
        (lambda: tfdist.DiLoCo(every=4, fragments=5), "`fragments` of DiLoCo must be at most `every`, 4"),
        (lambda: tfdist.DiLoCo(overlap_steps=-1), "`overlap_steps` of DiLoCo must be an integer of at least 0"),
        (lambda: tfdist.DiLoCo(every=4, overlap_steps=4), "`overlap_steps` of DiLoCo must be less than `every`, 4"),
        (lambda: tfdist.DiLoCo(outer_optimizer="sgd"), "must be a function that makes an optimizer of Keras"),
        (lambda: tfdist.DiLoCo(outer_optimizer=lambda: "sgd").new_outer_optimizer(), "must be a function"),
        (
            lambda: tfdist.DiLoCo(outer_optimizer=lambda: keras.optimizers.SGD(use_ema=True)).new_outer_optimizer(),
            "Leave `use_ema`",
        ),
        (lambda: tfdist.DiLoCo(outer_optimizer=keras.optimizers.SGD(use_ema=True)), "Leave `use_ema`"),
        (lambda: check_synchronization("local", None, None), "must be None, `tfdist.LocalSGD"),
        (lambda: check_synchronization(LOCAL, "optimizer", None), "Leave one of the two out"),
        (lambda: check_synchronization(LOCAL, None, "int8"), "DiLoCo"),
        (lambda: check_synchronization(DILOCO, None, "auto"), "Choose a codec"),
        (lambda: check_synchronization(DILOCO, None, tfdist.compression.Auto()), "Choose a codec"),
    ],
)
def test_unsuitable_options_are_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


@pytest.mark.unit
def test_an_outer_optimizer_made_too_early_is_named():
    early = tfdist.DiLoCo(outer_optimizer=keras.optimizers.Adam())
    assert "`outer_optimizer=lambda: keras.optimizers.Adam(...)`" in remedy_of_early_start(early)
    for other in (None, DILOCO, LOCAL, tfdist.DiLoCo(outer_optimizer=keras.optimizers.SGD)):
        assert "to the top of the program" in remedy_of_early_start(other)


@pytest.mark.unit
def test_functions_are_compared_by_the_optimizers_they_make():
    first, same, other = (
        tfdist.DiLoCo(outer_optimizer=functools.partial(keras.optimizers.SGD, r)) for r in (0.5, 0.5, 1.0)
    )
    assert described(first) == described(same) != described(other)
    assert "0x" not in described(first)
