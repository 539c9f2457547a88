"""`PeerProbe`: asks whether a worker answers, and names a silent one."""

import pytest
import tensorflow as tf

from tfdist._compat import tf_internals
from tfdist.errors import WorkerLostError
from tfdist.faults.peer_probe import PeerProbe

pytestmark = pytest.mark.unit

JOBS = {"worker": ["a:1", "b:2"]}


class Store:
    """A coordination store whose worker 0 answers, or not."""

    def __init__(self, answers):
        self.answers, self.asked = answers, 0

    def await_life(self, timeout_seconds):
        self.asked += 1
        if not self.answers:
            raise tf.errors.DeadlineExceededError(None, None, "no answer")


class Tensorflow:
    """TensorFlow's context, which checks peers in a call that stops all Python threads."""

    def __init__(self):
        self.checked = []

    def check_collective_ops_peer_health(self, task, milliseconds):
        self.checked.append(task)


@pytest.fixture(autouse=True)
def tensorflow(monkeypatch):
    found = Tensorflow()
    monkeypatch.setattr(tf_internals.context, "context", lambda: found)
    return found


def test_worker_0_is_asked_by_the_store_alone(tensorflow):
    store = Store(answers=True)
    PeerProbe(JOBS, 10, store).check(0)
    assert store.asked == 1 and tensorflow.checked == []


def test_others_are_asked_by_tensorflow(tensorflow):
    PeerProbe(JOBS, 10, Store(answers=True)).check(1)
    PeerProbe(JOBS, 10).check(0)
    assert tensorflow.checked == ["/job:worker/replica:0/task:1", "/job:worker/replica:0/task:0"]


def test_a_silent_worker_0_is_named():
    with pytest.raises(WorkerLostError, match=r"worker 0 at a:1 has not answered for 0 s: .* \(no answer\)"):
        PeerProbe(JOBS, 0, Store(answers=False)).check(0)
