"""Who the workers are: TF_CONFIG read, checked and written, without loading TensorFlow."""

from tfdist.cluster.ports import check_bindable, free_ports
from tfdist.cluster.spec import DEVICES_PER_WORKER, ClusterSpec, is_chief

__all__ = ["DEVICES_PER_WORKER", "ClusterSpec", "check_bindable", "free_ports", "is_chief"]
