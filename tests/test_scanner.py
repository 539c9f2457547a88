"""A scanner that sends data to every listening port during start and training does not disturb training."""

import contextlib
import time

import numpy as np
import pytest

import scanner
from launched import eventually, nothing_left

DEADLINE_SECONDS = 400
ZEROS = 8 << 20
HELD = 100
MOST_BYTES = 1 << 20  # per connection
STEPS, RATE, ROWS = 240, 0.01, 16

TRAIN = f"""
leave(f"pid-{{worker}}", os.getpid())
import keras, numpy as np, tfdist
strategy = tfdist.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD({RATE}), "mse")
class Step(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 9: leave(f"training-{{worker}}", 1)
        while not (here / "scanned").exists():
            time.sleep(0.1)
            if batch < {STEPS} - 9: break
x = np.random.default_rng(0).normal(size=({ROWS} * {STEPS}, 4)).astype("float32")
model.fit(x, x.sum(1), batch_size={ROWS}, verbose=0, shuffle=False, callbacks=[Step()])
assert strategy.extended._peers is not None
np.savez(here / f"weights-{{worker}}.npz", *model.get_weights())
"""


@pytest.fixture
def run(tmp_path):
    with nothing_left(tmp_path) as run:
        yield run


def expected():
    """Computes the weights of a training on one device."""
    x = np.random.default_rng(0).normal(size=(ROWS * STEPS, 4)).astype("float32").astype("float64")
    kernel, bias = np.zeros(4), 0.0
    for rows in x.reshape(STEPS, ROWS, 4):
        wrong = 2 * (rows @ kernel + bias - rows.sum(1)) / ROWS
        kernel, bias = kernel - RATE * wrong @ rows, bias - RATE * wrong.sum()
    return kernel, bias


def test_a_scan_during_start_and_training_changes_nothing_and_takes_little_memory(run):
    with run.start("--workers", 2, "--tee", run.script(TRAIN)) as job:
        try:
            with scanner.Scanner(lambda: run.pids().values(), ZEROS) as scan:
                is_training = eventually(lambda: len(list(run.directory.glob("training-*"))) == 2, DEADLINE_SECONDS)
            assert is_training, job.communicate(timeout=5)
            per_connection = {pid: grown(pid) for pid in run.pids().values()}
            with scanner.Scanner(lambda: run.pids().values(), ZEROS) as again:
                # Scanned more often than there are kinds of words, or until training fails.
                eventually(lambda: is_scanned(again) or job.poll() is not None, DEADLINE_SECONDS)
                (run.directory / "scanned").touch()
                out, err = job.communicate(timeout=DEADLINE_SECONDS)
        finally:
            job.kill()
    assert job.returncode == 0, out + err
    kernel, bias = expected()
    for path in run.directory.glob("weights-*"):
        weights = np.load(path)
        np.testing.assert_allclose(weights["arr_0"][:, 0], kernel, atol=1e-5)
        np.testing.assert_allclose(weights["arr_1"], [bias], atol=1e-5)
    # The scan found the rendezvous and the ports of both TensorFlow servers; tfdist's own sockets listen at loopback.
    assert len(scan.connections) >= 2 and is_scanned(again)
    tensorflows = {port for _, port in again.ports}
    assert {address for address, port in scan.ports if port not in tensorflows} <= {"127.0.0.1"}, scan.ports
    assert all(each < MOST_BYTES for each in per_connection.values()), per_connection


def is_scanned(scan):
    counts = list(scan.connections.values())
    return bool(counts) and min(counts) > 20


def grown(pid):
    """Returns the memory per connection that a worker uses for many open connections."""
    time.sleep(0.5)
    before = scanner.resident_bytes(pid)
    ports = [port for _, port in scanner.listening_at([pid])]
    assert ports, "the worker does not listen"
    with contextlib.ExitStack() as stack:
        for number in range(HELD):
            words = [*scanner.WORDS.values()][number % len(scanner.WORDS)]
            connection = scanner.connect(ports[0], words, ZEROS if number == 0 else 0)
            if connection is not None:
                stack.enter_context(connection)
        time.sleep(0.5)
        return (scanner.resident_bytes(pid) - before) / HELD
