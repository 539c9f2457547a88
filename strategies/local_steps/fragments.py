"""Divides the weights of a model into fragments, which synchronize one after another."""

from collections.abc import Sequence

from tfdist.readable_numbers import counted


def deal_out(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Returns the places of the weights in each fragment, such that fragments have about equal sizes.

    The largest weight comes first, and each goes to the smallest fragment so far.

    Args:
      sizes: Number of elements of each weight.
      fragments: Number of fragments, at most that of weights.
    """
    places: list[list[int]] = [[] for _ in range(fragments)]
    filled = [0] * fragments
    for place in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        # A fragment without weights comes before one with weights of no elements.
        smallest = min(range(fragments), key=lambda i: (filled[i], len(places[i]), i))
        places[smallest].append(place)
        filled[smallest] += sizes[place]
    return [sorted(each) for each in places]


def check_suffice(weights: int, fragments: int) -> None:
    """Checks that there is a weight for each fragment.

    Raises:
      ValueError: If there are fewer weights than fragments.
    """
    if weights < fragments:
        raise ValueError(
            "`fragments` of DiLoCo must be at most the number of weights that an optimizer trains, since each fragment "
            f"has at least one of them, got fragments={fragments} and {counted(weights, 'weight')}. Give a smaller "
            "number."
        )


def is_due(step: int, fragment: int, fragments: int, every: int) -> bool:
    """Whether a fragment synchronizes after a step; steps count from 1.

    Each fragment synchronizes every `every` steps. The last fragment does after that many steps, the others earlier, at
    equal distances.
    """
    return (step + (fragments - 1 - fragment) * every // fragments) % every == 0


def has_arrived(step: int, fragment: int, fragments: int, every: int, overlap_steps: int) -> bool:
    """Whether a fragment arrives after a step that has departed `overlap_steps` steps earlier; see `is_due`."""
    return (step > overlap_steps) & is_due(step - overlap_steps, fragment, fragments, every)
