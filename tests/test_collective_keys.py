"""Keys of collectives stay valid, however many collectives a program runs. No collective runs here."""

import contextlib

import pytest
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

from tfdist.strategies.collectives import collective_launcher
from tfdist.strategies.collectives.collective_launcher import FIRST_KEY_BESIDE, CollectiveLauncher

FIRST = collective_launcher._FIRST_INSTANCE_KEY


def launcher_after(collectives, first_key):
    """Returns a launcher that has launched some collectives."""
    options = tf.distribute.experimental.CommunicationOptions()
    launcher = CollectiveLauncher(1, 2, CollectiveKeys(1), "/device:CPU:0", options, first_key)
    launcher.count.assign(collectives)
    return launcher


@pytest.mark.parametrize(("first_key", "end"), [(FIRST, FIRST_KEY_BESIDE), (FIRST_KEY_BESIDE, 1 << 31)])
@pytest.mark.parametrize("collectives", [0, (1 << 29) - 3, (1 << 31) - 3, (1 << 40) - 3])
def test_keys_stay_in_their_range_and_differ(collectives, first_key, end):
    launcher = launcher_after(collectives, first_key)
    keys = [launcher._next_instance_key() for _ in range(5)]
    with launcher.reserve(5)():
        keys += [launcher._next_instance_key() for _ in range(5)]
    found = [int(key) for key in keys]
    assert all(key.dtype == tf.int32 for key in keys)
    assert len(set(found)) == 10 and min(found) >= first_key and max(found) < end


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_step_on_a_gpu_computes_keys_on_the_host(is_reserved):
    options = tf.distribute.experimental.CommunicationOptions()
    launcher = CollectiveLauncher(1, 2, CollectiveKeys(1), "/device:GPU:0", options)

    @tf.function(autograph=False)
    def step():
        with tf.device("/device:GPU:0"), launcher.reserve(3)() if is_reserved else contextlib.nullcontext():
            return launcher._next_instance_key()

    operations = [each for each in step.get_concrete_function().graph.get_operations() if each.type != "Placeholder"]
    assert {each.type for each in operations} >= {"AssignAddVariableOp", "BitwiseAnd", "Cast", "AddV2"}
    computing = [each for each in operations if each.type not in ("Const", "Identity", "NoOp", "Reshape")]
    assert all("CPU" in each.device for each in computing), [(each.type, each.device) for each in computing]
