"""How many rows of a global batch each replica takes: by policy, and under "speed" by measured times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_plan import split
from tfdist.data.replica_speed import SpeedModel
from tfdist.data.topology import ReplicaTopology
from tfdist.readable_numbers import counted

_LEAST_WEIGHT = 1e-300  # With smaller weights, or larger ones than its inverse, quotients leave the range of floats.


class Shares:
    """The share of each replica: its rows of a whole global batch. Not thread-safe: callers must hold a lock.

    Args:
      policy: "speed", "equal", or a list of one weight per replica.
      global_batch_size: Number of rows to share.

    Attributes:
      policy: The policy, with weights as floats.
      present: The shares in force. Empty before `settle`, unless shares were restored.
      changes: How often the shares have changed.

    Raises:
      ValueError: If the policy is anything else.
    """

    def __init__(self, policy: str | Sequence[float], global_batch_size: int):
        self.policy, self._size = _checked_policy(policy), global_batch_size
        self.present: tuple[int, ...] = ()
        self.changes = 0
        self._speed, self._before = SpeedModel(1), np.zeros(1)

    @property
    def follow_speed(self) -> bool:
        """Whether the rows per replica follow the measured speed of the replicas."""
        return self.policy == "speed"

    def at(self, place: ReplicaTopology, size: int | None = None) -> tuple[int, ...]:
        """Returns the present shares if they fit these replicas and their limits, else the policy's initial shares.

        Args:
          place: The replicas.
          size: Number of rows to share, by default the size of `__init__`. If the present shares are of another size,
            shares under "speed" keep their proportions.

        Raises:
          ValueError: If the policy has weights for another number of replicas.
        """
        size = self._size if size is None else size
        # The policy has weights of all replicas of the job, of which these are a part.
        weights: Sequence[float] = [1.0] * place.replicas if place.is_alone else self._weights(place.replicas)
        if self._fits(place):
            if sum(self.present) == size:
                return self.present
            weights = self.present if self.follow_speed else weights
        return split(size, weights, place.at_most)

    def _fits(self, place: ReplicaTopology) -> bool:
        return len(self.present) == place.replicas and all(
            share <= most for share, most in zip(self.present, place.at_most, strict=True)
        )

    def settle(self, place: ReplicaTopology, size: int | None = None) -> None:
        """Keeps present shares and measured speeds if they fit these replicas, else starts from the policy."""
        shares = self.at(place, size)
        if not self._fits(place):
            self._speed = SpeedModel(place.replicas)
        self.present = shares
        if len(self._before) != place.replicas:
            self._before = np.zeros(place.replicas)

    def learn(self, assignment: BatchAssignment, report: Any, size: int | None = None, *, is_first: bool) -> None:
        """Decides the shares of one more step, from the report of a step that was trained on.

        Args:
          assignment: The assignment that gets the decision.
          report: The report.
          size: Number of rows of the step to decide; by default as before.
          is_first: Whether training may have paused before the reported step. Its time before computing is then
            ignored.
        """
        self.present = shares = self.at(assignment.place, sum(assignment.latest_shares) if size is None else size)
        if self.follow_speed and assignment.place.replicas > 1:
            shares = self._proposal(assignment, report, is_first)
        assignment.decide(shares)
        self.present = shares

    def _proposal(self, assignment: BatchAssignment, report: Any, is_first: bool) -> tuple[int, ...]:
        before = report.own_seconds - report.compute_seconds
        self._before = np.where((before > 0) & (not is_first), before, self._before)
        self._speed.observe(report.rows, report.compute_seconds + self._before)
        if not assignment.may_change():
            return self.present
        shares = self._speed.proposal(self.present, assignment.place.at_most)
        self.changes += shares != self.present
        return shares

    def state(self) -> dict[str, Any]:
        """Returns the shares and measured speeds of the replicas, for `restore`."""
        return {"shares": list(self.present), "speed": self._speed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the shares and measured speeds that `state` returned, if the policy is "speed"."""
        if self.follow_speed and state.get("shares"):
            self.present = tuple(state["shares"])
            speed = state.get("speed")
            self._speed = SpeedModel.restored(speed) if speed else SpeedModel(len(self.present))

    def _weights(self, replicas: int) -> list[float]:
        if isinstance(self.policy, str):
            return [1.0] * replicas
        if len(self.policy) != replicas:
            raise ValueError(
                f"policy must have one weight per replica, but {list(self.policy)} has {len(self.policy)} for "
                f'{counted(replicas, "replica")}. Give {counted(replicas, "weight")}, or "speed", which measures any '
                "number of replicas."
            )
        return list(self.policy)


def _checked_policy(policy: str | Sequence[float]) -> str | tuple[float, ...]:
    if isinstance(policy, str) and policy in ("speed", "equal"):
        return str(policy)
    try:
        is_text = isinstance(policy, str | Mapping) or any(isinstance(weight, str) for weight in policy)
        weights = () if is_text else tuple(float(weight) for weight in policy)
    except (TypeError, ValueError):
        weights = ()
    if not weights or not all(_LEAST_WEIGHT <= weight <= 1 / _LEAST_WEIGHT for weight in weights):
        raise ValueError(f'policy must be "speed", "equal" or one positive weight per replica, got {policy!r}.')
    return weights
