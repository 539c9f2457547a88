"""Policy: which workers exchange with each other, if exchanges between all workers go in two levels."""

import dataclasses
import itertools
from collections.abc import Sequence

from tfdist.cluster.address import split_address
from tfdist.strategies.collectives.shard_groups import Box

BY_NUMBER, BY_HOST = "auto", "host"


@dataclasses.dataclass(frozen=True)
class ExchangeGroups:
    """The division of all workers into groups of consecutive workers, of equal size.

    A worker exchanges with the workers of its group, and with those that have its place in the other groups. See
    `TwoLevelTransport`.

    Attributes:
      size: Number of workers of a group.
      workers: Number of all workers.
    """

    size: int
    workers: int

    @classmethod
    def of(cls, asked: int | str | None, addresses: Sequence[str]) -> "ExchangeGroups | None":
        """Returns the groups for the argument `exchange_group_size` of the strategy; `None` for exchanges in one level.

        Raises:
          ValueError: If groups of that size would be unequal, or workers of a host are no group of equal size.
        """
        workers = len(addresses)
        if asked is None or workers < 4:
            return None
        if asked == BY_NUMBER:
            size = balanced_size(workers)
        elif asked == BY_HOST:
            size = _size_by_host([split_address(address)[0] for address in addresses])
        else:
            size = int(asked)
            if workers % size:
                raise ValueError(
                    f"`exchange_group_size` must divide the number of workers, got {size} for {workers} workers. Give "
                    f"one of {', '.join(map(str, _divisors(workers)[1:]))}, or '{BY_NUMBER}'."
                )
        return None if size in (1, workers) else cls(size, workers)

    def group_of(self, worker: int) -> Box:
        """Returns the workers of the group of a worker."""
        first = worker - worker % self.size
        return Box(range(first, first + self.size), range(1))

    def same_place(self, worker: int) -> Box:
        """Returns the workers that have the place of a worker in their group, one of each group."""
        return Box(range(worker % self.size, self.workers, self.size), range(1))

    def peers_of(self, worker: int) -> list[int]:
        """Returns the workers with which a worker exchanges messages."""
        return sorted({*self.group_of(worker).workers, *self.same_place(worker).workers} - {worker})


def check_exchange_group_size(asked: object) -> None:
    """Raises a ValueError if `exchange_group_size`, an argument of the strategy, can have no meaning."""
    is_size = isinstance(asked, int) and not isinstance(asked, bool) and asked >= 2
    if asked is not None and asked not in (BY_NUMBER, BY_HOST) and not is_size:
        raise ValueError(
            f"`exchange_group_size` must be '{BY_NUMBER}', '{BY_HOST}' or an integer of at least 2, got {asked!r}. "
            "Leave it out for exchanges in one level."
        )


def balanced_size(workers: int) -> int:
    """Returns the size of groups with which a worker has the fewest peers; the larger one of two such sizes.

    The number of peers is least at the square root. Larger groups send fewer bytes between groups.
    """
    return min(reversed(_divisors(workers)), key=lambda size: size + workers // size)


def _divisors(workers: int) -> list[int]:
    return [size for size in range(1, workers + 1) if workers % size == 0]


def _size_by_host(hosts: Sequence[str]) -> int:
    runs = [(host, len(list(run))) for host, run in itertools.groupby(hosts)]
    sizes = {size for _, size in runs}
    if len(sizes) > 1 or len({host for host, _ in runs}) < len(runs):
        found = ", ".join(f"{size} on {host}" for host, size in runs)
        raise ValueError(
            "exchange_group_size='host' needs equally many workers on each host, one host after another in TF_CONFIG, "
            f"but there are, in this order, {found}. List the workers host by host, or give a number or 'auto'."
        )
    return sizes.pop()
