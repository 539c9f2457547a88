"""A worker's attempts to connect to all workers of its TF_CONFIG, at the same time, until a deadline."""

import dataclasses
import errno
import socket
import threading
import time
from collections.abc import Callable, Sequence

from tfdist.cluster.address import split_address
from tfdist.doctor.doctor_channel import DoctorChannel, is_open
from tfdist.doctor.worker_facts import (
    MISMATCH,
    NO_SUCH_NAME,
    OTHER_TASK,
    REFUSED,
    SILENT,
    STRANGER,
    UNREACHABLE,
    PeerContact,
)
from tfdist.network.handshake import NotOursError, RefusedError

_RETRY_SECONDS = 0.2
_ATTEMPT_SECONDS = 2.0  # A whole attempt: a busy machine answers late.
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EINVAL, errno.EACCES)


class PeerContacts:
    """Connects to each worker again and again, until each has answered or the time is over.

    Args:
      addresses: The addresses of all workers in TF_CONFIG.
      call: Opens a channel to a worker, within a number of seconds.
      clock: The clock of this worker, in seconds since the epoch.
      deadline: When to stop, as a time of the monotonic clock.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        call: Callable[[int, float], DoctorChannel],
        clock: Callable[[], float],
        deadline: float,
    ):
        self._addresses, self._call, self._clock = addresses, call, clock
        self._deadline = deadline
        self._last = {peer: PeerContact(peer, SILENT, "there was no attempt yet") for peer in range(len(addresses))}
        self._threads = [
            threading.Thread(target=self._contact, args=(peer,), name="tfdist-contact", daemon=True)
            for peer in range(len(addresses))
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Stops after one more whole attempt for each worker that has not answered yet."""
        self._deadline = min(self._deadline, time.monotonic())

    def outcomes(self, deadline: float) -> tuple[PeerContact, ...]:
        """Waits for the last attempts, at most until a moment, and returns the outcome for each worker."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return tuple(self._last.values())

    def _contact(self, peer: int) -> None:
        while True:
            start = time.monotonic()
            found = self._last[peer] = self._attempt(peer)
            if found.problem in ("", MISMATCH) or start > self._deadline:
                return
            time.sleep(_RETRY_SECONDS)

    def _attempt(self, peer: int) -> PeerContact:
        try:
            with self._call(peer, _ATTEMPT_SECONDS) as channel:
                other = channel.peer
                round_trip, ahead = channel.ping(self._clock, _ATTEMPT_SECONDS)
        except (OSError, NotOursError, RefusedError, UnicodeError) as error:
            return PeerContact(peer, *_described(error))
        found = PeerContact(peer, "", "", other.token, round_trip, ahead)
        if other.worker != peer:
            problem = f"a task that is worker {other.worker} in its own TF_CONFIG answers"
            return dataclasses.replace(found, problem=OTHER_TASK, detail=problem)
        host = split_address(self._addresses[peer])[0]
        return dataclasses.replace(found, other_port=is_open(host, other.port) if other.port else None)


def _described(error: Exception) -> tuple[str, str]:
    """Returns the kind of a failed attempt, and its description."""
    if isinstance(error, socket.gaierror | UnicodeError):
        return NO_SUCH_NAME, f"the host name does not resolve ({getattr(error, 'strerror', None) or error})"
    if isinstance(error, RefusedError):
        return MISMATCH, str(error)
    if isinstance(error, NotOursError):
        return STRANGER, "another program answers there"
    if isinstance(error, TimeoutError) or getattr(error, "errno", None) == errno.ETIMEDOUT:
        return SILENT, "no answer"
    if isinstance(error, ConnectionRefusedError):
        return REFUSED, "nothing listens at this port"
    if getattr(error, "errno", None) in _NO_ROUTE:
        return UNREACHABLE, f"the network refuses it ({getattr(error, 'strerror', None) or error})"
    return STRANGER, f"the connection ends during the handshake ({getattr(error, 'strerror', None) or error})"
