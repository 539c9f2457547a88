"""Describes the workers of a cluster: reads, checks and writes TF_CONFIG without loading TensorFlow."""

from tfdist.cluster.ports import check_bindable, free_ports
from tfdist.cluster.spec import DEVICES_PER_WORKER_VARIABLE, ClusterSpec, is_chief

__all__ = ["DEVICES_PER_WORKER_VARIABLE", "ClusterSpec", "check_bindable", "free_ports", "is_chief"]
