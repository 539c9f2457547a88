"""Workers that exchange in groups train as all workers do, over few connections, with equal bits on all workers."""

import numpy as np
import pytest

import exchange_group_checks as checks
import tfdist
from tfdist.errors import WorkerError
from tfdist.testing import run_workers


@pytest.fixture(scope="module")
def results():
    return run_workers(checks.trained_with_and_without_groups, 4, args=(2,), timeout_seconds=400)


def test_groups_train_alike_on_all_workers_and_in_each_run(results):
    expected = results[0][1]
    for _, own in results:
        for name, (weights, _, _) in own.items():
            for mine, first in zip(weights, expected[name][0], strict=True):
                np.testing.assert_array_equal(mine, first)
        for mine, again in zip(own["grouped"][0], own["again"][0], strict=True):
            np.testing.assert_array_equal(mine, again)


@pytest.mark.parametrize("codec", ["", " int8"])
def test_groups_give_the_sums_of_one_level_but_for_rounding(results, codec):
    own = results[0][1]
    for mine, whole in zip(own[f"grouped{codec}"][0], own[f"one level{codec}"][0], strict=True):
        np.testing.assert_allclose(mine, whole, rtol=1e-4, atol=1e-5)


def test_workers_send_to_their_group_and_to_one_worker_of_the_other_only(results):
    """A step has few other exchanges, of some bytes."""
    for worker, own in results:
        same_group, same_place = worker ^ 1, worker ^ 2
        sent = own["grouped"][1]
        assert sent.keys() == {same_group, same_place}
        assert sent[same_group] == pytest.approx(1, abs=0.02)  # Half of the gradients, and then half of the sums.
        assert sent[same_place] == pytest.approx(0.5, abs=0.02)  # The sum of the group, of half of the gradients.
        assert own["one level"][1].keys() == {0, 1, 2, 3} - {worker}
        assert sum(own["one level"][1].values()) == pytest.approx(1.5, abs=0.02)


@pytest.mark.parametrize("codec", ["grouped int8", "grouped powersgd", "one level int8"])
def test_traffic_counts_the_bytes_on_the_connections(results, codec):
    for _, own in results:
        _, sent, counted = own[codec]
        assert counted == pytest.approx(sum(sent.values()), abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "tensorflow"}, "transport='tensorflow' does not use them"),
        ({"model_sharding": "optimizer"}, "`shard_group_size` makes groups"),
    ],
)
def test_options_that_exclude_groups_are_refused(options, message, pools):
    with pytest.raises(WorkerError) as error:
        pools("4x1").run(checks.made_with, {"exchange_group_size": 2, **options})
    assert message in str(error.value.__cause__)


def test_one_worker_needs_no_groups():
    with pytest.raises(ValueError, match="`exchange_group_size` must be"):
        tfdist.MultiWorkerMirroredStrategy(exchange_group_size=0)
