"""README and pages of `docs/`: links lead somewhere, code blocks are run or say why not."""

import ast
import collections
import dataclasses
import pathlib
import re

import pytest

import tfdist
from code_blocks import BLOCKS, PAGES, ROOT
from test_package import HOUSE, PUBLIC
from tfdist.launch import cli

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
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


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


def tables(page):
    """Returns the tables of a page: for each, the place of its first row and the number of cells of each row."""
    found, before = [], 0
    for number, line in enumerate(without_code(page.read_text()).splitlines(), 1):
        if not line.startswith("|"):
            continue
        if number != before + 1:
            found.append((f"{page.relative_to(ROOT)}, table {len(found) + 1}", []))
        found[-1][1].append(len(re.split(r"(?<!\\)\|", line.strip())))
        before = number
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_all_rows_of_a_table_have_as_many_cells(page):
    assert [place for place, cells in tables(page) if len(set(cells)) > 1] == []


REFERENCE = {path.name: path.read_text() for path in sorted((ROOT / "docs/reference").glob("*.md"))}
MODULES = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names} & {*PUBLIC, "tfdist.data.sources"}


def test_each_public_name_is_in_the_reference():
    shown = set(re.findall(r"^::: (\S+)$", "\n".join(REFERENCE.values()), re.MULTILINE))
    known = {f"{module}.{name}" for module, names in PUBLIC.items() for name in names}
    sources = next(
        ast.literal_eval(node.value)
        for node in ast.parse((ROOT / "data/sources/__init__.py").read_text()).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    )
    known |= {f"tfdist.data.sources.{name}" for name in sources}
    short = {name: name.replace("tfdist.strategies.", "tfdist.") for name in known - MODULES}  # both import paths work
    assert [name for name in sorted(short) if short[name] not in shown] == []


def has_example(name, page):
    """Whether code, a link or a table on a page of the reference uses a name, beside the entry of the name itself."""
    entry = page.partition(f"::: {name}\n")[2].partition("\n::: ")[0]
    elsewhere = re.findall(r"^```.*?^```$|^\|.*$", page, re.DOTALL | re.MULTILINE)
    last = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    return "](" in entry or "Example" in entry or any(last.search(text) for text in elsewhere)


@pytest.mark.parametrize("page", REFERENCE)
def test_each_entry_of_the_reference_has_an_example(page):
    names = re.findall(r"^::: (\S+)$", REFERENCE[page], re.MULTILINE)
    assert [name for name in names if not has_example(name, REFERENCE[page])] == []


def test_each_environment_variable_is_in_the_reference():
    source = "".join(path.read_text() for folder in HOUSE for path in (ROOT / folder).rglob("*.py"))
    fields = [field.name for field in dataclasses.fields(tfdist.FaultTolerance)]
    deadlines = [name for name in fields if name.endswith("_seconds")]
    names = {*re.findall(r"TFDIST_[A-Z_]*[A-Z]\b", source), *(f"TFDIST_{name.upper()}" for name in deadlines)}
    assert len(deadlines) == 5
    assert [name for name in sorted(names) if f"`{name}`" not in REFERENCE["environment.md"]] == []


def test_each_command_is_in_the_reference():
    names = [command.name for command in cli._COMMANDS]
    assert names and [name for name in names if f"<!-- help: {name} -->" not in REFERENCE["command_line.md"]] == []


def test_each_exit_code_is_in_the_reference():
    codes = re.findall(r"^[A-Z]+ = (\d+)$", (ROOT / "tfdist/exit_codes.py").read_text(), re.MULTILINE)
    assert codes and [code for code in codes if f"\n| {code} |" not in REFERENCE["exit_codes.md"]] == []


def test_each_file_of_a_run_is_in_the_reference():
    """The docstring of the module lists the files, with `<n>` and `<i>` for numbers."""
    listed = (ROOT / "tfdist/run_files.py").read_text().split('"""')[1]
    names = re.findall(r"^    +([\w<>.-]+/?)  ", listed, re.MULTILINE)
    assert len(names) > 6 and [name for name in names if name not in REFERENCE["run_directory.md"]] == []
