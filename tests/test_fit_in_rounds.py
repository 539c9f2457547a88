"""`fit` of worker 0 with `tolerate_lost_workers`, in this process, with a member that is played by a thread."""

import dataclasses
import json
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdist
from tfdist.cluster import ClusterSpec, free_ports
from tfdist.errors import CompiledCollectivesError
from tfdist.strategies.elastic import model_state
from tfdist.strategies.elastic.round_member import RoundMember
from tfdist.strategies.elastic.round_messages import Message
from tfdist.strategies.elastic.round_policy import Contribution

SECONDS = 60.0
EVERY, STEPS, BATCH = 4, 12, 2


class FastMember:
    """Worker 1 of a job of two. It takes part in the rounds of one epoch, and needs almost no time for its steps."""

    def __init__(self, ports):
        self._member = RoundMember(ClusterSpec.local(2, 1, ports), SECONDS, SECONDS)
        self._member.hear("greeting")
        self._member.send(Message("join", {"fit": 0, "is_warm": True}))

    def train(self):
        weights = self._member.hear("state").arrays[:2]
        done = dataclasses.asdict(Contribution(rows=EVERY, steps=EVERY, seconds=1e-9))
        for end in range(EVERY - 1, STEPS, EVERY):
            self._member.send(Message("weights", {"fit": 0, "place": [0, 0, end], "done": done}, weights))
            self._member.hear("weights")
        self._member.send(Message("logs", {"fit": 0, "place": [0, 0, STEPS - 1], "rows": STEPS, "logs": {"loss": 1.0}}))
        self._member.hear("logs")
        self._member.hear("over")

    def close(self):
        self._member.close()


@pytest.fixture
def job(monkeypatch):
    """The strategy of worker 0, which trains fewer steps if it is slower, and worker 1."""
    ports = free_ports(2)
    spec = {"cluster": {"worker": [f"127.0.0.1:{port}" for port in ports]}, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(spec))
    strategy = tfdist.MultiWorkerMirroredStrategy(
        synchronization=tfdist.LocalSGD(every=EVERY, tolerate_lost_workers=True, equal_time=True),
        fault_tolerance=tfdist.FaultTolerance(start_timeout_seconds=SECONDS),  # It waits as long for the member.
    )
    member = FastMember(ports)
    yield strategy, member
    member.close()


def compiled(strategy, kind=keras.Sequential, optimizer="sgd", **options):
    with strategy.scope():
        model = kind([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(optimizer, "mse", **options)
    return model


def fit(model):
    x = np.ones((2 * STEPS * BATCH, 3), "float32")
    return model.fit(x, x[:, :1], batch_size=2 * BATCH, verbose=0, shuffle=False).history


def test_the_learning_rate_follows_its_schedule_in_skipped_steps(job):
    strategy, member = job
    with strategy.scope():
        optimizer = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, STEPS))
    model = compiled(strategy, optimizer=optimizer)
    thread = threading.Thread(target=member.train, daemon=True)
    thread.start()
    fit(model)
    thread.join(SECONDS)
    report = strategy.row_report()
    assert report.trained[0] == BATCH * (EVERY + 1 + 1) and report.skipped[0] == BATCH * 2 * (EVERY - 1)
    assert int(optimizer.iterations.numpy()) == STEPS
    assert float(optimizer.learning_rate) == pytest.approx(0.0, abs=1e-6)


def test_steps_that_xla_compiles_are_refused_since_nobody_counts_their_rows(job):
    with pytest.raises(CompiledCollectivesError, match=r"tolerate_lost_workers needs a report .* jit_compile=False"):
        fit(compiled(job[0], jit_compile=True))


class OwnFunction(keras.Sequential):
    """Makes a train function that runs another function than `train_step`."""

    def make_train_function(self, force=False):
        def step(data):
            return {"loss": tf.reduce_sum(data[0])}

        def function(iterator):
            return self.distribute_strategy.reduce("SUM", self.distribute_strategy.run(step, (next(iterator),)), None)

        self.train_function = function
        return function


def test_a_train_function_without_train_step_is_refused(job):
    with pytest.raises(ValueError, match=r"tolerate_lost_workers needs a report .* runs 'step'"):
        fit(compiled(job[0], OwnFunction))


@pytest.mark.parametrize(
    ("optimizer", "counted"),
    [
        (keras.optimizers.SGD(0.1), [0, 0, 0]),
        (keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9)), [1, 2, 3]),
        (
            keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 9), gradient_accumulation_steps=2)
            ),
            [0, 2, 2],
        ),
    ],
    ids=["constant", "schedule", "accumulation"],
)
def test_schedules_count_skipped_steps_by_whole_groups_of_gradients(optimizer, counted):
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    counter = getattr(optimizer, "inner_optimizer", optimizer)._iterations
    behind, found = 0, []
    for _ in counted:
        behind = model_state.advance_schedule(optimizer, behind + 1)
        found.append(int(counter.numpy()))
    assert found == counted
