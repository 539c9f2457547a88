"""PyTorch fully sharded data parallel (`fully_shard`, FSDP 2) on gloo: weights, gradients and state in shards."""

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import models
from benchmarks.peers import torch_ddp


def prepare(model, alone, optimizer="sgd"):
    worker = torch_ddp.join_group()
    torch.manual_seed(0)
    network = models.torch_model(model)
    if not alone:
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
        for block in _blocks(network):
            fully_shard(block, mesh=mesh)
        fully_shard(network, mesh=mesh)
    kind, rate = torch_ddp.OPTIMIZERS[optimizer]
    return torch_ddp.trainer(model, worker, network, kind(network.parameters(), rate))


def _blocks(network):
    """Returns the modules that are gathered one after another: the layers of a transformer, else the children."""
    layers = [each for each in network.modules() if isinstance(each, torch.nn.TransformerEncoderLayer)]
    return layers or [each for each in network.children() if any(True for _ in each.parameters())]
