"""Runs every example in the four ways that its header names."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import sysconfig
import time

import pytest

from launched import beside_progress
from tfdist.cluster import free_ports

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
DEADLINE_SECONDS = 400


def one_process(script, flags):
    return [([sys.executable, script, *flags], {})]


def two_devices(script, flags):
    return [([sys.executable, script, *flags, "--devices", "2"], {})]


def launcher(script, flags):
    command = [os.path.join(sysconfig.get_path("scripts"), "tfdist"), "run", "--workers", "2", script, *flags]
    return [(command, {"TF_CPP_MIN_LOG_LEVEL": "0"})]  # the default level, as for users


def by_hand(script, flags):
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    configs = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}}) for i in range(2)]
    return [([sys.executable, script, *flags], {"TF_CONFIG": config}) for config in configs]


def by_default(*ways):
    """Returns all ways, marked `exhaustive` unless they are in `ways`; together the examples cover all ways."""
    every = (one_process, two_devices, launcher, by_hand)
    return [pytest.param(way, marks=() if way in ways else pytest.mark.exhaustive) for way in every]


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs an example in one way, and returns the output of its processes if all succeed."""
    processes = []

    def run(way, example, *flags):
        env = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        env |= {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2", "TMPDIR": str(tmp_path)}
        paths = []
        for command, extra in way(str(EXAMPLES / example), flags):
            paths.append(tmp_path / f"output-{len(paths)}")
            with paths[-1].open("w") as output:
                process = subprocess.Popen(
                    command, env=env | extra, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                )
            processes.append(process)
        wait(processes)
        text = "\n".join(path.read_text() for path in paths)
        assert [process.poll() for process in processes] == [0] * len(processes), text
        return text

    yield run
    for process in processes:
        end(process)


def wait(processes):
    """Waits until all processes have ended, one has failed, or the deadline has passed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    codes = [None]
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.1)
        codes = [process.poll() for process in processes]


def end(process):
    """Ends the launcher first by SIGTERM, so that it can end workers outside this process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def printed(name, text):
    """Returns the number after `name:`, which the processes must have printed exactly once."""
    numbers = re.findall(rf"{name}: (\d+\.\d+)", text)
    assert len(numbers) == 1, text
    return float(numbers[0])


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return str(tmp_path_factory.mktemp("data"))


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
    with pytest.raises(AssertionError, match=r"test accuracy: 0\.(8[5-9]|9)"):
        run(one_process, "digits.py", "--epochs", "4", "--data_dir", data_dir, "--min_accuracy", "1")


@pytest.mark.parametrize("way", by_default(two_devices))
def test_custom_loop_learns(run, way, data_dir):
    text = run(way, "custom_loop.py", "--epochs", "3", "--data_dir", data_dir)
    assert printed("test accuracy", text) > 0.9


@pytest.mark.parametrize("way", by_default(one_process))
def test_char_lm_beats_the_unigram_entropy(run, way):
    text = run(way, "char_lm.py", "--steps", "30", "--width", "64", "--blocks", "1")
    assert printed("validation loss", text) < printed("unigram entropy", text) - 0.1


def test_the_tutorial_of_tensorflow_runs_unchanged(run, tmp_path):
    (tmp_path / "saved").mkdir()
    run(launcher, "../tests/tutorial.py", str(tmp_path / "saved"))

    assert {"ckpt", "keras-model.keras"} <= {path.name for path in (tmp_path / "saved").iterdir()}
