"""Rows cut into blocks, small numbers packed into int32 words, and floats as their bits."""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

__all__ = ["absmax_bits", "from_bits", "pack", "reduce_blocks", "rows_of", "split_blocks", "to_bits", "unpack"]

_LANES = 8


def to_bits(values: tf.Tensor) -> tf.Tensor:
    """Float32 as int32 of the same bits."""
    return tf.bitcast(values, tf.int32)


def from_bits(words: tf.Tensor) -> tf.Tensor:
    """Int32 as float32 of the same bits."""
    return tf.bitcast(words, tf.float32)


def rows_of(values: tf.Tensor) -> int:
    """The number of rows, or -1, as `tf.reshape` takes it, where only the run can tell."""
    return -1 if values.shape[0] is None else values.shape[0]


def split_blocks(values: tf.Tensor, block_size: int) -> tf.Tensor:
    """[rows, elements] -> [rows, blocks, block_size]."""
    rows, elements = rows_of(values), values.shape[1]
    return tf.reshape(values, [rows, elements // block_size, block_size])


def reduce_blocks(blocks: tf.Tensor, combine: Callable, reduce: Callable) -> tf.Tensor:
    """Reduces each block to one number, [rows, blocks, block_size] -> [rows, blocks].

    Args:
      blocks: What is reduced.
      combine: The operation on two tensors, `tf.maximum` say.
      reduce: The same along an axis, `tf.reduce_max` say.
    """
    rows, (count, block_size) = rows_of(blocks), blocks.shape[1:]
    # A reduction over a whole block takes one number at a time; slices of blocks are combined as vectors.
    lanes = math.gcd(block_size, _LANES)
    slices = tf.unstack(tf.reshape(blocks, [rows, count, lanes, block_size // lanes]), axis=2)
    return reduce(functools.reduce(combine, slices), axis=-1)


def absmax_bits(blocks: tf.Tensor) -> tf.Tensor:
    """Bits of the largest magnitude: [rows, blocks, block_size] -> int32 [rows, blocks].

    Magnitudes are ordered as their bits are, Inf above all numbers and NaN above Inf; a maximum of floats may pass over
    NaN.
    """
    return reduce_blocks(tf.bitwise.bitwise_and(to_bits(blocks), 0x7FFFFFFF), tf.maximum, tf.reduce_max)


def pack(codes: tf.Tensor) -> tf.Tensor:
    """Small numbers, several to a word: a type of 1 or 2 bytes [rows, ...] -> int32 [rows, words]."""
    each = 4 // codes.dtype.size
    return tf.bitcast(tf.reshape(codes, [rows_of(codes), codes.shape[1:].num_elements() // each, each]), tf.int32)


def unpack(words: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Int32 [rows, words] -> `dtype` [rows, words * 2 or 4]."""
    return tf.reshape(tf.bitcast(words, dtype), [rows_of(words), words.shape[1] * 4 // dtype.size])
