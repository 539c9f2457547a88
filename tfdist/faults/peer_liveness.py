"""Reveals the end of a peer at once: the kernel closes its connections, whatever ended it.

TensorFlow's heartbeats reveal it after seconds, unless a message to that worker is under way. The kernel does not close
the connections of a worker that is frozen or whose host is off. Heartbeats detect such a worker; for the chief see
`tfdist.faults.chief_liveness`.
"""

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from tfdist.cluster.address import split_address

__all__ = ["PeerLiveness"]

_DONE, _FAILED = b"bye\n", b"bad\n"
_IDLE_SECONDS = 30  # Keeps firewalls from forgetting a silent connection.
_CHECKS, _CHECK_SECONDS = 5, 0.2


class PeerLiveness:
    """Connections to other workers, watched by a thread.

    Args:
      lines: A connection to each, by worker.
      addresses: Of all workers.
      on_loss: Called with a worker whose process has ended without a word.

    Attributes:
      left: The workers that have said goodbye when they were done.
      ended: Those, the ones that said so as they failed, and the ones that ended without a word.
      silent: The workers that were found not to answer.
    """

    def __init__(self, lines: Mapping[int, socket.socket], addresses: list[str], on_loss: Callable[[int], None]):
        self._lines = dict(lines)
        self._addresses = addresses
        self._on_loss = on_loss
        self._lock = threading.Lock()  # A connection with TLS must not be read and written at the same time.
        self.left: set[int] = set()
        self.ended: set[int] = set()
        self.silent: set[int] = set()
        for line in self._lines.values():
            line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_SECONDS)
        threading.Thread(target=self._watch, name="tfdist-lifelines", daemon=True).start()

    def say_goodbye(self, *, done: bool) -> None:
        """Lets this process end without being a loss, also if it has failed."""
        for line in self._lines.values():
            with self._lock, contextlib.suppress(OSError):
                line.sendall(_DONE if done else _FAILED)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for worker, line in self._lines.items():
                selector.register(line, selectors.EVENT_READ, worker)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    if self._has_died(key.data):
                        self.ended.add(key.data)
                        self._on_loss(key.data)

    def _has_died(self, worker: int) -> bool:
        try:
            with self._lock:
                said = self._lines[worker].recv(len(_DONE))
            if said == _DONE:
                self.left.add(worker)
            if said:
                self.ended.add(worker)
                return False
        except ConnectionResetError:
            pass
        except OSError:  # the network, not the process
            return False
        # A line may be cut by others than its ends: who still serves its address is not gone.
        return any(self._refuses(self._addresses[worker]) for _ in range(_CHECKS))

    def _refuses(self, address: str) -> bool:
        try:
            with socket.create_connection(split_address(address), timeout=_CHECK_SECONDS):
                time.sleep(_CHECK_SECONDS)  # It may be about to end.
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False
