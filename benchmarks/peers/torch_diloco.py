"""DiLoCo in plain PyTorch on gloo: the character model of `examples/char_lm.py`, with weights that Keras has made."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed
from torch.nn import functional

from tfdist.cluster import ClusterSpec

_HEADS, _EPSILON = 4, 1e-3  # Of Keras' LayerNormalization.
_BLOCK_WEIGHTS = 16  # Two LayerNormalizations, attention with four kernels and biases, and two dense layers.


def logits_of(weights: Sequence[torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """[B, context] -> [B, context, vocabulary]; `weights` in the order of Keras' `model.weights`."""
    characters, positions, *rest = weights
    x = characters[tokens] + positions[: tokens.shape[1]]
    while len(rest) > _BLOCK_WEIGHTS:
        block, rest = rest[:_BLOCK_WEIGHTS], rest[_BLOCK_WEIGHTS:]
        x = x + _attention(_normalized(x, block[0:2]), block[2:10])
        y = functional.gelu(_normalized(x, block[10:12]) @ block[12] + block[13])
        x = x + y @ block[14] + block[15]
    return _normalized(x, rest[0:2]) @ rest[2] + rest[3]


def _normalized(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    scale, offset = weights
    return functional.layer_norm(x, x.shape[-1:], scale, offset, _EPSILON)


def _attention(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Causal attention with Keras' kernels: [width, heads, size], and the last one [heads, size, width]."""
    query, key, value = (
        torch.einsum("btw,whs->bhts", x, kernel) + bias[:, None]
        for kernel, bias in zip(weights[0:6:2], weights[1:6:2], strict=True)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return torch.einsum("bhts,hsw->btw", mixed, weights[6]) + weights[7]


def train(
    arrays: Sequence[np.ndarray],
    batches: tuple[np.ndarray, np.ndarray],
    held_out: tuple[np.ndarray, np.ndarray],
    every: int,
    rendezvous: str,
) -> float:
    """Trains by DiLoCo on this worker's rows of each batch. Returns the loss on `held_out` in nats per character.

    Args:
      arrays: The weights.
      batches: Inputs and labels, [steps, rows of all workers, context].
      held_out: Inputs and labels, [rows, context].
      every: Number of steps between two synchronizations.
      rendezvous: Path of a new file by which the workers find each other.
    """
    spec = ClusterSpec.from_env()
    rank, workers = spec.worker_id, spec.num_workers
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=workers)
    weights = [torch.tensor(array, requires_grad=True) for array in arrays]
    starts = [weight.detach().clone() for weight in weights]
    inner = torch.optim.AdamW(weights, 2e-3, eps=1e-7, weight_decay=0.004)
    outer = torch.optim.SGD(starts, 0.7, momentum=0.9, nesterov=True)
    rows = batches[0].shape[1] // workers
    own = slice(rank * rows, (rank + 1) * rows)
    for step, (x, y) in enumerate(zip(*batches, strict=True), start=1):
        inner.zero_grad()
        _loss(weights, x[own], y[own]).backward()
        inner.step()
        if step % every == 0:
            _synchronize(weights, starts, outer, workers)
    with torch.no_grad():
        losses = [_loss(weights, x[None], y[None]).item() for x, y in zip(*held_out, strict=True)]
    return float(np.mean(losses))


def _synchronize(weights, starts, outer, workers):
    with torch.no_grad():
        change = torch.cat([(start - end).flatten() for start, end in zip(starts, weights, strict=True)])
        torch.distributed.all_reduce(change)
        parts = torch.split(change / workers, [start.numel() for start in starts])
        for start, part in zip(starts, parts, strict=True):
            start.grad = part.reshape(start.shape)
        outer.step()
        for weight, start in zip(weights, starts, strict=True):
            weight.copy_(start)


def _loss(weights, x, y):
    logits = logits_of(weights, torch.as_tensor(x).long())
    return functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(y).long().flatten())
