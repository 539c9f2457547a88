"""Where a `fit` stands in its strategy's `BalancedSharding`s: said in a commit, found again in another process."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


class ShardingPositions:
    """The shardings that are there when a `fit` begins, held until it ends. Callbacks may make more: those are theirs.

    Those of a commit are told from each other by what they hand out, not by their places in a list: a program that
    starts again has made fewer of them by then, or more.

    Args:
      shardings: Of the strategy, in the order in which they were made.
      own: The one that the `fit` is trained on, if it is trained on one.
      is_other: Whether the input of the `fit` is known, and is none of them.
    """

    def __init__(self, shardings: Sequence[Any], own: Any = None, *, is_other: bool = False):
        self._is_other = is_other
        self._shardings = list(shardings)
        if own is not None and not any(sharding is own for sharding in shardings):
            self._shardings.append(own)
        self._own = next((i for i, sharding in enumerate(self._shardings) if sharding is own), None)
        self._at_epoch = self._now()

    def begin_epoch(self, saved: Mapping[str, Any] | None = None) -> None:
        """Notes where an epoch begins.

        Args:
          saved: What a commit says of it, if it was made in this epoch.
        """
        self._at_epoch = self._now()
        if saved is not None:
            for place, before in self._matched(saved).items():
                self._at_epoch[place] = saved["at_epoch"][before]

    def capture(self) -> dict[str, Any]:
        """For a commit: JSON."""
        return {"now": self._now(), "at_epoch": self._at_epoch, "own": self._own}

    def check(self, saved: Mapping[str, Any]) -> None:
        """Checks that `restore` can give back what was captured, and changes nothing.

        Raises:
          PositionError: If what was trained on in the epoch belongs to other global batches than what is there now.
        """
        for place, before in self._counterparts(saved):
            self._shardings[place].check(saved["now"][before])

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Gives back what was captured, as far as there are such shardings.

        Raises:
          PositionError: See `check`.
        """
        for place, before in self._counterparts(saved):
            is_counted = place != self._own or self._shardings[place].is_followed
            self._shardings[place].deserialize(saved["now" if is_counted else "at_epoch"][before])

    def _counterparts(self, saved: Mapping[str, Any]) -> list[tuple[int, int]]:
        """Places here, and in the commit: of those that are alike, and of those that were read and are not there."""
        matched = self._matched(saved)
        free = [place for place in range(len(self._shardings)) if place not in matched]
        lost = [i for i in range(len(saved["now"])) if i not in matched.values() and _has_moved(saved, i)]
        return [*matched.items(), *zip(free, lost, strict=False)]

    def continues(self, saved: Mapping[str, Any]) -> bool:
        """Whether the input of the `fit` goes on by itself where it was, once `restore` was called."""
        if self._own is not None or saved["own"] is not None:
            return self._own is not None and saved["own"] is not None and self._shardings[self._own].is_followed
        # Of a loop of the user's nobody knows what it is trained on.
        return not self._is_other and any(_has_moved(saved, i) for i in range(len(saved["now"])))

    def _now(self) -> list[str]:
        return [_text(sharding.serialize()) for sharding in self._shardings]

    def _matched(self, saved: Mapping[str, Any]) -> dict[int, int]:
        """Places in the commit, by places here."""
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
    """Which global batches a serialized sharding hands out."""
    return json.loads(text)["of"]


def _text(serialized: Any) -> str:
    return serialized.decode() if isinstance(serialized, bytes) else serialized
