"""Codecs, which compress gradients before they travel: pure arithmetic on tensors, without devices or network."""

import dataclasses
import re
from typing import Any

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


_SPELLING = re.compile(r"(\w+)\((\d+|\d*\.\d+)\)")


def from_name(codec: str | Codec | None) -> Codec | None:
    """Returns the codec for the value of a `compression` argument.

    Args:
      codec: A codec or None, returned unchanged; or a name from `NAMES`, also with a number, as in "powersgd(8)".

    Raises:
      ValueError: If `codec` is anything else; the message lists the names.
    """
    if codec is None or isinstance(codec, WordCodec | PowerSGD):
        return codec
    if isinstance(codec, str) and codec in NAMES:
        return NAMES[codec]()
    spelt = _SPELLING.fullmatch(codec) if isinstance(codec, str) else None
    if spelt and spelt[1] in _numbered():
        kind: Any = NAMES[spelt[1]]
        return kind(float(spelt[2]) if "." in spelt[2] else int(spelt[2]))
    names = ", ".join(repr(name) for name in NAMES)
    numbered = " and ".join(_numbered())
    raise ValueError(
        f"`compression` must be None, 'auto', one of {names} ({numbered} also with a number, as in 'powersgd(4)'), or "
        f"a codec of tfdist.compression, got {codec!r}.{_way_out(codec)}"
    )


def _numbered() -> list[str]:
    """Names of the codecs that take one option as a positional number."""
    return [name for name, kind in NAMES.items() if not all(field.kw_only for field in dataclasses.fields(kind))]


def _way_out(codec: Any) -> str:
    if isinstance(codec, type) and issubclass(codec, Codec):
        return f" Call the class: {codec.__name__}()."
    if isinstance(codec, Codec):
        return " Derive your own codec from tfdist.compression.WordCodec, which encodes gradients as int32 words."
    return ""
