"""Groups the dense gradients of an optimizer by their codec."""

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from tfdist.strategies.collectives.all_reduce import Collectives
from tfdist.strategies.collectives.codec_group import CodecGroup
from tfdist.strategies.collectives.power_sgd_group import PowerSGDGroup
from tfdist.strategies.collectives.transport import Gradient
from tfdist.strategies.compression import Codec, PowerSGD, WordCodec
from tfdist.strategies.sharding.part_codec_group import PartCodecGroup
from tfdist.strategies.sharding.partition import Partition

CodecPart = CodecGroup | PowerSGDGroup | PartCodecGroup


def parts_by_codec(
    gradients: Sequence[Gradient],
    codecs: Sequence[Codec | None],
    collectives: Collectives,
    seed: int,
    partitions: Sequence[Any],
) -> list[CodecPart]:
    """Groups dense gradients by codec, and those that are divided apart, starting with the last gradient."""
    groups: dict[tuple[Codec, bool], list[int]] = {}
    for i in reversed(range(len(gradients))):
        codec = codecs[i]
        if codec is not None and not isinstance(gradients[i], tf.IndexedSlices):
            is_divided = isinstance(codec, WordCodec) and isinstance(partitions[i], Partition)
            groups.setdefault((codec, is_divided), []).insert(0, i)
    return [
        part_of_codec(codec, positions, is_divided, gradients, [partitions[i] for i in positions], collectives, seed)
        for (codec, is_divided), positions in groups.items()
    ]


def part_of_codec(
    codec: Codec,
    positions: list[int],
    is_divided: bool,
    gradients: Sequence[Gradient],
    partitions: Sequence[Any],
    collectives: Collectives,
    seed: int,
) -> CodecPart:
    """Makes the part of one codec for the gradients at `positions`, which have the `partitions` if divided."""
    if isinstance(codec, PowerSGD):
        return PowerSGDGroup(codec, positions, gradients, codec.seed + seed)
    if is_divided:
        return PartCodecGroup(cast(WordCodec, codec), positions, partitions, collectives)
    return CodecGroup(cast(WordCodec, codec), positions, gradients, collectives)
