"""Exchanges of one of several workers for graphs that never run, without connections and threads."""

import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.exchange_groups import ExchangeGroups
from tfdist.strategies.collectives.exchange_inboxes import ExchangeInboxes
from tfdist.strategies.collectives.peer_exchange import PeerExchange


class UnconnectedExchange(PeerExchange):
    """The exchange of the first of several workers, which cannot reach the others."""

    def __init__(self, workers):
        self._names, self._members = range(workers), {}
        self._inboxes = ExchangeInboxes(0, lambda labels, key, rows: key)


def unconnected_collectives(workers, group_size=None):
    """Returns the collectives of the first of several workers with one CPU each, in two levels if in groups."""
    options = tf.distribute.experimental.CommunicationOptions()
    collectives = Collectives(["/job:localhost/replica:0/task:0/device:CPU:0"], workers, options, CollectiveKeys(1))
    if group_size is not None:
        collectives.exchange_in(ExchangeGroups(group_size, workers))
    collectives.use(UnconnectedExchange(workers))
    return collectives
