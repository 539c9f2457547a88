"""Finds the worker that holds up its peers, from the positions of all workers: their current call, step and section."""

import collections
from collections.abc import Mapping
from typing import Any

from tfdist.events.phase_names import AGREEING, COMPUTE, EXCHANGE, INPUT, ITS_END, MEETING, SAVE, WAITING

Positions = Mapping[int, Mapping[str, Any] | None]
"""The position of each worker: its "step", "section", "call" and "begun"; `None` if the worker does not answer."""

UNLIKE_CALLS = "All workers must make the same calls in the same order"

# How likely it is that a worker waits for peers in this section. In all other sections workers do not wait.
_WAITS = {SAVE: 1, COMPUTE: 1, INPUT: 2, MEETING: 3, EXCHANGE: 3, WAITING: 3, AGREEING: 3}


def suspect_of(positions: Positions, own: int | None = None) -> int | None:
    """Returns the worker that holds up its peers in a stall.

    Args:
      positions: The positions of all workers.
      own: The worker that asks, if it makes no progress itself.

    Returns:
      The worker that asks, if a peer does not answer but the asking worker waits for no peer, as in a callback.
      Otherwise the worker that does not answer. Otherwise the worker with an ended program, or with the only model that
      was told to stop. Otherwise the worker in a different call than its peers. Otherwise the worker that is behind.
      Otherwise the worker in the section where waiting is least likely. `None` if nothing distinguishes the workers.
    """
    silent = [worker for worker, position in positions.items() if position is None]
    if silent:
        section = (positions.get(own) or {}).get("section") if own is not None else None
        return own if section is not None and section not in _WAITS and section != ITS_END else silent[0]
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
    """Returns the worker outside of Keras' calls while peers are in one, or alone in its call among three or more."""
    outside = [worker for worker, call in calls.items() if not call]
    if 0 < len(outside) < len(calls):
        return outside[0]
    counts = collections.Counter(calls.values())
    alone = [worker for worker, call in calls.items() if counts[call] == 1]
    return alone[0] if len(alone) == 1 and len(calls) > 2 else None


def stalled_at(positions: Positions, suspect: int | None, own: int) -> str | None:
    """Returns the line of the user's code at which the suspect, or else the worker `own`, hangs; `None` if unknown."""
    told = [positions.get(worker) or {} for worker in (suspect, own) if worker is not None]
    return next((line for each in told if (line := each.get("line"))), None)


def describe(positions: Positions) -> str:
    """Describes in which call, step and section each worker is, for a message about a stall."""
    return ", ".join(f"worker {worker} {_place(position)}" for worker, position in sorted(positions.items()))


def _place(position: Mapping[str, Any] | None) -> str:
    if position is None:
        return "does not answer"
    line = f" at {position['line']}" if position.get("line") else ""
    place = f"is in step {position['step'] + 1} ({position['section']}{line})"
    if position.get("call"):
        return f"{place} of {_named(position['call'])}"
    if position["section"] is None and "begun" in position:
        return f"is in no call of the strategy, after {position['begun']} calls and {position['step']} steps"
    return place


def _named(call: Any) -> str:
    name, number = call
    return f"`{name}`, call {number}"


def meeting_of(name: str, number: int) -> dict[str, Any]:
    """Makes the position of a worker that waits for its peers at the beginning of a call, for `unlike_calls`."""
    return {"section": MEETING, "call": [name, number]}


def unlike_calls(positions: Positions) -> str | None:
    """Returns an error text if workers wait in different calls of Keras, which then never end; `None` otherwise.

    Only waiting workers count: a worker that is busy in its call may still reach the call of its peers.
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
        f"{UNLIKE_CALLS}, since each call waits for all workers, but {said}. "
        "Call `fit`, `evaluate`, `predict` and similar methods on all workers, and put only code that writes files "
        "under `if tfdist.cluster.is_chief():`. All workers save a model with `model_sharding` or a ShardedEmbedding, "
        "each with a path of its own."
    )


def yet_to_come(positions: Positions, number: int) -> list[int]:
    """Returns the workers that may still come to call `number` of Keras: outside of calls, with fewer calls begun."""
    return [
        worker
        for worker, position in positions.items()
        if position and position["section"] is None and position.get("begun", number) < number
    ]
