"""A batch assignment gives each example once per epoch, in equal global batches for any shares, workers, restarts."""

import functools
import itertools
import threading

import numpy as np
import pytest

from tfdist.data import batch_assignment as handout_module
from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_plan import BatchPlan, split
from tfdist.data.topology import ReplicaTopology
from tfdist.errors import PositionError

LEAD = 4
DEADLINE_SECONDS = 60


def plan_of(n, size, seed, drop_remainder=False):
    @functools.cache
    def whole(epoch):
        return np.random.default_rng([seed, epoch]).permutation(n)

    return BatchPlan(n, size, lambda epoch, positions: whole(epoch)[positions], drop_remainder)


def indices(handout):
    return (part for _, part in handout.batches())


def place_of(own):
    """Returns the topology of a worker with the replicas `own` of two."""
    return ReplicaTopology(2, own, (0, 1), (5, 5))


class Run:
    """Simulates training on several workers. Each has an assignment and reads ahead at random; all get equal reports.

    Args:
      plan: The global batches.
      position: First epoch and step.
      replicas: Number of replicas.
      workers: Number of workers, a divisor of `replicas`.
      rng: Random generator for shares and for how far workers read ahead.
      repeat: Whether one assignment gives several epochs.
    """

    def __init__(self, plan, position, replicas, workers, rng, repeat=False):
        self.plan, self.rng, self.replicas, self.workers = plan, rng, replicas, workers
        self.repeat, self.position = repeat, position
        self.places = rng.permutation(replicas)
        self.shares = split(plan.global_batch_size, [1] * replicas)
        self.at_most = [plan.global_batch_size] * replicas
        self.begin()

    def begin(self):
        devices = self.replicas // self.workers
        owned = [range(worker * devices, (worker + 1) * devices) for worker in range(self.workers)]
        places = [ReplicaTopology(self.replicas, own, tuple(self.places), tuple(self.at_most)) for own in owned]
        self.handouts = [
            BatchAssignment(self.plan, *self.position, self.shares, place, repeat=self.repeat, lead=LEAD)
            for place in places
        ]
        self.readers = [indices(handout) for handout in self.handouts]
        self.read = [[] for _ in range(self.workers)]
        self.trained_here, self.readable = 0, LEAD

    def step(self):
        """Trains on one global batch. Returns (epoch, step), examples in the order of the plan, and rows by replica."""
        if not self.plan_goes_on():
            self.begin()
        for worker in range(self.workers):
            self._read_ahead(worker)
        parts = [part for batches in self.read for part in batches.pop(0)]
        before = self.handouts[0].position
        rows = np.array([len(part) for part in parts])
        new = self._new_shares()
        for handout in self.handouts:
            assert handout.has_trained(rows)
            handout.decide(new if handout.may_change() else handout.latest_shares)
        self.trained_here += 1
        self.readable += 1
        assert len({(handout.position, handout.latest_shares) for handout in self.handouts}) == 1
        self.position, self.shares = self.handouts[0].position, self.handouts[0].latest_shares
        return before, np.concatenate([parts[replica] for replica in np.argsort(self.places)]), tuple(rows)

    def plan_goes_on(self):
        return self.repeat or self.position[1] > 0 or self.trained_here == 0

    def _read_ahead(self, worker):
        devices = self.replicas // self.workers
        behind = self.readable - self.trained_here - len(self.read[worker])
        for _ in range(max(self.rng.integers(behind + 1), not self.read[worker])):
            parts = [part for _, part in zip(range(devices), self.readers[worker], strict=False)]
            if parts:
                self.read[worker].append(parts)

    def _new_shares(self):
        if self.rng.random() < 0.5:
            return self.shares
        return split(self.plan.global_batch_size, self.rng.random(self.replicas) + 0.01, self.at_most)


def unbroken(plan, epochs):
    return [
        ((epoch, step), plan.batch(epoch, step).tolist())
        for epoch in range(epochs)
        for step in range(plan.steps_per_epoch)
    ]


def cases(number):
    rng = np.random.default_rng(0)
    for case in range(number):
        n, workers, devices = int(rng.integers(1, 90)), int(rng.integers(1, 5)), int(rng.integers(1, 4))
        size = int(rng.integers(workers * devices, 40))
        yield case, n, size, workers, devices


@pytest.mark.parametrize("repeat", [False, True])
def test_every_example_once_an_epoch_and_the_global_batches_of_the_plan(repeat):
    changed = 0
    for seed, n, size, workers, devices in cases(120):
        plan = plan_of(n, size, seed)
        run = Run(plan, (0, 0), workers * devices, workers, np.random.default_rng(seed), repeat)

        steps = [run.step() for _ in range(3 * plan.steps_per_epoch)]

        assert [(position, batch.tolist()) for position, batch, _ in steps] == unbroken(plan, 3)
        for epoch in range(3):
            seen = [batch for (of, _), batch, _ in steps if of == epoch]
            np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(n))
        if size <= n:
            assert all(min(rows) > 0 for _, batch, rows in steps if len(batch) == size)
        changed += len({rows for _, _, rows in steps}) > 2
    assert changed > 40, "shares hardly ever changed, so little was tested"


def test_continuing_on_another_number_of_replicas():
    for seed, n, size, _, _ in cases(150):
        size = max(size, 7)
        plan = plan_of(n, size, seed, drop_remainder=seed % 2 == 0 and n >= size)
        rng = np.random.default_rng(seed)
        expected = unbroken(plan, 3)
        got, position = [], (0, 0)
        for workers in (4, 3, 7):
            left = len(expected) - len(got)
            run = Run(plan, position, workers, workers, rng, repeat=seed % 3 == 0)
            for _ in range(left if workers == 7 else rng.integers(left + 1)):
                at, batch, _ = run.step()
                got.append((at, batch.tolist()))
            position = run.position  # Batches that were read ahead but not trained on are read again.

        assert got == expected


def test_a_reader_waits_for_the_decision_or_close():
    plan = plan_of(100, 5, 0)
    handout = BatchAssignment(plan, 0, 0, (2, 3), place_of(range(2)), repeat=False, lead=LEAD)
    got, ended = [], threading.Event()

    def read():
        got.extend(part.tolist() for part in indices(handout))
        ended.set()

    def wait_for(steps):
        for _ in range(int(DEADLINE_SECONDS / 0.01)):
            if len(got) >= 2 * steps:
                return
            ended.wait(0.01)
        raise AssertionError(f"{len(got)} parts of {steps} steps came")

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    wait_for(LEAD)
    assert not ended.wait(0.1) and len(got) == 2 * LEAD, "nobody hands out a step that is not decided"
    assert handout.has_trained(np.array([2, 3]))
    handout.decide((4, 1))
    wait_for(LEAD + 1)
    assert [len(part) for part in got[-2:]] == [4, 1]
    handout.close()
    assert ended.wait(DEADLINE_SECONDS)
    thread.join(DEADLINE_SECONDS)
    assert not handout.finished


def test_a_reader_waits_with_a_deadline_except_during_callbacks_and_validation(monkeypatch):
    monkeypatch.setattr(handout_module, "_SILENT_SECONDS", 0.05)
    other, looks = [True, True, False] * 2 * handout_module._LOOKS, []
    does = itertools.chain(other, itertools.repeat(False))
    monkeypatch.setattr(handout_module.activity, "is_between_steps", lambda: looks.append(next(does)) or looks[-1])
    handout = BatchAssignment(plan_of(100, 5, 0), 0, 0, (2, 3), place_of(range(1)), repeat=False, lead=LEAD)
    steps = handout.batches()
    for _ in range(LEAD):
        next(steps)
        assert not handout.has_trained(np.array([4, 6]))
    with pytest.raises(PositionError, match=rf"{LEAD} steps and got reports of 0, then of {LEAD} .* \(4, 6\)"):
        next(steps)
    assert len(looks) >= len(other)


def test_is_decided_is_known_without_waiting():
    handout = BatchAssignment(plan_of(100, 5, 0), 0, 0, (2, 3), place_of(range(1)), repeat=False, lead=LEAD)
    steps = handout.batches()
    for trained in range(1, 4):
        while handout.is_decided():
            next(steps)
        assert not handout.has_trained(np.array([3, 2])) and not handout.is_decided()
        assert handout.has_trained(np.array([2, 3]))
        handout.decide((2, 3))
        assert handout.is_decided(), f"after {trained} steps"


def test_reports_of_other_rows_are_not_counted():
    handout = BatchAssignment(plan_of(13, 5, 0), 2, 1, (2, 3), place_of(range(1)), repeat=False)

    assert not handout.has_trained(np.array([2, 3])), "nobody has read yet: as many rows of somebody else's batch"
    next(handout.batches())
    assert not handout.has_trained(np.array([3, 2])), "rows of somebody else's batch"
    assert handout.position == (2, 1)
    assert handout.has_trained(np.array([2, 3])) and handout.position == (2, 2)
    assert handout.has_trained(np.array([1, 2])) and handout.position == (3, 0)
    assert not handout.has_trained(np.array([2, 3])), "the epoch is over"
