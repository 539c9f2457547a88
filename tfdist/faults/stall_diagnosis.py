"""Who holds up the others, by where each says it is."""

import collections
from collections.abc import Mapping
from typing import Any

from tfdist.faults.activity import COMPUTE, EXCHANGE, INPUT, MEETING

__all__ = [
    "ITS_END",
    "UNLIKE_CALLS",
    "WAITING",
    "Positions",
    "describe",
    "meeting_of",
    "suspect_of",
    "unlike_calls",
    "yet_to_come",
]

Positions = Mapping[int, Mapping[str, Any] | None]
"""By worker where it is: its "step", "section", "call" and "begun", `None` of one that does not answer."""

ITS_END = "its program is over"
WAITING = "waiting for the chief"
UNLIKE_CALLS = "All workers must make the same calls in the same order"

# How likely a section is one in which a worker waits for others; of the rest, not at all.
_WAITS = {COMPUTE: 1, INPUT: 2, MEETING: 3, EXCHANGE: 3, WAITING: 3}


def suspect_of(positions: Positions) -> int | None:
    """Who holds up the others.

    Args:
      positions: Of all workers.

    Returns:
      The one that does not answer, else one whose program is over or whose model alone was told to stop, else the one
      that is in another call than all others, else the one that is behind, else the one whose section is least likely
      to be that of a worker that waits; `None` if nothing tells.
    """
    silent = [worker for worker, position in positions.items() if position is None]
    if silent:
        return silent[0]
    known = {worker: position for worker, position in positions.items() if position}
    over = [worker for worker, position in known.items() if position["section"] == ITS_END]
    if over:
        return over[0]
    stopped = [worker for worker, position in known.items() if position.get("has_stopped")]
    if 0 < len(stopped) < len(known):
        return stopped[0]
    odd = _odd_one({worker: tuple(position.get("call") or ()) for worker, position in known.items()})
    if odd is not None:
        return odd
    steps = {worker: position["step"] for worker, position in known.items()}
    behind = [worker for worker, step in steps.items() if step == min(steps.values())]
    if len(behind) < len(steps):
        return behind[0]
    rank = {worker: _WAITS.get(position["section"], 0) for worker, position in known.items()}
    least = [worker for worker in rank if rank[worker] == min(rank.values())]
    return least[0] if len(least) == 1 else None


def _odd_one(calls: Mapping[int, tuple[Any, ...]]) -> int | None:
    """The worker that is outside of calls while others are in one, or alone in its call among three or more."""
    outside = [worker for worker, call in calls.items() if not call]
    if 0 < len(outside) < len(calls):
        return outside[0]
    counts = collections.Counter(calls.values())
    alone = [worker for worker, call in calls.items() if counts[call] == 1]
    return alone[0] if len(alone) == 1 and len(calls) > 2 else None


def describe(positions: Positions) -> str:
    """Where the workers are, in words."""
    return ", ".join(f"worker {worker} {_place(position)}" for worker, position in sorted(positions.items()))


def _place(position: Mapping[str, Any] | None) -> str:
    if position is None:
        return "does not answer"
    place = f"is in step {position['step'] + 1} ({position['section']})"
    if position.get("call"):
        return f"{place} of {_named(position['call'])}"
    if position["section"] is None and "begun" in position:
        return f"is in no call of the strategy, after {position['begun']} of them and {position['step']} steps"
    return place


def _named(call: Any) -> str:
    name, number = call
    return f"`{name}`, call {number}"


def meeting_of(name: str, number: int) -> dict[str, Any]:
    """Where a worker is that waits at the beginning of a call."""
    return {"section": MEETING, "call": [name, number]}


def unlike_calls(positions: Positions) -> str | None:
    """What to say if workers wait in unlike calls, which no worker can leave then.

    A worker that is in a call, and does something that others wait for, may come to the call of the others yet.
    """
    known = {worker: position for worker, position in positions.items() if position}
    waiting = {
        worker: position["call"]
        for worker, position in known.items()
        if position.get("call") and _WAITS.get(position["section"], 0) == _WAITS[EXCHANGE]
    }
    if len({tuple(call) for call in waiting.values()}) < 2:
        return None
    said = ", ".join(f"worker {worker} is in {_named(call)} of its program" for worker, call in waiting.items())
    return (
        f"{UNLIKE_CALLS}, since each waits in its call for all others, but {said}. "
        "Call `fit`, `evaluate`, `predict` and the like on all workers, and only write files `if "
        "tfdist.cluster.is_chief():`."
    )


def yet_to_come(positions: Positions, number: int) -> list[int]:
    """The workers that have not begun as many calls, and are outside of all: they may come yet."""
    return [
        worker
        for worker, position in positions.items()
        if position and position["section"] is None and position.get("begun", number) < number
    ]
