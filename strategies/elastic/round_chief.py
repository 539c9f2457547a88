"""Worker 0's end of rounds: admits members, gathers their parts, answers, and goes on without lost ones."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from absl import logging

from tfdist.cluster import ClusterSpec
from tfdist.errors import ClusterError, WorkerLostError
from tfdist.faults import rendezvous
from tfdist.members_record import MembersRecord
from tfdist.network.connection_acceptor import ConnectionAcceptor
from tfdist.network.handshake import NotOursError, receive
from tfdist.network.secret import Secret
from tfdist.network.tls import Tls
from tfdist.strategies.elastic.member_link import MemberLink
from tfdist.strategies.elastic.member_socket import MemberSocket
from tfdist.strategies.elastic.round_messages import Message, send_message

_LINE_BYTES = 1 << 18
_IS_SILENT = "is frozen or cut off"
_LOOK_SECONDS = 0.5
_LOG_SECONDS, _LOG_WAIT_SECONDS = 5.0, 30.0
_REFUSED_SECONDS = 3.0  # A closed connection would lose the greeting if the worker still sends.
_PLACE_REMEDY = (
    "Give all workers equally many batches (a BalancedSharding, arrays, or `repeat()` and steps_per_epoch), and "
    "callbacks that end training on all of them"
)


class RoundChief:
    """The connections of worker 0 to all other workers that live, and which of them take part in rounds.

    Args:
      cluster: The cluster.
      silence_seconds: How long a worker may be silent before it counts as lost.
      greeting: The first message to each worker that connects.
      on_loss: Called with a member that is lost during a `fit`, and the rows of which it has told since the last round.
      on_members: Called with the members, and what else the supervisor must know, whenever they change.

    Attributes:
      fit: Number of the newest `fit` that worker 0 has begun; -1 before the first. Signs of life tell it to workers.
      present: The place of the running `fit`, for workers that must still trace their step; `None` before it has begun.
      late: Returns the answer to a worker that wants to join the `fit` with a number, which is over.
    """

    def __init__(
        self,
        cluster: ClusterSpec,
        silence_seconds: float,
        greeting: Message,
        on_loss: Callable[[int, int], None],
        on_members: Callable[[MembersRecord], None],
    ):
        self._cluster, self._silence_seconds = cluster, silence_seconds
        self._greeting, self._on_loss, self._on_members = greeting, on_loss, on_members
        self.fit = -1
        self.present: Message | None = None
        self.late: Callable[[int], Message] | None = None
        self._changed = threading.Condition()
        self._links: dict[int, MemberLink] = {}
        self._joining: dict[int, int] = {}  # The `fit` that a worker wants to join.
        self._members: set[int] = set()
        self._joins: dict[int, int] = {}
        self._connections: dict[int, int] = {}
        self._missed_steps: dict[tuple[int, int], int] = {}
        self._took_part: dict[int, int] = {}
        self._offered: dict[int, Message] = {}
        self._told: dict[int, int] = {}  # Rows since the last round, by the signs of progress of a member.
        self._fits_over = 0
        self._telling = threading.Lock()  # Taken before `_changed`: records are told one after another.
        self._is_told, self._has_failed_to_tell = False, False
        self._tell_members()  # So the supervisor knows that the job goes on without lost workers.
        secret = Secret.from_env()
        self._acceptor: ConnectionAcceptor[int] = ConnectionAcceptor(
            rendezvous.listen_at(cluster), functools.partial(self._admit, secret), Tls.from_env()
        )
        threading.Thread(target=self._accept, name="tfdist-members", daemon=True).start()

    @property
    def members(self) -> list[int]:
        """The workers other than worker 0 that take part in the next round."""
        with self._changed:
            return sorted(self._members)

    def await_workers(self, fit: int, workers: Collection[int] | None, seconds: float) -> list[int]:
        """Waits until workers want to join a `fit`, and returns those that do.

        Args:
          fit: Number of the `fit`.
          workers: The workers; `None` for those that are connected.
          seconds: The deadline.

        Raises:
          WorkerLostError: If some of the given `workers` do not come in time.
        """
        deadline = time.monotonic() + seconds
        logged = time.monotonic()
        with self._changed:
            while True:
                for worker, link in list(self._links.items()):
                    if link.is_silent:  # Its host may have ended, which the kernel notices late.
                        logging.warning("worker %d %s; `fit` does not wait for it", worker, _IS_SILENT)
                        self._drop(worker, link, _IS_SILENT)
                awaited = set(self._links) if workers is None else set(workers)
                missing = sorted(worker for worker in awaited if self._joining.get(worker) != fit)
                now = time.monotonic()
                if not missing or (workers is None and now > deadline):
                    return sorted(worker for worker, wanted in self._joining.items() if wanted == fit)
                addresses = self._cluster.training_addresses
                names = ", ".join(f"worker {worker} at {addresses[worker]}" for worker in missing)
                if now > deadline:
                    raise WorkerLostError(
                        f"All {self._cluster.num_workers} workers must begin `fit` within {seconds:g} s, but these "
                        f"have not: {names}. Start the missing workers, see their logs, or raise "
                        "start_timeout_seconds of tfdist.FaultTolerance. Later a worker may be missing."
                    )
                if now - logged > _LOG_SECONDS:
                    logged = now
                    logging.warning("waiting %.0f s more for %s", deadline - now, names)
                self._changed.wait(min(_LOOK_SECONDS, max(0.01, deadline - now)))

    def joining(self, fit: int) -> list[int]:
        """Returns the workers that wait to join a `fit`."""
        with self._changed:
            return sorted(worker for worker, wanted in self._joining.items() if wanted == fit)

    def welcome(self, workers: Collection[int], message: Message) -> None:
        """Makes workers members from the next round on, and sends them the present state."""
        with self._changed:  # Before the message, which a worker may answer at once.
            here = [worker for worker in workers if worker in self._links]
            for worker in here:
                self._joining.pop(worker, None)
                self._offered.pop(worker, None)
                self._told[worker] = 0
                self._members.add(worker)
                self._joins[worker] = self._joins.get(worker, 0) + 1
            self._is_told = False
        self._send_all(dict.fromkeys(here, message))
        self._tell_members()

    def gather(self, kind: str, place: Any, patience_seconds: float) -> dict[int, Message]:
        """Waits until each member has sent its part of a round, and returns the parts by worker.

        A member that is lost meanwhile, sends nothing in time or is at another place is left out. The part of a member
        that is lost after it has sent all of it counts. A part that is arriving may take longer than the patience.

        Args:
          kind: Kind of the messages.
          place: The place in training, equal on all members.
          patience_seconds: How long to wait for a member that lives but sends nothing.

        Raises:
          ClusterError: If members have come to another place, and none to this one.
        """
        deadline, logged = time.monotonic() + patience_seconds, time.monotonic()
        with self._changed:
            while missing := [worker for worker in sorted(self._members) if worker not in self._offered]:
                is_late = time.monotonic() > deadline
                for worker in missing:
                    link = self._links[worker]
                    if link.is_silent:
                        self._drop(worker, link, _IS_SILENT)
                    elif is_late and not link.is_receiving:
                        self._drop(worker, link, f"has sent nothing for {patience_seconds:g} s")
                if self._members.intersection(missing):
                    logged = self._log_wait(logged)
                    self._changed.wait(_LOOK_SECONDS)
            parts, strays = self._take_offers(kind, place)
        for worker, (link, where) in strays.items():
            why = f"All workers must synchronize after the same steps, but {where}. {_PLACE_REMEDY}"
            if not parts:
                raise ClusterError(f"{why}.")
            self._send(worker, link, Message("left out", {"why": why}))
            with self._changed:
                if self._links.get(worker) is link:
                    self._drop(worker, link, f"is left out, since {where}. {_PLACE_REMEDY}")
        self._tell_members()
        return parts

    def _log_wait(self, logged: float) -> float:
        """Logs sometimes whose parts are still missing. Returns when it was logged last. Needs the lock."""
        if time.monotonic() - logged < _LOG_WAIT_SECONDS:
            return logged
        missing = [worker for worker in sorted(self._members) if worker not in self._offered]
        arriving = [worker for worker in missing if self._links[worker].is_receiving]
        logging.warning("waiting for the parts of workers %s; now arriving: %s", missing, arriving or "none")
        return time.monotonic()

    def _take_offers(self, kind, place):
        """Returns the parts for this place, and the link and place of each member at another one. Needs the lock."""
        offered, self._offered = self._offered, {}
        parts = {worker: offered[worker] for worker in sorted(offered) if _is_at(offered[worker], kind, place)}
        self._told, strays = dict.fromkeys(self._members, 0), {}
        for worker in sorted(offered.keys() - parts.keys()):
            part = offered[worker]
            if worker in self._members:
                self._told[worker] = _rows_of(part)
                here, there = f"{kind} {place} (fit, epoch, step)", f"{part.kind} {part.fields.get('place')}"
                strays[worker] = self._links[worker], f"worker 0 is at {here} and worker {worker} at {there}"
            else:  # It was lost, and its rows have not counted as lost.
                self._on_loss(worker, _rows_of(part))
        return parts, strays

    def answer(self, messages: Mapping[int, Message]) -> None:
        """Sends messages to members that live, which end a round for them."""
        with self._changed:
            living = {worker: message for worker, message in messages.items() if worker in self._members}
        self._send_all(living)

    def close_round(self, took_part: Collection[int], steps: int) -> None:
        """Counts the steps of a round as missed by the workers that did not take part, and notes those that did."""
        with self._changed:
            before = dict(self._took_part)
            self._took_part |= {worker: self._joins.get(worker, 0) for worker in took_part}
            missing = set(range(1, self._cluster.num_workers)) - set(took_part)
            for worker in missing:
                key = worker, self._joins.get(worker, 0)
                self._missed_steps[key] = self._missed_steps.get(key, 0) + steps
            if missing or self._took_part != before:
                self._is_told = False
        self._tell_members()

    def end_fit(self, fit: int, message: Message) -> None:
        """Tells all workers that still take part in a `fit`, or wait to join it, that it is over."""
        with self._changed:
            self._fits_over, self.present = fit + 1, None
            late = {worker for worker, wanted in self._joining.items() if wanted <= fit}
            told = self._members | late
            self._joining = {worker: wanted for worker, wanted in self._joining.items() if worker not in late}
            self._members = set()
            self._offered.clear()
        self._send_all(dict.fromkeys(told, message), are_last=True)

    # The methods below run in threads of this object.

    def _admit(self, secret, connection):
        worker = receive(connection, secret, _LINE_BYTES)
        number, addresses = worker.get("member"), worker.get("addresses")
        if type(number) is not int or not isinstance(addresses, list):
            raise NotOursError("it is not a worker of this job")
        if addresses != list(self._cluster.training_addresses):
            self._greet_and_await_end(connection)
            raise NotOursError("it has other addresses in its TF_CONFIG")
        if not 0 < number < self._cluster.num_workers:
            raise NotOursError("it is not a worker of this job")
        return number

    def _greet_and_await_end(self, connection):
        """Sends the greeting to a worker with another cluster. It finds the difference there, and raises an error."""
        with contextlib.suppress(OSError):
            send_message(MemberSocket(connection, _REFUSED_SECONDS), self._greeting)
            connection.settimeout(_REFUSED_SECONDS)
            while connection.recv(_LINE_BYTES):
                pass

    def _accept(self):
        while True:
            guest = self._acceptor.next(_LOOK_SECONDS)
            if guest is None:
                continue
            connection, _, worker = guest
            link = MemberLink(
                connection,
                self._silence_seconds,
                functools.partial(self._take, worker),
                functools.partial(self._lose, worker),
                lambda: {"fit": self.fit},
            )
            with self._changed:
                if worker in self._links:  # Its process has ended, and a new one is faster than that news.
                    self._drop(worker, self._links[worker], "was started again")
                self._links[worker] = link
                self._connections[worker] = self._connections.get(worker, 0) + 1
                self._is_told = False
                self._changed.notify_all()
            self._tell_members()
            self._send(worker, link, self._greeting)

    def _take(self, worker, link, message):
        """Takes a message of a worker."""
        with self._changed:
            if self._links.get(worker) is not link:
                return
            if message.kind == "progress":
                self._told[worker] = message.fields["rows"]
            elif message.kind == "join" and message.fields["fit"] < self._fits_over and self.late is not None:
                self._reply(worker, link, self.late(message.fields["fit"]))
            elif message.kind == "join" and self._goes_before(message):
                self._reply(worker, link, self.present)
            elif message.kind == "join":
                self._joining[worker] = message.fields["fit"]
            elif message.kind == "leave":
                self._members.discard(worker)
            else:
                self._offered[worker] = message
            self._changed.notify_all()

    def _goes_before(self, joining):
        """Whether a worker must run a step before it joins, since the others are training in this `fit`."""
        is_running = self.present is not None and self.present.fields["fit"] == joining.fields["fit"]
        return is_running and not joining.fields.get("is_warm", True)

    def _reply(self, worker, link, message):
        """Sends a message in a thread: the thread that receives must not wait for a peer."""
        threading.Thread(target=self._send, args=(worker, link, message), daemon=True).start()

    def _lose(self, worker, link, why):
        with self._changed:
            if self._links.get(worker) is link:
                self._drop(worker, link, f"is gone ({why})")
            self._changed.notify_all()
        self._tell_members()

    def _drop(self, worker, link, why):
        """Forgets a worker. Needs the lock."""
        link.close()
        del self._links[worker]
        self._joining.pop(worker, None)
        rows = self._told.pop(worker, 0)
        if worker in self._members:
            self._members.discard(worker)
            self._is_told = False
            if worker in self._offered:  # Its part of the round is complete, and counts.
                rows = 0
            logging.warning(
                "worker %d at %s %s. The others go on without it; it may join again. Rows it has trained on since the "
                "last synchronization are lost: %d.",
                *(worker, self._cluster.training_addresses[worker], why, rows),
            )
            self._on_loss(worker, rows)

    def _tell_members(self):
        """Tells the supervisor of changes. Not under the lock, since a disk may be slow.

        If this fails, the next call tries again.
        """
        with self._telling:
            with self._changed:
                if self._is_told:
                    return
                self._is_told = True
                counts = dict(self._joins), dict(self._connections), dict(self._missed_steps)
                record = MembersRecord([0, *sorted(self._members)], *counts, took_part=dict(self._took_part))
            try:
                self._on_members(record)
            except OSError as error:
                self._is_told = False
                if not self._has_failed_to_tell:
                    self._has_failed_to_tell = True
                    logging.warning(
                        "Worker 0 cannot tell `tfdist run` its members (%s). It tries again at each synchronization. "
                        "Until then a lost worker may not start again alone.",
                        error,
                    )

    def _send(self, worker, link, message, *, is_last=False):
        try:
            (link.send_last if is_last else link.send)(message)
        except OSError as error:
            self._lose(worker, link, str(error))
            return False
        return True

    def _send_all(self, messages: Mapping[int, Message], *, are_last: bool = False) -> list[int]:
        """Sends messages to workers at the same time. Returns the workers that took theirs.

        If `are_last`, waits until they have arrived, since this process may end.
        """
        with self._changed:
            links = {worker: self._links[worker] for worker in messages if worker in self._links}
        if not links:
            return []
        with ThreadPoolExecutor(len(links)) as pool:
            send = functools.partial(self._send, is_last=are_last)
            sent = pool.map(lambda worker: send(worker, links[worker], messages[worker]), links)
            return [worker for worker, is_sent in zip(links, list(sent), strict=True) if is_sent]


def _is_at(part: Message, kind: str, place: Any) -> bool:
    return (part.kind, part.fields.get("place")) == (kind, place)


def _rows_of(part: Message) -> int:
    """Returns the rows on which a worker has trained for a part with weights; 0 for other parts."""
    return part.fields["done"]["rows"] if "done" in part.fields else 0
