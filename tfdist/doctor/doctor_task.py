"""One task of `tfdist doctor`: listens at its address, tries all peers, and answers the chief's requests."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import secrets
import threading
import time
from collections.abc import Callable
from typing import Any

from tfdist.cluster import ClusterSpec
from tfdist.cluster.address import split_address
from tfdist.cluster.ports import check_port, is_held
from tfdist.doctor import compute_rate, machine_facts
from tfdist.doctor.doctor_channel import COMMANDS, CONTACTS, SERVES, DoctorChannel, Identity, call, welcome
from tfdist.doctor.job_facts import Participant
from tfdist.doctor.machine_facts import FactRequest
from tfdist.doctor.peer_contacts import PeerContacts
from tfdist.doctor.worker_facts import PeerContact, WorkerFacts, from_message
from tfdist.errors import TFConfigError
from tfdist.network import listening
from tfdist.network.connection_acceptor import ConnectionAcceptor
from tfdist.network.handshake import NotOursError, RefusedError
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls

MEASURING_SECONDS = 9.0
"""The last part of the time limit, in which the present tasks measure and no longer wait for missing ones."""

CALL_ERRORS = (OSError, NotOursError, RefusedError, UnicodeError, IndexError)
"""The errors of `DoctorTask.call`: there is no connection to the worker, or no such worker."""

_RETRY_SECONDS = 0.2
_LEAST_WAIT_SECONDS = 1.0
_FACTS_SECONDS = 5.0
_MOST_COMPUTE_SECONDS = 1.0
_LINK_SECONDS = 4.0
_LATE_SECONDS = 2.5  # How much longer than the chief another task waits for the chief.
_MARKER_SECONDS = 1.0  # A file server may show a new file late.


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """The options of a task of `tfdist doctor`.

    Attributes:
      request: The files and folders to look at.
      timeout_seconds: Time limit of the whole check.
    """

    request: FactRequest = dataclasses.field(default_factory=FactRequest)
    timeout_seconds: float = 15.0


class DoctorTask:
    """This process as a task of `tfdist doctor`, from its start to `close`.

    Args:
      spec: The cluster, seen from this process.
      options: Time limit, and the files and folders to look at.
      clock: The clock of this machine, in seconds since the epoch.

    Raises:
      ClusterError: If the secret or the TLS files in the environment are invalid.
    """

    def __init__(self, spec: ClusterSpec, options: DoctorOptions, clock: Callable[[], float] = time.time):
        self.spec, self.options, self._clock = spec, options, clock
        start = time.monotonic()
        self.deadline = start + options.timeout_seconds
        self.join_deadline = start + max(_LEAST_WAIT_SECONDS, options.timeout_seconds - MEASURING_SECONDS)
        self.start, self.token = start, secrets.token_hex(16)
        self._secret, self._tls = Secret.from_env(), Tls.from_env()
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._controls, self._computing = 0, threading.Lock()
        self._has_begun, self._alone_since = False, start
        self.exit_code: int | None = None
        self.channels: dict[str, DoctorChannel] = {}
        port_problem, self._acceptor, self._other_port = self._listen()
        self._facts = _Later(functools.partial(self._gather, port_problem))
        self.contacts = PeerContacts(spec.training_addresses, self._contact, clock, self.join_deadline)
        for duty in (self._receive, compute_rate.prepare, *([] if spec.worker_id == 0 else [self._serve_chief])):
            threading.Thread(target=duty, name="tfdist-doctor", daemon=True).start()

    def __enter__(self) -> "DoctorTask":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the sockets at which this task listens, and the connections to other tasks."""
        self._ended.set()
        if self._acceptor:
            self._acceptor.close()
        for channel in list(self.channels.values()):
            channel.close()

    def call(self, worker: int, role: str, seconds: float) -> DoctorChannel:
        """Opens a channel to a worker at its address in TF_CONFIG. Raises as `doctor_channel.call` does."""
        own = Identity(self.spec.worker_id, self.token, self._other_port, role)
        return call(self.spec.training_addresses[worker], own, self._secret, self._tls, seconds)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answers a request of the chief, or of a peer that measures the round trip."""
        if "begin" in request:
            self._has_begun = True
            return self._begin(request)
        if "compute" in request:
            seconds, threads = float(request["compute"]), int(request.get("threads", 1))
            with self._computing:
                return {"rate": compute_rate.measure(min(seconds, _MOST_COMPUTE_SECONDS), max(1, min(threads, 1024)))}
        if "trip" in request:
            return self._measure_trip(int(request["trip"]))
        if "link" in request:
            return self._measure_link(int(request["link"]), float(request.get("seconds", 0.1)))
        if "end" in request:
            self.exit_code = int(request["end"])
            self._ended.set()
        return {"clock": self._clock()}

    def alone(self) -> Participant:
        """Returns the facts and contacts of this task, when it does not wait for other tasks any longer."""
        self.contacts.end()
        outcomes = self.contacts.outcomes(time.monotonic() + _FACTS_SECONDS)
        return Participant(self.spec.worker_id, self._facts.get(_FACTS_SECONDS), outcomes)

    def wait_for_chief(self) -> bool:
        """Waits until the chief has ended the check; returns False if the chief cannot be reached, or has died."""
        while not self._ended.wait(0.05):
            now = time.monotonic()
            is_late = self._has_begun or now > self.join_deadline + _LATE_SECONDS
            if is_late and not self._controls and now > self._alone_since + _LATE_SECONDS:
                return False
            if now > self.deadline + self.options.timeout_seconds:
                return False
        return True

    def _listen(self) -> tuple[str, ConnectionAcceptor[DoctorChannel] | None, int]:
        """Listens at the address in TF_CONFIG, and at a free port as training does for its exchanges."""
        host, port = split_address(self.spec.address)
        problem, found, other = "", [], 0
        try:
            check_port(self.spec)
            found += listening.listen(host, port, backlog=1024, reuse_port=is_held(port))
        except (OSError, TFConfigError) as error:
            problem = str(error)
        with contextlib.suppress(OSError):
            more = listening.listen(host, 0, backlog=1024)
            found, other = [*found, *more], more[0].getsockname()[1]
        own = Identity(self.spec.worker_id, self.token, other)
        shake = functools.partial(welcome, own=own, secret=self._secret)
        return problem, ConnectionAcceptor(found, shake, self._tls) if found else None, other

    def _gather(self, port_problem: str) -> WorkerFacts:
        kinds = [*(["secret"] if self._secret else []), *(["TLS"] if self._tls else [])]
        security = " and ".join(kinds) or "none"
        names = {"token": self.token, "port_problem": port_problem, "security": security}
        return machine_facts.gather(self.spec, self.options.request, environ=os.environ, **names)

    def _contact(self, peer: int, seconds: float) -> DoctorChannel:
        return self.call(peer, CONTACTS, seconds)

    def _receive(self) -> None:
        """Serves the peers that connect. Chief: keeps the channels of workers that serve."""
        while self._acceptor and not self._ended.is_set():
            guest = self._acceptor.next(0.2)
            if guest is None:
                continue
            channel = guest[2]
            if channel.peer.role == SERVES:
                if self.spec.worker_id or not self.keep(channel):
                    channel.close()
                continue
            threading.Thread(target=self._serve, args=(channel,), name="tfdist-doctor", daemon=True).start()

    def keep(self, channel: DoctorChannel) -> bool:
        """Chief: keeps a channel for requests, unless there is one to the same task."""
        with self._lock:
            if channel.peer.token in self.channels or channel.peer.token == self.token:
                return False
            self.channels[channel.peer.token] = channel
            return True

    def drop(self, token: str) -> None:
        """Chief: closes a channel that has failed. The task at its other end then connects anew."""
        with self._lock:
            if channel := self.channels.pop(token, None):
                channel.close()

    def _serve(self, channel: DoctorChannel) -> None:
        """Answers the requests of one connection until it ends."""
        is_control = channel.peer.role in (COMMANDS, SERVES) or channel.peer.worker == 0
        with self._lock:
            self._controls += is_control
        try:
            with channel:
                channel.serve(self.answer, 2 * self.options.timeout_seconds)
        except (OSError, ValueError, TypeError, NotOursError):
            pass
        finally:
            with self._lock:
                self._controls -= is_control
                self._alone_since = time.monotonic()

    def _serve_chief(self) -> None:
        """Connects to the chief to answer its requests, in case that the chief cannot connect to this worker."""
        while not self._ended.is_set() and (self._has_begun or time.monotonic() < self.join_deadline):
            if not self._controls:
                with contextlib.suppress(*CALL_ERRORS):
                    channel = self.call(0, SERVES, _RETRY_SECONDS * 10)
                    self._serve(channel) if channel.peer.worker == 0 else channel.close()
            time.sleep(_RETRY_SECONDS)

    def _begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Ends the attempts to reach peers, and returns all facts and contacts."""
        self.contacts.end()
        outcomes = self.contacts.outcomes(time.monotonic() + _FACTS_SECONDS)
        facts, marker = self._facts.get(_FACTS_SECONDS), request.get("marker")
        folder = self.options.request.backups
        sees = _appears(folder, os.path.basename(marker)) if folder and isinstance(marker, str) else None
        contacts = [dataclasses.asdict(each) for each in outcomes]
        return {"facts": dataclasses.asdict(facts), "contacts": contacts, "sees_marker": sees}

    def _measure_link(self, peer: int, seconds: float) -> dict[str, Any]:
        try:
            with self.call(peer, CONTACTS, _LINK_SECONDS) as channel:
                there, here = channel.rates(min(seconds, 1.0), _LINK_SECONDS)
        except CALL_ERRORS:
            return {}
        return {"sent": there, "received": here}

    def _measure_trip(self, peer: int) -> dict[str, Any]:
        try:
            with self.call(peer, CONTACTS, _LINK_SECONDS) as channel:
                return {"round_trip": channel.ping(self._clock, _LINK_SECONDS)[0]}
        except CALL_ERRORS:
            return {}


class _Later:
    """The result of a function that runs in a thread."""

    def __init__(self, function: Callable[[], Any]):
        self._results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._results.append(function()), daemon=True)
        self._thread.start()

    def get(self, seconds: float) -> Any:
        """Waits for the result. Raises `TimeoutError` if there is none in time."""
        self._thread.join(seconds)
        if not self._results:
            raise TimeoutError("the facts about this machine could not be gathered in time")
        return self._results[0]


def participant_of(answer: dict[str, Any]) -> Participant | None:
    """Returns the facts and contacts in another task's answer to the chief; None if it has none."""
    facts, contacts = from_message(WorkerFacts, answer.get("facts")), answer.get("contacts")
    if facts is None or not isinstance(contacts, list):
        return None
    read = [from_message(PeerContact, each) for each in contacts]
    sees = answer.get("sees_marker")
    return Participant(None, facts, tuple(filter(None, read)), sees if isinstance(sees, bool) else None)


def _appears(folder: pathlib.Path, name: str) -> bool:
    """Returns whether a file of another host is in a folder, or in one above it, or appears there within a second."""
    deadline = time.monotonic() + _MARKER_SECONDS
    while not any(os.path.exists(each / name) for each in (folder.absolute(), *folder.absolute().parents)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True
