"""README and pages of `docs/`: links lead somewhere, code blocks are run or say why not."""

import collections
import pathlib
import re

import pytest

from code_blocks import BLOCKS, PAGES, ROOT

NO_CODE = ("", "text")  # languages of output and drawings


def test_the_readme_is_read_in_five_minutes():
    text = (ROOT / "README.md").read_bytes()
    assert len(text) <= 12 * 1024 and text.count(b"\n") <= 200


def test_each_code_block_is_run_or_says_why_not():
    assert [block.place for block in BLOCKS if block.language not in NO_CODE and block.kind is None] == []


def test_each_code_block_that_is_run_has_a_test():
    """Python runs by its mark, in tests/test_readme.py. A test of its own names every other block."""
    run = [block for block in BLOCKS if block.kind == "run"]
    assert [name for name, count in collections.Counter(block.name for block in run).items() if count > 1] == []
    tests = "".join(path.read_text() for path in pathlib.Path(__file__).parent.glob("test_*.py"))
    assert [block.place for block in run if block.language != "python" and f'"{block.name}"' not in tests] == []


def without_code(text):
    return re.sub(r"^( *)```.*?^\1```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Returns the anchors of a page, as MkDocs makes them of headings and of names in the reference."""
    text = path.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE), re.M)
    words = (re.sub(r"[^\w\s-]", "", re.sub(r"\]\([^)]*\)", "", title)).strip().lower() for title in titles)
    return {re.sub(r"[-\s]+", "-", each) for each in words} | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(page):
    broken = []
    for link in re.findall(r"\]\(\s*([^)\s]+)", without_code(page.read_text())):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        path = page.parent / target if target else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            broken.append(link)
    assert broken == []
