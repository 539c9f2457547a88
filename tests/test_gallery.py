"""Runs the examples of the gallery on small data, each in one way by default: on two workers, or on two devices."""

import pytest

from example_runs import runs


@pytest.fixture
def run(tmp_path):
    with runs(tmp_path) as run:
        yield run
