"""The transports of a worker's replicas to some replicas only, such as those of a group."""

from tfdist.strategies.collectives.replica_transports import ReplicaTransports
from tfdist.strategies.collectives.shard_groups import Box
from tfdist.strategies.collectives.transport import Transport


class BoxTransports(ReplicaTransports):
    """The transports between the replicas of a box.

    Each replica of the worker is in a box of its own or shares one with others. All boxes have the same size and are on
    the same workers.

    Args:
      box: One of the boxes.
      worker: Number of this worker.

    Attributes:
      workers: The workers of the boxes.
      inside: For each replica of the worker, its transport to the other devices of the box; empty if it has one device.
      between: For each replica of the worker, its transport to the other workers; empty if the box is on one worker.
    """

    inside: list[Transport]
    between: list[Transport]

    def __init__(self, box: Box, worker: int):
        self.workers, self.worker, self.replicas = list(box.workers), box.workers.index(worker), len(box.devices)
        is_wide = len(box.workers) > 1
        self.spread = self.replicas if is_wide else 1
        self.ranks = len(box.workers) if is_wide else self.replicas
        self.inside, self.between = [], []

    def within_worker(self, replica: int) -> Transport | None:
        """Returns the transport on which a replica sums with other devices first; `None` if `spread` is 1."""
        return self.inside[replica] if self.spread > 1 else None

    def across_workers(self, replica: int) -> Transport:
        """Returns the transport of a replica to the matching replicas of other workers, or else to other devices."""
        return (self.between or self.inside)[replica]
