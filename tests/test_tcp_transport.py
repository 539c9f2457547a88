"""Exchanges over the TCP transport run concurrently, and errors name the failed worker."""

import dataclasses

import pytest

import tcp_transport_checks as checks
from certificates import Authority
from tfdist.testing import run_workers

EXHAUSTIVE = (checks.a_message_larger_than_one_dimension_can_count_arrives,)  # It takes 2 GiB and half a minute.
WITH_TLS = checks.data_goes_both_ways_whole_or_in_parts_until_a_worker_closes


@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Returns the failure of each scenario, or ""; all run in one worker, which imports TensorFlow once."""
    files = dataclasses.astuple(Authority(tmp_path_factory.mktemp("tls")).worker())
    scenarios = [(each, ()) for each in checks.SCENARIOS if each not in EXHAUSTIVE] + [(WITH_TLS, files)]
    (ended,) = run_workers(checks.run_each, 1, args=(scenarios,), timeout_seconds=300)
    return {scenario: failure for (scenario, _), failure in zip(scenarios, ended, strict=True)}


@pytest.mark.parametrize(
    "scenario", [each for each in checks.SCENARIOS if each not in EXHAUSTIVE], ids=lambda scenario: scenario.__name__
)
def test_transport_scenarios_without_tls(scenario, failures):
    assert failures[scenario] == ""


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", EXHAUSTIVE, ids=lambda scenario: scenario.__name__)
def test_large_transport_scenarios_without_tls(scenario):
    assert run_workers(checks.run_each, 1, args=([(scenario, ())],), timeout_seconds=300) == [[""]]


def test_transport_scenarios_with_tls(failures):
    assert failures[WITH_TLS] == ""
