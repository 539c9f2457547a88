"""The codecs from which the exchange of an optimizer's gradients may choose, and those that it has chosen."""

import dataclasses
from collections.abc import Callable, Sequence

from tfdist.strategies.codec_trials import TrialOrder
from tfdist.strategies.compression import Codec


@dataclasses.dataclass(frozen=True)
class CodecsToChoose:
    """The codecs from which the exchange chooses while it runs.

    Attributes:
      codecs: The codecs, the least lossy one first.
      fits: Tells whether a codec can encode the gradient at a position.
      tell: Function that the first replica of all calls with the names of the chosen codecs, and with the order that
        makes the choice final.
    """

    codecs: Sequence[Codec]
    fits: Callable[[Codec, int], bool]
    tell: Callable[[str, TrialOrder], None]


@dataclasses.dataclass(frozen=True)
class ChosenCodecs:
    """The present codecs of an optimizer's gradients.

    Attributes:
      codecs: The codec of each gradient, by the path of its variable; None if it travels uncompressed.
      is_final: Whether the choice stays until the time of a step changes. False while tfdist tries codecs.
      reason: A sentence that says why the codecs were chosen; empty if no trials of this process have chosen them.
    """

    codecs: dict[str, Codec | None]
    is_final: bool
    reason: str
