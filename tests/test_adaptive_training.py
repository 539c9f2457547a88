"""`tfdist.callbacks.AdaptiveBatch` in `fit`: the noise scale, the batch sizes, the learning rate, restarts."""

import shutil
import types

import keras
import numpy as np
import pytest

import adaptive_checks as checks
import tfdist
from tfdist.adaptive.batch_controller import LEAST_STEPS, BatchController, BatchDecision

EXAMPLES = 1797


@pytest.mark.parametrize(("placement", "policy"), [("1x2", [2, 1]), ("2x1", "equal")])
def test_the_noise_scale_agrees_with_many_small_batches(placement, policy, pools):
    for measured, expected in pools(placement).run(checks.noise_in_training_and_of_small_batches, placement, policy):
        assert measured == pytest.approx(expected, rel=0.2)


def test_all_workers_change_the_size_and_the_learning_rate_at_the_same_step(pools):
    """The Audit in `train` checks that each example is trained on once an epoch."""
    workers = pools("2x1").run(checks.train, "2x1", 10)

    assert workers[0] == workers[1]
    result = workers[0]
    assert len(set(result["sizes"])) > 3 and len(result["decisions"]) > 3
    assert sum(result["sizes"]) == 4 * EXAMPLES and result["position"] == (4, 0)
    rates = dict(zip(result["sizes"], result["rates"], strict=True))
    assert rates[max(rates)] > rates[checks.BATCH] == pytest.approx(0.1)


def test_sizes_change_at_epoch_ends_and_epochs_go_on_to_their_end(pools):
    (result,) = pools("1x2").run(checks.train, "1x2", "epoch", optimizer="adam")

    sizes = np.array(result["sizes"])
    ends = np.flatnonzero(np.cumsum(sizes) % EXAMPLES == 0)
    epochs = np.split(sizes, ends[:-1] + 1)
    assert len(epochs) == 4
    assert [len(set(epoch[:-1])) for epoch in epochs] == [1] * 4
    assert [epoch[0] for epoch in epochs[1:]] == [int(size) for size in result["history"]["global_batch_size"][:-1]]
    assert len({epoch[0] for epoch in epochs}) > 1


def test_an_execution_of_several_steps_has_one_size_and_learning_rate(pools):
    arguments = {"epochs": 4, "steps_per_epoch": 32, "steps_per_execution": 4}
    (result,) = pools("1x2").run(checks.train, "1x2", 10, **arguments)

    sizes = np.array(result["sizes"]).reshape(-1, 4)
    whole = [set(four) for four in sizes if (np.cumsum(result["sizes"]) % EXAMPLES).all()]
    assert len(sizes) == len(result["rates"]) == 32
    assert len(result["decisions"]) > 2 and all(len(four) == 1 for four in whole)


def test_a_restart_has_the_bits_of_an_unbroken_run(pools, tmp_path):
    pool = pools("1x2")
    (unbroken,) = pool.run(checks.train, "1x2", 10, str(tmp_path / "unbroken"))
    (first,) = pool.run(checks.train, "1x2", 10, str(tmp_path / "broken"), stop_after=40)
    (second,) = pool.run(checks.train, "1x2", 10, str(tmp_path / "broken"))

    assert first["sizes"][:35] + second["sizes"] == unbroken["sizes"], "the last commit is of step 35"
    assert second["digest"] == unbroken["digest"]
    assert unbroken["decisions"][-len(second["decisions"]) :] == second["decisions"]


def test_a_restart_on_another_number_of_replicas_decides_anew(pools, tmp_path):
    (first,) = pools("1x2").run(checks.train, "1x2", "epoch", str(tmp_path / "first"), stop_after=40)
    shutil.copytree(tmp_path / "first", tmp_path / "second")  # The first process still holds the lock of the folder.
    (second,) = pools("1x3").run(checks.train, "1x3", "epoch", str(tmp_path / "second"))

    assert first["replicas"] == [2] and set(second["replicas"]) == {3}
    assert 4 * EXAMPLES - sum(second["sizes"]) == sum(first["sizes"][:35]), "the last commit is of step 35"
    assert len(second["decisions"]) == 4, "one within the second epoch, and three at the ends of epochs"


def test_unsuitable_optimizers_are_refused(pools):
    (messages,) = pools("1x2").run(checks.refusals)

    assert "LearningRateSchedule" in messages[0]
    assert "gradient_accumulation_steps" in messages[1]


def sharding(**arguments):
    return tfdist.data.BalancedSharding((np.zeros((100, 2)), np.zeros(100)), 16, **arguments)


@pytest.mark.parametrize("sizes", [(20, 50), (2, 15), (0, 32), (8, 101), (8,), 8, "ab"])
def test_a_range_of_batch_sizes_is_checked(sizes):
    with pytest.raises(ValueError, match="batch_size_range must hold"):
        sharding(batch_size_range=sizes)


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="drop_remainder"):
        sharding(batch_size_range=(8, 32), drop_remainder=True)
    with pytest.raises(ValueError, match="this one has none"):
        sharding().resize(8)
    with pytest.raises(ValueError, match="from 8 to 32, got 33"):
        sharding(batch_size_range=(8, 32)).resize(33)
    adaptive = tfdist.callbacks.AdaptiveBatch
    with pytest.raises(ValueError, match="has none"):
        adaptive(sharding())
    for wrong in (
        {"every": 9},
        {"every": "step"},
        {"every": None},
        {"every": 10.5},
        {"goal": "speed"},
        {"learning_rate": 0.1},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            adaptive(sharding(batch_size_range=(8, 32)), **wrong)


class Rates(keras.callbacks.Callback):
    """Records the learning rate of each step."""

    def __init__(self):
        super().__init__()
        self.found = []

    def on_train_batch_end(self, batch, logs=None):
        self.found.append(float(self.model.optimizer.learning_rate))


def test_a_new_optimizer_is_scaled_from_its_first_step_and_the_same_one_only_once():
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    of_examples = sharding(batch_size_range=(8, 64))
    data = strategy.distribute_datasets_from_function(of_examples)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    adaptive = tfdist.callbacks.AdaptiveBatch(of_examples, goal="noise_scale", learning_rate="linear")
    controller = BatchController((8, 64), 16, 100, "noise_scale", "linear")
    for _ in range(LEAST_STEPS - 1):  # One too few for a decision.
        controller.observe((8, 8), (1.0, 1.0), 2.5)
    adaptive.set_model(model)
    adaptive.set_state({"controller": controller.state(), "since": 0, "pending": None, "in_force": 2.0})
    of_examples.resize(32)

    def rate(optimizer):
        rates = Rates()
        with strategy.scope():
            model.compile(optimizer, "mse")
        model.fit(data, verbose=0, callbacks=[adaptive, rates])
        return rates.found

    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.01)
    for _ in range(2):
        assert rate(optimizer) == pytest.approx([0.02] * 4)


@pytest.mark.parametrize(("rate", "is_told"), [(1.0, False), (1.2, True)])
def test_a_changed_learning_rate_is_told_also_if_the_size_stays(rate, is_told, caplog):
    strategy = tfdist.MirroredStrategy(["CPU:0"])
    of_examples = sharding(batch_size_range=(8, 64))
    adaptive = tfdist.callbacks.AdaptiveBatch(of_examples)
    model = types.SimpleNamespace(distribute_strategy=strategy, steps_per_execution=1)
    adaptive.set_model(model)
    decision = BatchDecision(16, 16, rate, 100.0, 0.0, None, 2)
    adaptive._controller = types.SimpleNamespace(decide=lambda size: decision)
    with caplog.at_level("WARNING", logger="absl"):
        adaptive._decide()
    assert bool(caplog.records) == is_told
