"""MkDocs hook: shows the sources to mkdocstrings in the layout in which they are installed.

`strategies/` and `data/` are installed as `tfdist.strategies` and `tfdist.data`. mkdocstrings reads files, and does not
know `package_dir` of setup.cfg. So it gets a copy.
"""

import atexit
import pathlib
import shutil
import tempfile
from typing import Any

from mkdocs.plugins import event_priority

ROOT = pathlib.Path(__file__).parents[2]
FOLDERS = {"tfdist": "tfdist", "strategies": "tfdist/strategies", "data": "tfdist/data"}  # in the tree: as installed


@event_priority(100)  # before mkdocstrings reads its options
def on_config(config: Any) -> Any:
    """Makes the copy, and gives its path to mkdocstrings."""
    copy = pathlib.Path(tempfile.mkdtemp(prefix="tfdist-docs-"))
    atexit.register(shutil.rmtree, copy, ignore_errors=True)
    for folder, installed in FOLDERS.items():
        shutil.copytree(ROOT / folder, copy / installed, ignore=shutil.ignore_patterns("__pycache__"))
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(copy)]
    return config
