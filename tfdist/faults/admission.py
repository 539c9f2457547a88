"""Decides at the start of a job whether worker 0 admits a process that claims to be a worker of it."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tfdist.network.connection_acceptor import printable
from tfdist.readable_numbers import counted

PLAIN_SECONDS = 3.0
"""How long a misfit on a host of this cluster must keep trying before it ends the job."""

_MOST_SHOWN = 8
_MOST_NOTED = 256


@dataclasses.dataclass(frozen=True)
class Introduction:
    """The introduction that a worker sends to worker 0 at the start of a job.

    Attributes:
      worker: Index of the worker.
      addresses: Addresses of all workers in the worker's TF_CONFIG.
      versions: Versions of the packages that must be the same on all workers.
      host: Name of the worker's host.
    """

    worker: int
    addresses: tuple[str, ...]
    versions: str
    host: str

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> "Introduction | None":
        """Returns the worker's introduction in an untrusted message to worker 0; `None` if the message has none."""
        worker, addresses = message.get("worker"), message.get("addresses")
        versions, host = message.get("versions"), message.get("host")
        if type(worker) is not int or not isinstance(addresses, list):
            return None
        if not all(isinstance(text, str) for text in (versions, host, *addresses)) or not 0 < worker < len(addresses):
            return None
        return cls(worker, tuple(addresses), str(versions), str(host))

    def describe(self) -> str:
        """Returns a text that names the worker and its host, for messages."""
        return f"worker {self.worker} on {printable(self.host)}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Worker 0's decision to admit or refuse a worker that has introduced itself.

    Attributes:
      refused: The reason of a refusal, "cluster", "versions" or "index"; `None` if the worker is admitted.
      problem: The full error text; empty without an error.
      is_plain: Whether the error ends the job.
    """

    refused: str | None = None
    problem: str = ""
    is_plain: bool = False


class Admission:
    """Decides which workers join at the start of a job, and when a misfit (cluster, versions or index) ends the job.

    With a secret every introduction is proved. A misfit is then a mistake in the job and ends the job at once. Without
    a secret anybody can claim anything. Only a misfit on a host of this cluster then ends the job, after 3 s of tries.
    If two workers have the same index, the worker on the host that TF_CONFIG names for this index is admitted.

    Args:
      own: Worker 0's own introduction.
      is_proved: Whether introductions prove a secret.
      addresses_of: Returns the known IP addresses of a worker's host.
    """

    def __init__(self, own: Introduction, is_proved: bool, addresses_of: Callable[[int], Collection[str]]):
        self._own = own
        self._is_proved = is_proved
        self._addresses_of = addresses_of
        self._first_seen: dict[tuple[str, str], float] = {}

    def judge(self, guest: Introduction, source: str, present: tuple[str, str] | None, now: float) -> Verdict:
        """Decides whether to admit the worker that sent an introduction.

        Args:
          guest: The introduction.
          source: The IP address of the sender.
          present: The IP address and the host name of the worker admitted under this index; `None` if none was.
          now: The time of a monotonic clock.
        """
        misfit = self._misfit(guest, present)
        if misfit is None:
            return Verdict()
        refused, problem = misfit
        if self._is_proved:
            return Verdict(refused, problem, is_plain=True)
        if refused == "index" and present and self._is_at_home(guest, source) > self._is_at_home(guest, present[0]):
            return Verdict(None, problem)
        if not any(source in self._addresses_of(worker) for worker in range(len(self._own.addresses))):
            return Verdict(refused, problem)
        if len(self._first_seen) >= _MOST_NOTED:
            self._first_seen.clear()
        since = self._first_seen.setdefault((source, problem), now)
        return Verdict(refused, problem, is_plain=now - since >= PLAIN_SECONDS)

    def _is_at_home(self, guest: Introduction, source: str) -> bool:
        return source in self._addresses_of(guest.worker)

    def _misfit(self, guest: Introduction, present: tuple[str, str] | None) -> tuple[str, str] | None:
        """Returns what does not fit in a worker's introduction, as one word and as a full text; `None` if all fits."""
        own, name = self._own, guest.describe()
        if own.addresses != guest.addresses:
            return "cluster", (
                f"All workers need the same cluster in TF_CONFIG, but worker 0 has {_counted(own.addresses)}, and "
                f"{name} has {_counted(guest.addresses)}. Give all workers the same addresses in the same order."
            )
        if own.versions != guest.versions:
            return "versions", (
                f"All workers need the same versions, but worker 0 has {own.versions}, and {name} has "
                f"{printable(guest.versions)}. Install the same versions on all workers."
            )
        if present is not None:
            return "index", (
                f"Each worker must have its own index in TF_CONFIG, but two processes have index {guest.worker}: one "
                f"on {printable(present[1])}, one on {printable(guest.host)}. End one, or give it another index."
            )
        return None


def _counted(addresses: Collection[str]) -> str:
    shown = [printable(address) for address in list(addresses)[:_MOST_SHOWN]]
    more = f", … {len(addresses) - _MOST_SHOWN} more" if len(addresses) > _MOST_SHOWN else ""
    return f"{counted(len(addresses), 'worker')} ({', '.join(shown)}{more})"
