"""A callback that sets the global batch size and the learning rate while training goes on."""

import time
import weakref
from collections.abc import Callable
from typing import Any

import keras
from absl import logging

from tfdist.adaptive.batch_controller import BatchController, BatchDecision
from tfdist.adaptive.learning_rate_rules import RULES
from tfdist.callbacks.measurable_codecs import check_measurable_codecs
from tfdist.data.balanced_sharding import BalancedSharding
from tfdist.data.validation import as_count
from tfdist.data.weak_callbacks import listen
from tfdist.strategies.foreign_keras import ForKerasModels

_GOALS = ("goodput", "noise_scale")
_LEAST_EVERY = 10
_ADAPTIVE = (
    "Adam",
    "AdamW",
    "Adamax",
    "Nadam",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Lamb",
    "Lion",
    "Muon",
    "Adafactor",
)


class AdaptiveBatch(ForKerasModels, keras.callbacks.Callback):
    """Chooses the global batch size by the noise of the gradients and the times of the steps, during `fit`.

        sharding = tfdist.data.BalancedSharding((x, y), global_batch_size=64, batch_size_range=(32, 1024))
        train = strategy.distribute_datasets_from_function(sharding)
        model.fit(train, epochs=20, callbacks=[tfdist.callbacks.AdaptiveBatch(sharding)])

    Each replica has a gradient of its own rows. How much these differ shows the gradient noise scale: the batch size up
    to which a larger batch makes a step better about in proportion. The goodput of a batch size is the number of
    examples in a second, times how much each of them helps. A decision takes the size with the largest goodput, at most
    a factor of 2 away, if it gains 5 % or more. It also scales the learning rate. All workers decide alike, and the log
    of the chief says why: a warning for each change of either, and INFO if both stay.

    After a restart on another number of workers, step times are measured anew, the noise scale stays, and a decision
    follows after 20 steps. `BackupAndRestore` saves the state. With one replica the noise is not measured, so the batch
    size changes only if the noise is known from a run with several replicas.

    Training differs from training with a constant size: see "Adapt the batch size" in the documentation. Adds to the
    logs of an epoch `global_batch_size`, `noise_scale` and `learning_rate_scale`, as they are after its decision.

    Costs two passes over the gradients, and 2 R numbers in the exchange that ends a step with R replicas.

    Args:
      sharding: The sharding that `fit` trains on, with a `batch_size_range`.
      every: When to decide: `"epoch"` for the end of each epoch, or a number of steps, at least 10.
      goal: `"goodput"`, or `"noise_scale"` for the size nearest the noise scale. The latter needs no clock, so two runs
        agree in every bit if the sharding has `policy="equal"`.
      learning_rate: How the learning rate follows the batch size: `"adascale"`, `"sqrt"`, `"linear"`, or `None` to keep
        it. `"auto"` is `"sqrt"` for adaptive optimizers such as Adam, and `"adascale"` for others.

    Attributes:
      decisions: The decisions of this process, each with its reasons, oldest first.

    Raises:
      TypeError: If `sharding` is not a `BalancedSharding`.
      ValueError: If an argument is out of range, or the sharding has no `batch_size_range`. When `fit` begins: if no
        strategy of tfdist trains on the sharding, the learning rate is a schedule, replicas divide the weights, groups
        of replicas divide the model, the replicas train by local steps, the optimizer accumulates gradients or scales
        the loss, or a codec delays most of a gradient (`PowerSGD`, `TopK`, `Sign`).

    References:
      McCandlish et al., An Empirical Model of Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162
      Qiao et al., Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning, OSDI 2021,
      https://arxiv.org/abs/2008.12260
    """

    _end_listening: Callable[[], None] | None = None

    def __init__(
        self,
        sharding: BalancedSharding,
        every: str | int = "epoch",
        *,
        goal: str = "goodput",
        learning_rate: str | None = "auto",
    ):
        super().__init__()
        if not isinstance(sharding, BalancedSharding):
            raise TypeError(
                "An AdaptiveBatch needs the BalancedSharding that `fit` trains on, got a "
                f"{type(sharding).__name__}. Make it with BalancedSharding(data, global_batch_size=..., "
                "batch_size_range=(smallest, largest))."
            )
        if sharding.batch_size_range is None:
            raise ValueError(
                "An AdaptiveBatch chooses a batch size within the batch_size_range of its sharding, but this sharding "
                "has none. Make it with BalancedSharding(..., batch_size_range=(smallest, largest))."
            )
        if every != "epoch" and (as_count(every) or 0) < _LEAST_EVERY:
            raise ValueError(f'every must be "epoch" or a number of steps, at least {_LEAST_EVERY}, got {every!r}.')
        if goal not in _GOALS:
            raise ValueError(f"goal must be one of {', '.join(_GOALS)}, got {goal!r}.")
        if learning_rate is not None and learning_rate not in ("auto", *RULES):
            raise ValueError(f"learning_rate must be None or one of auto, {', '.join(RULES)}, got {learning_rate!r}.")
        self._sharding, self._every, self._goal, self._rule = sharding, every, goal, learning_rate
        sharding.state.add_setting("adaptive_batch", f"every {every}, {goal}, {learning_rate}")
        self.decisions: list[BatchDecision] = []
        self._optimizer: Callable[[], Any] = lambda: None  # The one whose learning rate is scaled, weakly.
        self._controller = self._new_controller(None)
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._since = 0  # Steps since the last decision.
        # The size and the learning rate scale of the last decision, until they are in force.
        self._pending: tuple[int, float] | None = None
        self._in_force = 1.0  # The learning rate scale in force.
        self._ended, self._size = 0.0, self._sharding.global_batch_size

    def _new_controller(self, rule: str | None) -> BatchController:
        plan, sizes = self._sharding.plan, self._sharding.batch_size_range
        assert sizes is not None
        return BatchController(sizes, plan.global_batch_size, plan.num_examples, self._goal, rule)

    # -- state

    def get_state(self) -> dict[str, Any]:
        """Returns the state with which a restart decides as this process would, for a backup."""
        return {
            "controller": self._controller.state(),
            "since": self._since,
            "pending": None if self._pending is None else list(self._pending),
            "in_force": self._in_force,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores a result of `get_state`, also with another number of workers."""
        self._optimizer = weakref.ref(self.model.optimizer)
        self._controller.restore(state["controller"])
        self._controller.begin(self.model.distribute_strategy.num_replicas_in_sync)
        pending = state["pending"]
        self._since, self._in_force = int(state["since"]), float(state["in_force"])
        self._pending = None if pending is None else (int(pending[0]), float(pending[1]))
        self._ended, self._size = 0.0, self._sharding.global_batch_size

    # -- hooks of Keras

    def set_model(self, model: keras.Model) -> None:
        """Sets the model, and makes its training step measure the norms of gradients."""
        super().set_model(model)
        reports = getattr(model.distribute_strategy, "reports", None)
        if reports is not None and reports.num_replicas > 1 and model not in reports.measured:
            reports.measured.add(model)
            model.train_function = None  # Traced without the norms; `fit` makes it anew.

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the model, and starts to listen to the reports of training steps."""
        strategy = self.model.distribute_strategy
        if not self._sharding.is_followed:
            raise ValueError(
                "An AdaptiveBatch needs the reports of a strategy of tfdist, but its sharding is read without one. "
                "Give `fit` the result of strategy.distribute_datasets_from_function(sharding)."
            )
        if getattr(strategy, "synchronization", None) is not None:
            raise ValueError(
                "AdaptiveBatch compares the gradients of replicas in each step, but with synchronization= they train "
                "by local steps. Leave out synchronization or AdaptiveBatch."
            )
        if getattr(strategy, "model_sharding", None) == "parameters":
            raise ValueError(
                'AdaptiveBatch compares the gradients of replicas, but with model_sharding="parameters" no replica has '
                'whole gradients of its own. Use model_sharding="optimizer" or none, or leave out AdaptiveBatch.'
            )
        if getattr(strategy, "model_sharding", None) and getattr(strategy, "shard_group_size", None):
            raise ValueError(
                "AdaptiveBatch adds up the norms of the parts of a gradient, but with shard_group_size each part is in "
                "several groups. Leave out shard_group_size or AdaptiveBatch."
            )
        check_measurable_codecs(getattr(strategy, "compression", None), self.model.trainable_variables)
        rule = self._rule_for(self.model.optimizer)
        AdaptiveBatch.on_train_end(self)  # The callback still listens if an earlier `fit` failed.
        replicas = strategy.num_replicas_in_sync
        if self._controller.noise.samples == 0:
            self._controller = self._new_controller(rule)
            self._begin_pass()
        elif self._optimizer() is not self.model.optimizer:
            self._begin_optimizer(rule)
        self._optimizer = weakref.ref(self.model.optimizer)
        self._controller.begin(replicas)
        if replicas == 1:
            self._tell(
                "AdaptiveBatch cannot measure the gradient noise with one replica. The batch size changes only if the "
                "noise is known from a backup of a run with more replicas."
            )
        self._end_listening = listen(strategy.reports.listeners, self._take)

    def _begin_optimizer(self, rule: str | None) -> None:
        """Scales the learning rate of a new optimizer, chosen for the first batch size, from the first step on."""
        size = self._sharding.assignments.sizes.latest
        self._controller.follow(rule, size)
        self._pending, self._in_force = (size, self._controller.scale), 1.0

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stops listening to the reports of training steps."""
        if self._end_listening is not None:
            self._end_listening()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes that the next step follows a pause, so that its time does not count."""
        self._ended, self._size = 0.0, self._sharding.global_batch_size

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the learning rate before the first step with a new batch size."""
        if self._pending is not None and self._sharding.global_batch_size == self._pending[0]:
            _, scale = self._pending
            self._pending = None
            if scale != self._in_force:
                optimizer = self.model.optimizer
                now = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
                optimizer.learning_rate = now * (scale / self._in_force)
                self._in_force = scale

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Decides if this is due, and adds the batch size, the noise scale and the learning rate scale to `logs`."""
        if self._every == "epoch":
            self._decide()
        if logs is not None:
            logs["global_batch_size"] = self._sharding.assignments.sizes.latest
            logs["noise_scale"] = self._controller.noise.value
            logs["learning_rate_scale"] = self._controller.scale

    # -- reports

    def _take(self, report: Any) -> None:
        rows = report.rows.tolist()
        total, self._size, expected = sum(rows), self._sharding.global_batch_size, self._size
        now, began = time.monotonic(), self._ended
        self._ended = now
        if total == expected:  # Not the short end of an epoch, nor other data.
            own = None if report.own_squares is None else report.own_squares.tolist()
            self._controller.observe(rows, own, report.sum_square)
            if began and not report.has_traced:
                # One clock for all workers: that of the chief.
                seconds = report.cycle_seconds if len(report.links) else now - began
                self._controller.observe_time(total, seconds, max(report.compute_seconds.tolist()))
        self._since += 1
        if self._controller.must_decide_anew or (self._every != "epoch" and self._since >= int(self._every)):
            self._decide()

    def _decide(self) -> None:
        if self._pending is not None:  # The last decision is not in force yet.
            return
        decision = self._controller.decide(self._sharding.assignments.sizes.latest)
        self._since = 0
        if decision is None:
            return
        self.decisions.append(decision)
        if decision.size != decision.before:
            self._sharding.resize(decision.size, multiple=self.model.steps_per_execution)
        self._pending = decision.size, decision.learning_rate_scale
        rates = [f"{each:.3g}" for each in (decision.learning_rate_scale, self._in_force)]
        self._tell(f"AdaptiveBatch: {decision}.", is_news=decision.size != decision.before or rates[0] != rates[1])

    def _tell(self, text: str, *, is_news: bool = True) -> None:
        # News are a warning, because absl hides lower levels by default.
        is_chief = self.model.distribute_strategy.extended.should_checkpoint
        (logging.warning if is_chief and is_news else logging.info)("%s", text)

    def _rule_for(self, optimizer: Any) -> str | None:
        """Returns the rule for the learning rate of an optimizer.

        Raises:
          ValueError: If a schedule sets the learning rate.
        """
        if self._rule is None:
            return None
        if isinstance(optimizer.get_config().get("learning_rate"), dict):
            raise ValueError(
                "An AdaptiveBatch scales the learning rate, but a LearningRateSchedule of the optimizer sets it in "
                "each step. Give the optimizer a number and let a callback change it, or pass learning_rate=None."
            )
        if self._rule != "auto":
            return self._rule
        names = {each.__name__ for each in type(optimizer).__mro__}
        return "sqrt" if names & set(_ADAPTIVE) else "adascale"
