"""Codecs, which compress the gradients that replicas exchange. A strategy's `compression=` takes a name or a codec."""

from tfdist.strategies.auto_compression import Auto
from tfdist.strategies.compression import BFloat16, Codec, Float16, Int4, Int8, PowerSGD, Sign, TopK, WordCodec
from tfdist.strategies.compression_policy import uncompressed

__all__ = [
    "Auto",
    "BFloat16",
    "Codec",
    "Float16",
    "Int4",
    "Int8",
    "PowerSGD",
    "Sign",
    "TopK",
    "WordCodec",
    "uncompressed",
]
