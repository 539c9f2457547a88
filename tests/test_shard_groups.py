"""Training equals unsharded training if the replicas of a group divide the model, and each group has all of it."""

import re

import numpy as np
import pytest

import embedding_checks
import parameter_checks
import shard_group_checks as checks
import sharding_checks
import tfdist
from launched import nothing_left
from tfdist.errors import WorkerError
from tfdist.launch import cli

GROUPS = {"shard_group_size": 2}
USUAL = {
    "1x4": ["muon"],
    "2x2": ["global_clipnorm"],
    "4x1": [],
}
OPTIMIZERS = [
    "adam",
    "muon",
    "adafactor",
    "lamb",
    "average",
    "accumulation",
    "loss_scale",
    "clipnorm",
    "global_clipnorm",
]
IN_PARTS = ["sgd", "muon", "average", "accumulation", "loss_scale", "clipnorm", "global_clipnorm"]
# The sum of four terms in two pairs rounds in another way than their sum one after another.
TOLERANCE = 1e-5


def cases(names, usual):
    """Returns parameters (placement, name), `exhaustive` unless `usual` has them."""
    return [
        pytest.param(placement, name, marks=() if name in usual.get(placement, ()) else pytest.mark.exhaustive)
        for placement in USUAL
        for name in names
    ]


def assert_close(results, expected, kinds=("losses", "weights", "state"), tolerance=TOLERANCE):
    for result, other in zip(results, expected, strict=True):
        for kind in kinds:
            for mine, theirs in zip(result[kind], other[kind], strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
    for result in results[1:]:  # All workers have the same bits.
        for kind in kinds:
            for mine, theirs in zip(result[kind], results[0][kind], strict=True):
                np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(("placement", "optimizer"), cases(OPTIMIZERS, USUAL))
def test_state_in_groups_gives_the_same_results(placement, optimizer, pools):
    whole = pools(placement).run(sharding_checks.trained, placement, optimizer, None)
    grouped = pools(placement).run(sharding_checks.trained, placement, optimizer, "optimizer", **GROUPS)

    assert_close(grouped, whole)
    if optimizer != "lamb":  # One replica of a group owns each weight.
        assert all(max(result["bytes"]) <= 1.03 * result["whole"] / 2 for result in grouped)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("2x4", {"shard_group_size": 2}),  # Each worker has two groups.
        ("2x4", {"shard_group_size": 4}),
        ("4x1", {"shard_group_size": 2, "transport": "tensorflow"}),
    ],
)
def test_groups_exchange_over_each_transport(placement, options, pools):
    whole = pools(placement).run(sharding_checks.trained, placement, "adam", None)
    grouped = pools(placement).run(sharding_checks.trained, placement, "adam", "optimizer", **options)

    assert_close(grouped, whole)


@pytest.mark.exhaustive
def test_a_second_strategy_has_groups_of_its_own(pools):
    options = {"model_sharding": "optimizer", **GROUPS}
    for first, second in pools("4x1").run(checks.trained_by_a_second_strategy, options):
        assert_close([second], [first], tolerance=0)


@pytest.mark.parametrize(("placement", "optimizer"), cases(IN_PARTS, {"2x2": ["loss_scale"]}))
def test_weights_in_groups_give_the_same_results_with_each_optimizer(placement, optimizer, pools):
    whole = pools(placement).run(parameter_checks.trained_with, placement, optimizer, None)
    grouped = pools(placement).run(parameter_checks.trained_with, placement, optimizer, "parameters", **GROUPS)

    assert_close(grouped, whole)


@pytest.mark.parametrize(
    ("placement", "model"),
    cases(["mlp", "embedding", "run_eagerly", "several_steps"], {"2x2": ["several_steps"]}),
)
def test_weights_in_groups_give_the_same_results_with_each_model(placement, model, pools):
    whole = pools(placement).run(parameter_checks.trained, placement, model, None)
    grouped = pools(placement).run(parameter_checks.trained, placement, model, "parameters", **GROUPS)

    assert_close(grouped, whole, kinds=("losses", "weights", "predicted"))
    assert all(result["divided"] >= 2 for result in grouped)


def test_each_replica_keeps_the_part_of_its_group(pools):
    ((taken, whole, report),) = pools("1x4").run(parameter_checks.reported, "1x4", **GROUPS)

    assert len(taken) == 4 and max(taken) <= 1.03 * whole / 2
    assert report.whole_weights > 1.5 * report.weights


def test_rows_of_embeddings_are_divided_among_all_replicas(pools):
    (alone,) = pools("single").run(embedding_checks.trained, "single", "global_clipnorm")
    options = {"model_sharding": "optimizer", **GROUPS}
    grouped = pools("1x4").run(embedding_checks.trained, "1x4", "global_clipnorm", **options)

    assert_close(grouped, [alone])


@pytest.mark.parametrize("placement", ["1x4", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_encoded_sums_are_those_without_sharding(placement, pools):
    options = {"compression": checks.INT8}
    whole = pools(placement).run(sharding_checks.trained, placement, "adam", None, **options)
    grouped = pools(placement).run(sharding_checks.trained, placement, "adam", "optimizer", **options, **GROUPS)

    assert_close(grouped, whole, tolerance=0)


@pytest.mark.parametrize("placement", ["1x4", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_files_do_not_depend_on_groups(placement, pools, tmp_path):
    options = {"saved_with": "optimizer", "loaded_with": None, **GROUPS}
    ran = pools(placement).run(sharding_checks.round_trip, placement, str(tmp_path), **options)
    loaded, kept = zip(*ran, strict=True)

    assert_close(loaded, kept)


@pytest.mark.parametrize(
    ("placement", "sharding", "group_size", "within", "between"),
    [
        # The devices of a worker are a group: a replica sends its half of the sum to one replica of the other worker.
        ("2x2", "parameters", 2, 0, 1),
        # Without groups a step gathers six times one of the four weights, and sums four.
        pytest.param("2x2", "parameters", None, 0, 1.25, marks=pytest.mark.exhaustive),
        pytest.param("2x2", "optimizer", 2, 0, 1, marks=pytest.mark.exhaustive),
        # Two workers are a group.
        pytest.param("4x1", "optimizer", 2, 1, 0.5, marks=pytest.mark.exhaustive),
        pytest.param("4x1", "parameters", 2, 1.25, 0.5, marks=pytest.mark.exhaustive),
        pytest.param("4x1", "optimizer", None, 0.5, 1, marks=pytest.mark.exhaustive),
    ],
)
def test_only_parts_of_sums_travel_between_groups(placement, sharding, group_size, within, between, pools):
    """A step has few other exchanges over these connections, of some bytes."""
    for worker, sent in pools(placement).run(checks.bytes_of_a_step, placement, sharding, group_size):
        in_group = {peer: count for peer, count in sent.items() if placement == "4x1" and peer // 2 == worker // 2}
        assert sum(in_group.values()) == pytest.approx(within, abs=0.02)
        assert sum(sent.values()) - sum(in_group.values()) == pytest.approx(between, abs=0.02)


@pytest.mark.parametrize("size", [1, 0, True, 2.0, "2"])
def test_sizes_that_are_no_groups_are_refused(size):
    with pytest.raises(ValueError, match="`shard_group_size` must be an integer of at least 2"):
        tfdist.MirroredStrategy(["CPU:0"], model_sharding="optimizer", shard_group_size=size)


def test_groups_without_sharding_are_refused():
    with pytest.raises(ValueError, match="Give model_sharding='optimizer' or 'parameters'"):
        tfdist.MirroredStrategy(["CPU:0"], shard_group_size=2)


def test_one_replica_needs_no_groups():
    assert tfdist.MirroredStrategy(["CPU:0"], model_sharding="optimizer", shard_group_size=2).extended.parts is None


def test_unequal_groups_are_refused(pools):
    with pytest.raises(WorkerError) as error:
        pools("1x4").run(sharding_checks.trained, "1x4", "adam", "optimizer", shard_group_size=3)
    assert "got 3 for 1 worker with 4 devices each. Give one of 2, 4." in str(error.value.__cause__)


FREEZES = """
import keras, numpy as np, tensorflow as tf
import tfdist

strategy = tfdist.MultiWorkerMirroredStrategy(model_sharding="optimizer", shard_group_size=2)
calls = 0

def freeze():
    global calls
    calls += 1
    if worker == 1 and calls == 20:
        time.sleep(0.7)  # Meanwhile the other exchanges of this step end.
        os.kill(os.getpid(), signal.SIGSTOP)
    return np.int32(0)

@tf.custom_gradient
def passed(x):
    def backward(dy):
        with tf.control_dependencies([tf.numpy_function(freeze, [], tf.int32)]):
            return tf.identity(dy)
    return tf.identity(x), backward

class Freezer(keras.layers.Layer):
    def call(self, x):
        return passed(x)

with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), Freezer(), keras.layers.Dense(64)])
    model.compile("adam", "mse", jit_compile=False)
x = np.ones((4096, 64), "float32")
model.fit(x, x, batch_size=64, epochs=4, verbose=0)
"""


@pytest.mark.exhaustive
def test_the_report_of_a_frozen_worker_names_those_of_its_groups_that_waited_for_it(tmp_path, capsys):
    with nothing_left(tmp_path) as run:
        code, _, err = run.finish("--workers", 4, "--log-dir", tmp_path / "logs", run.script(FREEZES))
    assert code != 0, err
    cli.main(["report", str(tmp_path / "logs"), "--no-html"])
    out = capsys.readouterr().out
    missing = re.findall(r"(worker \d.*) was missing from exchange \d+ \(group \d+ of ([^)]*), \d+ bytes", out)
    assert missing and all(who == "worker 1" in members.split(", ") for who, members in missing), out
    held_up = re.findall(r"(worker \d.*) had not begun exchange \d+ .* waiting for (worker .*): worker", out)
    assert all("worker 1" not in who and cause == "worker 1" for who, cause in held_up), out
