"""`tfdist.data.BalancedSharding` in `fit`: unequal shares, stops and restarts give the results of one device."""

import copy
import gc
import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import balanced_checks as checks
import tfdist
from test_keras_features import assert_same
from tfdist.data import BalancedSharding, reading

STEPS = 9  # in an epoch
DEADLINE_SECONDS = 60
SHARES = {"2x1": (5, 11), "1x3": (1, 2, 5), "3x1": (1, 2, 5)}
BY_DEFAULT = {
    "2x1": ["batch_normalization"],
    "1x3": [],
    "3x1": [],
}


@pytest.fixture(scope="module")
def one_device(pools):
    known = {}

    def run(case):
        if case not in known:
            (known[case],) = pools("single").run(checks.one_device, case)
        return known[case]

    return run


def assert_agree(workers):
    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"


def placed_cases():
    for placement, chosen in BY_DEFAULT.items():
        for case in checks.CASES:
            yield pytest.param(placement, case, marks=() if case in chosen else pytest.mark.exhaustive)


@pytest.mark.parametrize(("placement", "case"), list(placed_cases()))
def test_unequal_shares_equal_one_device(placement, case, pools, one_device):
    workers = pools(placement).run(checks.train, placement, case, SHARES[placement])

    assert_agree(workers)
    assert_same(workers[0], one_device(case), tolerance=checks.CASES[case][-1])
    rows = workers[0]["rows"]
    whole = checks.BATCH // sum(SHARES[placement])
    assert rows[0] == tuple(whole * share for share in SHARES[placement])
    assert (len(rows), workers[0]["position"]) == (checks.EPOCHS * STEPS, (checks.EPOCHS, 0))


def test_a_wrapped_train_function_is_traced_once_for_all_numbers_of_rows(pools, one_device):
    workers = pools("2x1").run(checks.train_by_wrapped_function, "2x1", SHARES["2x1"])

    assert [result["later_traces"] for result in workers] == [0, 0]
    assert_agree(workers)
    assert_same(workers[0], one_device("plain"), tolerance=1e-5)


def test_a_train_function_trains_on_iterators_of_a_user(pools, one_device):
    """Keras 3.16 reads a batch in Python, and evaluates there whether an iterator had one."""
    workers = pools("2x1").run(checks.train_by_own_iterators, "2x1", "balanced", SHARES["2x1"])

    assert_agree(workers)
    assert_same(workers[0], one_device("plain") | {"history": {}}, tolerance=1e-5)


def test_a_train_function_trains_on_a_plain_iterator(pools):
    (expected,) = pools("single").run(checks.train_by_own_iterators, "single", "plain", None)
    (result,) = pools("1x2").run(checks.train_by_own_iterators, "1x2", "plain", None)

    assert_same(result, expected, tolerance=1e-5)


@pytest.mark.parametrize(
    "placement", ["2x1", *(pytest.param(place, marks=pytest.mark.exhaustive) for place in ("1x2", "2x2"))]
)
def test_evaluate_and_predict_read_each_example_once_in_order(placement, pools):
    for evaluated, predicted, expected in pools(placement).run(checks.evaluate_and_predict, placement):
        np.testing.assert_allclose(*evaluated, rtol=1e-5)
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)


def test_training_stopped_in_mid_epoch_and_continued_elsewhere_equals_one_device(pools, one_device, tmp_path):
    folder = str(tmp_path)
    parts = [
        pools("2x1").run(checks.stop_or_continue, "2x1", folder, 11),
        pools("single").run(checks.stop_or_continue, "1x1", folder, 3),
        pools("1x2").run(checks.stop_or_continue, "1x2", folder),
    ]

    assert [part[0]["start"] for part in parts] == [(0, 0), (1, 2), (1, 5)]
    assert parts[-1][0]["end"] == (3, 0)
    assert max(part[0]["saved"] for part in parts) < 1000
    expected = one_device("plain") | {"history": {}}
    assert_same(parts[-1][0], expected, tolerance=1e-5)


def test_compressed_gradients_of_unequal_shares(pools, one_device):
    (result,) = pools("1x2").run(checks.train, "1x2", "plain", (5, 11), "int8")

    assert_agree([result])
    losses = result["history"]["loss"]
    assert losses[-1] < losses[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("placement", ["2x1", "1x2"])
def test_only_training_moves_the_position(placement, pools):
    for history, expected, positions in pools(placement).run(checks.together, placement):
        np.testing.assert_allclose([history["val_loss"][-1], history["val_accuracy"][-1]], expected, rtol=1e-5)
        assert positions == [(2, 0), (0, 0), (2, 0), (3, 0)]


def test_one_sharding_for_training_and_validation(pools):
    for history, expected, positions in pools("2x1").run(checks.with_itself_as_validation, "2x1"):
        np.testing.assert_allclose([history["val_loss"][-1], history["val_accuracy"][-1]], expected, rtol=1e-5)
        assert positions == [(0, 3), (0, 6), (1, 0), (1, 3)]


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_a_fit_within_a_fit_does_not_change_the_outer_shares_and_position(placement, pools, one_device):
    for result in pools(placement).run(checks.one_fit_within_another, placement):
        assert_same(result, one_device("plain"), 1e-5)
        assert result["positions"] == [(checks.EPOCHS, 0), (0, 2)]
        assert "within its own fit" in result["error"]
        assert "'run_step'" in result["unknown_step"]


def test_endless_epochs_continue_where_fit_stopped():
    assert checks.without_end(tfdist.MirroredStrategy(["CPU:0"])) == [(0, 5), (1, 1), (1, 6)]


def test_all_workers_reduce_a_slow_share_at_the_same_step(pools):
    (first, state, statistics), (second, other_state, _) = pools("2x1").run(checks.slowed, "2x1")

    assert first == second
    assert state == other_state
    assert first[0] == (16, 16)
    fast, slow = first[-2]  # the last batch is short
    assert fast > 2 * slow >= 2
    assert len(set(first)) <= 8 + 1, "and the last, short batches"
    assert statistics.changes >= 1 and statistics.rows_per_second > 0 and statistics.imbalance >= 1


@pytest.mark.exhaustive  # A slow layer is tested above, and its pauses in test_replica_speed.py.
def test_a_worker_that_is_slow_between_steps_gets_a_smaller_share(pools):
    (first, *_), (second, *_) = pools("2x1").run(checks.slowed, "2x1", by_callback=True)

    assert first == second
    fast, slow = first[-2]
    assert fast > slow + 4


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_a_custom_loop_reads_each_example_once_and_counts_epochs(placement, pools):
    workers = pools(placement).run(checks.custom_loop, placement)

    seen = [row for rows, _ in workers for row in rows]
    np.testing.assert_array_equal(np.sort(seen), np.repeat(np.arange(checks.ROWS), 2))
    assert {tuple(positions) for _, positions in workers} == {((1, 0), (2, 0))}


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_reading_without_training_counts_no_epoch(placement, pools):
    for positions in pools(placement).run(checks.look_and_train, placement):
        assert positions == [(0, 0), (1, 0), (2, 0)]


def test_an_audit_of_untrained_data_raises():
    said = checks.audit_of_another(tfdist.MirroredStrategy(["CPU:0"]))
    assert len(said) == 2
    assert "trained on no example of it" in said[0] and "without a strategy" in said[1]


@pytest.mark.parametrize("placement", ["2x1", pytest.param("1x2", marks=pytest.mark.exhaustive)])
def test_an_audit_of_complete_and_continued_epochs_passes(placement, pools):
    for error, history, position in pools(placement).run(checks.audited, placement):
        assert error is None
        assert position == (2, 0)
        assert {"rows_per_second", "step_seconds", "imbalance", "wait_share"} <= history.keys()
        assert history["imbalance"][0] >= 1 and 0 <= history["wait_share"][0] <= 1


def test_an_epoch_of_one_step_has_its_balance_in_the_logs():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = strategy.distribute_datasets_from_function(BalancedSharding((np.ones((4, 1)), np.ones(4)), 4))
    logs = model.fit(data, epochs=2, verbose=0, callbacks=[tfdist.callbacks.Balance()]).history
    for rows, seconds in zip(logs["rows_per_second"], logs["step_seconds"], strict=True):
        assert seconds > 0 and rows == pytest.approx(4 / seconds)


def test_an_interrupted_fit_leaves_no_listeners():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sharding = BalancedSharding((np.ones((8, 1)), np.ones(8)), 4)
    data = strategy.distribute_datasets_from_function(sharding)

    def listening():
        return len(strategy.reports.listeners), len(sharding.visitors)

    def break_off(callbacks):
        broken = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.fit(data, verbose=0, callbacks=[*callbacks, broken])

    before = listening()
    for _ in range(2):
        break_off([tfdist.callbacks.Balance(), tfdist.callbacks.Audit(sharding)])
        gc.collect()
        assert listening() == before
    kept = [tfdist.callbacks.Balance(), tfdist.callbacks.Audit(sharding)]
    break_off(kept)
    model.fit(data, verbose=0, callbacks=kept)
    assert listening() == before


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
def test_an_audit_names_repeated_and_missed_examples_on_every_worker(placement, pools):
    errors = [error for error, _, _ in pools(placement).run(checks.audited, placement, broken=True)]

    assert len(set(errors)) == 1
    assert re.search(r"258 examples .* epoch 0 9 were trained on more than once: \d+ \(2 times\)", errors[0])
    assert "9 instead of 0 were missed" in errors[0]


@pytest.mark.parametrize("placement", ["2x1", pytest.param("1x2", marks=pytest.mark.exhaustive)])
def test_reading_beside_training_does_not_disturb_it(placement, pools):
    chief, *others = pools(placement).run(checks.look_beside_training, placement)
    assert chief[-1] == [checks.BATCH, checks.ROWS]
    for rows, position, looked_at in [chief, *others]:
        assert rows == [checks.BATCH] * (STEPS - 1) + [checks.ROWS - checks.BATCH * (STEPS - 1)]
        assert position == (1, 0)
        assert looked_at in (None, chief[-1])


CONTEXTS = [tf.distribute.InputContext(3, worker, 3) for worker in range(3)]


def rows_read(dataset):
    return [batch.numpy().tolist() for batch in dataset]


@pytest.mark.parametrize("one_after_another", [True, False])
def test_one_process_can_ask_for_the_batches_of_each_worker(one_after_another):
    sharding = BalancedSharding(np.arange(20), 8, policy=(1, 2, 5))
    if one_after_another:
        workers = [rows_read(sharding(context)) for context in CONTEXTS]
    else:
        workers = [rows_read(dataset) for dataset in [sharding(context) for context in CONTEXTS]]

    batches = [list(itertools.chain(*parts)) for parts in zip(*workers, strict=True)]
    assert batches == [sharding.plan.batch(0, step).tolist() for step in range(3)]
    assert [[len(part) for part in worker[:2]] for worker in workers] == [[1, 1], [2, 2], [5, 5]]
    assert sharding.position == (1, 0)


def test_without_a_strategy_the_next_call_continues_where_the_last_stopped():
    sharding = BalancedSharding(np.arange(20), 8)
    epochs = [rows_read(sharding()) for _ in range(2)]
    data = sharding()
    sharding.deserialize(json.dumps(json.loads(sharding.serialize()) | {"epoch": 5, "step": 2}))
    epochs += [rows_read(data) for _ in range(2)]

    steps = [(0, 0), (1, 0), (5, 2), (6, 0)]
    assert epochs == [[sharding.plan.batch(epoch, s).tolist() for s in range(step, 3)] for epoch, step in steps]
    assert sharding.position == (7, 0)


def fit_without_a_strategy(data, **options):
    """Returns the number of steps in each epoch of a `fit`."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.append(0),
        on_train_batch_end=lambda batch, logs: steps.append(steps.pop() + 1),
    )
    model.fit(data, callbacks=[count], verbose=0, **options)
    return steps


def test_without_a_strategy_only_the_first_epoch_of_a_resumed_run_is_short():
    sharding = BalancedSharding((np.ones((20, 1)), np.ones(20)), 4, drop_remainder=True)
    sharding.deserialize(sharding.serialize().replace('"step":0', '"step":3'))

    assert fit_without_a_strategy(sharding(), epochs=3) == [2, 5, 5]
    assert (len(sharding()), len(sharding(training=False)), sharding.position) == (5, 5, (3, 0))


class Asked:
    """A source of six rows with an event that is set when all rows were read."""

    def __init__(self):
        self.left, self.all = set(range(6)), threading.Event()

    def __len__(self):
        return 6

    def __getitem__(self, row):
        self.left.discard(row)
        if not self.left:
            self.all.set()
        return row


def test_rows_read_ahead_without_a_strategy_count_no_epoch():
    source = Asked()
    sharding = BalancedSharding(source, 2)
    iterator = iter(sharding())
    next(iterator)
    positions = [sharding.position]
    for _ in range(2):
        next(iterator)
        assert source.all.wait(DEADLINE_SECONDS)  # Two batches are mapped concurrently, beside the one that waits.
        positions.append(sharding.position)
    assert positions == [(0, 0), (0, 0), (1, 0)]


def sharding_of(replicas, size=8, source=None, **options):
    """Returns a sharding on the first of `replicas` workers with one replica each."""
    sharding = BalancedSharding(np.arange(20) if source is None else source, size, **options)
    sharding.for_strategy(tf.distribute.InputContext(replicas, 0, replicas), training=True)
    return sharding


def test_an_audit_ignores_counts_of_other_numbers_of_workers():
    def audit_of(workers):
        audit = tfdist.callbacks.Audit(sharding)
        extended = types.SimpleNamespace(worker_devices=["CPU:0"])
        strategy = types.SimpleNamespace(num_replicas_in_sync=workers, extended=extended)
        audit.set_model(types.SimpleNamespace(distribute_strategy=strategy))
        audit.on_train_begin()
        return audit

    sharding = sharding_of(2)
    sharding.attach(types.SimpleNamespace(latest=None))
    audit = audit_of(2)
    (count,) = sharding.visitors
    count(0, np.arange(4))
    same, other = audit_of(2), audit_of(3)
    position = json.loads(sharding.serialize())
    sharding.deserialize(json.dumps(position | {"step": 1}))
    for each in (same, other):
        each.set_state(audit.get_state())
    assert [list(each.get_state()["visits"]) for each in (same, other)] == [[0], []]
    assert [each.get_state()["first_epoch"] for each in (same, other)] == [0, 1]


def test_a_fit_of_shorter_epochs_continues_beyond_the_end_of_the_data():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    sharding = tfdist.data.BalancedSharding((np.ones((20, 1)), np.ones(20)), 2)
    data = strategy.distribute_datasets_from_function(sharding)
    steps, losses = [], []
    for epochs in (1, 3):
        fit = model.fit(data, steps_per_epoch=5, epochs=epochs, verbose=0)
        steps.append(strategy.reports.latest.number)
        losses += fit.history["loss"]
    assert steps == [5, 20] and sharding.position == (2, 0)
    assert np.all(np.diff(losses) < 0) and losses[-1] > 0


@pytest.mark.parametrize("options", [{"drop_remainder": True}, {"repeat": True}], ids=str)
def test_evaluate_and_predict_read_left_out_and_repeated_examples_once(options):
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
        model.compile(loss="mae")
    rows = np.arange(20.0)[:, None]
    sharding = tfdist.data.BalancedSharding((rows, np.zeros(20)), 8, **options)
    data = strategy.distribute_datasets_from_function(sharding)
    np.testing.assert_array_equal(model.predict(data, verbose=0), rows)
    assert model.evaluate(data, verbose=0) == rows.mean()
    assert int(data.cardinality) == sharding.cardinality


@pytest.mark.parametrize("options", [{"policy": "equal"}, {"policy": [2, 1]}, {"max_rows": 4}], ids=str)
def test_a_worker_that_evaluates_alone_reads_all_rows_without_weights_and_limits_of_the_job(options):
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(1.0)])
        model.compile(loss="mae")
    rows = np.arange(20.0)[:, None]
    sharding = tfdist.data.BalancedSharding((rows, np.zeros(20)), 8, drop_remainder=True, **options)
    strategy.elastic = types.SimpleNamespace(  # As with tolerate_lost_workers, on one of two workers.
        check_sharding=lambda sharding: None, input_context=lambda context: tf.distribute.InputContext(2, 0, 2)
    )
    data = strategy.distribute_datasets_from_function(sharding)
    del strategy.elastic
    assert model.evaluate(data, verbose=0) == rows.mean()
    np.testing.assert_array_equal(model.predict(data, verbose=0), rows)
    assert sharding.assignments.place.replicas == 2


def test_integral_numbers_of_any_type_are_accepted():
    for calls in (2.0, tf.data.AUTOTUNE):
        sharding = BalancedSharding(np.arange(20), 8.0, block_size=4.0, num_parallel_calls=calls, max_rows=8.0)
        assert sorted(itertools.chain(*rows_read(sharding()))) == list(range(20))


def test_weights_and_limits_of_numpy_are_accepted():
    sharding = sharding_of(2, policy=np.array([3.0, 1.0]), max_rows=np.int64(6))
    assert sharding.assignments.start(training=True).latest_shares == (6, 2)
    with pytest.raises(ValueError, match=r"Call for_strategy\(context, training=\.\.\.\) first"):
        BalancedSharding(np.arange(20), 8).assignments.start(training=True)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: sharding_of(3, size=2), ["global_batch_size is 2", "3 replicas"]),
        (lambda: sharding_of(1, size=0), ["global_batch_size", "0"]),
        (lambda: sharding_of(1, size=2.5), ["global_batch_size", "2.5"]),
        (lambda: sharding_of(1, source=np.zeros([0, 3])), ["no rows"]),
        (lambda: sharding_of(1, source=[]), ["length of 0"]),
        (lambda: sharding_of(2, policy="fast"), ["policy", "'fast'"]),
        (lambda: sharding_of(2, policy=[1, 0]), ["policy", "[1, 0]"]),
        (lambda: sharding_of(2, policy=[1, 2, 3]), ["3 for 2 replicas"]),
        (lambda: sharding_of(2, max_rows=3), ["max_rows", "8 on 2 replicas", "3"]),
        (lambda: sharding_of(2, max_rows=[8]), ["max_rows", "[8]"]),
        (lambda: sharding_of(2, max_rows=4.5), ["max_rows", "4.5"]),
        (lambda: sharding_of(2, max_rows="8"), ["max_rows", "'8'"]),
        (lambda: sharding_of(1, seed=None), ["seed", "None"]),
        (lambda: sharding_of(1, seed=1.5), ["seed", "1.5"]),
        (lambda: sharding_of(1, size=30, drop_remainder=True), ["drop_remainder", "20"]),
        (lambda: sharding_of(1, stratify_by=[1, 2]), ["stratify_by", "[20]", "[2]"]),
        (lambda: sharding_of(1, block_size=0), ["block_size", "0"]),
        (lambda: sharding_of(1, block_size=2.5), ["block_size", "2.5"]),
        (lambda: sharding_of(1, block_size=-3, shuffle=False), ["block_size", "-3"]),
        (lambda: sharding_of(1, size=None), ["global_batch_size", "None"]),
        (lambda: sharding_of(1, size=float("inf")), ["global_batch_size", "inf"]),
        (lambda: sharding_of(1, num_parallel_calls=0), ["num_parallel_calls", "0"]),
        (lambda: sharding_of(1, max_rows=True), ["max_rows", "True"]),
        (lambda: sharding_of(1, max_rows=8.5), ["max_rows", "8.5"]),
        (lambda: sharding_of(1, policy={1: 2}), ["policy", "{1: 2}"]),
        (lambda: sharding_of(1, policy=["1"]), ["policy", "['1']"]),
        (lambda: sharding_of(1, policy=[1e-320]), ["policy", "1e-320"]),
        (lambda: sharding_of(1, shuffle="no"), ["shuffle", "'no'"]),
        (lambda: sharding_of(1, repeat=2), ["repeat", "2"]),
        (lambda: sharding_of(1, stratify_by=[None] * 20), ["stratify_by", "NoneType"]),
        (lambda: sharding_of(1, stratify_by=np.array(["a", 1] * 10, object)), ["stratify_by", "'str'"]),
        (lambda: sharding_of(1, map_fn=3), ["map_fn", "3"]),
        (lambda: sharding_of(1, map_fn=lambda x: None)(), ["map_fn", "returned None"]),
        (lambda: sharding_of(1, map_fn=lambda x: ())(), ["map_fn", "returned ()"]),
        (lambda: sharding_of(1, map_fn=lambda x: (x, None))(), ["map_fn", "leave out values that are None"]),
        (lambda: copy.deepcopy(sharding_of(1)), ["BalancedSharding", "serialize()"]),
        (lambda: pickle.dumps(sharding_of(1)), ["BalancedSharding", "serialize()"]),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises((ValueError, TypeError)) as raised:
        make()

    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"seed": 1}, ["seed was 0, is 1"]),
        ({"size": 7}, ["global_batch_size was 8, is 7"]),
        ({"source": np.arange(21)}, ["examples was 20, is 21"]),
        ({"shuffle": False}, ["order was Shuffled, is Unshuffled"]),
    ],
)
def test_a_position_of_other_global_batches_is_refused(other, words):
    assert_refused({}, other, words)


LABELS = np.arange(20) % 2


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({"block_size": 4}, {"block_size": 5}, ["BlockShuffled(4)", "BlockShuffled(5)"]),
        ({"stratify_by": LABELS}, {"stratify_by": LABELS[::-1]}, ["order was Stratified("]),
        ({"stratify_by": LABELS}, {"stratify_by": LABELS, "shuffle": False}, ["shuffle=True", "shuffle=False"]),
    ],
)
def test_a_position_in_another_order_is_refused(one, other, words):
    assert_refused(one, other, words)


def assert_refused(one, other, words):
    saved = sharding_of(2, **one).serialize()

    sharding_of(2, **one).deserialize(saved)
    with pytest.raises(tfdist.errors.PositionError) as raised:
        sharding_of(2, **other).deserialize(saved)

    assert [word for word in words if word not in str(raised.value)] == []


def test_a_position_before_a_dropped_batch_is_the_end_of_the_epoch():
    saved = sharding_of(2).serialize().replace('"step":0', '"step":2')
    sharding = sharding_of(2, drop_remainder=True)

    sharding.deserialize(saved)

    assert sharding.position == (1, 0)


def test_workers_with_different_shardings_raise_at_once(pools, tmp_path):
    for fewer, seeds, alike, moved, changed in pools("2x1").run(checks.unlike_shardings, str(tmp_path)):
        assert "worker 0 has examples 20, worker 1 has examples 19" in fewer
        assert "worker 0 has seed 0, worker 1 has seed 1" in seeds
        assert alike == moved == "alike"
        assert all(str(tmp_path / f"of_{worker}") in changed for worker in (0, 1))


def test_a_mapped_sharding_keeps_its_length():
    """Keras maps the dataset for class weights, and takes a step too many if the length is unknown."""
    x = np.arange(20, dtype="float32")[:, None]
    sharding = BalancedSharding((x, np.arange(20) % 2), 8, shuffle=False)
    same = lambda *batch: batch  # noqa: E731
    options = tf.data.Options()
    for change in (
        *(lambda d: d.map(same), lambda d: d.prefetch(2), lambda d: d.map(same).prefetch(tf.data.AUTOTUNE)),
        *(lambda d: d.with_options(options), lambda d: d.enumerate(), lambda d: d.cache(), lambda d: d.shuffle(2)),
    ):
        assert int(change(sharding()).cardinality()) == 3
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(sharding(), epochs=2, verbose=0, class_weight={0: 1.0, 1: 2.0})
    assert int(model.optimizer.iterations) == 6


def test_the_error_of_keras_tells_how_to_pass_a_sharding():
    model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    sharding = BalancedSharding(np.zeros((20, 1)), 8)
    for call in (model.fit, model.evaluate, model.predict):
        with pytest.raises(ValueError, match=r"strategy\.distribute_datasets_from_function\(sharding\)"):
            call(sharding, verbose=0)


def test_datasets_that_bypass_the_strategy_and_different_positions_raise_on_every_worker(pools):
    for *around, elsewhere in pools("2x1").run(checks.beside_the_strategy):
        assert around == ["strategy.distribute_datasets_from_function(sharding)"] * 4
        assert "worker 0 has position (0, 5), worker 1 has position (0, 0)" in elsewhere
        assert "A loop in a graph also counts batches read ahead" in elsewhere


@pytest.mark.parametrize(
    "compose",
    [
        lambda one, other: one.take(1),
        lambda one, other: one.concatenate(other),
        lambda one, other: tf.data.Dataset.zip((one, other)).map(lambda mine, theirs: mine),
    ],
    ids=["take", "concatenate", "zip"],
)
def test_datasets_composed_of_shardings_with_their_context_are_read(compose):
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    one, other = (BalancedSharding(np.arange(20), 8, seed) for seed in (0, 1))
    data = strategy.distribute_datasets_from_function(lambda context: compose(one(context), other(context)))
    assert len(next(iter(data))) == 8


def test_a_sharding_called_without_the_context_is_refused_on_several_devices():
    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    sharding = BalancedSharding(np.arange(20), 8)
    with pytest.raises(ValueError, match="without that context"):
        strategy.distribute_datasets_from_function(lambda context: sharding().take(2))


def test_an_unrelated_attribute_named_sharding_is_ignored():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    dataset = tf.data.Dataset.range(4)
    dataset.sharding = "by rows"
    assert next(iter(strategy.distribute_datasets_from_function(lambda context: dataset))) == 0


@pytest.mark.parametrize("policy", ["speed", pytest.param("equal", marks=pytest.mark.exhaustive)])
def test_a_map_that_changes_the_rows_is_refused(policy, pools):
    (said,) = pools("1x2").run(checks.train_on_doubled, "1x2", policy)
    assert "must keep their number of rows" in said


def test_devices_of_one_worker_share_the_batches_of_a_plain_dataset(pools, one_device):
    (result,) = pools("1x2").run(checks.train_on_plain_dataset, "1x2")
    assert_same(result, one_device("plain"), 1e-5)
    assert result["position"] == (checks.EPOCHS, 0)


def test_the_data_of_a_deleted_dataset_is_freed(pools):
    alive, only_the_last_is_known = pools("1x2").run(checks.let_go, "1x2")[0]
    assert not any(alive) and only_the_last_is_known


def test_examples_that_cannot_be_batched_are_named():
    def of_unknown_rank(x):
        return tf.numpy_function(lambda x: x, [x], tf.int64)

    with pytest.raises(ValueError, match=r"known rank .*<unknown>.*ensure_shape"):
        BalancedSharding(np.arange(8), 4, map_fn=of_unknown_rank)()


def test_an_example_of_another_shape_is_named():
    said = r"Example 5 \(row 5 of the arrays\) has other shapes than example 4 .* \[4\], \[\] and not \[3\], \[\]"
    data = BalancedSharding(np.arange(8), 4, shuffle=False, map_fn=lambda x: (tf.zeros([3 + x // 5]), x))()
    with pytest.raises(tf.errors.OpError, match=f"{said}.*Read by a single process"):
        list(data)


def test_random_operations_draw_new_numbers_in_each_batch_epoch_and_worker(pools):
    (drawn,) = pools("single").run(checks.drawn_by_workers)
    assert len(drawn) == 2 * 2 * 32 and len(set(drawn)) == len(drawn)


def test_under_op_determinism_each_worker_draws_its_own_numbers(monkeypatch):
    monkeypatch.setattr(reading.tf_internals, "is_op_determinism_enabled", lambda: True)
    draws = []
    for replica in (0, 1):
        with tf.Graph().as_default() as graph:
            graph.seed = 7
            draw = reading.drawing_afresh(tf.random.uniform, replica)([])
            draws += tf.compat.v1.Session(graph=graph).run([draw])
    assert draws[0] != draws[1]


@pytest.mark.parametrize("state", ["", "{}", "[]", '{"epoch": "x"}', '{"epoch": 0, "step": 0, "of": 3}'])
def test_an_invalid_position_is_refused(state):
    with pytest.raises(tfdist.errors.PositionError, match="must be a result of `serialize`"):
        sharding_of(1).deserialize(state)


def test_a_position_is_small_for_any_number_of_replicas():
    for replicas in (1, 3, 200):
        sharding = sharding_of(replicas, size=4000)
        assert len(sharding.serialize()) < 1000
        sharding_of(replicas, size=4000).deserialize(sharding.serialize())


def test_a_source_that_changed_its_length_is_named():
    examples = [1, 2, 3, 4]
    dataset = BalancedSharding(examples, 2)()
    examples.pop()

    with pytest.raises(tf.errors.OpError, match=r"had 4 examples when training began and has 3 now"):
        list(dataset)


@pytest.fixture
def start(tmp_path):
    """Returns a function: `start(code)` runs code in two workers, and returns (process, output file) for each."""
    processes = []

    def start(code):
        ports = tfdist.cluster.free_ports(2)
        for worker in range(2):
            path = tmp_path / f"output-{worker}"
            cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
            environ = os.environ | {
                "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": worker}}),
                "PYTHONPATH": os.pathsep.join([os.path.dirname(checks.__file__), os.environ.get("PYTHONPATH", "")]),
                **{"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": "-1", "PYTHONDONTWRITEBYTECODE": "1"},
            }
            with path.open("w") as output:
                command = [sys.executable, "-c", code]
                processes.append((subprocess.Popen(command, env=environ, stdout=output, stderr=output), path))
        return processes

    yield start
    for process, _ in processes:
        process.kill()
        process.wait()


# By default, test_faults.py tests that a failed worker ends its peers, and test_sources.py that the record is named.
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["file", "map_fn"])
def test_a_bad_example_is_named_by_its_worker_and_ends_its_peer(kind, start, tmp_path):
    path = tmp_path / "rows.tfrecord"
    checks.write_records(str(path))

    workers = start(f"import balanced_checks; balanced_checks.fail_in_training({kind!r}, {str(path)!r})")
    deadline = time.monotonic() + 120
    codes = [process.wait(max(deadline - time.monotonic(), 0.1)) for process, _ in workers]
    outputs = [path.read_text() for _, path in workers]

    assert 0 not in codes
    words = {"map_fn": ["Example 41 (row 41", "could not be mapped"], "file": ["Example ", f"of {path})"]}[kind]
    told = [all(word in output for word in [*words, f"worker {i} of 2"]) for i, output in enumerate(outputs)]
    assert any(told), "\n".join(outputs)
