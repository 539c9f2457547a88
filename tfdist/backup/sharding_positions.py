"""The positions of a `fit` in its strategy's `BalancedSharding`s, saved in a commit and restored in another process."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class ShardingPositions:
    """Saves and restores the positions of the `BalancedSharding`s that exist when a `fit` begins.

    Holds the shardings until the `fit` ends. Later shardings of callbacks are not included.

    The shardings of a commit are identified by their global batches, not by their index, because a restarted program
    may have made fewer or more shardings at this point.

    Args:
      shardings: The shardings of the strategy, in the order of their creation.
      own: The sharding that the `fit` trains on, if any.
      is_other: Whether the input of the `fit` is known and is not a sharding.
    """

    def __init__(self, shardings: Sequence[Any], own: Any = None, *, is_other: bool = False):
        self._is_other = is_other
        self._shardings = list(shardings)
        if own is not None and not any(sharding is own for sharding in shardings):
            self._shardings.append(own)
        self._own = next((i for i, sharding in enumerate(self._shardings) if sharding is own), None)
        self._at_epoch = self._now()

    def begin_epoch(self, saved: Mapping[str, Any] | None = None) -> None:
        """Notes the positions at the beginning of an epoch, or those in a commit of this epoch, to read it again."""
        self._at_epoch = self._now()
        if saved is not None:
            for place, before in self._matched(saved).items():
                self._at_epoch[place] = saved["at_epoch"][before]

    def capture(self) -> dict[str, Any]:
        """Returns the positions of the shardings for a commit, as JSON."""
        return {"now": self._now(), "at_epoch": self._at_epoch, "own": self._own}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Checks that `restore` can restore the positions of the shardings, and changes nothing.

        Raises:
          PositionError: If a sharding that was trained on has other global batches than its counterpart here.
        """
        for place, before in self._counterparts(saved):
            self._shardings[place].check(saved["now"][before])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Restores the positions of the shardings that exist here from a commit.

        Raises:
          PositionError: If a sharding has other global batches, as in `check`.
        """
        for place, before in self._counterparts(saved):
            is_counted = place != self._own or self._shardings[place].is_followed
            self._shardings[place].deserialize(saved["now" if is_counted else "at_epoch"][before])

    def _counterparts(self, saved: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Pairs indices of shardings here and in the commit: equal ones, then the rest here with those lost."""
        matched = self._matched(saved)
        free = [place for place in range(len(self._shardings)) if place not in matched]
        lost = [i for i in range(len(saved["now"])) if i not in matched.values() and _has_moved(saved, i)]
        return [*matched.items(), *zip(free, lost, strict=False)]

    def continues(self, saved: Mapping[str, Any]) -> bool:
        """Whether the input of the `fit` continues at its restored position without reading batches again."""
        if self._own is not None or saved["own"] is not None:
            return self._own is not None and saved["own"] is not None and self._shardings[self._own].is_followed
        # The input of a custom loop is unknown.
        return not self._is_other and any(_has_moved(saved, i) for i in range(len(saved["now"])))

    def _now(self) -> list[str]:
        return [_text(sharding.serialize()) for sharding in self._shardings]

    def _matched(self, saved: Mapping[str, Any]) -> dict[int, int]:
        """Returns indices of shardings in the commit by indices here, for shardings that are equal."""
        matched = {}
        if self._own is not None and saved["own"] is not None:
            matched[self._own] = saved["own"]
        left = [i for i in range(len(saved["now"])) if i not in matched.values()]
        for place, text in enumerate(self._now()):
            alike = next((i for i in left if _identity(saved["now"][i]) == _identity(text)), None)
            if place not in matched and alike is not None:
                matched[place] = alike
                left.remove(alike)
        return matched


def _has_moved(saved: Mapping[str, Any], place: int) -> bool:
    return saved["now"][place] != saved["at_epoch"][place]


def _identity(text: str) -> Any:
    """Returns what defines the global batches of a serialized sharding, to find the same sharding after a restart."""
    return json.loads(text)["of"]


def _text(serialized: Any) -> str:
    return serialized.decode() if isinstance(serialized, bytes) else serialized
