"""Policy: which replicas divide a model among themselves, in groups that each have a whole copy."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from tfdist.readable_numbers import counted


class Box(NamedTuple):
    """Some devices of some workers: the replicas of `devices`, counted within their worker, on each of `workers`."""

    workers: Sequence[int]
    devices: Sequence[int]


@dataclasses.dataclass(frozen=True)
class ShardGroups:
    """The division of all replicas into groups of consecutive replicas, in the order of workers.

    Each group has a whole copy of what is sharded, of which each of its replicas has a part. A group consists of some
    devices of one worker, or of all devices of some workers.

    Attributes:
      size: Number of replicas of a group.
      workers: Number of workers.
      devices: Number of devices of each worker.
    """

    size: int
    workers: int
    devices: int

    @classmethod
    def of(cls, size: int | None, workers: int, devices: int) -> "ShardGroups | None":
        """Returns the groups of `size` replicas; `None` for one group of all replicas, or if there is one replica.

        Raises:
          ValueError: If a group would have a part of the devices of several workers, or groups would be unequal.
        """
        replicas = workers * devices
        if size is None or size == replicas or replicas == 1:
            return None
        possible = [each for each in range(2, replicas + 1) if _is_possible(each, workers, devices)]
        if size not in possible:
            raise ValueError(
                "`shard_group_size` must divide the number of devices of a worker, or be a multiple of it that divides "
                f"the number of all replicas, got {size} for {counted(workers, 'worker')} with "
                f"{counted(devices, 'device')} each. Give one of {', '.join(map(str, possible))}."
            )
        return cls(size, workers, devices)

    @property
    def devices_of_group(self) -> int:
        """Number of devices that a group has on each of its workers."""
        return min(self.size, self.devices)

    @property
    def workers_of_group(self) -> int:
        """Number of workers of a group."""
        return max(self.size // self.devices, 1)

    def group_of(self, worker: int, replica: int) -> Box:
        """Returns the replicas of the group of a replica."""
        first, device = worker - worker % self.workers_of_group, replica - replica % self.devices_of_group
        return Box(range(first, first + self.workers_of_group), range(device, device + self.devices_of_group))

    def copies_of(self, worker: int, replica: int) -> Box:
        """Returns the replicas that have the same part as a replica, one of each group."""
        return Box(
            range(worker % self.workers_of_group, self.workers, self.workers_of_group),
            range(replica % self.devices_of_group, self.devices, self.devices_of_group),
        )


def is_group_size(size: Any) -> bool:
    """Whether a value is an integer that a group of several replicas can have as its size."""
    return isinstance(size, int) and not isinstance(size, bool) and size >= 2


def check_shard_group_size(size: Any, model_sharding: Any) -> None:
    """Raises a ValueError if `shard_group_size`, an argument of a strategy, can have no meaning."""
    if size is None:
        return
    if not is_group_size(size):
        raise ValueError(
            f"`shard_group_size` must be an integer of at least 2, got {size!r}. Leave it out for one group of all "
            "replicas."
        )
    if model_sharding is None:
        raise ValueError(
            f"`shard_group_size` says among how many replicas `model_sharding` divides a model, but got {size} without "
            "`model_sharding`. Give model_sharding='optimizer' or 'parameters'."
        )


def _is_possible(size: int, workers: int, devices: int) -> bool:
    if size < devices:
        return devices % size == 0
    return size % devices == 0 and workers % (size // devices) == 0
