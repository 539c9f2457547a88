"""How many rows of a global batch each replica takes: by policy, and under "speed" by measured times."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.batch_plan import split
from tfdist.data.replica_speed import SpeedModel
from tfdist.data.topology import ReplicaTopology

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

    def at(self, place: ReplicaTopology) -> tuple[int, ...]:
        """Returns the present shares if they fit these replicas and their limits, else the policy's initial shares.

        Raises:
          ValueError: If the policy has weights for another number of replicas.
        """
        weights = self._weights(place.replicas)
        fits = len(self.present) == place.replicas and sum(self.present) == self._size
        if fits and all(share <= most for share, most in zip(self.present, place.at_most, strict=True)):
            return self.present
        return split(self._size, weights, place.at_most)

    def settle(self, place: ReplicaTopology) -> None:
        """Keeps present shares and measured speeds if they fit these replicas, else starts from the policy."""
        shares = self.at(place)
        if shares is not self.present:
            self._speed, self.present = SpeedModel(place.replicas), shares
        if len(self._before) != place.replicas:
            self._before = np.zeros(place.replicas)

    def learn(self, assignment: BatchAssignment, report: Any, *, is_first: bool) -> None:
        """Decides the shares of one more step, from the report of a step that was trained on.

        If `is_first`, training may have paused before that step, and its time before computing is ignored.
        """
        before = report.own_seconds - report.compute_seconds
        self._before = np.where((before > 0) & (not is_first), before, self._before)
        self._speed.observe(report.rows, report.compute_seconds + self._before)
        shares = assignment.latest_shares
        if assignment.may_change():
            shares = self._speed.proposal(shares, assignment.place.at_most)
            self.changes += shares != assignment.latest_shares
        assignment.decide(shares)
        self.present = shares

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
                f"policy must have one weight per replica, but {list(self.policy)} has {len(self.policy)} and there "
                f'are {replicas} replicas. Give {replicas} weights, or "speed", which measures any number of replicas.'
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
