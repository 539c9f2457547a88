"""Rules by which the learning rate follows the global batch size."""

import math

RULES = ("adascale", "sqrt", "linear")


def learning_rate_scale(rule: str | None, size: int, base: int, noise_scale: float) -> float:
    """Returns the factor for the learning rate that was chosen for batches of `base` examples.

    - "adascale": (noise scale / base + 1) / (noise scale / size + 1). It is the number of steps with `base` examples
      that one step with `size` examples is worth: the quotient of the sizes if noise prevails, 1 if it is negligible.
    - "sqrt": the square root of the quotient of the sizes, for adaptive optimizers such as Adam.
    - "linear": the quotient of the sizes, for SGD with sizes far below the noise scale.
    - `None`: 1.

    Args:
      rule: The rule.
      size: The global batch size.
      base: The global batch size that the learning rate was chosen for.
      noise_scale: The gradient noise scale in examples.

    References:
      "adascale": Johnson et al., AdaScale SGD, 2020, https://arxiv.org/abs/2007.05105.
      "sqrt": Malladi et al., Scaling Rules for Adaptive Gradient Algorithms, 2022, https://arxiv.org/abs/2205.10287.
      "linear": Goyal et al., Accurate, Large Minibatch SGD, 2017, https://arxiv.org/abs/1706.02677.
    """
    quotient = size / base
    if rule == "adascale" and math.isfinite(noise_scale):
        return (noise_scale / base + 1) / (noise_scale / size + 1)
    if rule == "sqrt":
        return math.sqrt(quotient)
    return 1.0 if rule is None else quotient
