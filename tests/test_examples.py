"""Runs digits.py, custom_loop.py and char_lm.py in the ways that their headers name, and TensorFlow's tutorial."""

import pathlib
import runpy
import sys

import pytest

from example_runs import by_default, by_hand, launcher, one_process, printed, runs, two_devices
from launched import beside_progress


@pytest.fixture
def run(tmp_path):
    with runs(tmp_path) as run:
        yield run


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", by_default(by_hand))
def test_digits_learns(run, way, data_dir):
    text = run(way, "digits.py", "--epochs", "3", "--data_dir", data_dir)
    assert printed("test accuracy", text) > 0.8


@pytest.mark.parametrize(
    ("length", "least"),
    [
        pytest.param(("--epochs", "4"), 0.85, id="4 epochs"),
        pytest.param((), 0.97, id="full length", marks=pytest.mark.exhaustive),
    ],
)
def test_digits_on_two_workers_learns_saves_and_prints_little(length, least, run, data_dir, tmp_path):
    flags = ("--data_dir", data_dir, "--min_accuracy", str(least), "--save", str(model := tmp_path / "model.keras"))
    text = run(launcher, "digits.py", *length, *flags)
    assert printed("test accuracy", text) > least
    assert model.exists()
    of_tfds = ("Downloading and preparing", "Dataset digits", "Generating", "Shuffling")  # if this test runs first
    assert len(beside_progress(text, "test accuracy: ", *of_tfds)) <= 3, text


def test_digits_learns_in_one_process_and_fails_below_the_accuracy_asked_for(run, data_dir):
    with pytest.raises(AssertionError, match=r"test accuracy: 0\.[5-9]"):
        run(one_process, "digits.py", "--epochs", "2", "--data_dir", data_dir, "--min_accuracy", "1")


@pytest.mark.parametrize("way", by_default(two_devices))
def test_custom_loop_learns(run, way, data_dir):
    text = run(way, "custom_loop.py", "--epochs", "3", "--data_dir", data_dir)
    assert printed("test accuracy", text) > 0.9


@pytest.mark.parametrize("way", by_default(one_process))
def test_char_lm_beats_the_unigram_entropy(run, way):
    text = run(way, "char_lm.py", "--steps", "30", "--width", "64", "--blocks", "1")
    assert printed("validation loss", text) < printed("unigram entropy", text) - 0.1


def test_char_lm_learns_by_local_steps(run):
    text = run(launcher, "char_lm.py", "--steps", "60", "--width", "64", "--blocks", "1", "--local_steps", "20")
    assert printed("validation loss", text) < printed("unigram entropy", text) - 0.1


def test_the_tutorial_of_tensorflow_runs_unchanged(pools, tmp_path):
    pools("2x1").run(run_tutorial, str(tmp_path))

    assert {"ckpt", "keras-model.keras"} <= {path.name for path in tmp_path.iterdir()}


def run_tutorial(folder):
    before, sys.argv = sys.argv, ["tutorial.py", folder]
    try:
        runpy.run_path(str(pathlib.Path(__file__).with_name("tutorial.py")), run_name="__main__")
    finally:
        sys.argv = before
