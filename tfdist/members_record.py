"""The message of worker 0 to the supervisor in a job that goes on without lost workers. Does not load TensorFlow."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class MembersRecord:
    """The workers that take part in synchronizations, and counts that only grow in an attempt.

    Attributes:
      members: The workers that take part, worker 0 included.
      joins: How often each worker has joined.
      connections: How often each worker has connected to worker 0.
      missed_steps: Steps of synchronizations without a worker, by worker and by how often it had joined before.
      start_seconds: Time that a worker has from its start until it connects.
      took_part: By worker, the number of the last join after which it has taken part in a synchronization.
    """

    members: Sequence[int] = ()
    joins: Mapping[int, int] = dataclasses.field(default_factory=dict)
    connections: Mapping[int, int] = dataclasses.field(default_factory=dict)
    missed_steps: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    start_seconds: float = 300.0
    took_part: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the record as JSON."""
        return {
            "members": list(self.members),
            "joins": sorted(self.joins.items()),
            "connections": sorted(self.connections.items()),
            "missed_steps": [[*key, steps] for key, steps in sorted(self.missed_steps.items())],
            "start_seconds": self.start_seconds,
            "took_part": sorted(self.took_part.items()),
        }

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> "MembersRecord":
        """Makes a record from the JSON that `to_json` has returned.

        Raises:
          KeyError: If a part is missing; `ValueError` or `TypeError` if it has another form.
        """
        return cls(
            [int(worker) for worker in told["members"]],
            {int(worker): int(count) for worker, count in told["joins"]},
            {int(worker): int(count) for worker, count in told["connections"]},
            {(int(worker), int(joins)): int(steps) for worker, joins, steps in told["missed_steps"]},
            float(told["start_seconds"]),
            {int(worker): int(join) for worker, join in told["took_part"]},
        )
