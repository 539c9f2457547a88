"""Codecs for gradients. The argument `compression=` of a strategy takes a codec by name or as an object."""

from tfdist.strategies.compression import BFloat16, Codec, Float16, Int4, Int8, PowerSGD, Sign, TopK, WordCodec
from tfdist.strategies.compression_policy import uncompressed

__all__ = ["BFloat16", "Codec", "Float16", "Int4", "Int8", "PowerSGD", "Sign", "TopK", "WordCodec", "uncompressed"]
