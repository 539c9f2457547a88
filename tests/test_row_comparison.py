"""Workers that read the whole data notice different rows; nothing is refused where a difference may be intended."""

from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import row_checks as checks
from tfdist.errors import WorkerError
from tfdist.strategies.row_comparison import RowsRead
from tfdist.strategies.row_samples import difference, digest, sample
from tfdist.strategies.tensor_origin import origins_of, reads_files, sizes_of
from tfdist.testing import run_workers

MISTAKES = (
    *("a part of the arrays", "arrays in another order", "fewer rows", "a shard", "fewer rows in a pipeline"),
    *("another seed", "an own generator of numbers", "a part of a generator", "another width"),
)
RIGHT = (
    *("arrays", "shuffled", "augmented by TensorFlow", "augmented in Python"),
    "rounded in another way",
)


# Cases that a similar case covers: an array, a pipeline or a generator with other rows.
SIMILAR = ("arrays in another order", "fewer rows in a pipeline", "another width")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.exhaustive if case in SIMILAR else ()) for case in MISTAKES]
)
def test_different_rows_are_refused_before_the_first_update(case, pools):
    told = pools("2x1").run(checks.outcome, case)
    for kind, message, moved in told:
        assert kind == "ClusterError" and not moved, message
        assert (
            "worker 0 has" in message and "worker 1 has" in message and "distribute_datasets_from_function" in message
        )


@pytest.mark.parametrize(
    ("case", "method"),
    [
        ("a part of the arrays", "evaluate"),
        ("a part of a generator", "predict"),
        pytest.param("a part of the arrays", "predict", marks=pytest.mark.exhaustive),
        pytest.param("a part of a generator", "evaluate", marks=pytest.mark.exhaustive),
    ],
)
def test_evaluate_and_predict_refuse_different_rows(case, method, pools):
    for kind, message, _ in pools("2x1").run(checks.outcome, case, method):
        assert kind == "ClusterError" and f"`{method}`" in message


def test_different_rows_in_a_later_epoch_are_named_on_all_workers(pools):
    for _, message, _ in pools("2x1").run(checks.outcome, "from the third pass on"):
        assert "the first batch of pass" in message and "row 0 of the labels" in message


@pytest.mark.parametrize("method", ["fit", pytest.param("evaluate", marks=pytest.mark.exhaustive), "predict"])
def test_an_early_end_of_the_data_of_one_worker_is_named_on_all_workers(method, pools):
    for _, message, _ in pools("2x1").run(checks.outcome, "an early end", method):
        assert "the data of worker 1 ends before that of worker 0" in message


@pytest.mark.parametrize(
    ("rows", "is_endless", "is_of_another_fit", "ended"),
    [
        ([4, 4, 0, 0], False, False, [(0, 1)]),
        ([4, 0, 4, 0], False, False, []),
        ([1, 1, 0, 0], False, False, []),  # The rest of a batch, too small for all replicas.
        ([4, 4, 0, 0], True, False, []),  # Workers may draw batches of other sizes.
        ([4, 4, 0, 0], False, True, []),
    ],
)
def test_a_worker_without_rows_has_ended_early_only_if_its_peers_have_enough(
    rows, is_endless, is_of_another_fit, ended
):
    model, found = keras.Sequential(), []
    comparison = mock.Mock(is_endless=is_endless, refuse_end=lambda *workers: found.append(workers))
    comparison.model = lambda: model
    read = RowsRead("/device:CPU:0", 2)
    read.note(comparison, 7)
    if is_of_another_fit:
        read.forget()

    read.check(model, np.array(rows), np.array([1, 0, 1, 0]), np.array([7, 0, 7, 0]))

    assert found == ended


def test_different_learning_rates_in_a_later_epoch_are_named_on_all_workers(pools):
    for _, message, _ in pools("2x1").run(checks.outcome, "another learning rate from the second epoch on"):
        assert "ClusterError" in message and "worker 0 has 0.01, worker 1 has 0.02" in message


@pytest.mark.exhaustive  # Worker 0 waits for half a minute.
def test_an_error_before_the_first_batch_of_one_worker_ends_the_job(tmp_path):
    """Worker 0 has its first batch and waits for that of worker 1, which never comes."""
    (tmp_path / "file").write_text("1")
    with pytest.raises(WorkerError, match=r"Worker 1 of 2 raised \S*NotFoundError"):
        run_workers(checks.reads_a_file_that_one_worker_lacks, 2, args=(str(tmp_path),), timeout_seconds=200)


@pytest.mark.parametrize("case", RIGHT)
def test_correct_programs_are_not_refused(case, pools):
    # Refused programs of other tests have drawn other numbers on each worker.
    assert pools("2x1").run(checks.outcome_in_a_new_program, case) == [("nothing", "", True)] * 2


def test_code_that_uses_unseeded_numpy_is_not_refused(pools):
    told = pools("2x1").run(checks.outcome_in_a_new_program, "NumPy's random numbers")
    assert told == [("nothing", "", True)] * 2


def test_an_evaluation_that_a_callback_stops_is_not_refused(pools):
    assert pools("2x1").run(checks.outcome, "a callback that stops", "evaluate") == [("nothing", "", True)] * 2


def test_different_rows_of_endless_data_get_a_warning(pools):
    (_, said, _), (_, of_other, _) = pools("2x1").run(checks.outcome, "a part of endless data")
    assert "worker 0 has row 0" in said and "worker 1 has" in said and of_other == ""


def test_a_folder_of_images_without_a_seed_has_one_order_on_all_workers(pools, tmp_path):
    (tmp_path / "kind").mkdir()
    for number in range(32):
        keras.utils.save_img(tmp_path / "kind" / f"{number}.png", np.full((2, 2, 3), number), scale=False)
    first, second = pools("2x1").run(checks.outcome_of_directory, str(tmp_path))
    assert first == second and len(first) == checks.BATCH


def test_a_custom_loop_notices_different_rows(pools):
    assert pools("2x1").run(checks.outcome_of_loop, False) == [("", checks.ROWS // 2)] * 2
    for message, seen in pools("2x1").run(checks.outcome_of_loop, True):
        assert "first batch of `a custom loop`" in message and seen == 0


def _draw(x):
    return x + tf.random.uniform([])


def _draw_in_branch(x):
    return tf.cond(x > 3, lambda: _draw(x), lambda: x)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda base: base.shuffle(9).batch(4).prefetch(1), "GRAPH"),
        (lambda base: base.map(_draw).shuffle(9).batch(4), "RANDOM"),
        (lambda base: base.map(_draw_in_branch, num_parallel_calls=2), "RANDOM"),
        (lambda base: base.map(lambda x: tf.image.stateless_random_brightness(x, 0.5, (1, 2))), "RANDOM"),
        (lambda base: base.map(lambda x: tf.numpy_function(abs, [x], tf.float32)).batch(4), "PYTHON"),
        (lambda base: tf.data.Dataset.zip((base, base.map(_draw))).map(lambda a, b: (a * 2, b * 2)), "GRAPH RANDOM"),
        (lambda base: base.interleave(lambda x: tf.data.Dataset.range(3).shuffle(3)), "GRAPH"),
        (lambda base: tf.data.Dataset.from_generator(lambda: [1], output_types=tf.int32), "PYTHON"),
    ],
)
def test_random_numbers_are_traced_through_the_graph_of_a_pipeline(made, expected):
    dataset = made(tf.data.Dataset.range(8).map(lambda x: tf.cast(x, tf.float32)))
    assert [origin.name for origin in origins_of(dataset)] == expected.split()


def test_sizes_and_readers_of_a_pipeline():
    assert sizes_of(tf.data.Dataset.range(50).take(48).shuffle(3).batch(4).prefetch(1)) == [12, 48, 50]
    assert reads_files(tf.data.TFRecordDataset("a").batch(2))
    assert reads_files(tf.data.Dataset.range(2).interleave(lambda x: tf.data.TextLineDataset(["a"])))
    assert not reads_files(tf.data.Dataset.range(2).batch(2))


@pytest.mark.parametrize(
    "array", [np.arange(12.0).reshape(4, 3), np.arange(4), np.array([b"a", b"b", b"c", b"dd"], "O")]
)
def test_samples_differ_between_rows_but_not_by_rounding(array):
    one, same, swapped = sample(array), sample(array.copy()), sample(array[[0, 2, 1, 3]])
    assert digest([one]) == digest([same]) != digest([swapped])
    assert difference(one.described(), same.described()) is None
    assert difference(one.described(), swapped.described()) == 1
    assert "[4" in difference(one.described(), sample(array[:3]).described())
    if array.dtype.kind == "f":
        assert difference(one.described(), sample(array * (1 + 1e-9)).described()) is None
        assert difference(one.described(), sample(np.where(array == 4.0, np.nan, array)).described()) == 1


@pytest.mark.parametrize("dtype", ["float32", "int64", "complex64"])
def test_rows_of_a_large_batch_are_compared_to_its_end(dtype):
    rows = (np.arange(5000) * 1999 % 5000).astype(dtype)
    swapped = rows.copy()
    swapped[[4998, 4999]] = swapped[[4999, 4998]]

    one, other = sample(rows).described(), sample(swapped).described()

    assert len(one["groups"]) == len(one["shown"]) <= 1024
    assert difference(one, sample(rows.copy()).described()) is None
    assert difference(one, other) == 4998 // one["group_size"]


def test_a_sample_of_large_rows_is_small():
    assert sample(np.zeros((8, 100_000), "float32")).values.size <= 1 << 17
