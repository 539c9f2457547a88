"""`tfdist.data`: input for `fit` on each worker, from sources of examples read by index, split among replicas.

Names are imported at first use (PEP 562), so that `import tfdist.data` does not load TensorFlow.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.data import sources
    from tfdist.data.balanced_sharding import BalancedSharding
    from tfdist.data.digits import Digits
    from tfdist.data.loading import load

__all__ = ["BalancedSharding", "Digits", "load", "sources"]

_HOMES = {
    "BalancedSharding": "tfdist.data.balanced_sharding:BalancedSharding",
    "Digits": "tfdist.data.digits:Digits",
    "load": "tfdist.data.loading:load",
    "sources": "tfdist.data.sources",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return pkgutil.resolve_name(_HOMES[name])
    raise AttributeError(f"module 'tfdist.data' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
