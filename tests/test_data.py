"""The digits dataset, and several processes that prepare a dataset at the same time."""

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import sys
import urllib.request

import numpy as np
import pytest

import tfdist
from tfdist.data import loading

DEADLINE_SECONDS = 600

# Three processes that load a dataset. They are forked, since its import takes seconds; the first never ends to prepare.
LOADERS = """
import os, pathlib, signal, sys, time, tfdist
folder, load = pathlib.Path(sys.argv[1]), tfdist.data.load

def stall(*_):
    print("preparing", flush=True)
    time.sleep(1000)

def loader(number):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        output = os.open(folder / f"output-{number}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if number == 0:
            tfdist.data.Digits._generate_examples = stall
        print(sum(1 for _ in load("digits", "train", folder / "data", timeout_seconds=500)), "rows", flush=True)
        code = 0
    finally:
        os._exit(code)

def wait_for(text, number):
    path = folder / f"output-{number}"
    while not path.exists() or text not in path.read_text():
        time.sleep(0.05)

pids = [loader(0)]
try:
    wait_for("preparing", 0)
    pids += [loader(number) for number in (1, 2)]
    for number in (1, 2):
        wait_for(f"Waiting for process {pids[0]} on ", number)
    os.kill(pids[0], signal.SIGKILL)
    print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])
except BaseException:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    raise
"""


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("digits")


def read(split, data_dir):
    images, labels = zip(*tfdist.data.load("digits", split, data_dir).as_numpy_iterator(), strict=True)
    return np.stack(images), np.stack(labels)


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


def test_preparing_keeps_the_random_state(tmp_path):
    random.seed(0)
    before = random.getstate()
    tfdist.data.load("digits", "train", tmp_path)
    assert random.getstate() == before  # Keras draws seeds from it.


def test_one_waiting_process_prepares_after_the_preparer_is_killed(tmp_path):
    command = [sys.executable, "-c", LOADERS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as loaders:
        try:
            printed, _ = loaders.communicate(timeout=DEADLINE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(loaders.pid, signal.SIGKILL)
    _, *waiters = [(tmp_path / f"output-{number}").read_text() for number in range(3)]
    assert printed == "[-9, 0, 0]\n", waiters
    for output in waiters:
        assert f" on {socket.gethostname()}, which prepares" in output
        assert "1433 rows" in output
    assert sum(output.count("Downloading and preparing") for output in waiters) == 1


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
    with pytest.raises(ConnectionError, match=r"no network.*tfdist\.data\.load\(\"digits\""):
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
