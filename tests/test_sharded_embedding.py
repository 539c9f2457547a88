"""An embedding whose rows are divided among replicas trains as a plain embedding on one device."""

import numpy as np
import pytest

import embedding_checks as checks
from test_model_sharding import placements
from tfdist.errors import WorkerError

USUAL = ["adam", "adagrad", "loss_scale"]
NUMBER = {"1x2": 2, "2x1": 2, "2x2": 4}


def assert_close(result, expected, tolerance=1e-5):
    assert result.keys() == expected.keys()
    for kind, values in result.items():
        assert len(values) == len(expected[kind])
        for own, other in zip(values, expected[kind], strict=True):
            np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)


def on_one_device(pools, check, *args):
    return pools("single").run(check, "single", *args)[0]


@pytest.mark.parametrize(("placement", "optimizer"), placements(checks.OPTIMIZERS, USUAL))
def test_training_equals_one_device(placement, optimizer, pools):
    expected = on_one_device(pools, checks.trained, optimizer)
    for result in pools(placement).run(checks.trained, placement, optimizer):
        assert_close(result, expected)


@pytest.mark.parametrize("rows", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize(
    "optimizer",
    ["adam", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in checks.OPTIMIZERS if name != "adam")],
)
def test_training_in_blocks_of_rows_equals_one_device(optimizer, rows, pools):
    expected = on_one_device(pools, checks.trained, optimizer)
    for result in pools("1x2").run(checks.trained_in_blocks, "1x2", optimizer, rows):
        assert_close(result, expected)


@pytest.mark.parametrize(("placement", "name"), placements(checks.FEATURES, ["train_step", "run_eagerly"]))
def test_features_equal_one_device(placement, name, pools):
    expected = on_one_device(pools, checks.with_feature, name)
    for result in pools(placement).run(checks.with_feature, placement, name):
        assert_close(result, expected)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_works_with_sharded_optimizer_state(placement, pools):
    expected = on_one_device(pools, checks.trained, "adam")
    for result in pools(placement).run(checks.trained, placement, "adam", model_sharding="optimizer"):
        assert_close(result, expected)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_mixed_precision_equals_one_device(placement, pools):
    expected = on_one_device(pools, checks.mixed)
    for result in pools(placement).run(checks.mixed, placement):
        assert_close(result, expected, tolerance=2e-3)


@pytest.mark.parametrize("placement", ["2x1", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_unequal_shares_equal_one_device(placement, pools):
    expected = on_one_device(pools, checks.sharded_data)
    for result in pools(placement).run(checks.sharded_data, placement):
        assert_close(result, expected)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_each_replica_has_its_rows_and_their_state(placement, pools):
    rows = -(-checks.TABLE[0] // NUMBER[placement])
    for shapes, report in pools(placement).run(checks.parts, placement):
        assert set(shapes) == {(rows, checks.TABLE[1])} and len(shapes) == 6
        table = checks.TABLE[0] * checks.TABLE[1] * 4
        assert report.whole_weights - report.weights >= table - 4 * rows * checks.TABLE[1]


@pytest.mark.parametrize(("optimizer", "reads"), [("sgd", False), ("adagrad", False), ("adam", True)])
def test_a_step_reads_a_whole_small_part_only_if_it_changes_all_rows(optimizer, reads, pools):
    for names in pools("1x2").run(checks.reads_of_whole_parts, "1x2", optimizer):
        assert bool(names) == reads, names


@pytest.mark.parametrize("bad", [checks.TABLE[0], -checks.TABLE[0] - 1])
@pytest.mark.parametrize("placement", ["1x2", "2x1"])
def test_bad_ids_fail_on_all_workers(placement, bad, pools):
    for text in pools(placement).run(checks.bad_ids, placement, bad):
        assert "is not in [0, 11)" in text


@pytest.mark.parametrize("loaded_by", [pytest.param(None, marks=pytest.mark.exhaustive), "strategy"])
@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_files_have_the_form_of_a_plain_embedding(placement, loaded_by, pools, tmp_path):
    for result, expected in pools(placement).run(checks.round_trip, placement, str(tmp_path), loaded_by):
        assert_close(result, expected)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_checkpoints_of_tensorflow_have_whole_tables(placement, pools, tmp_path):
    for plain, sharded in pools(placement).run(checks.in_checkpoint, placement, str(tmp_path)):
        for own, other in zip(plain, sharded, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("name", ["model.keras", pytest.param("model.weights.h5", marks=pytest.mark.exhaustive)])
def test_model_checkpoint_saves_the_rows_of_all_workers(name, pools, tmp_path):
    for plain, sharded in pools("2x1").run(checks.by_checkpoint, "2x1", str(tmp_path), name):
        for own, other in zip(plain, sharded, strict=True):
            np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("placement", ["2x1", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_a_backup_continues_with_the_same_bits(placement, pools, tmp_path):
    for result, unbroken in pools(placement).run(checks.resumed, placement, str(tmp_path)):
        assert_close(result, unbroken, tolerance=0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["CPU:0", "CPU:1"], ["CPU:0"]),
        pytest.param(["CPU:0"], ["CPU:0", "CPU:1"], marks=pytest.mark.exhaustive),
        pytest.param(["CPU:0", "CPU:1"], ["CPU:0", "CPU:1", "CPU:2"], marks=pytest.mark.exhaustive),
    ],
)
def test_a_backup_continues_on_other_replicas(before, after, pools, tmp_path):
    pool = pools("1x2" if len(before) + len(after) < 5 else "1x3")
    assert_close(*pool.run(checks.resumed, "1x2", str(tmp_path), before, after)[0])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("regularizer", "embeddings_regularizer, which needs all of them"),
        ("constraint", "embeddings_constraint, which needs all of them"),
        ("lora", "lora_rank, which needs all of them"),
        ("quantize", "quantization, which needs all of them"),
        ("optimizer", "must update each element by itself, but 'muon'"),
        ("export", "called in another tf.function, as for `export`"),
        ("read", "cannot read the whole table"),
        ("branch", "is looked up in a tf.while_loop, a recurrent layer or a branch of tf.cond"),
        ("cross_device_ops", "exchanges rows by collectives, but cross_device_ops is ReductionToOneDevice"),
        ("apply", "Call `apply` on `strategy.distributed_optimizer(optimizer)`"),
    ],
)
def test_what_needs_the_whole_table_is_refused(what, text, pools):
    with pytest.raises(WorkerError) as error:
        pools("1x2").run(checks.refused, "1x2", what)
    assert text in str(error.value.__cause__)
