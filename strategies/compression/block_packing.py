"""Helpers of the codecs: split rows into blocks, pack small numbers into int32 words, and view floats as bits."""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

_LANES = 8


def to_bits(values: tf.Tensor) -> tf.Tensor:
    """Reinterprets the bits of float32 as int32."""
    return tf.bitcast(values, tf.int32)


def from_bits(words: tf.Tensor) -> tf.Tensor:
    """Reinterprets the bits of int32 as float32."""
    return tf.bitcast(words, tf.float32)


def rows_of(values: tf.Tensor) -> int:
    """The static number of rows of a tensor, or -1 (for use in `tf.reshape`) if it is unknown while tracing."""
    return -1 if values.shape[0] is None else values.shape[0]


def split_blocks(values: tf.Tensor, block_size: int) -> tf.Tensor:
    """Splits each row of a gradient into blocks: [rows, elements] -> [rows, blocks, block_size]."""
    rows, elements = rows_of(values), values.shape[1]
    return tf.reshape(values, [rows, elements // block_size, block_size])


def reduce_blocks(blocks: tf.Tensor, combine: Callable, reduce: Callable) -> tf.Tensor:
    """Reduces each block to one number: `[rows, blocks, block_size] -> [rows, blocks]`.

    `combine` does on two tensors what `reduce` does along an axis, as `tf.maximum` and `tf.reduce_max` do.
    """
    rows, (count, block_size) = rows_of(blocks), blocks.shape[1:]
    # Combining slices of the blocks uses vector instructions; a reduction over a whole block would be scalar.
    lanes = math.gcd(block_size, _LANES)
    slices = tf.unstack(tf.reshape(blocks, [rows, count, lanes, block_size // lanes]), axis=2)
    return reduce(functools.reduce(combine, slices), axis=-1)


def absmax_bits(blocks: tf.Tensor) -> tf.Tensor:
    """Bits of the largest magnitude of each block: [rows, blocks, block_size] -> int32 [rows, blocks].

    The bits of magnitudes, compared as integers, are in the order of the magnitudes, with Inf above all numbers and NaN
    above Inf. A maximum of floats could ignore NaN.
    """
    return reduce_blocks(tf.bitwise.bitwise_and(to_bits(blocks), 0x7FFFFFFF), tf.maximum, tf.reduce_max)


def pack(codes: tf.Tensor) -> tf.Tensor:
    """Packs numbers of 1 or 2 bytes into int32 words: [rows, ...] -> int32 [rows, words]."""
    each = 4 // codes.dtype.size
    return tf.bitcast(tf.reshape(codes, [rows_of(codes), codes.shape[1:].num_elements() // each, each]), tf.int32)


def unpack(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Inverse of `pack`: int32 [rows, words] -> `dtype` [rows, words * 4 // dtype.size]."""
    return tf.reshape(tf.bitcast(words, dtype), [rows_of(words), words.shape[1] * 4 // dtype.size])
