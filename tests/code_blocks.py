"""Code blocks of the README and of the pages in `docs/`, and what the line before each says about it.

Such a line is one of

    <!-- run: NAME -->                  A test runs the block. Python without a test of its own runs on two workers.
    <!-- run: NAME, as one process -->  Python that runs as one process.
    <!-- command: NAME -->              A command of the README.
    <!-- not run: REASON -->            No test runs the block.
"""

import dataclasses
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

MARK = re.compile(r"\s*<!-- (run|command|not run): (.+) -->$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A code block: where it begins, its language, its kind of mark or None, the text of the mark, its code."""

    place: str
    language: str
    kind: str | None
    said: str
    code: str

    @property
    def name(self):
        return self.said.partition(",")[0]

    @property
    def workers(self):
        return 1 if self.said.endswith(", as one process") else 2


def blocks_of(path):
    lines = path.read_text().splitlines()
    begin = None
    for number, line in enumerate(lines):
        fence = re.match(r"(\s*)```(.*)$", line)
        if not fence:
            continue
        if begin is None:
            begin, indent, language = number, len(fence[1]), fence[2].split(" ")[0]
            mark = MARK.match(lines[number - 1]) if number else None
        else:
            code = "".join(f"{each[indent:]}\n" for each in lines[begin + 1 : number])
            kind, said = mark.groups() if mark else (None, "")
            yield Block(f"{path.relative_to(ROOT)}:{begin + 1}", language, kind, said, code)
            begin = None
    assert begin is None, f"{path}:{begin + 1}: the code block has no end"


BLOCKS = [block for path in PAGES for block in blocks_of(path)]


def code(name):
    """Returns the code of the block with a name."""
    (found,) = [block.code for block in BLOCKS if block.kind == "run" and block.name == name]
    return found
