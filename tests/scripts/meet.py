"""Meets the other workers of a cluster, given as JSON. Prints their addresses, then its peak memory in KiB."""

import resource
import sys

from tfdist.cluster import ClusterSpec
from tfdist.faults import rendezvous

if len(sys.argv) > 2:  # how many files it may open
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
lines = rendezvous.meet(ClusterSpec.from_json(sys.argv[1]), 300)
print({worker: line.getpeername()[0] for worker, line in lines.items()})
with open("/proc/self/status") as status:
    print(*[line.split()[1] for line in status if line.startswith("VmHWM")], flush=True)
