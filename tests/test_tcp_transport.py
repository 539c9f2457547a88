"""Exchanges over the TCP transport run concurrently, and errors name the failed worker."""

import dataclasses

import pytest

import tcp_transport_checks as checks
from certificates import Authority
from tfdist.testing import run_workers

EXHAUSTIVE = (checks.a_message_larger_than_one_dimension_can_count_arrives,)  # It takes 2 GiB and half a minute.


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, marks=pytest.mark.exhaustive if each in EXHAUSTIVE else ()) for each in checks.SCENARIOS],
    ids=lambda scenario: scenario.__name__,
)
def test_transport_scenarios_without_tls(scenario):
    run_workers(checks.run, 1, args=(scenario,), timeout_seconds=300)


def test_transport_scenarios_with_tls(tmp_path):
    files = dataclasses.astuple(Authority(tmp_path).worker())
    scenario = checks.data_goes_both_ways_whole_or_in_parts_until_a_worker_closes
    run_workers(checks.run, 1, args=(scenario, files), timeout_seconds=300)
