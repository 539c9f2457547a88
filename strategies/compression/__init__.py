"""Codecs: what makes a gradient smaller before it travels. Arithmetic on tensors, no device, no network."""

from tfdist.strategies.compression.bfloat16 import BFloat16
from tfdist.strategies.compression.codec import Codec, WordCodec
from tfdist.strategies.compression.float16 import Float16
from tfdist.strategies.compression.int4 import Int4
from tfdist.strategies.compression.int8 import Int8
from tfdist.strategies.compression.power_sgd import PowerSGD
from tfdist.strategies.compression.sign import Sign
from tfdist.strategies.compression.top_k import TopK

__all__ = [
    "NAMES",
    "BFloat16",
    "Codec",
    "Float16",
    "Int4",
    "Int8",
    "PowerSGD",
    "Sign",
    "TopK",
    "WordCodec",
    "from_name",
]

NAMES: dict[str, type[Codec]] = {codec.name: codec for codec in (Float16, BFloat16, Int8, Int4, Sign, TopK, PowerSGD)}


def from_name(codec: str | Codec | None) -> Codec | None:
    """The codec of that name with its default options; a codec, or None for no compression, as it is.

    Raises:
      ValueError: If it is neither; the message lists the names.
    """
    if codec is None or isinstance(codec, Codec):
        return codec
    if isinstance(codec, str) and codec in NAMES:
        return NAMES[codec]()
    names = ", ".join(repr(name) for name in NAMES)
    raise ValueError(f"`compression` must be None, one of {names}, or a codec of tfdist.compression, got {codec!r}.")
