"""Exchanges between two workers in one process, which are connected without TensorFlow."""

import gc
import itertools
import os
import socket
import threading
import time
import traceback

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.cross_device_utils import CollectiveKeys

from tfdist._compat import tf_internals
from tfdist.network.tls import Tls, TlsFiles
from tfdist.strategies.collectives import peer_exchange, pending_exchange, received_bytes
from tfdist.strategies.collectives.collective_launcher import _FIRST_INSTANCE_KEY, CollectiveLauncher
from tfdist.strategies.collectives.message_arrival import HEADER
from tfdist.strategies.collectives.ordered_sums import sum_in_order
from tfdist.strategies.collectives.peer_exchange import PeerExchange
from tfdist.strategies.collectives.pending_exchange import ExchangeForm
from tfdist.strategies.collectives.tcp_transport import TcpTransport

NAMES = ["worker 0 at a:1", "worker 1 at b:1"]
OPTIONS = tf_internals.CommunicationOptions()

SCENARIOS = []


def scenario(function):
    """Adds a function of two connected workers to `SCENARIOS`."""
    SCENARIOS.append(function)
    return function


def run_each(scenarios):
    """Runs scenarios, each in a forked process, since a scenario may leave its process in any state.

    Args:
      scenarios: Each scenario with the TLS files of its workers; without files, they do not use TLS.

    Returns:
      The traceback of each scenario, or "" if it passed.
    """
    return [run_forked(*each) for each in scenarios]


def run_forked(scenario, files):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        failure = ""
        try:
            scenario(ConnectedWorkers(files))
        except BaseException:
            failure = traceback.format_exc()
        os.write(writer, failure[-10_000:].encode())
        os._exit(0)
    os.close(writer)
    with open(reader) as told:
        failure = told.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return failure or (f"the process ended with {status}" if status else "")


class ConnectedWorkers:
    """Two workers that have exchanged tensors once.

    Attributes:
      ends: The connection's end at each worker.
      exchanges: The `PeerExchange` of each worker.
      ended: The sums that each worker has received, or its error; `None` while it waits.
    """

    def __init__(self, files):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.ends = [socket.create_connection(listener.getsockname()), listener.accept()[0]]
        if files:
            self._encrypt(files)
        self.exchanges = [PeerExchange(worker, {1 - worker: self.ends[worker]}, NAMES) for worker in range(2)]
        self.launchers = [CollectiveLauncher(77, 2, CollectiveKeys(), "/device:CPU:0", OPTIONS) for _ in range(2)]
        pairs = zip(self.launchers, self.exchanges, strict=True)
        self._steps = [sums(TcpTransport(launcher, True, exchange)) for launcher, exchange in pairs]
        self.ended = [None, None]
        assert self.both() == [[2000, 1000]] * 2, self.ended
        self.ended = [None, None]

    def _encrypt(self, files):
        tls, accepted = Tls(TlsFiles(*files)), []

        def accept():
            accepted.append(tls.accept(self.ends[1]))
            accepted[0].do_handshake()

        accepting = threading.Thread(target=accept)
        accepting.start()
        self.ends[0] = tls.connect(self.ends[0], "127.0.0.1")
        accepting.join()
        self.ends[1] = accepted[0]

    def begin(self, *workers, sizes=(1000, 500)):
        """Begins a step of each of these workers, which sums tensors of ones. Returns the threads."""
        threads = [threading.Thread(target=self._run, args=(i, *map(tf.ones, sizes)), daemon=True) for i in workers]
        for thread in threads:
            thread.start()
        return threads

    def both(self, **options):
        """Runs a step of both workers, and returns `ended`."""
        for thread in self.begin(0, 1, **options):
            thread.join(60)
        return self.ended

    def _run(self, worker, *tensors):
        try:
            self.ended[worker] = [total.numpy().sum() for total in self._steps[worker](*tensors)]
        except tf.errors.OpError as error:
            self.ended[worker] = f"{type(error).__name__} {error.message}"

    def shorten_sends(self):
        """Lets the kernel take only a part of a message at a time."""
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


def sums(transport):
    def step(*tensors):
        return [transport.all_reduce(each, OPTIONS) for each in tensors]

    return tf.function(step, autograph=False)


def eventually(found):
    deadline = time.monotonic() + 60
    while not found() and time.monotonic() < deadline:
        time.sleep(0.01)
    return found()


@scenario
def a_graph_that_is_deleted_leaves_no_inboxes(workers):
    first, _ = workers.exchanges
    assert len(first._inboxes) == 2, first._inboxes
    workers.both(sizes=(7, 9, 3))
    assert len(first._inboxes) == 5, first._inboxes
    workers._steps.clear()
    assert eventually(lambda: gc.collect() is not None and not first._inboxes), first._inboxes


@scenario
def exchanges_do_not_wait_for_each_other(workers):
    (thread,) = workers.begin(0)
    first, second = workers.exchanges
    assert eventually(lambda: len(first._rounds) == 2), first._rounds
    workers.begin(1)
    thread.join(60)
    assert eventually(lambda: workers.ended == [[2000, 1000]] * 2), workers.ended
    # A worker may count the bytes that it has sent only after they have arrived.
    assert eventually(lambda: first.carried_bytes() == second.carried_bytes() >= 4 * 1500 * 4), "each way, in two steps"


FORGED_HEADERS = {
    "a negative size": [(77, 1 << 30, -1)],
    "the least size": [(77, 1 << 30, -(1 << 63))],
    "an absurd size": [(77, 1 << 30, 1 << 31)],
    "the most size": [(77, 1 << 30, (1 << 63) - 1)],
    "a key that is none": [(77, 0, 8)],
    "a negative key": [(77, -1, 8)],
    "a group that is none": [(-1, 5, 8)],
    "a form that is none": [(77, 1 << 30, 8, 9)],
    "an exchange a second time": [(99, 5, 0), (99, 5, 0)],
    "too many exchanges": [(99, key, 0) for key in range(1, 300_000)],
    "another protocol": [(0x47455420, 0x2F204854, 0x54502F312E310D0A)],
}


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def header_of(group, key, size, form=ExchangeForm.ALL_GATHER.value):
    return HEADER.pack(group, key, size, form)


def is_closed_after(end, headers):
    """Sends headers, and returns whether the other end then closes the connection."""
    try:
        end.sendall(b"".join(header_of(*each) for each in headers))
        while end.recv(1 << 16):  # earlier messages of the other end
            pass
        return True
    except OSError:
        return True


@scenario
def a_header_that_no_worker_sends_is_refused_its_sender_named_and_its_connection_closed(workers):
    exchange, end = workers.exchanges[0], workers.ends[1]
    workers.begin(0)
    assert eventually(lambda: len(exchange._rounds) == 2), exchange._rounds
    before = resident_bytes()
    for case, headers in FORGED_HEADERS.items():
        assert is_closed_after(end, headers), case
        assert eventually(lambda exchange=exchange: exchange._fault), case
        assert exchange._fault.startswith("worker 1 at b:1 has ") and "closed" in exchange._fault, exchange._fault
        assert eventually(lambda: workers.ended[0]) and "worker 1 at b:1 has sent" in workers.ended[0], workers.ended
        own_end, end = socket.socketpair()
        exchange = PeerExchange(0, {1: own_end}, NAMES)
    assert resident_bytes() - before < 80 << 20, resident_bytes() - before


@scenario
def the_sum_of_empty_tensors_is_empty(workers):
    assert workers.both(sizes=(0, 4)) == [[0, 8]] * 2, workers.ended


@scenario
def a_worker_that_has_taken_other_steps_is_named(workers):
    peer_exchange._LOOK_SECONDS, peer_exchange._UNLIKE_SECONDS = 0.05, 0.5
    workers.launchers[0].count.assign_add(2)  # as after a step that failed on one worker only
    assert all("UnavailableError" in each for each in workers.both()), workers.ended
    assert any("exchanges something else" in each and "worker" in each for each in workers.ended), workers.ended


@scenario
def a_step_does_not_take_the_messages_that_failed_steps_have_left(workers):
    exchange, steps = workers.exchanges[0], []
    for launcher, own in zip(workers.launchers, workers.exchanges, strict=True):
        transport = TcpTransport(launcher, True, own)

        def fail():
            assert eventually(lambda: exchange._rounds)
            raise ValueError("on purpose")

        @tf.function(autograph=False)
        def step(tensor, fails, transport=transport, fail=fail):
            tf.cond(fails, lambda: tf.numpy_function(fail, [], tf.bool), lambda: tf.constant(True))
            return transport.all_reduce(tensor, OPTIONS)

        steps.append(step)
    for number in range(2):
        try:
            steps[0](tf.fill([1000], 1.0 + number), tf.constant(True))
            raise AssertionError("the step has not failed")
        except tf.errors.InvalidArgumentError as error:
            assert "on purpose" in error.message, error.message
        assert steps[1](tf.fill([1000], 1.0 + number), tf.constant(False)).numpy().tolist() == [2.0 + 2 * number] * 1000
        assert eventually(lambda: not exchange._rounds), exchange._rounds
    totals = []
    last = tf.fill([1000], 5.0), tf.constant(False)
    thread = threading.Thread(target=lambda: totals.append(steps[0](*last)), daemon=True)
    thread.start()
    assert steps[1](tf.fill([1000], 6.0), tf.constant(False)).numpy().tolist() == [11.0] * 1000
    thread.join(60)
    assert totals and totals[0].numpy().tolist() == [11.0] * 1000, totals


@scenario
def workers_that_send_tensors_in_different_ways_are_named(workers):
    first, second = (
        TcpTransport(launcher, True, exchange)
        for launcher, exchange in zip(workers.launchers, workers.exchanges, strict=True)
    )
    workers._steps = [
        tf.function(lambda *tensors: [first.all_gather(each, OPTIONS) for each in tensors], autograph=False),
        tf.function(lambda *tensors: [second.sum_sent_whole(each, OPTIONS) for each in tensors], autograph=False),
    ]
    assert all("UnavailableError" in each for each in workers.both()), workers.ended
    assert any("in one way" in each and "by swap" in each for each in workers.ended), workers.ended


@scenario
def a_worker_that_cannot_send_fails_without_waiting(workers):
    def without_room(self, *args):
        raise MemoryError("no room")

    pending_exchange.PendingExchange.__init__ = without_room
    assert all("UnavailableError" in each for each in workers.both()), workers.ended
    assert all("no room" in each for each in workers.ended), workers.ended


@scenario
def large_and_small_tensors_arrive_independently(workers):
    sizes = [3, 4_000_000, 5, 70_000, 100_001, 1, 2_000_000]
    assert workers.both(sizes=sizes) == [[2 * size for size in sizes]] * 2, workers.ended


@scenario
def a_message_larger_than_one_dimension_can_count_arrives(workers):
    received_bytes._MOST_ROWS = 900  # less than the rows of a message of 4000 bytes
    assert workers.both() == [[2000, 1000]] * 2, workers.ended


@scenario
def a_message_that_is_sent_in_parts_arrives_whole(workers):
    workers.shorten_sends()
    for sizes in ([50_000], [1000, 60_000, 3], [64_000, 64_000]):
        assert workers.both(sizes=sizes) == [[2 * size for size in sizes]] * 2, workers.ended


@scenario
def an_exchange_after_a_failure_raises_at_once(workers):
    context, begun = tf_internals.context.context(), threading.Event()
    abort = context.abort_collective_ops

    def slowly(*args):
        begun.set()
        time.sleep(0.5)
        abort(*args)

    context.abort_collective_ops = slowly
    fail = workers.exchanges[0]._fail
    threading.Thread(target=fail, args=("worker 1 at b:1 is gone",), daemon=True).start()
    begun.wait()
    workers.begin(0)[0].join(60)
    assert "worker 1 at b:1 is gone" in workers.ended[0], workers.ended


def connected(count):
    """Connects workers to each other. Returns the ends of each worker's connections, by peer, and all names."""
    ends = [{} for _ in range(count)]
    for one, other in itertools.combinations(range(count), 2):
        ends[one][other], ends[other][one] = socket.socketpair()
    return ends, [f"worker {i} at x:1" for i in range(count)]


def summing(exchanges, ranks, group=None):
    """Returns a step for each exchange, which sums tensors over the workers of a group."""
    launchers = [CollectiveLauncher(88, ranks, CollectiveKeys(), "/device:CPU:0", OPTIONS) for _ in exchanges]
    pairs = zip(launchers, exchanges, strict=True)
    return [sums(TcpTransport(launcher, True, exchange, group)) for launcher, exchange in pairs]


def run_at_once(steps, tensors):
    """Runs steps at once, each with its tensors. Returns the totals of each step, or its error."""
    ended = [None] * len(steps)

    def run(place):
        try:
            ended[place] = [total.numpy() for total in steps[place](*tensors[place])]
        except tf.errors.OpError as error:
            ended[place] = f"{type(error).__name__} {error.message}"

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ended


def random_tensor(worker, size, dtype):
    draws = np.random.default_rng([worker, size])
    if dtype.is_integer:
        return tf.constant(draws.integers(dtype.min, dtype.max, size, dtype.as_numpy_dtype))
    return tf.cast(draws.normal(size=size) * 10.0 ** draws.integers(-3, 4, size), dtype)


@scenario
def sums_over_own_connections_have_the_bits_of_sums_in_a_graph(workers):
    del workers
    ends, names = connected(3)
    steps = summing([PeerExchange(worker, ends[worker], names) for worker in range(3)], 3)
    dtypes = tf.float32, tf.float64, tf.int32, tf.int64, tf.float16, tf.bfloat16
    kinds = [(size, dtype) for dtype in dtypes for size in (0, 1, 3, 70_001, 300_000)]  # Whole, and in parts.
    given = [[random_tensor(worker, *kind) for kind in kinds] for worker in range(3)]
    expected = [sum_in_order(tf.stack(own)).numpy().tobytes() for own in zip(*given, strict=True)]
    for _ in range(2):
        for totals in run_at_once(steps, given):
            assert not isinstance(totals, str), totals
            assert [total.tobytes() for total in totals] == expected


@scenario
def a_worker_that_is_lost_between_the_halves_of_a_sum_is_named(workers):
    del workers
    ends, names = connected(3)
    exchanges = [PeerExchange(worker, ends[worker], names) for worker in range(2)]
    steps = summing(exchanges, 3)
    size = 400_000
    first_key = _FIRST_INSTANCE_KEY + 1
    for peer in range(2):  # Worker 2 sends its rows of the first half, and no sum.
        message = header_of(88, first_key, size, ExchangeForm.SUM_PARTS.value) + bytes(size)
        threading.Thread(target=ends[2][peer].sendall, args=(message,), daemon=True).start()
    closes = exchanges, ends[2], first_key + 1
    threading.Thread(target=close_when_summed, args=closes, daemon=True).start()
    for ended in run_at_once(steps, [[tf.ones([3 * size // 4])]] * 2):
        assert "worker 2 at x:1 is gone" in ended, ended


def close_when_summed(exchanges, ends, key):
    """Closes the connections when all have joined the second half of a sum."""
    assert eventually(lambda: all((88, key) in exchange._rounds for exchange in exchanges))
    for end in ends.values():
        end.shutdown(socket.SHUT_RDWR)


@scenario
def workers_outside_of_a_group_take_no_part(workers):
    del workers
    ends, names = connected(4)
    exchanges, group = [PeerExchange(worker, ends[worker], names) for worker in range(4)], [0, 2, 3]
    steps = summing([exchanges[worker] for worker in group], 3, group)
    given = [[tf.range(size, dtype=tf.float32) * (place + 1) for size in (3, 60_001)] for place in range(3)]
    for totals in run_at_once(steps, given):  # Whole, and in parts.
        assert [total.tolist() for total in totals] == [[6.0 * i for i in range(size)] for size in (3, 60_001)]
    assert exchanges[1].carried_bytes() == 0 and exchanges[0].carried_bytes() > 0
    ends[1][0].sendall(header_of(88, 5, 8))
    assert eventually(lambda: exchanges[0]._fault) and "worker 1 at x:1 has sent" in exchanges[0]._fault
    assert "takes no part" in exchanges[0]._fault, exchanges[0]._fault


def data_goes_both_ways_whole_or_in_parts_until_a_worker_closes(workers):
    workers.shorten_sends()
    for sizes in ([3, 1_000_000, 5, 70_000, 100_001, 1, 0], [50_000], [1000, 60_000, 3], [64_000, 64_000]):
        for _ in range(2):
            assert workers.both(sizes=sizes) == [[2 * size for size in sizes]] * 2, (sizes, workers.ended)
    socket.socket.shutdown(workers.ends[1], socket.SHUT_RDWR)
    assert eventually(lambda: workers.exchanges[0]._gone)  # Otherwise the step may begin its exchange before.
    workers.begin(0)[0].join(60)
    assert "worker 1 at b:1 is gone" in workers.ended[0], workers.ended
    refused = workers.exchanges[0]._state()["pending"][-1]
    assert (refused["group"], refused["missing"]) == (77, [1]) and refused["bytes"] > 0 and refused["since"], refused
