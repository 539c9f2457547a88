"""What each worker reads.

Names are handed on lazily (PEP 562), so that `import tfdist.data` does not load TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.data import sources
    from tfdist.data.audit import Audit
    from tfdist.data.balanced import BalancedSharding
    from tfdist.data.digits import Digits
    from tfdist.data.loading import load

__all__ = ["Audit", "BalancedSharding", "Digits", "load", "sources"]

_HOMES = {
    "Audit": "tfdist.data.audit",
    "BalancedSharding": "tfdist.data.balanced",
    "Digits": "tfdist.data.digits",
    "load": "tfdist.data.loading",
}


def __getattr__(name: str) -> Any:
    if name == "sources":
        return importlib.import_module("tfdist.data.sources")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfdist.data' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
