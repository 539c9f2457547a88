"""Training with sharded optimizer state equals training without, in the memory of its share."""

import itertools

import keras
import numpy as np
import pytest

import sharding_checks as checks
import tfdist
from tfdist.errors import WorkerError

USUAL = ["adam", "muon", "adafactor", "loss_scale"]


def placements(names, always):
    """Returns parameters (placement, name): `always` has one placement of two replicas; all others are `exhaustive`."""
    usual = {name: ["1x2", "2x1"][i % 2] for i, name in enumerate(always)}
    return [
        pytest.param(place, name, marks=_marks(name) + [pytest.mark.exhaustive] * (usual.get(name) != place))
        for name in names
        for place in ["1x2", "2x1", "2x2"]
    ]


def _marks(optimizer):
    is_refused = optimizer == "muon" and keras.__version__.startswith("3.12.")
    return [pytest.mark.skip(reason="unsharded, strategies refuse Muon of Keras 3.12")] if is_refused else []


def assert_close(result, expected, tolerance):
    for kind in ("losses", "weights", "state"):
        for own, other in zip(result[kind], expected[kind], strict=True):
            np.testing.assert_allclose(own, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("placement", "optimizer"),
    placements(checks.OPTIMIZERS, USUAL),
)
def test_sharded_state_gives_the_same_bits(placement, optimizer, pools):
    whole = pools(placement).run(checks.trained, placement, optimizer, None)
    sharded = pools(placement).run(checks.trained, placement, optimizer, "optimizer")

    for result, expected in zip(sharded, whole, strict=True):
        assert_close(result, expected, tolerance=1e-6 if placement == "2x2" else 0)
        assert result["whole"] and not expected["whole"]


@pytest.mark.parametrize(("placement", "optimizer"), placements(checks.ROUNDED, ["rmsprop", "global_clipnorm"]))
def test_sharded_state_gives_the_same_results(placement, optimizer, pools):
    whole = pools(placement).run(checks.trained, placement, optimizer, None)
    sharded = pools(placement).run(checks.trained, placement, optimizer, "optimizer")

    for result, expected in zip(sharded, whole, strict=True):
        assert_close(result, expected, tolerance=1e-5)


def test_names_of_weights_do_not_make_them_averages(pools):
    whole, sharded = (
        pools("1x2").run(checks.trained_with_the_name_of_an_average, mode)[0] for mode in (None, "optimizer")
    )
    assert_close(sharded, whole, tolerance=0)


def test_new_weights_leave_while_other_gradients_are_summed(pools):
    waits = pools("1x2").run(checks.sums_before_gathers)[0]
    assert len(waits) > 2 and set(waits) == {1}  # Each bucket waits for its own gradients only.


def test_each_replica_keeps_its_share(pools):
    result = pools("1x2").run(checks.trained, "1x2", "adam", "optimizer")[0]

    assert max(result["bytes"]) <= 1.03 * result["whole"] / 2


@pytest.mark.parametrize(
    ("saved_with", "loaded_with"),
    [
        ("optimizer", None),
        (None, "optimizer"),
        pytest.param("optimizer", "optimizer", marks=pytest.mark.exhaustive),
        pytest.param(None, None, marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_files_do_not_depend_on_sharding(placement, saved_with, loaded_with, pools, tmp_path):
    for result, expected in pools(placement).run(checks.round_trip, placement, str(tmp_path), saved_with, loaded_with):
        assert_close(result, expected, tolerance=0)


@pytest.mark.exhaustive
@pytest.mark.parametrize("optimizer", ["adam", "muon", "adafactor"])
@pytest.mark.parametrize("few", ["single", "2x1", "3x1"])
@pytest.mark.parametrize("many", ["1x4", "4x1"])
def test_files_of_four_replicas_load_on_fewer_and_back(many, few, optimizer, pools, tmp_path):
    sharded, whole = str(tmp_path / "sharded.keras"), str(tmp_path / "whole.keras")
    by_four = pools(many).run(checks.saved, many, sharded, "optimizer", optimizer)[0]
    by_few = pools(few).run(checks.saved, few, whole, None, optimizer)[0]
    for path, saved, place, mode in [(sharded, by_four, few, None), (whole, by_few, many, "optimizer")]:
        for weights, state, losses in pools(place).run(checks.loaded, place, path, mode):
            for own, other in zip([*weights, *state], [*saved[0], *saved[1]], strict=True):
                np.testing.assert_array_equal(own, other)
            assert np.all(np.isfinite(losses))


# Parts are equal but for padding. The models are large enough that it is small, as in models that need sharding.
@pytest.mark.parametrize(
    ("optimizer", "model"),
    [
        pytest.param(
            *case, marks=() if case in (("adafactor", "cnn"), ("muon", "transformer")) else pytest.mark.exhaustive
        )
        for case in itertools.product(
            ["adam", "adamw", "sgd", "adafactor", "muon", "lion"], ["mlp", "cnn", "transformer"]
        )
    ],
)
def test_four_replicas_keep_a_quarter_of_the_state_each(optimizer, model, pools):
    sharded, whole = pools("1x4").run(checks.bytes_of_state, "1x4", optimizer, model)[0]
    assert sharded <= 1.03 * whole / 4


@pytest.mark.parametrize("whole", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_model_checkpoint_saves_state_of_all_workers(whole, pools, tmp_path):
    for result, loaded in pools("2x1").run(checks.saved_by_callback, "2x1", str(tmp_path), whole):
        assert_close(loaded, result, tolerance=0)


@pytest.mark.parametrize("placement", ["1x2", pytest.param("2x1", marks=pytest.mark.exhaustive)])
def test_memory_report_counts_parts(placement, pools):
    for _, state, report, parameters in pools(placement).run(checks.report, placement, "optimizer"):
        assert 4 * parameters * 0.9 <= state <= 4 * parameters * 1.1  # Two states for each weight, half of each.
        assert report.whole_optimizer_state > 1.8 * report.optimizer_state
        assert "optimizer state" in str(report)


def test_reads_outside_of_steps_are_whole(pools):
    assert all(pools("1x2").run(checks.read_outside)[0])


def test_apply_without_a_view_is_refused(pools):
    with pytest.raises(WorkerError) as error:
        pools("1x2").run(checks.plain_apply, "1x2")
    assert "strategy.distributed_optimizer(optimizer)" in str(error.value.__cause__)


@pytest.mark.exhaustive
def test_state_of_unknown_weights_is_refused(pools):
    with pytest.raises(WorkerError) as error:
        pools("1x2").run(checks.hidden_state)
    assert "it is not known for which weight" in str(error.value.__cause__)


def test_unknown_modes_are_refused():
    with pytest.raises(
        ValueError, match="`model_sharding` must be one of None, 'optimizer', 'parameters', got 'weights'"
    ):
        tfdist.MirroredStrategy(["CPU:0"], model_sharding="weights")


@pytest.mark.skipif(not keras.__version__.startswith("3.12."), reason="only Muon of Keras 3.12 needs paths")
def test_muon_that_needs_paths_is_refused(pools):
    with pytest.raises(WorkerError, match=r"Install Keras 3\.13 or newer, or pass model_sharding='optimizer'"):
        pools("1x2").run(checks.trained, "1x2", "muon", None)
