"""The digits dataset, and several processes that prepare a dataset at the same time."""

import fcntl
import os
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

import tfdist
from tfdist.data import loading

DEADLINE_SECONDS = 300

LOAD = """
import sys, tfdist
print(sum(1 for _ in tfdist.data.load("digits", "train", sys.argv[1], timeout_seconds=150)), "rows")
"""

STALL = """
import sys, time, tfdist
def stall(*_):
    print("preparing", flush=True)
    time.sleep(1000)
tfdist.data.Digits._generate_examples = stall
tfdist.data.load("digits", "train", sys.argv[1])
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("digits")


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts Python code with a data_dir. Kills the processes at the end."""
    processes = []

    def start(code, data_dir):
        path = tmp_path / f"output-{len(processes)}"
        with path.open("w") as output:
            command = [sys.executable, "-c", code, str(data_dir)]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT))
        return processes[-1], path

    yield start
    for process in processes:
        process.kill()
        process.wait()


def read(split, data_dir):
    images, labels = zip(*tfdist.data.load("digits", split, data_dir).as_numpy_iterator(), strict=True)
    return np.stack(images), np.stack(labels)


def wait_for_text(path, text):
    deadline = time.monotonic() + DEADLINE_SECONDS
    while text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in:\n{path.read_text()}"
        time.sleep(0.1)


def test_splits_hold_every_image_once(data_dir):
    from sklearn.datasets import load_digits

    images, labels = (
        np.concatenate(parts) for parts in zip(read("train", data_dir), read("test", data_dir), strict=True)
    )
    assert images.shape == (1797, 8, 8, 1)
    assert images.dtype == np.uint8
    digits = load_digits()
    expected = np.round(digits.images * 255 / 16).astype(np.uint8)

    def rows(images, labels):
        return sorted((int(label), image.tobytes()) for image, label in zip(images, labels, strict=True))

    assert rows(images, labels) == rows(expected, digits.target)


def test_splits_are_stratified(data_dir):
    in_train, in_test = (np.bincount(read(split, data_dir)[1], minlength=10) for split in ("train", "test"))
    # A fifth of the images of each label, rounded up, is in "test".
    np.testing.assert_array_equal(in_test, -(-(in_train + in_test) // 5))


def test_preparing_twice_writes_the_same_files(data_dir, tmp_path):
    tfdist.data.load("digits", "train", data_dir)
    tfdist.data.load("digits", "train", tmp_path)

    def contents(directory):
        return {path.name: path.read_bytes() for path in directory.glob("digits/*/*tfrecord*")}

    assert len(contents(tmp_path)) == 2
    assert contents(tmp_path) == contents(data_dir)


def test_one_waiting_process_prepares_after_the_preparer_is_killed(start, tmp_path):
    preparer, output = start(STALL, tmp_path / "data")
    wait_for_text(output, "preparing")
    waiters = [start(LOAD, tmp_path / "data") for _ in range(2)]
    for waiter, output in waiters:
        wait_for_text(output, f"Waiting for process {preparer.pid} on {socket.gethostname()}")
        assert waiter.poll() is None
    preparer.kill()
    for waiter, output in waiters:
        assert waiter.wait(DEADLINE_SECONDS) == 0, output.read_text()
        assert "1433 rows" in output.read_text()
    assert sum(output.read_text().count("Downloading and preparing") for _, output in waiters) == 1


def test_waiting_ends_at_its_deadline_and_names_the_holder(tmp_path):
    with (tmp_path / ".digits.lock").open("w") as file:
        file.write("process 4711 on node7")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match="process 4711 on node7"):
            tfdist.data.load("digits", "train", tmp_path, timeout_seconds=0.3)


def test_a_prepared_dataset_needs_no_lock(data_dir):
    tfdist.data.load("digits", "train", data_dir)
    with (data_dir / ".digits.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert len(tfdist.data.load("digits", "train", data_dir, timeout_seconds=0.3)) == 1433


def test_a_download_without_a_network_names_the_remedy(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(urllib.request, "getproxies", dict)
    monkeypatch.setattr(loading.socket, "getaddrinfo", no_network)
    with pytest.raises(ConnectionError, match=r"no network.*--dataset digits"):
        tfdist.data.load("mnist", "train", tmp_path)


def test_a_read_only_folder_raises_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"Dataset 'digits' is not in .*file.*data_dir.*TFDS_DATA_DIR"):
        tfdist.data.load("digits", "train", tmp_path / "file" / "data")


def test_missing_scikit_learn_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'tfdist\[examples\]'"):
        tfdist.data.load("digits", "train", tmp_path)


def test_import_does_not_load_tensorflow():
    code = "import sys, tfdist.data; sys.exit('tensorflow' in sys.modules or 'tensorflow_datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_SECONDS, env=dict(os.environ))
