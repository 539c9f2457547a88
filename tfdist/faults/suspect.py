"""Who holds up the others, by where each says it is."""

from collections.abc import Mapping
from typing import Any

__all__ = ["WAITS", "suspect_of"]

# How likely a section is one in which a worker waits for others; of the rest, not at all. A dataset that is split among
# workers, unless a BalancedSharding is, lets them agree on its end before each step, so who waits may be in "input".
WAITS = {"compute": 1, "input": 2, "exchange": 3}


def suspect_of(positions: Mapping[int, Mapping[str, Any] | None]) -> int | None:
    """Who holds up the others.

    Args:
      positions: By worker its "step" and "section", `None` of one that does not answer.

    Returns:
      The one that does not answer, else the one that is behind, else the one whose section is least likely to be
      that of a worker that waits; `None` if nothing tells.
    """
    silent = [worker for worker, position in positions.items() if position is None]
    if silent:
        return silent[0]
    steps = {worker: position["step"] for worker, position in positions.items() if position}
    behind = [worker for worker, step in steps.items() if step == min(steps.values())]
    if len(behind) < len(steps):
        return behind[0]
    rank = {worker: WAITS.get(position["section"], 0) for worker, position in positions.items() if position}
    least = [worker for worker in rank if rank[worker] == min(rank.values())]
    return least[0] if len(least) == 1 else None
