"""PyTorch `DistributedDataParallel` on gloo: plain, with a communication hook, or with sharded optimizer state."""

import functools

from benchmarks import models
from tfdist.cluster import ClusterSpec

try:
    import torch
except ImportError as error:
    raise ImportError("PyTorch is not installed: pip install torch==2.13.0") from error
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

OPTIMIZERS = {"sgd": (torch.optim.SGD, 0.01), "adam": (torch.optim.Adam, 0.001)}  # Class and learning rate.

_CASTS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


@functools.cache
def join_group():
    """Joins the group that TF_CONFIG names. Returns the index of this worker."""
    spec = ClusterSpec.from_env()
    torch.set_num_threads(1)
    method = f"tcp://{spec.jobs['worker'][0]}"
    torch.distributed.init_process_group("gloo", method, rank=spec.worker_id, world_size=spec.num_workers)
    return spec.worker_id


def _add_hook(network, hook):
    if hook == "powersgd":  # rank 4; compresses from the second step that may, so within the warm-up
        state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        network.register_comm_hook(state, powersgd.powerSGD_hook)
    elif hook:
        network.register_comm_hook(None, _CASTS[hook])


def prepare(model, alone, hook=None, bucket_megabytes=None, optimizer="sgd", shards_state=False):
    worker = join_group()
    torch.manual_seed(0)
    network = models.torch_model(model)
    if not alone:
        network = DistributedDataParallel(network, bucket_cap_mb=bucket_megabytes)
        _add_hook(network, hook)
    kind, rate = OPTIMIZERS[optimizer]
    if shards_state and not alone:
        return trainer(model, worker, network, ZeroRedundancyOptimizer(network.parameters(), kind, lr=rate))
    return trainer(model, worker, network, kind(network.parameters(), rate))


def trainer(model, worker, network, optimizer):
    """Returns a function that trains a network on the batch of a worker."""
    features, labels = (torch.as_tensor(part) for part in models.make_batch(model, worker))
    if model == "cnn":
        features = features.permute(0, 3, 1, 2).contiguous()

    def train(steps, tick):
        for _ in range(steps):
            optimizer.zero_grad()
            logits = network(features)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
            loss.backward()
            optimizer.step()
            loss.item()
            tick()

    return train
