"""Policy: the order in which pairs of workers measure their links, so that no worker measures two at a time."""

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def rounds(members: Sequence[T]) -> list[list[tuple[T, T]]]:
    """Returns rounds of disjoint pairs, in which each pair of members occurs once: a round-robin tournament."""
    circle: list[T | None] = [*members, *([None] if len(members) % 2 else [])]
    found = []
    for _ in range(len(circle) - 1):
        halves = zip(circle[: len(circle) // 2], reversed(circle[len(circle) // 2 :]), strict=True)
        found.append([(a, b) for a, b in halves if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return found


def disjoint_rounds(pairs: Iterable[tuple[T, T]]) -> list[list[tuple[T, T]]]:
    """Returns the given pairs in rounds of disjoint pairs."""
    found: list[list[tuple[T, T]]] = []
    for pair in pairs:
        for each in found:
            if not any(set(pair) & set(other) for other in each):
                each.append(pair)
                break
        else:
            found.append([pair])
    return found


def turns(groups: Iterable[Sequence[T]], most: int) -> list[list[T]]:
    """Returns the turns in which members measure, such that members of a group take turns, in at most `most` turns."""
    found: list[list[T]] = []
    for group in groups:
        for place, member in enumerate(group):
            turn = place % most
            found += [[] for _ in range(turn + 1 - len(found))]
            found[turn].append(member)
    return found
