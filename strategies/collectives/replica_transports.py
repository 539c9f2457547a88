"""The interface through which the replicas of a worker reach all replicas, or those of a group."""

from typing import Protocol

from tfdist.strategies.collectives.transport import Transport


class ReplicaTransports(Protocol):
    """The transports of a worker's replicas to the other replicas with which they exchange.

    If these are on several workers with several devices each, the devices of a worker first sum among themselves.

    Attributes:
      worker: Place of this worker among those that take part.
      replicas: Number of devices that take part on each worker.
      spread: The same number if devices of a worker sum first; otherwise 1.
      ranks: Number of participants of the exchange after that.
    """

    worker: int
    replicas: int
    spread: int
    ranks: int

    def within_worker(self, replica: int) -> Transport | None:
        """Returns the transport on which a replica sums with other devices first; `None` if `spread` is 1."""
        ...

    def across_workers(self, replica: int) -> Transport:
        """Returns the transport of a replica to the matching replicas of other workers, or else to other devices."""
        ...
