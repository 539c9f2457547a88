"""All facts that the chief of `tfdist doctor` has collected, from which the checks follow."""

import dataclasses
from collections.abc import Mapping, Sequence

from tfdist.cluster.address import split_address
from tfdist.doctor.worker_facts import PeerContact, WorkerFacts
from tfdist.network.connection_acceptor import printable
from tfdist.readable_numbers import counted

_MOST_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Participant:
    """A task of `tfdist doctor` that has told its facts.

    Attributes:
      seat: Index of the worker in the chief's TF_CONFIG; None if the task has no place there.
      facts: Its facts.
      contacts: The outcome of its attempts to connect to each worker of its TF_CONFIG.
      sees_marker: Whether it sees the chief's file in the backup folder; None if not asked.
    """

    seat: int | None
    facts: WorkerFacts
    contacts: tuple[PeerContact, ...]
    sees_marker: bool | None = None

    def contact(self, peer: int) -> PeerContact | None:
        """Returns the outcome of the attempts to connect to a peer, or None if they are not known."""
        return next((each for each in self.contacts if each.peer == peer), None)


@dataclasses.dataclass(frozen=True)
class JobFacts:
    """The facts of all tasks that the reporting task knows.

    Attributes:
      worker: The reporting worker: the chief, or a worker without contact to the chief.
      addresses: Addresses of all workers, in the TF_CONFIG of the reporting worker.
      participants: The tasks that have told their facts, the reporting one first.
      waited_seconds: How long the tasks waited for each other.
      speeds: Floating-point operations per second of workers.
      links: Payload in bit/s from one worker to another.
      round_trips: Shortest round trips in seconds between workers.
    """

    worker: int
    addresses: tuple[str, ...]
    participants: tuple[Participant, ...]
    waited_seconds: float = 0.0
    speeds: Mapping[int, float] = dataclasses.field(default_factory=dict)
    links: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)
    round_trips: Mapping[tuple[int, int], float] = dataclasses.field(default_factory=dict)

    @property
    def seats(self) -> Mapping[int, Participant]:
        """The participants by worker, the first one if several claim the same place."""
        return {each.seat: each for each in reversed(self.participants) if each.seat is not None}

    @property
    def is_joint(self) -> bool:
        """Whether these are the facts of the chief, not those of one worker without contact to it."""
        return self.worker == 0

    def name(self, worker: int) -> str:
        """Names a worker with its address, and with its host if host names differ: "worker 2 at 10.0.0.3:2222"."""
        named = f"worker {worker} at {self.addresses[worker]}"
        present, hosts = self.seats.get(worker), {each.facts.host for each in self.participants}
        if present and len(hosts) > 1 and present.facts.host != split_address(self.addresses[worker])[0]:
            named += f" on {printable(present.facts.host)}"
        return named

    def names(self, workers: Sequence[int]) -> str:
        """Names several workers, the first of them in full."""
        listed = [self.name(worker) for worker in workers[:_MOST_NAMED]]
        more = [counted(len(workers) - _MOST_NAMED, "more worker")] if len(workers) > _MOST_NAMED else []
        return joined([*listed, *more])


def verb(workers: Sequence[int], one: str, several: str) -> str:
    """Returns the singular or plural form of a verb for these workers."""
    return one if len(workers) == 1 else several


def joined(parts: Sequence[str]) -> str:
    """Joins parts of a sentence: "a, b and c"."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
