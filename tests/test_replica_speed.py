"""Shares follow measured speeds, in simulated steps that take alpha + beta * rows seconds per replica, plus noise."""

import itertools
import json
import types

import numpy as np
import pytest

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_plan import BatchPlan, split
from tfdist.data.example_order import Unshuffled
from tfdist.data.replica_shares import Shares
from tfdist.data.replica_speed import SpeedModel
from tfdist.data.topology import ReplicaTopology

ROWS, LEAD = 256, 4
SOON = 20  # Steps after a start or a change until shares must fit the speeds.
CLOSE = 1.10  # Largest time of a step relative to the ideal.


def run(alpha, betas_of, steps, noise=0.0, outliers=0.0, seed=0, model=None, start=None, rows=ROWS):
    """Simulates training with `BalancedSharding`. Returns the shares and relative times (slowest / ideal) of steps."""
    rng, alpha = np.random.default_rng(seed), np.asarray(alpha, float)
    model, replicas = model or SpeedModel(len(alpha)), len(alpha)
    shares, at_most = start or split(rows, [1] * replicas), [rows] * replicas
    plan = BatchPlan(rows * steps, rows, Unshuffled())
    place = ReplicaTopology(replicas, range(replicas), tuple(range(replicas)), tuple(at_most))
    handout = BatchAssignment(plan, 0, 0, shares, place, repeat=False, lead=LEAD)
    batches = handout.batches()
    taken, slower = [], []
    for step in range(steps):
        shares = tuple(len(next(batches)[1]) for _ in range(replicas))
        beta = np.asarray(betas_of(step), float)
        exact = alpha + beta * shares
        seconds = exact * np.clip(1 + noise * rng.normal(size=replicas), 0.5, None)
        seconds *= np.where(rng.random(replicas) < outliers, 5, 1)
        assert handout.has_trained(np.array(shares))
        model.observe(shares, seconds)
        handout.decide(
            model.proposal(handout.latest_shares, at_most) if handout.may_change() else handout.latest_shares
        )
        taken.append(shares)
        slower.append(exact.max() / ideal_seconds(rows, alpha, beta))
    return taken, np.array(slower)


def ideal_seconds(rows, alpha, beta):
    """Returns the time T for which the sum of (T - alpha) / beta over replicas is `rows`."""
    return (rows + np.sum(alpha / beta)) / np.sum(1 / beta)


def changes(taken):
    return sum(before != after for before, after in itertools.pairwise(taken))


UNEQUAL = (1e-3, 2e-3, 4e-3)


@pytest.mark.parametrize("alpha", [0.0, 0.02, 0.05])
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.1])
@pytest.mark.parametrize("seed", range(4))
def test_unequal_replicas_come_within_a_tenth_of_the_ideal_in_twenty_steps(alpha, noise, seed):
    taken, slower = run([alpha] * 3, lambda step: UNEQUAL, 100, noise, seed=seed)

    assert slower[0] > 1.5, "equal shares are bad"
    assert np.median(slower[SOON : SOON + 10]) < CLOSE
    assert np.mean(slower[SOON:]) < CLOSE
    assert len(set(taken)) <= 8


@pytest.mark.parametrize("alpha", [0.0, 0.02])
@pytest.mark.parametrize("after", [(4e-3, 1e-3, 2e-3), (1e-3, 1e-3, 1e-3), (1e-3, 2e-3, 1.5e-3)])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_is_followed_within_twenty_steps(alpha, after, seed):
    _, slower = run([alpha] * 3, lambda step: UNEQUAL if step < 60 else after, 120, 0.05, seed=seed)

    assert np.median(slower[60 + SOON : 60 + SOON + 10]) < CLOSE
    assert np.mean(slower[60 + SOON :]) < CLOSE


@pytest.mark.parametrize("seed", range(3))
def test_single_outliers_do_not_change_shares(seed):
    taken, slower = run([0.01] * 3, lambda step: UNEQUAL, 200, 0.03, outliers=0.03, seed=seed)

    assert np.mean(slower[SOON:]) < CLOSE
    assert changes(taken[40:]) <= 3


@pytest.mark.parametrize("replicas", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("alpha", [0.0, 0.02])
def test_equal_replicas_do_not_oscillate(replicas, noise, alpha):
    taken, slower = run([alpha] * replicas, lambda step: [1e-3] * replicas, 300, noise, outliers=0.01, seed=replicas)

    assert changes(taken) <= 3
    assert np.mean(slower) < 1.05


def test_a_replica_keeps_one_row_and_none_more_than_its_limit():
    model = SpeedModel(3)
    for _ in range(10):
        model.observe((10, 10, 12), (0.001, 0.01, 100.0))

    assert min(model.proposal((10, 10, 12), [32] * 3)) == 1
    assert model.proposal((10, 10, 12), [12, 32, 32])[0] == 12
    assert sum(model.proposal((10, 10, 12), [12, 32, 32])) == 32


def test_replicas_without_rows_or_unknown_keep_the_shares():
    model = SpeedModel(2)
    assert model.proposal((3, 5), [8, 8]) == (3, 5)
    for _ in range(10):
        model.observe((8, 0), (1.0, 0.5))
    assert model.proposal((3, 5), [8, 8]) == (3, 5), "nothing is known of the second"


@pytest.mark.parametrize("seed", range(5))
def test_a_restored_model_makes_the_same_decisions(seed):
    model = SpeedModel(3)
    taken, _ = run([0.02] * 3, lambda step: UNEQUAL, 30, 0.05, seed=seed, model=model)
    state = json.loads(json.dumps(model.state()))
    restored, twin = SpeedModel.restored(state), SpeedModel.restored(state)

    np.testing.assert_allclose(restored.coefficients(), model.coefficients(), rtol=0.02, atol=1e-4)
    proposals = [each.proposal(split(ROWS, [1, 1, 1]), [ROWS] * 3) for each in (model, restored, twin)]
    assert proposals[1] == proposals[2]
    np.testing.assert_allclose(proposals[0], proposals[1], atol=2)
    later = [
        run([0.02] * 3, lambda step: UNEQUAL, 40, 0.05, seed=9, model=each, start=taken[-1])[0]
        for each in (restored, twin)
    ]
    assert later[0] == later[1]


def test_first_steps_after_a_restart_do_not_change_shares():
    model = SpeedModel(3)
    taken, _ = run([0.0] * 3, lambda step: UNEQUAL, 40, model=model)
    restored = SpeedModel.restored(model.state())
    for _ in range(2):
        restored.observe(taken[-1], (3.0, 0.2, 0.2))

    assert restored.proposal(taken[-1], [ROWS] * 3) == taken[-1]


@pytest.mark.parametrize("steps_per_epoch", [3, 5])
def test_pauses_between_short_epochs_are_ignored(steps_per_epoch):
    """Replicas take 0.05 s before each step, but 1 s before the first of an epoch. The last batch is short."""
    place = ReplicaTopology(2, range(2), (0, 1), (ROWS, ROWS))
    shares, epochs = Shares("speed", ROWS), 12
    shares.settle(place)
    short = ROWS // 8
    for _ in range(epochs):
        plan = BatchPlan((steps_per_epoch - 1) * ROWS + short, ROWS, Unshuffled())
        handout = BatchAssignment(plan, 0, 0, shares.present, place, repeat=False, lead=LEAD)
        batches = handout.batches()
        for step in range(steps_per_epoch):
            rows = np.array([len(next(batches)[1]) for _ in range(2)])
            assert handout.has_trained(rows)
            compute = np.array([1e-3, 2e-3]) * rows
            report = types.SimpleNamespace(
                rows=rows, compute_seconds=compute, own_seconds=compute + (0.05 if step else 1.0)
            )
            shares.learn(handout, report, is_first=step == 0)

    fast, slow = shares.present
    assert 1.5 < fast / slow < 2.5
