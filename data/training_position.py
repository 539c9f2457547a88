"""The position of training in a data set: the epoch and the step to train on next."""

from tfdist.data.batch_assignment import BatchAssignment
from tfdist.data.topology import ReplicaTopology


class TrainingPosition:
    """The position of training in a data set: epoch, step, first example. Not thread-safe: callers must hold a lock.

    The first example is the number of examples of the epoch before the next step. It does not follow from the step if
    global batches had several sizes.

    Reported steps set it. Where nothing reports steps, it counts whole epochs that were read.
    """

    def __init__(self) -> None:
        self._next = (0, 0, 0)
        self._counted: BatchAssignment | None = None
        self._epoch_before = 0  # `restore` found this epoch in the counted assignment, so it is no news.
        # Without a strategy: the position where all readers begin, and the epoch that each has reached.
        self._first = (0, 0, 0)
        self._reached: dict[ReplicaTopology, int] = {}

    @property
    def next(self) -> tuple[int, int]:
        """The epoch to train on next, and the step in it."""
        return self.place[:2]

    @property
    def place(self) -> tuple[int, int, int]:
        """The epoch to train on next, the step in it, and the number of examples before that step."""
        epoch = self._counted.epoch_taken if self._counted is not None else 0
        return (epoch, 0, 0) if epoch > max(self._next[0], self._epoch_before) else self._next

    def count(self, assignment: BatchAssignment | None) -> None:
        """Counts from now on the epochs taken from this assignment's iterator, or none, to move the position."""
        self._next = self.place
        self._counted, self._epoch_before = assignment, 0

    def has_trained(self, position: tuple[int, int, int]) -> None:
        """Sets the position after a step of training that was reported."""
        self._epoch_before = self._counted.epoch_taken if self._counted is not None else 0
        self._next = position

    def restore(self, position: tuple[int, int, int]) -> None:
        """Continues training at a position from a checkpoint."""
        self._epoch_before = self._counted.epoch_taken if self._counted is not None else 0
        self._next = self._first = position
        self._reached.clear()

    # The methods below serve readers without a strategy that reports steps.

    def of_reader(self, place: ReplicaTopology) -> tuple[int, int, int]:
        """Returns the position at which a worker reads on if no strategy reports steps."""
        return (self._reached[place], 0, 0) if place in self._reached else self._first

    def has_read(self, place: ReplicaTopology, epoch: int) -> None:
        """Notes that a worker has taken all epochs before `epoch`, if no strategy reports steps."""
        self._reached[place] = max(epoch, self._reached.get(place, 0))
        if epoch > self.next[0]:
            self._next = epoch, 0, 0
