"""A check, during training, that every example is trained on once an epoch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.data.balanced_sharding import BalancedSharding
from tfdist.data.weak_callbacks import listen
from tfdist.errors import AuditError
from tfdist.strategies.foreign_keras import ForKerasModels

_SHOWN = 5


class Audit(ForKerasModels, keras.callbacks.Callback):
    """Raises at the end of an epoch if an example was not trained on exactly once, over all workers.

        model.fit(train, callbacks=[tfdist.callbacks.Audit(sharding)])

    In an epoch that was trained on only in part, or continued in the middle, the audit finds repeated examples only.
    Costs 4 bytes per example on each worker, and one sum of as many bytes over the workers per epoch of `fit`.

    Args:
      sharding: The sharding that `fit` trains on.

    Raises:
      AuditError: At the end of an epoch of `fit`, on all workers, if an example was missed or repeated, or if `fit`
        trained on other data. At the start of `fit`, if no tfdist strategy reports the steps that were trained on.
    """

    def __init__(self, sharding: BalancedSharding):
        super().__init__()
        self._sharding = sharding
        self._visits: dict[int, np.ndarray] = {}  # By epoch of the sharding: visits of each example, int32 [n].
        self._first_epoch = 0  # The first epoch that the audit sees from its beginning.
        self._end_counting: Callable[[], None] | None = None
        self._is_trained_on, self._steps_before = False, 0  # Whether this epoch used the sharding; steps before it.

    def get_state(self) -> dict[str, Any]:
        """Returns how often each example was trained on, and the number of workers, for a backup."""
        return {"workers": self._workers, "visits": self._visits, "first_epoch": self._first_epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores the counts of examples if the number of workers is the same; if not, starts to count again."""
        if state["workers"] == self._workers:
            self._visits, self._first_epoch = state["visits"], state["first_epoch"]
        else:
            self._begin()

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts to count how often each example is trained on."""
        if not self._sharding.is_followed:
            raise AuditError(
                "An Audit counts the examples that a strategy of tfdist trains on, but this sharding is read without "
                "a strategy. Give `fit` the result of strategy.distribute_datasets_from_function(sharding)."
            )
        self._begin()
        Audit.on_train_end(self)  # An earlier `fit` that failed still counts.
        self._end_counting = listen(self._sharding.visitors, self._count)

    @property
    def _workers(self) -> int:
        strategy = self.model.distribute_strategy
        return strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)

    def _begin(self) -> None:
        epoch, step = self._sharding.position
        self._visits, self._first_epoch = {}, epoch + (step > 0)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops counting the examples that are trained on."""
        if self._end_counting is not None:
            self._end_counting()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that this epoch has not trained on the sharding yet, which `on_epoch_end` checks."""
        self._is_trained_on, self._steps_before = False, self._sharding.reported_steps

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Raises if an example was missed or repeated, by the sum of the counts of all workers."""
        if not self._is_trained_on and self._sharding.reported_steps > self._steps_before:
            raise AuditError(
                f"`fit` must train on the sharding of its Audit, but trained on no example of it in epoch {epoch + 1}. "
                "Give the Audit the sharding that `fit` trains on."
            )
        for of_epoch in sorted(self._visits):
            over = of_epoch < self._sharding.position[0]
            own = self._visits.pop(of_epoch) if over else self._visits[of_epoch]
            self._check(of_epoch, self._total(own), whole=over and of_epoch >= self._first_epoch)

    def _count(self, epoch: int, examples: np.ndarray) -> None:
        self._is_trained_on = True
        if epoch not in self._visits:
            self._visits[epoch] = np.zeros(self._sharding.plan.num_examples, np.int32)
        np.add.at(self._visits[epoch], examples, 1)

    def _total(self, own: np.ndarray) -> np.ndarray:
        strategy = self.model.distribute_strategy
        devices = len(strategy.extended.worker_devices)

        def of_replica(context: Any) -> tf.Tensor:
            first = context.replica_id_in_sync_group % devices == 0  # The worker's counts are of all its replicas.
            return tf.constant(own if first else np.zeros_like(own))

        counts = strategy.experimental_distribute_values_from_function(of_replica)
        return strategy.reduce(tf.distribute.ReduceOp.SUM, counts, axis=None).numpy()

    def _check(self, epoch: int, visits: np.ndarray, whole: bool) -> None:
        plan = self._sharding.plan
        left_out = max(plan.num_examples - plan.steps_per_epoch * plan.global_batch_size, 0)  # By drop_remainder.
        repeated, missed = np.flatnonzero(visits > 1), np.flatnonzero(visits == 0)
        found = []
        if len(repeated):
            times = ", ".join(f"{example} ({visits[example]} times)" for example in repeated[:_SHOWN])
            found.append(f"{len(repeated)} were trained on more than once: {times}{_more(repeated)}")
        if whole and len(missed) != left_out:
            found.append(f"{len(missed)} instead of {left_out} were missed: {_first(missed)}{_more(missed)}")
        if found:
            raise AuditError(
                f"Each of the {plan.num_examples} examples must be trained on once an epoch, but in epoch {epoch} "
                f"{'; '.join(found)}. Read them only with this sharding; if you do, this is a bug of tfdist."
            )


def _first(examples: np.ndarray) -> str:
    return ", ".join(map(str, examples[:_SHOWN].tolist()))


def _more(examples: np.ndarray) -> str:
    return ", ..." if len(examples) > _SHOWN else ""
