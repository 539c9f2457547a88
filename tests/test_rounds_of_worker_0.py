"""Worker 0 trains in this process by rounds, and the test answers as a lost worker that has started again."""

import json

import keras
import numpy as np
import pytest

import tfdist
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.strategies.elastic.round_member import RoundMember
from tfdist.strategies.elastic.round_messages import Message

SECONDS = 120.0
ROWS = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


class WorkerZero:
    """The strategy of worker 0 in a cluster of two, and connections of worker 1 to it."""

    def __init__(self, ports):
        self.spec, self.members = ClusterSpec.local(2, 1, ports), []
        self.strategy = tfdist.MultiWorkerMirroredStrategy(
            synchronization=tfdist.LocalSGD(every=2, tolerate_lost_workers=True)
        )

    def model(self):
        with self.strategy.scope():
            return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])

    def compile(self, model, optimizer):
        with self.strategy.scope():
            model.compile(optimizer(0.1), "mse")

    def fit(self, model, *callbacks, **options):
        model.fit(*ROWS, batch_size=4, shuffle=False, verbose=0, callbacks=list(callbacks), **options)

    def joining(self, fit):
        member = RoundMember(self.spec, SECONDS, SECONDS)
        self.members.append(member)
        member.hear("greeting")
        member.send(Message("join", {"fit": fit, "is_warm": False}))
        return member


@pytest.fixture
def zero(monkeypatch):
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": addresses}, "task": task}))
    made = WorkerZero(ports)
    yield made
    for member in made.members:
        member.close()


class AtBatch(keras.callbacks.Callback):
    """Calls a function when the first batch has ended."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self._function()


def test_a_worker_that_comes_back_gets_the_weights_of_the_end_of_an_earlier_fit(zero):
    model = zero.model()
    model.layers[0].trainable = False
    zero.compile(model, keras.optimizers.SGD)
    lost = zero.joining(0)
    zero.fit(model, AtBatch(lost.close))
    ends = model.get_weights()
    heard = []

    model.layers[0].trainable = True
    zero.compile(model, keras.optimizers.Adam)  # Its variables have other shapes.
    zero.fit(model, AtBatch(lambda: heard.append(zero.joining(0).hear("over", fit=0))))

    assert (heard[0].fields["fit"], heard[0].fields["has_optimizer"]) == (0, False)
    assert len(heard[0].arrays) == len(ends)
    for array, end in zip(heard[0].arrays, ends, strict=True):
        np.testing.assert_array_equal(array, end)


def test_a_fit_without_an_epoch_ends_for_members(zero):
    model = zero.model()
    zero.compile(model, keras.optimizers.SGD)
    member = zero.joining(0)
    zero.fit(model, epochs=2, initial_epoch=2)
    assert member.hear("over", fit=0).fields["fit"] == 0


class Skips(keras.callbacks.Callback):
    """Lets Keras begin after the last epoch, as a backup of the end of this `fit` does."""

    def on_train_begin(self, logs=None):
        self.model._initial_epoch = 1


def test_a_fit_that_a_backup_has_done_ends_for_members(zero, tmp_path):
    model = zero.model()
    zero.compile(model, keras.optimizers.SGD)
    member = zero.joining(0)
    zero.fit(model, tfdist.callbacks.BackupAndRestore(tmp_path), Skips(), epochs=1)
    assert member.hear("over", fit=0).fields["fit"] == 0


def test_a_second_strategy_is_refused(zero):
    with pytest.raises(ValueError, match="one strategy"):
        tfdist.MultiWorkerMirroredStrategy(synchronization=zero.strategy.synchronization)
