"""`benchmarks.local_steps`: its links, options and figures."""

import pathlib
import sys

import pytest
from absl import app
from absl.testing import flagsaver

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT))  # Benchmarks are not installed. Appended last, since the root also has a folder `data`.

from benchmarks import local_steps  # noqa: E402
from benchmarks.peers.messages import Answer  # noqa: E402

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("name", "expected"), [("10mbit", ("10mbit", 0)), ("100mbit+50ms", ("100mbit", 0.05)), ("none", ("none", 0))]
)
def test_a_link_has_a_rate_and_a_delay(name, expected):
    assert local_steps.link_of(name) == expected


@pytest.mark.parametrize("name", ["fast", "10mbit+1s", "10mbit+", ""])
def test_unknown_links_are_refused(name):
    with pytest.raises(app.UsageError, match="--links takes rates"):
        local_steps.link_of(name)


def test_links_of_one_delay_share_their_workers():
    links = ["none", "100mbit+50ms", "10mbit", "10mbit+50ms", "10mbit+9ms"]
    expected = [["none", "10mbit"], ["100mbit+50ms", "10mbit+50ms"], ["10mbit+9ms"]]
    assert local_steps.of_one_delay(links) == expected


def test_only_streaming_overlaps():
    local_steps.FLAGS.mark_as_parsed()
    with flagsaver.flagsaver(every=100, fragments=4, overlap_steps=20, codec="int8"):
        assert local_steps.options_of("blocking") == {"every": 100, "compression": "int8"}
        overlaps = {"every": 100, "fragments": 4, "overlap_steps": 20, "compression": "int8"}
        assert local_steps.options_of("streaming") == overlaps


def test_figures_are_those_of_the_slowest_worker_and_the_busiest_interface():
    answers = [
        Answer([0.0, 1.0, 2.0], 1_000_000, 0, processor_seconds=1.0),
        Answer([0.5, 1.0, 4.5], 0, 2_000_000, processor_seconds=3.0),
    ]
    row = local_steps.row_of(answers, rate=8e6)
    expected = {"steps_per_second": 0.5, "longest_step": 3.5, "megabytes": 2.0, "busy": 0.5, "processors": 1.0}
    assert row == expected
    assert local_steps.row_of(answers, rate=None)["busy"] == 0
