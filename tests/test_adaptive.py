"""The policy of adaptive training: noise scale, step times, batch size, learning rate; sizes of batches in the data."""

import itertools
import math
import types

import keras
import numpy as np
import pytest

import tfdist
from tfdist.adaptive.batch_choice import by_goodput, by_noise_scale, candidates, goodput
from tfdist.adaptive.batch_controller import LEAST_STEPS, BatchController
from tfdist.adaptive.learning_rate_rules import learning_rate_scale
from tfdist.adaptive.noise_scale import NoiseSample, NoiseScale
from tfdist.adaptive.step_time import StepLine, StepTime
from tfdist.callbacks.measurable_codecs import check_measurable_codecs
from tfdist.data.batch_plan import BatchPlan
from tfdist.data.batch_size_schedule import BatchSizeSchedule
from tfdist.data.example_order import Shuffled
from tfdist.data.iterator_assignments import IteratorAssignments
from tfdist.data.replica_shares import Shares
from tfdist.data.sharding_state import ShardingState
from tfdist.data.topology import ReplicaTopology


def squares(gradients, rows):
    """Returns what replicas report of the gradients of examples, [examples, numbers], in parts of `rows` rows."""
    parts = np.split(gradients, np.cumsum(rows)[:-1])
    weighted = [part.sum(0) / len(gradients) for part in parts]
    return [float((each**2).sum()) for each in weighted], float((sum(weighted) ** 2).sum())


@pytest.mark.parametrize("rows", [(8, 8), (12, 4), (1, 2, 5, 8), (0, 16, 16)])
def test_signal_and_noise_have_no_bias(rows):
    rng = np.random.default_rng(0)
    mean, spread = rng.normal(size=40) / 6, rng.uniform(0.5, 1.5, 40)
    samples = [
        NoiseSample.of(rows, *squares(mean + spread * rng.normal(size=(sum(rows), 40)), rows)) for _ in range(4000)
    ]

    for values, truth in (
        ([each.signal for each in samples], (mean**2).sum()),
        ([each.noise for each in samples], (spread**2).sum()),
    ):
        assert abs(np.mean(values) - truth) < 4 * np.std(values) / math.sqrt(len(values))


def test_batches_without_replacement_tell_of_the_gradient_of_the_data_set():
    rng = np.random.default_rng(0)
    gradients = 0.1 + rng.normal(size=(64, 30))
    samples = []
    for _ in range(500):
        drawn = rng.permutation(64)
        for batch in np.split(gradients[drawn], 2):
            samples.append(NoiseSample.of((24, 8), *squares(batch, (24, 8)), examples=64))

    signals, noises = np.array([(each.signal, each.noise) for each in samples]).T
    assert abs(signals.mean() - (gradients.mean(0) ** 2).sum()) < 4 * signals.std() / math.sqrt(len(signals))
    assert noises.mean() == pytest.approx(gradients.var(0, ddof=1).sum(), rel=0.02)


def test_no_sample_without_two_replicas_with_rows_or_with_broken_gradients():
    assert NoiseSample.of((8,), (1.0,), 1.0) is None
    assert NoiseSample.of((8, 0), (1.0, 0.0), 1.0) is None
    assert NoiseSample.of((4, 4), (math.nan, 1.0), 1.0) is None
    assert NoiseSample.of((4, 4), (1.0, 1.0), math.inf) is None


def test_the_noise_scale_is_the_quotient_of_averages_and_survives_a_restart():
    rng = np.random.default_rng(0)
    noise = NoiseScale()
    assert math.isnan(noise.value) and math.isnan(noise.least)
    for _ in range(3000):
        noise.observe(NoiseSample(rng.normal(2, 3), rng.normal(60, 5)))

    assert noise.value == pytest.approx(30, rel=0.35)
    assert noise.least < noise.value
    restored = NoiseScale.restored(noise.state())
    for each in (noise, restored):
        each.observe(NoiseSample(1.0, 70.0))
    assert restored.state() == noise.state()


def test_without_a_signal_the_noise_scale_is_infinite_and_its_least_value_is_not():
    noise = NoiseScale()
    for signal in (-1.0, 0.5) * 10:
        noise.observe(NoiseSample(signal, 10.0))

    assert noise.value == math.inf and 0 < noise.least < math.inf


def test_a_noise_scale_that_rises_is_followed():
    """The signal falls from 10 to 1 within 100 steps, as it can at the beginning of training."""
    rng, noise = np.random.default_rng(0), NoiseScale()
    for step in range(160):
        signal = 10 ** (1 - min(step / 100, 1))
        noise.observe(NoiseSample(signal * rng.normal(1, 0.3), 50.0))

    assert noise.value == pytest.approx(50, rel=0.25)
    assert 0.8 * noise.value < noise.least < noise.value


def test_a_constant_noise_scale_is_averaged_over_many_steps():
    """The mean of 200 samples with weights that fall exponentially has an error of 3 / sqrt(400)."""
    signals = []
    for seed in range(30):
        rng, noise = np.random.default_rng(seed), NoiseScale()
        for _ in range(600):
            noise.observe(NoiseSample(rng.normal(1, 3), 50.0))
        signals.append(noise.signal)

    assert np.sqrt(np.mean((np.array(signals) - 1) ** 2)) < 1.3 * 3 / math.sqrt(400)


def test_a_line_through_the_times_of_several_sizes():
    times, rng = StepTime(), np.random.default_rng(0)
    assert times.line() is None
    for size in (32, 64, 128):
        for step in range(20):
            pause = 1.0 if step == 7 else 0.0
            times.observe(size, (0.01 + 1e-4 * size) * rng.uniform(0.95, 1.05) + pause, 1e-4 * size)

    for each in (times, StepTime.restored(times.state())):
        assert each.line().fixed == pytest.approx(0.01, rel=0.2)
        assert each.line().per_row == pytest.approx(1e-4, rel=0.2)


def test_with_one_size_the_computation_is_the_part_per_row():
    times = StepTime()
    for _ in range(3):
        times.observe(100, 0.03, 0.02)

    assert times.line() == pytest.approx((0.01, 0.0002))


@pytest.mark.parametrize(("seconds", "expected"), [((0.02, 0.01), "fixed"), ((0.01, 0.05), "per_row")])
def test_neither_part_of_a_step_time_is_negative(seconds, expected):
    times = StepTime()
    for size, each in zip((10, 20), seconds, strict=True):
        for _ in range(5):
            times.observe(size, each, 0.0)

    fixed, per_row = times.line()
    assert min(fixed, per_row) == 0 < getattr(times.line(), expected)


@pytest.mark.parametrize("noise_scale", [50, 400, 3000])
@pytest.mark.parametrize("fixed", [0.002, 0.02])
def test_repeated_decisions_end_near_the_best_size(noise_scale, fixed):
    """The goodput N / (a + b N) / (B + N) is largest at N = sqrt(a B / b)."""
    line, size = StepLine(fixed, 1e-4), 64
    best = math.sqrt(fixed * noise_scale / 1e-4)
    for _ in range(12):
        before = size
        size = by_goodput(size, (8, 4096), 4, line, noise_scale, 64).size
        assert before / 2 <= size <= before * 2

    assert goodput(size, line, noise_scale, 64) >= 0.95 * goodput(best, line, noise_scale, 64)
    assert by_goodput(size, (8, 4096), 4, line, noise_scale, 64) == (size, 0.0)


def test_without_signal_the_throughput_decides():
    assert by_goodput(64, (8, 100), 2, StepLine(0.1, 1e-6), math.inf, 64).size == 100


def test_sizes_stay_within_the_limits_and_leave_each_replica_a_row():
    assert candidates(64, (60, 70), 2) == [60, 64, 70]
    assert candidates(8, (1, 100), 7) == [7, 8, 10, 12, 14, 16]
    assert candidates(3, (2, 100), 8)[0] == 3  # Too few rows for all replicas: stays, or grows.
    assert all(50 <= size <= 200 for size in candidates(100, (1, 10**6), 2))


def test_the_size_follows_the_noise_scale():
    size = 64
    for _ in range(6):
        size = by_noise_scale(size, (16, 4096), 2, 900.0).size
    assert size == pytest.approx(900, rel=0.1)
    assert by_noise_scale(64, (16, 4096), 2, 0.0).size == 32


def test_rules_of_the_learning_rate():
    for rule in ("adascale", "sqrt", "linear", None):
        assert learning_rate_scale(rule, 64, 64, 500.0) == 1
    assert learning_rate_scale("linear", 256, 64, 500.0) == 4
    assert learning_rate_scale("sqrt", 256, 64, 500.0) == 2
    assert learning_rate_scale(None, 256, 64, 500.0) == 1
    assert learning_rate_scale("adascale", 256, 64, 1e9) == pytest.approx(4)
    assert learning_rate_scale("adascale", 256, 64, math.inf) == 4
    assert learning_rate_scale("adascale", 256, 64, 1e-9) == pytest.approx(1)
    assert 1 < learning_rate_scale("adascale", 256, 64, 100.0) < 4


def controller(goal="goodput"):
    made = BatchController((8, 512), 64, 10**6, goal, "sqrt")
    made.begin(2)
    return made


def feed(made, steps, size=64):
    for _ in range(steps):
        made.observe((size // 2, size // 2), (1.0, 1.0), 2.5)
        made.observe_time(size, 0.02, 0.01)


def test_no_decision_before_enough_steps_and_again_after_a_change_of_replicas():
    made = controller()
    feed(made, LEAST_STEPS - 1)
    assert made.decide(64) is None
    feed(made, 1)
    decision = made.decide(64)
    assert (decision.before, decision.replicas) == (64, 2) and "noise scale" in str(decision)
    assert not made.must_decide_anew

    restored = controller()
    restored.restore(made.state())
    restored.begin(3)
    assert restored.decide(64) is None, "the times of 2 replicas do not count for 3"
    feed(restored, LEAST_STEPS)
    assert restored.must_decide_anew
    assert restored.decide(64).replicas == 3
    assert not restored.must_decide_anew


def test_a_restored_controller_decides_alike():
    made = controller("noise_scale")
    feed(made, 40)
    restored = controller("noise_scale")
    restored.restore(made.state())
    restored.begin(2)

    assert restored.decide(64) == made.decide(64)
    assert restored.state() == made.state()


def test_a_schedule_of_sizes_equals_a_list_of_sizes():
    rng = np.random.default_rng(0)
    for _ in range(50):
        schedule, expected = BatchSizeSchedule(5), [5] * 200
        for _ in range(60):
            if rng.random() < 0.3:
                size, steps = int(rng.integers(1, 50)), int(rng.integers(0, 9))
                schedule.change(size, steps)
                expected[steps:] = [size] * (len(expected) - steps)
            assert [schedule.ahead(steps) for steps in range(12)] == expected[:12]
            assert (schedule.present, schedule.latest) == (expected[0], expected[-1])
            schedule.has_trained()
            expected.pop(0)
            copy = BatchSizeSchedule(1)
            copy.restore(schedule.state())
            schedule = copy


class Workers:
    """Simulates `fit` on several workers with one replica each, whose batch size changes."""

    def __init__(self, replicas, examples, repeat, policy="equal", state=None):
        self.plan = BatchPlan(examples, 12, Shuffled(examples, 0))
        source = types.SimpleNamespace(fingerprint=lambda: "", origin=lambda: "")
        self.workers, self.states = [], []
        for worker in range(replicas):
            made = IteratorAssignments(self.plan, Shares(policy, 12), repeat, resizes=True)
            made.place = ReplicaTopology(replicas, range(worker, worker + 1), tuple(range(replicas)), (64,) * replicas)
            made.reports = types.SimpleNamespace(feed=lambda models, feeder, made=made: setattr(made, "feeder", feeder))
            made.shares.settle(made.place)
            self.workers.append(made)
            self.states.append(ShardingState(source, 0, made, {}))
            if state is not None:
                self.states[-1].restore(state)
        self.begin()

    def begin(self):
        self.readers = [worker.start(training=True, models=["model"]).batches() for worker in self.workers]

    def step(self):
        """Trains on one batch. Returns the epoch and the examples of the batch; `None` at the end of an epoch."""
        parts = [next(reader, None) for reader in self.readers]
        if parts[0] is None:
            assert parts == [None] * len(parts)
            self.begin()
            return None
        batch = np.concatenate([part for _, part in parts])
        rows = np.array([len(part) for _, part in parts])
        seconds = 0.01 * rows * np.arange(1, len(rows) + 1)
        times = {"compute_seconds": seconds, "own_seconds": seconds, "input_seconds": [0.0]}
        report = types.SimpleNamespace(rows=rows, is_local=False, **times)
        for worker in self.workers:
            worker.feeder(report)
        return parts[0][0].epoch, batch.tolist()


def sizes_of(step):
    return 4 + 7 * step % 40


@pytest.mark.parametrize("policy", ["equal", "speed"])
@pytest.mark.parametrize("repeat", [False, True])
def test_each_example_once_an_epoch_whatever_the_sizes_workers_and_restarts(repeat, policy):
    """Batches change their size every few steps. A run that is broken off and restored has the same batches."""

    def run(counts, restarts):
        job, batches, counted = Workers(counts[0], 211, repeat, policy), [], itertools.count()
        for step in range(90):
            if step in restarts:
                state = job.states[0].save()
                job = Workers(counts[restarts.index(step) + 1], 211, repeat, policy, state)
            got = job.step()
            if got is None:
                got = job.step()
            batches.append(got)
            if step % 11 == 10:
                size = sizes_of(next(counted))
                assert {worker.resize(size, multiple=1) for worker in job.workers} <= {0, 4}
            assert len({worker.position.place for worker in job.workers}) == 1
        return batches

    unbroken = run([2], [])
    for epoch in range(unbroken[-1][0]):
        seen = sorted(example for of, batch in unbroken if of == epoch for example in batch)
        assert seen == list(range(211))
    assert len({len(batch) for _, batch in unbroken}) > 4
    assert run([2, 3, 1], [12, 51]) == unbroken


def test_a_size_is_in_force_from_the_beginning_of_an_execution_on():
    job = Workers(2, 997, True)
    for _ in range(7):
        job.step()
    left = {worker.resize(20, multiple=8) for worker in job.workers}

    assert left == {9}
    assert [len(job.step()[1]) for _ in range(10)] == [12] * 9 + [20]


@pytest.mark.parametrize("compression", ["powersgd", "topk(0.01)", tfdist.compression.Sign()])
def test_codecs_that_delay_most_of_a_gradient_are_refused(compression):
    variables = [
        keras.Variable(np.zeros(shape, "float32"), name=name) for shape, name in ((3, "bias"), ((200, 200), "kernel"))
    ]
    for chosen in (compression, lambda shape, dtype, path: compression if "kernel" in path else "int8"):
        with pytest.raises(ValueError, match="sends most of the gradient of kernel in later steps"):
            check_measurable_codecs(chosen, variables)
    with pytest.raises(ValueError, match="sends most of a gradient in later steps"):
        check_measurable_codecs(tfdist.compression.Auto(["int8", compression]), variables)
    for allowed in (None, "int8", "auto", lambda shape, dtype, path: None):
        check_measurable_codecs(allowed, variables)
