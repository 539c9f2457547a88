"""MkDocs hook: puts the texts of `tfdist COMMAND --help` into pages, in place of `<!-- help: COMMAND -->`."""

import os
import re
import subprocess
import sys
from typing import Any

# A default of an option is the name of the machine, which is another one for the reader.
PRINT_HELP = """
import socket, sys
socket.gethostname = lambda: "the name of the host"
from tfdist.launch.cli import main
main([sys.argv[1], "--help"])
"""


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replaces each mark by the text of a command."""
    (sources,) = config.plugins["mkdocstrings"].config.handlers["python"]["paths"]
    environ = {**os.environ, "PYTHONPATH": sources, "COLUMNS": "100"}

    def help_of(match: re.Match[str]) -> str:
        command = [sys.executable, "-c", PRINT_HELP, match[1]]
        done = subprocess.run(command, env=environ, cwd=sources, capture_output=True, text=True, check=True)
        return f"```text\n{done.stdout}```"

    return re.sub(r"^<!-- help: (\S+) -->$", help_of, markdown, flags=re.MULTILINE)
