"""Messages to peers over connections of this process."""

import socket
import threading

import pytest

from tfdist.strategies.collectives.message_sender import MessageSender
from tfdist.strategies.collectives.socket_streams import PlainStream

pytestmark = pytest.mark.unit

SECONDS = 30


class Peers:
    """Several connections, and a sender of messages to their other ends."""

    def __init__(self, count):
        self._pairs = [socket.socketpair() for _ in range(count)]
        self.ends = [there for _, there in self._pairs]
        for end in self.ends:
            end.settimeout(SECONDS)
        self.errors, self.lost = [], threading.Event()
        self.sender = MessageSender({peer: PlainStream(here) for peer, (here, _) in enumerate(self._pairs)}, self._lose)

    def _lose(self, peer, error):
        self.errors.append((peer, type(error)))
        self.lost.set()

    def close(self):
        for pair in self._pairs:
            for end in pair:
                end.close()

    def receive(self, peer, size):
        parts, rest = [], size
        while rest:
            parts.append(self.ends[peer].recv(min(1 << 20, rest)))
            assert parts[-1], "the connection has ended"
            rest -= len(parts[-1])
        return b"".join(parts)


@pytest.fixture
def peers():
    made = []

    def make(count):
        made.append(Peers(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


def message(number, size):
    return b"head%04d" % number, memoryview(bytes([number % 251]) * size)


def test_messages_of_all_sizes_arrive_in_order(peers):
    group, sizes = peers(1), [3, 5_000_000, 0, 10, 300_000, 1]

    for number, size in enumerate(sizes):
        group.sender.give(0, *message(number, size))

    for number, size in enumerate(sizes):
        header, row = message(number, size)
        assert group.receive(0, len(header)) == header
        assert group.receive(0, size) == bytes(row)


def test_threads_do_not_grow_with_the_number_of_peers(peers):
    def senders():
        return sum(each.name == "tfdist-peers-send" for each in threading.enumerate())

    before = senders()
    peers(40)

    assert senders() - before == 4


def test_peers_that_do_not_receive_do_not_hold_up_others(peers):
    group = peers(6)
    for peer in range(3):
        group.sender.give(peer, *message(peer, 8_000_000))  # More than a connection takes without a receiver.

    for peer in (3, 4, 5):
        group.sender.give(peer, *message(peer, 4_000_000))
    for peer in (3, 4, 5):
        assert group.receive(peer, 4_000_008) == b"".join(message(peer, 4_000_000))


def test_a_lost_peer_is_told_and_others_go_on(peers):
    group = peers(2)
    group.ends[0].close()

    group.sender.give(0, *message(0, 8_000_000))
    assert group.lost.wait(SECONDS)
    group.sender.give(0, *message(1, 10))
    group.sender.give(1, *message(2, 2_000_000))

    assert group.receive(1, 2_000_008) == b"".join(message(2, 2_000_000))
    assert [peer for peer, _ in group.errors] == [0]
