"""Which part of a global batch each replica takes: by policy, and under "speed" by what was learnt."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfdist.data.handout import Handout
from tfdist.data.place import Place
from tfdist.data.plan import split
from tfdist.data.speed import SpeedModel

_LEAST_WEIGHT = 1e-300  # Of less, and of the sum of more than its inverse, no parts can be computed.


class Shares:
    """Rows of a whole batch by replica. Who calls it holds a lock.

    Args:
      policy: "speed", "equal", or a weight for each replica.
      global_batch_size: What is shared.

    Attributes:
      policy: As given, weights as floats.
      present: Those in force; none before `settle`, but for those that were restored.
      changes: How often they have changed.

    Raises:
      ValueError: If the policy is none of these.
    """

    def __init__(self, policy: str | Sequence[float], global_batch_size: int):
        self.policy, self._size = _checked_policy(policy), global_batch_size
        self.present: tuple[int, ...] = ()
        self.changes = 0
        self._speed, self._before = SpeedModel(1), np.zeros(1)

    @property
    def follow_speed(self) -> bool:
        """Whether they change as replicas are measured."""
        return self.policy == "speed"

    def at(self, place: Place) -> tuple[int, ...]:
        """Those that are there if they are for as many replicas; else those that the policy begins with.

        Raises:
          ValueError: If the policy has weights for another number of replicas.
        """
        weights = self._weights(place.replicas)
        fits = len(self.present) == place.replicas and sum(self.present) == self._size
        if fits and all(share <= most for share, most in zip(self.present, place.at_most, strict=True)):
            return self.present
        return split(self._size, weights, place.at_most)

    def settle(self, place: Place) -> None:
        """Keeps what is there if it is for these replicas; else starts from the policy, and learns anew."""
        shares = self.at(place)
        if shares is not self.present:
            self._speed, self.present = SpeedModel(place.replicas), shares
        if len(self._before) != place.replicas:
            self._before = np.zeros(place.replicas)

    def learn(self, place: Place, handout: Handout, report: Any, *, is_first: bool) -> None:
        """Decides on one more step of a handout, by the report of one that was trained on.

        Args:
          place: Of this worker.
          handout: That hands out.
          report: Of the step.
          is_first: Whether a pause may have been before the step: it counts as what was before the last other one.
        """
        before = report.own_seconds - report.compute_seconds
        self._before = np.where((before > 0) & (not is_first), before, self._before)
        self._speed.observe(report.rows, report.compute_seconds + self._before)
        shares = handout.latest_shares
        if handout.may_change():
            shares = self._speed.proposal(shares, place.at_most)
            self.changes += shares != handout.latest_shares
        handout.decide(shares)
        self.present = shares

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return {"shares": list(self.present), "speed": self._speed.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Goes on where `state` was called, as far as it is still there and the policy asks for it."""
        if self.follow_speed and state.get("shares"):
            self.present = tuple(state["shares"])
            speed = state.get("speed")
            self._speed = SpeedModel.restored(speed) if speed else SpeedModel(len(self.present))

    def _weights(self, replicas: int) -> list[float]:
        if isinstance(self.policy, str):
            return [1.0] * replicas
        if len(self.policy) != replicas:
            raise ValueError(
                f"policy needs a weight for each replica, but {list(self.policy)} has {len(self.policy)} and there "
                f'are {replicas} replicas. Give as many; or "speed", which learns them for any number.'
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
        raise ValueError(f'policy is "speed", "equal" or a positive weight for each replica, not {policy!r}.')
    return weights
