"""The estimate of memory before a job: it equals the memory of a real job, and allocates nothing itself."""

import json
import zipfile

import keras
import numpy as np
import pytest

import embedding_checks
import local_step_checks
import sharding_checks as checks
import tfdist
from tfdist.launch import cli
from tfdist.launch.estimate_command import maker_of
from tfdist.strategies.memory_needs import ModelShapes, TensorShape, TrainedWeight, needs_of

HUGE = 1_000_000


def weight(*shape, states=2, **more):
    value = TensorShape(shape, 4)
    return TrainedWeight(value, (value,) * states, **more)


def huge_model():
    model = keras.Sequential([keras.Input((HUGE,)), keras.layers.Dense(HUGE)])
    model.compile("adam", "mse")
    return model


def small_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    model.compile(keras.optimizers.Adam(), "mse")
    return model


@pytest.mark.unit
def test_state_is_divided_among_replicas():
    model = ModelShapes((weight(8, 4), weight(4)))

    needs = needs_of(model, replicas=4)

    assert needs[None].optimizer_state == 2 * 36 * 4
    assert needs["optimizer"].optimizer_state == 2 * 9 * 4
    assert needs["optimizer"].weights == needs[None].weights == 36 * 4


@pytest.mark.unit
def test_whole_weights_are_divided_by_size():
    model = ModelShapes(tuple(weight(size, states=1, is_elementwise=False) for size in (5, 3, 2)))

    assert needs_of(model, replicas=2)["optimizer"].optimizer_state == 5 * 4


@pytest.mark.unit
def test_large_weights_are_divided_and_small_ones_are_not():
    needs = needs_of(ModelShapes((weight(100, 100), weight(10))), replicas=2)["parameters"]

    assert needs.weights == needs.gradients == 4 * (5000 + 10)
    assert needs.optimizer_state == 2 * 4 * (5000 + 5)


@pytest.mark.unit
def test_weights_are_not_divided_where_training_refuses_it():
    owned = ModelShapes((weight(100, 100, is_elementwise=False),))
    whole = ModelShapes((weight(100, 100, needs_whole=True),))
    compressed = ModelShapes((weight(100, 100, residual_bytes=40000),))

    assert not any("parameters" in needs_of(each, 2) for each in (owned, whole, compressed))


@pytest.mark.unit
def test_one_replica_shards_and_exchanges_nothing():
    needs = needs_of(ModelShapes((weight(8, residual_bytes=32),)), replicas=1)

    assert list(needs) == [None]
    assert needs[None].exchange == needs[None].residuals == 0


@pytest.mark.unit
def test_a_model_larger_than_any_memory_is_described():
    estimate = tfdist.estimate_memory(huge_model, replicas=4)

    assert estimate.needs[None].weights == 4 * HUGE * (HUGE + 1)
    assert estimate.needs["optimizer"].optimizer_state < 0.26 * estimate.needs[None].optimizer_state
    assert estimate.needs["parameters"].weights < 0.26 * estimate.needs[None].weights
    assert estimate.fitting(1e15) == [None, "optimizer", "parameters"] and estimate.fitting(1e9) == []


@pytest.mark.unit
def test_the_verdict_names_the_option_that_fits():
    estimate = tfdist.estimate_memory(small_model, replicas=4)
    whole, sharded = (estimate.needs[mode].total for mode in (None, "optimizer"))

    assert "without sharding" in estimate.verdict(whole)
    assert "model_sharding='optimizer'" in estimate.verdict(sharded)
    assert "does not fit" in estimate.verdict(100)


@pytest.mark.unit
def test_compression_keeps_residuals_of_large_weights():
    def make():
        model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(100), keras.layers.Dense(4)])
        model.compile("sgd", "mse")
        return model

    assert tfdist.estimate_memory(make, 2, compression="int8").needs[None].residuals == 4 * 300 * 100
    of_four = tfdist.estimate_memory(make, 4, compression="int8").needs
    assert of_four[None].residuals == 5 * 300 * 100
    assert of_four["optimizer"].residuals == 4 * 300 * 100  # No replica encodes a sum.
    assert tfdist.estimate_memory(make, 4).needs[None].residuals == 0


@pytest.mark.unit
def test_an_estimate_leaves_no_trace():
    keras.utils.clear_session()  # Keras 3.12 keeps its generator of numbers when the seed is set.
    keras.utils.set_random_seed(1)
    expected = keras.random.uniform((3,)).numpy()

    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    tfdist.estimate_memory(small_model, 2)

    assert (keras.random.uniform((3,)).numpy() == expected).all()
    small_model().fit(np.zeros((4, 8)), np.zeros((4, 4)), verbose=0)


@pytest.mark.unit
@pytest.mark.parametrize(("make", "replicas"), [(small_model, 0), (small_model, 1.5), (None, 2), (dict, 2)])
def test_wrong_arguments_are_refused(make, replicas):
    with pytest.raises(ValueError, match="must"):
        tfdist.estimate_memory(make, replicas)


@pytest.mark.parametrize("optimizer", ["adam", "muon", "adafactor", "accumulation", "loss_scale", "average"])
def test_the_estimate_equals_the_memory_of_a_job(optimizer, pools):
    estimate = tfdist.estimate_memory(lambda: checks.compiled(optimizer), replicas=2)

    assert ("parameters" in estimate.needs) == (optimizer != "adafactor")
    for mode in (None, "optimizer"):
        weights, state, accumulated = pools("1x2").run(checks.memory_of, optimizer, mode)[0]
        need = estimate.needs[mode]
        assert (need.weights, need.accumulated_gradients) == (weights, accumulated)
        assert need.optimizer_state == pytest.approx(state, abs=40)  # Adafactor's scalars are no state in the report.


@pytest.mark.unit
@pytest.mark.parametrize(
    ("synchronization", "copies"), [(tfdist.LocalSGD(4), 0), (tfdist.DiLoCo(4), 1), (local_step_checks.STREAMING, 2)]
)
def test_local_steps_keep_copies_of_weights_and_shard_nothing(synchronization, copies):
    needs = tfdist.estimate_memory(local_step_checks.compiled, 2, synchronization=synchronization).needs
    assert list(needs) == [None]
    assert needs[None].local_copies == copies * needs[None].weights


def test_the_estimate_equals_the_memory_of_local_steps(pools):
    synchronization = local_step_checks.STREAMING
    need = tfdist.estimate_memory(local_step_checks.compiled, 2, synchronization=synchronization).needs[None]

    report = pools("1x2").run(local_step_checks.memory_of, "1x2", synchronization)[0]
    assert need.local_copies == report.local_copies == 2 * report.weights
    # Each fragment has scalars of its own.
    assert need.optimizer_state == pytest.approx(report.optimizer_state, abs=40)


@pytest.mark.parametrize("kind", ["mlp", "transformer"])
def test_the_estimate_equals_the_memory_of_a_job_in_groups(kind, pools):
    estimate = tfdist.estimate_memory(lambda: checks.compiled_large(kind), replicas=4, shard_group_size=2)

    for mode in ("optimizer", "parameters"):
        report, need = pools("1x4").run(checks.memory_in_groups, kind, mode, 2)[0], estimate.needs[mode]
        assert (need.weights, need.gradients) == (report.weights, report.gradients)
        assert need.optimizer_state == report.optimizer_state < 0.52 * report.whole_optimizer_state
    assert estimate.needs["parameters"].weights < 0.52 * report.whole_weights


@pytest.mark.parametrize("optimizer", ["adam", "accumulation"])
def test_the_estimate_equals_the_memory_of_a_job_with_a_table(optimizer, pools):
    estimate = tfdist.estimate_memory(lambda: embedding_checks.with_a_table(optimizer), replicas=2)

    for mode, need in estimate.needs.items():
        report = pools("1x2").run(embedding_checks.memory_with_a_table, optimizer, mode)[0]
        assert (need.weights, need.gradients) == (report.weights, report.gradients)
        assert need.optimizer_state == report.optimizer_state
        assert need.accumulated_gradients == report.accumulated_gradients
    assert len(estimate.needs) == 3
    alone = tfdist.estimate_memory(lambda: embedding_checks.with_a_table(optimizer), replicas=1).needs[None]
    assert alone.weights == 4 * (10_001 * 8 + 64 * 128 + 128)


@pytest.mark.unit
@pytest.mark.parametrize("group_size", [None, 2])
@pytest.mark.parametrize("mode", [None, "optimizer", "parameters"])
def test_rows_of_tables_are_divided_among_all_replicas_and_do_not_count_in_exchanges(mode, group_size):
    table, dense = weight(10, 4, is_table=True), weight(100, 100)

    both, alone = (needs_of(ModelShapes(each), 4, group_size)[mode] for each in ((table, dense), (dense,)))

    assert both.weights - alone.weights == 3 * 4 * 4
    assert both.optimizer_state - alone.optimizer_state == 2 * 3 * 4 * 4
    assert both.exchange == alone.exchange


@pytest.mark.unit
def test_groups_divide_the_model_among_their_replicas():
    model = ModelShapes((weight(100, 100), weight(8, 4)))

    grouped, of_two = needs_of(model, 4, group_size=2), needs_of(model, 2)

    for mode in ("optimizer", "parameters"):
        assert grouped[mode] == of_two[mode]
    assert grouped[None] == needs_of(model, 4)[None]


@pytest.mark.unit
def test_groups_sum_encoded_gradients_as_without_sharding():
    model = ModelShapes((weight(100, 100, residual_bytes=40000), weight(8, 4)))

    need, whole = (needs_of(model, 4, group_size=2)[mode] for mode in ("optimizer", None))

    assert need.residuals == whole.residuals
    assert need.exchange == 40000 + 4 * 16
    assert need.optimizer_state == 2 * 4 * (5000 + 16)


@pytest.mark.unit
def test_the_verdict_names_the_groups_that_fit():
    estimate = tfdist.estimate_memory(huge_model, 4)
    of_two, of_four = (estimate.needs_in_groups[size]["optimizer"].total for size in (2, 4))
    assert of_four < of_two < estimate.needs[None].total

    assert estimate.verdict(of_two).endswith("with model_sharding='optimizer', also with shard_group_size=2.")
    assert estimate.verdict(of_four).endswith("with model_sharding='optimizer'.")
    grouped = tfdist.estimate_memory(huge_model, 4, shard_group_size=2)
    assert grouped.needs == estimate.needs_in_groups[2]
    assert grouped.verdict(of_two).endswith("with model_sharding='optimizer' and shard_group_size=2.")
    assert grouped.fitting(of_four - 1) == []
    assert "in groups of 2. It fits with model_sharding='optimizer' and without groups." in grouped.verdict(of_four)
    assert "4 replicas in groups of 2" in str(grouped) and "take more workers" in grouped.verdict(1e9).lower()


@pytest.mark.unit
@pytest.mark.parametrize(
    ("replicas", "size"),
    [(4, 3), (4, 8), (4, 1), (4, True), (4, 2.5), (4, 4.0), (4, np.int64(4)), (1, 1), (1, 2.5)],
)
def test_groups_of_unequal_size_are_refused(replicas, size):
    with pytest.raises(ValueError, match="`shard_group_size` must be an integer of at least 2 that divides"):
        tfdist.estimate_memory(small_model, replicas, shard_group_size=size)


@pytest.mark.unit
def test_one_replica_ignores_the_size_of_groups():
    estimate = tfdist.estimate_memory(small_model, 1, shard_group_size=2)

    assert estimate.shard_group_size is None and list(estimate.needs) == [None]


@pytest.mark.unit
@pytest.mark.parametrize("compression", ["float16", "int8", lambda shape, dtype, path: None])
def test_weights_are_not_divided_with_compression(compression):
    estimate = tfdist.estimate_memory(huge_model, 4, compression=compression)

    assert "parameters" in tfdist.estimate_memory(huge_model, 4).needs
    assert not any("parameters" in needs for needs in (estimate.needs, *estimate.needs_in_groups.values()))


@pytest.mark.unit
def test_a_saved_model_is_described_by_its_file(tmp_path, capsys):
    path = tmp_path / "model.keras"
    small_model().save(path)

    assert cli.main(["estimate", str(path), "--replicas", "2", "--memory", "1MB"]) == 0
    assert cli.main(["estimate", str(path), "--replicas", "2", "--memory", "100B"]) == 1
    assert cli.main(["estimate", str(path), "--replicas", "4", "--shard-group-size", "2"]) == 0
    assert cli.main(["estimate", str(path), "--replicas", "4", "--shard-group-size", "3"]) == 1
    printed = capsys.readouterr().out
    assert "fits into 1 MB without sharding" in printed and "4 replicas in groups of 2" in printed


@pytest.mark.unit
def test_a_function_in_a_file_is_called(tmp_path, capsys):
    script = tmp_path / "described.py"
    script.write_text(
        "import keras\n"
        "def make():\n"
        "    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)])\n"
        "    model.compile('adam', 'mse')\n"
        "    return model\n"
    )

    assert cli.main(["estimate", f"{script}:make", "-n", "2"]) == 0
    assert "optimizer state" in capsys.readouterr().out


@pytest.mark.unit
@pytest.mark.parametrize("source", ["missing.keras", "missing.py:make", "model", "json:nothing"])
def test_a_wrong_source_is_refused(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"MODEL must be|There is no file|has no function"):
        maker_of(source)
    assert cli.main(["estimate", source, "-n", "2"]) == 1


@pytest.mark.unit
def test_a_file_of_something_else_is_refused(tmp_path):
    text, archive = tmp_path / "text.keras", tmp_path / "archive.keras"
    text.write_text("nothing")
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("metadata.json", json.dumps({}))

    for path in (text, archive):
        with pytest.raises(ValueError, match="is no file of"):
            maker_of(str(path))
