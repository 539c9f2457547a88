"""The values of `synchronization=`: how often the replicas of a strategy synchronize, and by which algorithm."""

import dataclasses
from typing import Any

import keras

from tfdist.strategies.auto_compression import AUTO, Auto


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Each replica trains by itself; every few steps all replicas average their weights.

    Sends the weights once in `every` steps, where exact training sends the gradients in each step. Costs no memory. The
    result differs from training on one device, the more the larger `every` and the learning rate are.

    Args:
      every: Number of training steps between two synchronizations, at least 1.
      start_step: Number of steps at the beginning in which all replicas average their gradients, so that their weights
        stay equal (post-local SGD). It keeps the accuracy of large batches better.
      tolerate_lost_workers: Whether workers go on without a worker whose process or host has ended, and let it join
        again; for `MultiWorkerMirroredStrategy` and `fit`. Worker 0 then averages what the other workers send it. The
        devices of one worker train together, as without `synchronization`.
      equal_time: Whether a slow worker trains fewer steps between two synchronizations, and skips the batches of the
        others, so that no worker waits for it. Needs `tolerate_lost_workers`.

    Raises:
      ValueError: If `every` is less than 1, or `start_step` less than 0; or if options exclude each other.

    References:
      Stich, Local SGD Converges Fast and Communicates Little, 2018, https://arxiv.org/abs/1805.09767
      Lin et al., Don't Use Large Mini-Batches, Use Local SGD, 2018, https://arxiv.org/abs/1808.07217
    """

    every: int = 8
    start_step: int = 0
    tolerate_lost_workers: bool = False
    equal_time: bool = False

    def __post_init__(self) -> None:
        _check_integer("LocalSGD", "every", self.every, 1)
        _check_integer("LocalSGD", "start_step", self.start_step, 0)
        _check_tolerance(self)


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Each replica trains by itself; every few steps an outer optimizer applies the average of their changes.

    The change of a weight since the last synchronization, start minus end, is its pseudo-gradient. All replicas average
    the pseudo-gradients, encoded if the strategy has `compression`, and the outer optimizer applies the average to the
    weights of the last synchronization. Its momentum allows many more local steps than averages of weights.

    Sends as many bytes in `every` steps as exact training in one. Costs a copy of the trainable weights, and the state
    of the outer optimizer: with the default another copy.

    Args:
      every: Number of training steps between two synchronizations, at least 1.
      outer_optimizer: A function without arguments that makes a Keras optimizer, by default
        `lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`. Or an optimizer, where one process trains, or
        with `tolerate_lost_workers`: elsewhere its variables would start TensorFlow before the workers are connected.
        The strategy makes its own optimizers from the configuration of this one.
      fragments: Number of parts of about equal sizes into which the weights are divided. Each part synchronizes every
        `every` steps, one after another at equal distances. So an exchange is shorter, and the link is used evenly. At
        most `every` and the number of weights.
      start_step: Number of first steps in which replicas average their gradients, uncompressed, in each step, as in
        exact training. The outer optimizer begins afterwards. In the first steps from random weights all changes point
        in similar directions, so its momentum carries the weights too far.
      overlap_steps: Number of steps that replicas take while a fragment travels, less than `every`. The outer optimizer
        applies the average so many steps later, and each replica then takes the mean of its own weights and the
        outer ones. 0: training waits for each exchange. Otherwise costs another copy of the trainable weights.
      tolerate_lost_workers: As for `LocalSGD`.
      equal_time: As for `LocalSGD`.

    Raises:
      ValueError: If `every` is less than 1, `fragments` is less than 1 or more than `every`, `start_step` is negative,
        `overlap_steps` is negative or not less than `every`, the outer optimizer averages weights, accumulates
        gradients or scales the loss, or options exclude each other.
      TypeError: If `outer_optimizer` is neither an optimizer of Keras nor a function. The strategy checks the result
        of a function.

    References:
      Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023,
      https://arxiv.org/abs/2311.08105
      Douillard et al., Streaming DiLoCo with overlapping communication, 2025, https://arxiv.org/abs/2501.18512
    """

    every: int = 100
    outer_optimizer: Any = None
    fragments: int = 1
    start_step: int = 0
    overlap_steps: int = 0
    tolerate_lost_workers: bool = False
    equal_time: bool = False

    def __post_init__(self) -> None:
        _check_integer("DiLoCo", "every", self.every, 1)
        _check_integer("DiLoCo", "fragments", self.fragments, 1)
        _check_tolerance(self)
        if self.fragments > self.every:
            raise ValueError(
                f"`fragments` of DiLoCo must be at most `every`, {self.every}, since at most one fragment synchronizes "
                f"after a step, got {self.fragments}."
            )
        _check_integer("DiLoCo", "start_step", self.start_step, 0)
        _check_integer("DiLoCo", "overlap_steps", self.overlap_steps, 0)
        if self.overlap_steps >= self.every:
            raise ValueError(
                f"`overlap_steps` of DiLoCo must be less than `every`, {self.every}, since a fragment must arrive "
                f"before it departs again, got {self.overlap_steps}. Give a smaller number, or a larger `every`."
            )
        if self.outer_optimizer is not None and (self.has_made_optimizer or not callable(self.outer_optimizer)):
            _check_outer_optimizer(self.outer_optimizer)

    @property
    def has_made_optimizer(self) -> bool:
        """Whether `outer_optimizer` is an optimizer, not a function that makes it."""
        return isinstance(self.outer_optimizer, keras.optimizers.Optimizer)

    def new_outer_optimizer(self) -> keras.optimizers.Optimizer:
        """Returns an optimizer with the configuration of `outer_optimizer`, made in the scope of the caller."""
        if self.outer_optimizer is None:
            return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True, name="outer_sgd")
        given = self.outer_optimizer if self.has_made_optimizer else self.outer_optimizer()
        _check_outer_optimizer(given)
        return type(given).from_config(given.get_config())


Synchronization = LocalSGD | DiLoCo


def check_synchronization(
    synchronization: Any, model_sharding: Any, compression: Any, exchange_group_size: Any = None
) -> None:
    """Checks the `synchronization` of a strategy, and that its other arguments go together with it.

    Raises:
      TypeError: If it is neither `None`, a `LocalSGD` nor a `DiLoCo`.
      ValueError: If the model is sharded, `LocalSGD` is to compress, the codec is to be chosen automatically, or
        `tolerate_lost_workers` comes with a codec or with groups.
    """
    if synchronization is None:
        return
    if not isinstance(synchronization, LocalSGD | DiLoCo):
        raise TypeError(
            "`synchronization` must be None, `tfdist.LocalSGD(every=8)` or `tfdist.DiLoCo(every=100)`, got "
            f"{synchronization!r}."
        )
    name = type(synchronization).__name__
    if model_sharding is not None:
        raise ValueError(
            f"With synchronization={name} each replica has all weights of its own, but model_sharding="
            f"{model_sharding!r} divides the model among replicas. Leave one of the two out."
        )
    if compression is not None and isinstance(synchronization, LocalSGD):
        raise ValueError(
            "LocalSGD averages weights, which codecs would round too coarsely, but got compression="
            f"{compression!r}. Leave compression out, or use `tfdist.DiLoCo(every={synchronization.every}, "
            "outer_optimizer=lambda: keras.optimizers.SGD(1.0))`, which averages the changes of the weights, encoded."
        )
    if synchronization.tolerate_lost_workers and compression is not None:
        raise ValueError(
            f"With tolerate_lost_workers, workers send whole weights to worker 0, which compression={compression!r} "
            "does not encode. Leave one of the two out."
        )
    if synchronization.tolerate_lost_workers and exchange_group_size is not None:
        raise ValueError(
            "With tolerate_lost_workers all workers exchange with worker 0, so there are no groups, but got "
            f"exchange_group_size={exchange_group_size!r}. Leave one of the two out."
        )
    if isinstance(compression, Auto) or (isinstance(compression, str) and compression == AUTO):
        raise ValueError(
            f"compression={compression!r} compares the time of each step with different codecs, but with "
            f"synchronization={name} most steps exchange nothing. Choose a codec, such as compression='int8'."
        )


def check_keeps_no_averages(optimizer: Any) -> None:
    """Checks that an optimizer, or `None`, keeps no moving averages of weights; raises `ValueError` if it does."""
    if getattr(optimizer, "use_ema", False):
        raise ValueError(
            f"With `synchronization` each replica would keep moving averages of its own weights, but optimizer "
            f"{optimizer.name!r} has use_ema=True, and `fit` ends with the averages as weights. Leave use_ema out."
        )


def described_state(synchronization: Synchronization) -> str:
    """Describes what decides which variables a synchronization keeps, and their meaning. `every` does not."""
    if not isinstance(synchronization, DiLoCo):
        return type(synchronization).__name__
    numbers = f"fragments={synchronization.fragments}, overlap_steps={synchronization.overlap_steps}"
    return f"DiLoCo({numbers}, outer_optimizer={_described_optimizer(synchronization)})"


def described(synchronization: Synchronization | None) -> str:
    """Describes a synchronization equally in every process, to compare workers. May make an optimizer."""
    if not isinstance(synchronization, DiLoCo):
        return repr(synchronization)
    names = ("every", "fragments", "start_step", "overlap_steps", "tolerate_lost_workers", "equal_time")
    numbers = ", ".join(f"{name}={getattr(synchronization, name)}" for name in names)
    return f"DiLoCo({numbers}, outer_optimizer={_described_optimizer(synchronization)})"


def _described_optimizer(synchronization: DiLoCo) -> str:
    if synchronization.outer_optimizer is None:
        return "None"
    optimizer = synchronization.new_outer_optimizer()
    # Keras numbers the names of a process.
    config = {name: value for name, value in sorted(optimizer.get_config().items()) if name != "name"}
    return f"{type(optimizer).__name__}({config})"


def remedy_of_early_start(synchronization: Synchronization | None) -> str:
    """Says what to change if TensorFlow's runtime has started before the strategy was made."""
    if isinstance(synchronization, DiLoCo) and synchronization.has_made_optimizer:
        name = type(synchronization.outer_optimizer).__name__
        return (
            "The `outer_optimizer` of DiLoCo has variables: give a function that makes it, such as "
            f"`outer_optimizer=lambda: keras.optimizers.{name}(...)`."
        )
    return "Move `tfdist.MultiWorkerMirroredStrategy()` to the top of the program, right after the imports."


def _check_outer_optimizer(outer: Any) -> None:
    if not isinstance(outer, keras.optimizers.Optimizer):
        raise TypeError(
            "The `outer_optimizer` of DiLoCo must be a function that makes an optimizer of Keras, such as `lambda: "
            f"keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)`, or such an optimizer, got {outer!r}."
        )
    is_wrapper = isinstance(outer, keras.optimizers.LossScaleOptimizer)
    if is_wrapper or getattr(outer, "use_ema", False) or getattr(outer, "gradient_accumulation_steps", None):
        raise ValueError(
            "The `outer_optimizer` of DiLoCo applies each average at once, so it cannot scale losses, keep "
            f"averages of weights or accumulate gradients, got a {type(outer).__name__} that does. Leave `use_ema` "
            "and `gradient_accumulation_steps` out."
        )


def _check_tolerance(options: Synchronization) -> None:
    kind = type(options).__name__
    for each in ("tolerate_lost_workers", "equal_time"):
        if not isinstance(getattr(options, each), bool):
            raise ValueError(f"`{each}` of {kind} must be True or False, got {getattr(options, each)!r}.")
    if options.equal_time and not options.tolerate_lost_workers:
        raise ValueError(
            f"`equal_time` of {kind} needs tolerate_lost_workers=True, with which workers take steps by themselves, "
            "got tolerate_lost_workers=False. Set both."
        )
    for name, plain in (("start_step", 0), ("fragments", 1), ("overlap_steps", 0)):
        given = getattr(options, name, plain)
        if options.tolerate_lost_workers and given != plain:
            raise ValueError(
                f"With tolerate_lost_workers workers train by themselves from the first step on, and all weights "
                f"synchronize at once, but {kind} got {name}={given!r}. Leave one of the two out."
            )


def _check_integer(kind: str, name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"`{name}` of {kind} must be an integer of at least {least}, got {value!r}.")
