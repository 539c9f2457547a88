"""Every Keras feature on several replicas gives what one device gives, and all replicas the same bits."""

import numpy as np
import pytest

from keras_features import ROWS, run_row


@pytest.fixture(scope="session")
def results(pools, tmp_path_factory):
    """`results(name, placement)` gives what each worker computed; a row runs once in a placement."""
    known = {}

    def run(name, placement):
        key = (name, placement)
        if key not in known:
            known[key] = pools(placement).run(run_row, name, placement, str(tmp_path_factory.mktemp(name)))
        return known[key]

    return run


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("placement", ["1x2", "2x1", "2x2"])
def test_replicas_equal_one_device(name, placement, results):
    workers = results(name, placement)

    assert all(result["replicas_agree"] for result in workers), "devices of a worker differ"
    assert len({result["digest"] for result in workers}) == 1, "workers differ"
    for result in workers[1:]:
        assert_same(result, workers[0], tolerance=0)
    if not ROWS[name].exempt:
        assert_same(workers[0], results(name, "single")[0], ROWS[name].tolerance)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.same_bits])
def test_two_workers_and_two_devices_give_the_same_bits(name, results):
    two_workers, two_devices = results(name, "2x1")[0], results(name, "1x2")[0]

    assert two_workers["digest"] == two_devices["digest"]
    assert_same(two_workers, two_devices, tolerance=0)


def assert_same(result, expected, tolerance):
    for kind in ("history", "values"):
        assert result[kind].keys() == expected[kind].keys()
    pairs = [(f"weight {i}", *pair) for i, pair in enumerate(zip(result["weights"], expected["weights"], strict=True))]
    for kind in ("history", "values"):
        pairs += [(f"{kind} {name}", value, expected[kind][name]) for name, value in result[kind].items()]
    for what, got, wanted in pairs:
        assert np.all(np.isfinite(got)), f"{what} is not finite"
        scale = np.max(np.abs(wanted), initial=0)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance * scale, err_msg=what)
