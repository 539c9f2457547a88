"""A tf.data service makes the same batches as the worker itself, even if servers fail."""

import argparse
import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import types
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

from launched import eventually
from tfdist.cluster import address, free_ports
from tfdist.data import BalancedSharding, reading, service_client
from tfdist.data.service_client import Service
from tfdist.data.sources import as_source
from tfdist.data.sources.tfrecord import TFRecordSource
from tfdist.errors import ClusterError, SourceError
from tfdist.launch import data_service

EXAMPLES, BATCH = 101, 12
RECORD = np.dtype([("x", "<f4", 3), ("y", "<i8")])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    examples = np.zeros(EXAMPLES, RECORD)
    examples["x"], examples["y"] = np.random.default_rng(0).normal(size=(EXAMPLES, 3)), np.arange(EXAMPLES)
    for number in range(3):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for example in examples[number::3]:
                writer.write(example.tobytes())
    return [str(folder / "*.tfrecord")]


def parse(record):
    x = tf.io.decode_raw(tf.strings.substr(record, 0, 12), tf.float32)
    return 2 * tf.ensure_shape(x, [3]), tf.io.decode_raw(tf.strings.substr(record, 12, 8), tf.int64)[0]


@contextlib.contextmanager
def started(folder, *arguments):
    """Runs `tfdist data-service` in a process, and waits until the service answers."""
    command = [sys.executable, "-m", "tfdist.launch.cli", "data-service", "--host", "localhost", *arguments]
    output = folder / f"output-{len(list(folder.iterdir()))}"
    with output.open("w") as stderr, subprocess.Popen(command, stderr=stderr, cwd=folder) as process:
        try:
            assert eventually(lambda: "tf.data service at" in output.read_text() or process.poll() is not None)
            assert process.poll() is None, output.read_text()
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.kill()


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Returns the address of a dispatcher with two servers, which run in separate processes."""
    (port,) = free_ports(1)
    folder = tmp_path_factory.mktemp("service")
    with started(folder, "--port", str(port)), started(folder, "--dispatcher", f"localhost:{port}"):
        yield f"localhost:{port}"


def sharding(files, **arguments):
    defaults = {"global_batch_size": BATCH, "seed": 5, "policy": "equal", "map_fn": parse}
    return BalancedSharding(files, **{**defaults, **arguments})


def assignment_of(batches, replica=0):
    """Returns an assignment of (position in training, indices) for a worker whose first replica is given."""
    place = types.SimpleNamespace(own=range(replica, replica + 1))
    return types.SimpleNamespace(batches=lambda: iter(batches), closed=False, place=place)


def read(data, epochs=2, worker=0, workers=1, replicas=3):
    """Returns all batches of a worker as arrays."""
    dataset = data(tf.distribute.InputContext(workers, worker, replicas))
    return [[part.numpy() for part in batch] for _ in range(epochs) for batch in dataset]


def assert_same(some, others):
    assert len(some) == len(others)
    for batch, other in zip(some, others, strict=True):
        for part, other_part in zip(batch, other, strict=True):
            np.testing.assert_array_equal(part, other_part, strict=True)


# The last batch of 101 examples has 5 rows for three replicas. The last batch of 26 has 2, so one replica has no row.
@pytest.mark.parametrize("parts", [[(None, 0, None)], [("0", 3, 20), ("2", 0, 6)]])
def test_served_batches_equal_local_batches(parts, files, service):
    source = TFRecordSource([(files[0].replace("*", number), *part) if number else files[0] for number, *part in parts])

    assert_same(read(sharding(source, service=service)), read(sharding(source)))


def test_each_worker_gets_its_own_served_batches(files, service):
    for worker in range(2):
        expected = read(sharding(files, policy=(1, 3)), 1, worker, 2, 2)
        assert_same(read(sharding(files, policy=(1, 3), service=f"grpc://{service}"), 1, worker, 2, 2), expected)


def test_a_restored_position_continues_with_the_next_served_batch(files, service):
    first = sharding(files)
    state = first.serialize().replace('"step":0', '"step":4')
    continued, served = sharding(files), sharding(files, service=service)
    continued.deserialize(state)
    served.deserialize(state)

    assert_same(read(served), read(continued))


def drawn(files, service):
    tf.random.set_seed(1)
    data = sharding(files, service=service, map_fn=lambda record: tf.random.uniform([], dtype=tf.float64))()
    return [float(value) for _ in range(2) for batch in data for value in batch]


def test_random_operations_on_servers_draw_new_numbers(files, service, pools):
    (values,) = pools("1x2").run(drawn, files, service)
    assert len(values) == len(set(values)) == 2 * EXAMPLES


def drawn_by_workers(files, service):
    """Returns random numbers in batches of two workers, computed by the servers and by the worker itself."""
    tf.random.set_seed(1)
    served = Service(service, as_source(files), lambda record: tf.random.uniform([], dtype=tf.float64))
    asked = [("a", np.arange(1))]
    with mock.patch.object(reading.tf_internals, "is_op_determinism_enabled", lambda: True):
        there = [float(batch[0]) for replica in (0, 1) for _, _, batch in served.batches(assignment_of(asked, replica))]
        here = [float(served._make_here(np.arange(1), replica)[0]) for replica in (0, 1)]
    tf.random.set_seed(None)  # Other tests share the process.
    return there, here


def test_under_op_determinism_workers_draw_different_numbers(files, service, pools):
    ((there, here),) = pools("1x2").run(drawn_by_workers, files, service)
    assert len(set(there)) == len(set(here)) == 2


def weights_after_fit(files, service):
    import keras

    import tfdist

    strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
    data = strategy.distribute_datasets_from_function(sharding(files, service=service))
    history = model.fit(data, epochs=2, verbose=0)
    return model.get_weights(), history.history, model.predict(data, verbose=0)


def test_fit_and_predict_with_a_service_have_equal_bits(files, service, pools):
    ((weights, history, outputs),) = pools("1x2").run(weights_after_fit, files, service)
    ((expected, expected_history, expected_outputs),) = pools("1x2").run(weights_after_fit, files, None)

    assert history == expected_history
    np.testing.assert_array_equal(outputs, expected_outputs)
    for weight, other in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(weight, other)


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.exhaustive)])
def test_a_worker_without_servers_makes_the_batches_itself(signum, files, tmp_path, caplog):
    (port,) = free_ports(1)
    asked = [(number, np.arange(number % 60, number % 60 + 40)) for number in range(150)]  # more than `_HELD`
    with started(tmp_path, "--port", str(port)) as process:
        served = Service(f"localhost:{port}", as_source(files), parse, timeout_seconds=2.0)
        batches = served.batches(assignment_of(asked))
        got = [next(batches) for _ in range(2)]
        os.kill(process.pid, signum)
        got += batches

    assert [number for number, _, _ in got] == list(range(150))
    ((_, labels),) = read(sharding(files, shuffle=False, global_batch_size=EXAMPLES), 1, replicas=1)
    for _, indices, (_, y) in got:
        np.testing.assert_array_equal(y, labels[indices])
    assert f"localhost:{port}" in caplog.text
    assert "itself" in caplog.text
    if signum == signal.SIGKILL:  # A service may stop after it has answered.
        expected = read(sharding(files), 1)
        assert_same(read(sharding(files, service=f"localhost:{port}"), 1), expected)
        assert "does not answer" in caplog.text


def test_closing_ends_the_receiving_thread(files, service):
    before = threading.enumerate()  # Threads of earlier tests may still wait for killed servers.
    asked = ((number, np.arange(40)) for number in range(60))
    batches = Service(service, as_source(files), parse).batches(assignment_of(asked))
    next(batches)
    batches.close()

    assert eventually(lambda: all(each in before or each.name != "tfdist-service" for each in threading.enumerate()))


def test_a_silent_service_gets_few_threads_and_sends_batches_when_it_answers(files, monkeypatch, caplog):
    answers = threading.Event()

    def blocked(*_):
        answers.wait()
        return [(0, "served")]

    monkeypatch.setattr(service_client, "_answers", lambda address: False)
    monkeypatch.setattr(service_client, "_CHUNK_ROWS", 1)  # one batch in each chunk
    monkeypatch.setattr(Service, "_dataset", blocked)
    served = Service("localhost:1", as_source(files), parse)
    before = threading.enumerate()
    asked = [(number, np.arange(40)) for number in range(30)]

    assert [number for number, _, _ in served.batches(assignment_of(asked))] == list(range(30))
    left = [each for each in threading.enumerate() if each not in before]
    assert 0 < len(left) <= 2
    answers.set()
    assert eventually(lambda: not any(each.is_alive() for each in left))
    assert "served" in [batch for _, _, batch in served.batches(assignment_of(asked)) if isinstance(batch, str)]
    assert "sends batches again" in caplog.text


def test_without_a_thread_for_the_service_a_worker_makes_the_batches_itself(files, monkeypatch, caplog):
    class Refused(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(service_client, "_answers", lambda address: True)
    served = Service("localhost:1", as_source(files), parse)
    monkeypatch.setattr(service_client.threading, "Thread", Refused)

    ((_, _, (_, y)),) = served.batches(assignment_of([(0, np.arange(40))]))
    assert len(y) == 40
    assert "can't start new thread" in caplog.text and "itself" in caplog.text


def test_functions_that_servers_cannot_run_run_locally_with_a_warning(files, service, caplog):
    def in_python(record):
        x, y = parse(record)
        return tf.ensure_shape(tf.numpy_function(lambda x: x + 1, [x], x.dtype), [3]), y

    assert_same(read(sharding(files, map_fn=in_python, service=service)), read(sharding(files, map_fn=in_python)))
    assert "makes up to" in caplog.text


def test_a_broken_record_is_named(files, service, tmp_path):
    path = tmp_path / "broken.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(20):
            writer.write(b"%04d" % number)

    def to_number(record):
        return tf.strings.to_number(tf.where(record == b"0013", b"unlucky", record), tf.int32)

    with pytest.raises(tf.errors.OpError, match=rf"Example 13 \(record 13 of {path}\)"):
        for _ in BalancedSharding([str(path)], 5, map_fn=to_number, policy="equal", service=service)():
            pass


def test_in_a_later_attempt_a_missing_service_is_tolerated(files, monkeypatch, caplog):
    (port,) = free_ports(1)
    monkeypatch.setenv("TFDIST_ATTEMPT", "1")

    assert_same(read(sharding(files, service=f"localhost:{port}"), 1), read(sharding(files), 1))
    assert "does not answer" in caplog.text


def test_sources_that_cannot_be_served_raise_at_once(files, service):
    with pytest.raises(ValueError, match="cannot read a ArraysSource"):
        BalancedSharding(np.zeros([20, 3]), BATCH, policy="equal", service=service)
    with pytest.raises(ValueError, match='Give policy="equal"'):
        BalancedSharding(files, BATCH, service=service)
    with pytest.raises(ValueError, match="node0:5050"):
        sharding(files, service="node0")
    (port,) = free_ports(1)
    with pytest.raises(SourceError, match=f"tfdist data-service --port {port}"):
        sharding(files, service=f"localhost:{port}")


@pytest.mark.parametrize("arguments", [["--port", "{port}"], ["--dispatcher", "localhost:1"], ["--work-dir", "{file}"]])
def test_a_service_that_cannot_start_logs_the_reason(arguments, service, tmp_path):
    names = {"port": service.rpartition(":")[2], "file": tmp_path / "file"}
    names["file"].touch()
    command = [sys.executable, "-m", "tfdist.launch.cli", "data-service", *(each.format(**names) for each in arguments)]

    done = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)

    assert done.returncode == 1
    assert "Give another --port, --work-dir or --dispatcher" in done.stderr


def test_a_server_that_tensorflow_refuses_to_start_is_a_clear_error(tmp_path, monkeypatch):
    def refuse(config):
        raise tf.errors.UnimplementedError(None, None, "Failed to register: unknown method")

    monkeypatch.setattr(tf.data.experimental.service, "WorkerServer", refuse)
    monkeypatch.setattr(data_service, "_check", lambda args, work_dir: None)
    monkeypatch.setattr(data_service, "_deadline", contextlib.nullcontext)
    arguments = argparse.Namespace(dispatcher="node0:12345", host="localhost", port=5050, work_dir=tmp_path)
    with mock.patch.dict(os.environ), pytest.raises(ClusterError, match=r"unknown method\. Give another --port"):
        data_service.run(arguments)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "web server"])
def test_a_server_that_is_no_dispatcher_is_refused_within_seconds(answer, monkeypatch):
    monkeypatch.setattr(address, "_CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if answer:
            threading.Thread(target=lambda: listener.accept()[0].sendall(answer), daemon=True).start()
        with pytest.raises(OSError, match=r"accepts connections, but sent nothing|does not answer as"):
            address.check_answers(f"127.0.0.1:{listener.getsockname()[1]}")


def test_signals_end_the_service_unless_they_are_ignored(tmp_path):
    def ignore():  # like `nohup`, or a shell with background jobs
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    (port,) = free_ports(1)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "tfdist.launch.cli", "data-service", "--host", "localhost", "--port", str(port)]
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    pipes = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": ignore}
    with subprocess.Popen(command, cwd=tmp_path, env=environ, **pipes) as process:
        try:
            while "tf.data service at" not in (line := process.stderr.readline()):
                assert line, "it ended"
            status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
            ignored = int(re.search(r"SigIgn:\s*([0-9a-f]+)", status)[1], 16)
            assert all(ignored >> (signum - 1) & 1 for signum in (signal.SIGHUP, signal.SIGINT))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()

    assert list((tmp_path / "tmp").iterdir()) == []
