"""Reveals the end of a peer at once: when a process ends for any reason, the kernel closes its connections.

TensorFlow's heartbeats reveal an end only after seconds, unless a message to the peer is under way. The kernel does not
close the connections of a frozen worker, or of a host that is off. Heartbeats detect such workers; for the chief see
`tfdist.faults.chief_liveness`.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from tfdist.cluster.address import split_address

_DONE, _FAILED = b"bye\n", b"bad\n"
_IDLE_SECONDS = 30  # Keeps firewalls from dropping an idle connection.
_CHECKS, _CHECK_SECONDS = 5, 0.2
_CONNECT_SECONDS = 1.0  # Longer than the round trip of any link.


class PeerLiveness:
    """Liveness connections to peers, which a thread watches to notice at once when a peer's process ends.

    Args:
      connections: The connection to each peer, by worker.
      addresses: The addresses of all workers.
      on_loss: Called with each worker that has ended without a goodbye.

    Attributes:
      left: The workers that were done and sent a goodbye.
      ended: All workers that have ended: done, failed, or without a goodbye.
      silent: The workers that did not answer.
    """

    def __init__(
        self, connections: Mapping[int, socket.socket], addresses: Sequence[str], on_loss: Callable[[int], None]
    ):
        self._connections = dict(connections)
        self._addresses = addresses
        self._on_loss = on_loss
        self._lock = threading.Lock()  # TLS connections cannot be read and written at the same time.
        self.left: set[int] = set()
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        for connection in self._connections.values():
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        threading.Thread(target=self._watch, name="tfdist-liveness", daemon=True).start()

    def say_goodbye(self, *, done: bool) -> None:
        """Tells peers that this process ends, done or failed, so that they do not report it as lost."""
        for connection in self._connections.values():
            with self._lock, contextlib.suppress(OSError):
                connection.sendall(_DONE if done else _FAILED)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    # In a thread, since a peer whose host does not answer takes seconds.
                    judging = threading.Thread(target=self._judge, args=[key.data], name="tfdist-liveness", daemon=True)
                    judging.start()

    def _judge(self, worker: int) -> None:
        if self._has_died(worker):
            self.ended.add(worker)
            self._on_loss(worker)

    def _has_died(self, worker: int) -> bool:
        try:
            with self._lock:
                said = self._connections[worker].recv(len(_DONE))
            if said == _DONE:
                self.left.add(worker)
            if said:
                self.ended.add(worker)
                return False
        except ConnectionResetError:
            pass
        except OSError:  # The network failed, not the process.
            return False
        # The network may have cut the connection: a worker that still serves its address is not lost.
        return any(self._refuses(self._addresses[worker]) for _ in range(_CHECKS))

    def _refuses(self, address: str) -> bool:
        try:
            with socket.create_connection(split_address(address), timeout=_CONNECT_SECONDS):
                time.sleep(_CHECK_SECONDS)  # The process may be about to end.
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False
