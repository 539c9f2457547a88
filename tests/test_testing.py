"""Workers return a function's result or raise its error, and leave no process or file behind."""

import functools
import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
import types

import pytest

from launched import eventually
from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError, WorkerError, WorkerTimeoutError
from tfdist.testing import WorkerPool, run_workers, workers
from tfdist.testing.worker_handle import WorkerHandle


def worker_id():
    return ClusterSpec.from_env().worker_id


def pid_and_arguments(*args, **kwargs):
    return worker_id(), os.getpid(), args, kwargs


def fail_in(index, folder=None):
    """Fails in one worker; with a folder, after all workers have printed something."""
    print(f"worker {worker_id()} says hello")
    if folder is not None:
        pathlib.Path(folder, f"kept_hello_{worker_id()}").touch()
        assert worker_id() != index or eventually(lambda: len(list(pathlib.Path(folder).glob("kept_hello_*"))) == 2)
    if worker_id() == index:
        raise ValueError("a fault on purpose")
    time.sleep(100)


def raise_consequence_first():
    """The first worker that fails is not the cause."""
    if worker_id() == 0:
        raise type("UnavailableError", (Exception,), {})("connection reset by peer")
    time.sleep(0.1)
    raise ValueError("the cause")


class UnpicklableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raise_unpicklable():
    raise UnpicklableError("one", "two")


def sleep_in(index, hangs):
    if worker_id() == index:
        print("about to sleep")
        a_place_to_hang(hangs)


def a_place_to_hang(hangs):
    pathlib.Path(hangs).touch()
    time.sleep(600)


def die_in(index, how):
    print("last words", end="", flush=True)
    if worker_id() == index:
        os.kill(os.getpid(), how) if how else os._exit(7)
    time.sleep(60)


def exit_politely():
    sys.exit(3)


def fork_and_die(pid_file):
    """A worker's own child inherits all open files of the worker."""
    if worker_id() == 0:
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        pathlib.Path(pid_file).write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def return_unpicklable():
    return lambda: None


def environment(*names):
    return [os.environ.get(name) for name in names]


def tensorflow_view():
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    assert tf.autograph.to_graph(pid_and_arguments)  # writes a file
    return resolver.task_id, resolver.cluster_spec().num_tasks("worker"), len(tf.config.list_logical_devices("CPU"))


def virtual_devices_twice():
    from tfdist.testing import virtual_devices

    names = virtual_devices(3)
    assert virtual_devices(3) == names  # before TensorFlow runs
    import tensorflow as tf

    for name in names:
        with tf.device(name):
            tf.ones(()).numpy()
    assert virtual_devices(3) == names  # after TensorFlow ran
    try:
        virtual_devices(2)
    except ClusterError as error:
        return names, str(error)


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """Checks that no child process, and no file in the temporary directory, outlives a test."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    before = children()
    yield
    assert children() <= before
    # AutoGraph of TensorFlow imports its code from files there, and Python keeps the byte code of some.
    kept = ("kept", "__pycache__")
    assert [path for path in tmp_path.iterdir() if not path.name.startswith(kept)] == []


def children():
    """Returns the child processes of this one. Without their arguments, which a process loses when it ends."""
    with subprocess.Popen(["ps", "-o", "pid=", "--ppid", str(os.getpid())], stdout=subprocess.PIPE, text=True) as ps:
        return {int(line) for line in ps.stdout} - {ps.pid}


def is_alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # The latter if it ends while it is read.
        return False


@pytest.mark.parametrize("num_workers", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_values_come_back_in_the_order_of_workers(num_workers):
    results = run_workers(pid_and_arguments, num_workers, args=(1, "two"), kwargs={"three": [3]})
    assert [result[0] for result in results] == list(range(num_workers))
    assert len({result[1] for result in results} | {os.getpid()}) == num_workers + 1
    assert all(result[2:] == ((1, "two"), {"three": [3]}) for result in results)


def test_a_large_value_is_sent_and_returned():
    data = os.urandom(5_000_000)
    assert all(args == (data,) for _, _, args, _ in run_workers(pid_and_arguments, 2, args=(data,)))


@pytest.fixture
def started_pool():
    """Yields a pool whose two workers have started, so that one does not fail while the other still starts."""
    with WorkerPool(2) as pool:
        pool.run(worker_id)
        yield pool


def test_an_exception_comes_with_traceback_and_output_and_ends_the_others(started_pool, tmp_path):
    start = time.monotonic()
    with pytest.raises(WorkerError) as caught:
        started_pool.run(fail_in, 1, str(tmp_path))
    assert time.monotonic() - start < 60
    message = str(caught.value)
    assert "Worker 1 of 2 raised ValueError: a fault on purpose" in message
    assert "in fail_in" in message
    assert "worker 0 says hello" in message and "worker 1 says hello" in message
    assert isinstance(caught.value.__cause__, ValueError)


def test_the_cause_is_reported_rather_than_its_consequence(started_pool, monkeypatch):
    monkeypatch.setattr(workers, "GRACE_SECONDS", 60)  # Until then the second worker has raised on any machine.
    with pytest.raises(WorkerError, match="Worker 1 of 2 raised ValueError: the cause"):
        started_pool.run(raise_consequence_first)


def test_an_exception_that_cannot_be_pickled_is_reported_as_text():
    with pytest.raises(WorkerError, match="UnpicklableError: one and two") as caught:
        run_workers(raise_unpicklable, 1)
    assert caught.value.__cause__ is None


def test_a_worker_that_exits_is_a_failure():
    with pytest.raises(WorkerError, match="SystemExit: 3"):
        run_workers(exit_politely, 1)


def test_deadline_names_the_worker_and_where_it_hangs(started_pool, tmp_path, monkeypatch):
    """Time stands still until worker 0 has returned and worker 1 hangs. Then the deadline is over."""
    hangs, received, receive = tmp_path / "kept_hangs", [], WorkerHandle.receive

    def note(handle):
        received.append(handle.index)
        return receive(handle)

    def now():
        return 1e9 + time.monotonic() if received == [0] and hangs.exists() else 0.0

    monkeypatch.setattr(WorkerHandle, "receive", note)
    monkeypatch.setattr(workers, "time", types.SimpleNamespace(monotonic=now, sleep=time.sleep))
    with pytest.raises(WorkerTimeoutError) as caught:
        started_pool.run(sleep_in, 1, str(hangs))
    message = str(caught.value)
    assert "still running: worker 1." in message
    assert "a_place_to_hang" in message and "about to sleep" in message


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param(signal.SIGSEGV, "was killed by SIGSEGV", marks=pytest.mark.exhaustive),
        (0, "ended with exit code 7"),
    ],
)
def test_a_worker_that_dies_silently_is_named_with_its_signal_or_code(how, words):
    with pytest.raises(WorkerError, match=f"Worker 1 of 2 {words}(.|\n)*last words"):
        run_workers(die_in, 2, args=(1, how))


def test_the_children_of_a_killed_worker_end(tmp_path):
    pid_file = tmp_path / "kept"
    with pytest.raises(WorkerError, match="Worker 0 of 2 was killed by SIGKILL"):
        run_workers(fork_and_die, 2, args=(pid_file,))
    assert eventually(lambda: not is_alive(int(pid_file.read_text())))


@pytest.mark.parametrize("fn", [lambda: None, functools.partial(print, file=lambda: None)], ids=["lambda", "partial"])
def test_a_function_that_cannot_be_sent_is_refused_at_once(fn):
    with pytest.raises(TypeError, match=r"cannot be sent by name(.|\n)*top of a module"):
        run_workers(fn)


def test_arguments_and_values_that_cannot_be_sent_are_named():
    with pytest.raises(TypeError, match="arguments of pid_and_arguments"):
        run_workers(pid_and_arguments, args=(lambda: None,))
    with pytest.raises(WorkerError, match="must return a value that can be pickled, got function"):
        run_workers(return_unpicklable, 1)


@pytest.mark.parametrize(
    "wrong",
    [{"num_workers": 0}, {"devices_per_worker": 0}, {"timeout_seconds": -1.0}, {"env": {"TF_CONFIG": "{}"}}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run_workers(worker_id, **wrong)


def test_environment_is_set_before_anything_runs(monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "EXTRA", "TFDIST_DEVICES_PER_WORKER")
    assert run_workers(environment, 1, args=names, env={"EXTRA": "x"}) == [["1", "-1", "x", None]]
    (config,) = run_workers(environment, 1, args=("TF_CONFIG",))[0]
    assert json.loads(config)["task"] == {"type": "worker", "index": 0}
    assert "TF_CONFIG" not in os.environ


def test_pool_keeps_its_workers_and_replaces_them_after_a_failure():
    others = children()  # belong to pools of other tests
    with WorkerPool(2) as pool:
        first, again = (pool.run(pid_and_arguments) for _ in range(2))
        assert first == again
        with pytest.raises(WorkerError):
            pool.run(fail_in, 0)
        assert children() == others
        new = pool.run(pid_and_arguments)
        assert not {pid for _, pid, *_ in first} & {pid for _, pid, *_ in new}
        with pytest.raises(TypeError):  # workers cannot import a lambda
            pool.run(lambda: None)
        assert pool.run(pid_and_arguments) == new
        os.kill(new[1][1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="Worker 1 of 2 was killed by SIGKILL"):
            pool.run(pid_and_arguments)
        assert [index for index, *_ in pool.run(pid_and_arguments)] == [0, 1]
    with pytest.raises(ValueError, match="closed"):
        pool.run(worker_id)


def script(tmp_path, body):
    path = tmp_path / "kept_script.py"
    path.write_text(textwrap.dedent(body))
    return path


def test_functions_of_a_script_run_in_workers(tmp_path):
    path = script(
        tmp_path,
        """
        import os
        from tfdist.testing import run_workers
        def value():
            return os.environ["MARK"]
        if __name__ == "__main__":
            print(run_workers(value, 2, env={"MARK": "here"}))
        """,
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=180)
    assert done.stdout == "['here', 'here']\n", done.stderr


def test_ended_workers_of_a_pool_are_noticed_although_sigchld_is_ignored(tmp_path):
    path = script(
        tmp_path,
        """
        import os, signal
        from tfdist.testing import run_workers
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            run_workers(os._exit, 2, args=(7,))
        """,
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=180)
    assert "of 2 ended with exit code 7" in done.stderr, done.stderr


def test_a_script_without_a_main_guard_gets_an_error(tmp_path):
    path = script(
        tmp_path,
        """
        from tfdist.testing import run_workers
        run_workers(print, 2)
        """,
    )
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=180)
    assert done.returncode == 1 and '`if __name__ == "__main__":`' in done.stderr


@pytest.mark.parametrize(
    ("busy", "how"),
    [
        pytest.param("time.sleep(100)", signal.SIGKILL, id="idle-9", marks=pytest.mark.exhaustive),
        pytest.param("time.sleep(100)", signal.SIGINT, id="idle-2"),
        pytest.param("ctypes.PyDLL(None).sleep(100)", signal.SIGKILL, id="holding the GIL-9"),
        pytest.param(
            "ctypes.PyDLL(None).sleep(100)", signal.SIGINT, id="holding the GIL-2", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_workers_end_with_their_parent(tmp_path, how, busy):
    path = script(
        tmp_path,
        f"""
        import ctypes, pathlib, os, signal, time
        from tfdist.testing import run_workers
        def hang(directory):
            pathlib.Path(directory, f"kept_{{os.getpid()}}").touch()
            {busy}
        if __name__ == "__main__":
            signal.signal(signal.SIGINT, signal.default_int_handler)
            run_workers(hang, 2, args=({str(tmp_path)!r},))
        """,
    )
    with subprocess.Popen([sys.executable, path], stderr=subprocess.DEVNULL) as parent:
        try:
            assert eventually(lambda: len(list(tmp_path.glob("kept_[0-9]*"))) == 2)
        finally:
            parent.send_signal(how)
            parent.wait(60)
    pids = [int(path.name.removeprefix("kept_")) for path in tmp_path.glob("kept_[0-9]*")]
    assert eventually(lambda: not any(map(is_alive, pids)))


def test_tensorflow_sees_the_cluster_and_the_devices():
    assert run_workers(tensorflow_view, 2, devices_per_worker=3) == [(0, 2, 3), (1, 2, 3)]


def test_virtual_devices_may_be_requested_again_but_not_changed():
    ((names, message),) = run_workers(virtual_devices_twice, 1)
    assert names == ["CPU:0", "CPU:1", "CPU:2"]
    assert "already runs" in message and "3 CPU devices." in message


def test_importing_does_not_load_tensorflow():
    code = "import sys, tfdist.testing; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=180).returncode == 0
