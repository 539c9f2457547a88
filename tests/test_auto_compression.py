"""Training with `compression="auto"`: workers choose alike, and keep their choice."""

import numpy as np
import pytest

import auto_checks as checks
import tfdist
from auto_checks import FAST_LINK, SLOW_LINK
from tfdist.strategies.codec_trials import TrialOrder
from tfdist.strategies.compression_state import _ChoiceLog


def assert_agree(workers):
    assert all(result["replicas_agree"] for result in workers)
    assert len({result["digest"] for result in workers}) == 1
    assert all(result["choices"] == workers[0]["choices"] for result in workers)


MORE = [
    ("1x2", "accumulation"),
    ("1x2", "steps_per_execution"),
    ("1x2", "eager"),
    ("1x2", "mixed_float16"),
    ("1x3", "plain"),
    ("3x1", "plain"),
    ("2x2", "plain"),
]


@pytest.mark.parametrize(
    ("placement", "mode"), [("2x1", "plain"), *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in MORE)]
)
def test_workers_choose_a_codec_on_a_slow_link_at_the_same_step(placement, mode, pools):
    workers = pools(placement).run(checks.train, placement, SLOW_LINK, mode)
    assert_agree(workers)
    choices = workers[0]["choices"]
    assert choices[0] == ([None], False)
    assert choices[-1] == (["int8"], True)
    assert workers[0]["sent_bytes"] < workers[0]["raw_bytes"]
    losses = workers[0]["history"]["loss"]
    assert losses[-1] < losses[0]


def test_workers_stay_uncompressed_on_a_fast_link(pools):
    workers = pools("2x1").run(checks.train, "2x1", FAST_LINK, epochs=12)
    assert_agree(workers)
    assert workers[0]["choices"][-1] == ([None], True)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x2", marks=pytest.mark.exhaustive)])
def test_a_sharded_optimizer_gets_encoded_gradients(placement, pools):
    workers = pools(placement).run(checks.train, placement, SLOW_LINK, model_sharding="optimizer")
    assert workers[0]["choices"][-1] == (["int8"], True)
    assert all(np.isfinite(weight).all() for weight in workers[0]["weights"])


@pytest.mark.parametrize("placement", ["2x1", pytest.param("1x2", marks=pytest.mark.exhaustive)])
def test_a_checkpoint_keeps_the_choice_and_all_bits(placement, pools, tmp_path):
    for (unbroken, choices), (resumed, again) in pools(placement).run(
        checks.unbroken_and_resumed, placement, str(tmp_path)
    ):
        assert choices == again == [(["int8"], True)] * 10
        for one, other in zip(unbroken, resumed, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_backup_keeps_the_choice(pools, tmp_path):
    [(first, later)] = pools("1x2").run(checks.backed_up, "1x2", str(tmp_path))
    assert first[-1] == (["int8"], True)
    assert later == first + [(["int8"], True)] * 10  # The backup has the notes of the callback too.


def test_after_a_backup_of_other_allowed_codecs_trials_begin_anew(pools, tmp_path):
    then = tfdist.compression.Auto([tfdist.compression.Int8(min_elements=20, block_size=16)])
    [(first, later)] = pools("1x2").run(checks.backed_up, "1x2", str(tmp_path), then)
    assert first[-1] == (["int8"], True)
    assert later[len(first)] == ([None], False)


def test_a_commit_has_each_codec_state_once_under_loss_scaling(pools):
    [names] = pools("1x2").run(checks.names_in_a_commit, "1x2")
    assert len([name for name in names if name.endswith("/chosen/0")]) == 1, names


@pytest.mark.parametrize(("value", "changes"), [(1.0, True), (float("nan"), False)])
def test_residuals_stay_if_a_gradient_that_is_not_encoded_is_not_finite(value, changes, pools):
    [(before, after)] = pools("1x2").run(checks.residuals_beside_a_gradient, "1x2", value)
    assert before.any()
    assert (before != after).any() == changes


def test_an_exchange_keeps_no_gradients(pools):
    assert pools("1x2").run(checks.frees_gradients, "1x2") == [(True, [True])]


def test_a_loop_of_the_user_changes_codecs_without_another_trace(pools):
    [(traces, names, value)] = pools("1x2").run(checks.train_in_a_loop, "1x2")
    assert traces == 1
    assert names == ["int8"]
    np.testing.assert_allclose(value, 1 - 40 * 2 * 0.1, rtol=1e-2)


def test_one_replica_measures_nothing():
    strategy = tfdist.MirroredStrategy(["CPU:0"], compression="auto")
    assert strategy.communication.choices() == []


@pytest.mark.unit
def test_only_changes_of_the_choice_are_warnings(caplog):
    told = _ChoiceLog()
    with caplog.at_level("INFO", logger="absl"):
        for choice in [(0, 0), (1, 0), (1, 0), (0, 0)]:
            told("some codecs", TrialOrder(choice, True, "a reason"))
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING", "INFO", "WARNING"]
    assert caplog.messages[0] == "compression='auto' uses some codecs: a reason."
