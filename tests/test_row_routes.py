"""Rows reach their owners, and gradients of repeated ids keep their sums and sums of squares."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from test_codec_groups import OneDevicePerWorker
from tfdist.strategies.collectives.in_memory_transport import run_ranks
from tfdist.strategies.collectives.row_routes import RowRoutes
from tfdist.strategies.sharding.part_tensors import own_part_of, part_of, rows_of, whole_of, whole_of_arrays
from tfdist.strategies.sharding.partition import Partition
from tfdist.strategies.sharding.repeated_rows import rows_with
from tfdist.strategies.sharding.table_exchange import TableExchange
from tfdist.strategies.sharding.table_initializer import TableInitializer, initial_state

RANKS = (1, 2, 3, 4)


def draws(seed):
    return np.random.default_rng(seed)


@pytest.mark.parametrize("shards", [*RANKS, 7])
@pytest.mark.parametrize("rows", [1, 5, 12])
def test_rows_are_dealt_out_in_turn(rows, shards):
    table, partition = tf.range(rows * 3.0), Partition.of_table((rows, 3), shards)
    table = tf.reshape(table, [rows, 3])
    parts = [part_of(partition, table, shard) for shard in range(shards)]

    for row in range(rows):
        np.testing.assert_array_equal(parts[row % shards][row // shards], table[row])
    np.testing.assert_array_equal(tf.stack([tf.reshape(part, [-1]) for part in parts]), rows_of(partition, table))
    np.testing.assert_array_equal(whole_of(partition, rows_of(partition, table)), table)
    np.testing.assert_array_equal(whole_of_arrays((rows, 3), [part.numpy() for part in parts], in_turn=True), table)


@pytest.mark.parametrize("ranks", RANKS)
def test_rows_reach_their_owners_and_answers_come_back(ranks):
    def run(transport, rank):
        number = 5 * rank  # The first rank has no rows.
        owners = tf.constant(draws(rank).integers(0, ranks, number), tf.int32)
        leading = tf.constant(draws(rank + 9).integers(0, 2, number), tf.bool)
        rows = tf.stack([tf.fill([number], rank), owners, tf.cast(leading, tf.int32), tf.range(number)], axis=1)
        routes = RowRoutes(transport, rank, owners, None, leading=leading, note=rank + 1)
        received, first = routes.send(rows), routes.send_leading(rows)
        answers = routes.answer(received * 10)
        return rows, received, first, routes.received_is_leading(), answers, routes.notes

    done = run_ranks(ranks, run)
    everyone = np.concatenate([rows for rows, *_ in done])
    for rank, (rows, received, first, is_leading, answers, notes) in enumerate(done):
        own = everyone[everyone[:, 1] == rank]
        assert sorted(map(tuple, received.numpy())) == sorted(map(tuple, own))
        np.testing.assert_array_equal(received[:, 0], np.sort(received[:, 0]))  # In the order of senders.
        np.testing.assert_array_equal(is_leading, received[:, 2] == 1)
        np.testing.assert_array_equal(first, tf.boolean_mask(received, is_leading))
        np.testing.assert_array_equal(answers, rows * 10)
        np.testing.assert_array_equal(notes, np.arange(ranks) + 1)


@pytest.mark.parametrize("k", [2, 3, 4, 9])
@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 10.0])
def test_made_rows_have_the_sum_and_the_squares(k, spread):
    rows = (1 + spread * draws(k).normal(size=(6, k, 8))).astype("float32")
    sums, squares = rows.sum(axis=1), np.square(rows).sum(axis=1)
    made, owner = rows_with(tf.constant(sums), tf.constant(squares))

    assert len(owner) <= 6 * k
    np.testing.assert_allclose(tf.math.segment_sum(made, owner), sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(tf.math.segment_sum(tf.square(made), owner), squares, rtol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_made_rows_of_infinite_gradients_are_not_finite(value):
    made, _ = rows_with(tf.constant([[value, 1.0]]), tf.constant([[value, 2.0]]))
    assert not np.all(np.isfinite(made))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("detail", ["sums", "squares", "rows"])
def test_owners_look_up_and_sum_rows(ranks, detail):
    table = tf.constant(draws(0).normal(size=(13, 3)), tf.float32)
    partition = Partition.of_table(table.shape, ranks)

    def run(transport, rank):
        exchange = TableExchange(OneDevicePerWorker(transport, rank))
        ids = tf.constant(draws(rank + 1).integers(0, 13, 20))
        part = own_part_of(partition, table, rank)
        rows = exchange.look_up(
            functools.partial(tf.gather, part), ids, partition=partition, replica=0, dtype=tf.float32
        )
        slices = tf.IndexedSlices(tf.constant(draws(rank).normal(size=(20, 3)), tf.float32), ids)
        own = exchange.to_owners(slices, partition=partition, replica=0, detail=detail)
        return ids, rows, slices, own

    done = run_ranks(ranks, run)
    total, squares = np.zeros([13, 3]), np.zeros([13, 3])
    for ids, rows, slices, _ in done:
        np.testing.assert_array_equal(rows, tf.gather(table, ids))
        np.add.at(total, ids.numpy(), slices.values.numpy())
        np.add.at(squares, ids.numpy(), np.square(slices.values.numpy()))
    for rank, (*_, own) in enumerate(done):
        dense = tf.math.unsorted_segment_sum(own.values, own.indices, partition.part_shape[0])
        np.testing.assert_allclose(dense, part_of(partition, total, rank), rtol=1e-4, atol=1e-5)
        if detail != "sums":
            of_squares = tf.math.unsorted_segment_sum(tf.square(own.values), own.indices, partition.part_shape[0])
            np.testing.assert_allclose(of_squares, part_of(partition, squares, rank), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bad", [-1, 13, 1 << 40])
def test_a_bad_id_fails_on_all_ranks(bad):
    partition = Partition.of_table((13, 2), 3)

    def run(transport, rank):
        exchange = TableExchange(OneDevicePerWorker(transport, rank))
        ids = tf.constant([3, bad if rank == 1 else 4], tf.int64)
        part = tf.zeros(partition.part_shape)
        try:
            exchange.look_up(functools.partial(tf.gather, part), ids, partition=partition, replica=0, dtype=tf.float32)
        except tf.errors.InvalidArgumentError as error:
            return str(error)
        return ""

    for text in run_ranks(3, run):
        assert f"{bad} is not in [0, 13)" in text


@pytest.mark.parametrize("make", [keras.initializers.RandomNormal, keras.initializers.GlorotUniform])
@pytest.mark.parametrize("shards", [1, 3])
def test_initial_values_do_not_depend_on_the_number_of_shards(make, shards, monkeypatch):
    initializer, shape = make(seed=3), (50, 4)
    np.testing.assert_array_equal(TableInitializer(initializer)(shape, "float32"), initializer(shape, "float32"))
    monkeypatch.setattr("tfdist.strategies.sharding.table_initializer._WHOLE_BYTES", 49 * 4 * 4)
    monkeypatch.setattr("tfdist.strategies.sharding.table_initializer._BLOCK_BYTES", 7 * 4 * 4)
    whole = TableInitializer(initializer)(shape, "float32")
    partition = Partition.of_table(shape, shards)

    assert len({tuple(row) for row in whole.numpy()}) == 50
    for shard in range(shards):
        part = tf.Variable(tf.zeros(partition.part_shape))
        TableInitializer(initializer).fill(part, partition, shard)
        np.testing.assert_array_equal(part, part_of(partition, whole, shard))


@pytest.mark.parametrize("name", ["Zeros", "Ones", "Constant", "GlorotUniform"])
def test_initial_state_equals_that_of_the_initializer(name):
    options = {"Constant": {"value": 0.1}, "GlorotUniform": {"seed": 3}}.get(name, {})
    initializer = keras.initializers.get({"class_name": name, "config": options})
    np.testing.assert_array_equal(initial_state(initializer, (7, 3), "float32"), initializer((7, 3), "float32"))
