"""Models of libraries on top of Keras train on several replicas as on one device.

KerasHub is not among the test dependencies, since it brings large packages. Its test runs where it is installed.
tests/test_strategies.py has a model of tf_keras.
"""

import importlib.util

import keras
import numpy as np
import pytest

import model_library_checks as checks

COMPARED = ("weights", "history", "values")


def needs(package):
    return pytest.mark.skipif(
        importlib.util.find_spec(package) is None, reason=f"{package} is not installed; CONTRIBUTING.md has the command"
    )


@pytest.mark.parametrize("placement", [pytest.param("1x2", marks=pytest.mark.exhaustive), "2x1"])
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(checks.keras_hub_classifier, id="KerasHub", marks=needs("keras_hub")),
        pytest.param(checks.keras_tuner_search, id="KerasTuner", marks=needs("keras_tuner")),
        pytest.param(checks.image_backbone, id="an image backbone"),
    ],
)
def test_a_model_of_a_library_equals_one_device(check, placement, pools, tmp_path):
    workers = pools(placement).run(check, placement, str(tmp_path / "workers"))
    (expected,) = pools("single").run(check, "single", str(tmp_path / "single"))

    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"
    for result in workers:
        keras.tree.map_structure(
            assert_close, *({kind: each[kind] for kind in COMPARED} for each in (result, expected))
        )


def assert_close(got, wanted):
    # Some weights, as the biases of keys of an attention, have no gradient but rounding errors.
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
