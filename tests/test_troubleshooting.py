"""The pages in `docs/troubleshooting/` have every error class and every warning of tfdist, and no message of the past.

The pages show messages as inline code, and write `…` for each value. A message of the sources is on the pages if one of
them shows its first sentence.
"""

import ast
import collections
import dataclasses
import difflib
import functools
import html
import pathlib
import re

import pytest

from tfdist import errors

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/troubleshooting").glob("*.md"))
OF_TFDIST = [page for page in PAGES if page.name not in ("index.md", "libraries.md")]

# Files that log texts which are not written in the call, and words that the pages have of such a message, one for each
# call. The words are of another text of the file, or of the error that the call logs.
ELSEWHERE = {
    "tfdist/cluster/launch_check.py": ["TF_CONFIG is unset: each of the 2 processes trains alone"],
    "tfdist/faults/coordination_store.py": ["has not answered for … s: it has ended, is frozen"],
    "tfdist/faults/creation_watch.py": ["All workers must make the same variables in the same order"],
    "tfdist/faults/watchdog.py": ["All workers must make the same calls in the same order"],
    "tfdist/launch/bench_command.py": ["the measurement did not finish within --timeout … s"],
    "tfdist/launch/cli.py": ["TF_CONFIG must be JSON", "and the first one takes nearly all memory of"],
    "tfdist/launch/estimate_command.py": ["MODEL must be a .keras file, FILE.py:FUNCTION or MODULE:FUNCTION"],
    "tfdist/plan/plan_command.py": ["A calibration needs at least two sizes of each codec"],
    "tfdist/report/report_command.py": ["RUN_DIR must be the folder of a run of tfdist run"],
    "tfdist/launch/supervisor.py": ["the first failure", "every line of each worker"],
    "tfdist/network/connection_acceptor.py": ["A connection from … is closed"],
}

LEVELS = ("warning", "error", "exception", "fatal")
LEAST_LETTERS = 12  # of a text that tells a message from others
VALUE = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[sdrgfix]")


@dataclasses.dataclass(frozen=True)
class Message:
    """A message that the sources log: its place, and its texts with `…` for each value."""

    place: str
    texts: tuple[str, ...]


def text_of(node):
    """Returns the text of a string in the sources with `…` for each value; `None` if it is not written there."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return VALUE.sub("…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def plain(text):
    return re.sub(r"\s+", " ", text.replace("`", "")).strip()


def letters(text):
    return sum(character.isalpha() for character in text)


def first_sentences(text):
    """Returns the beginnings of a text that end with a sentence, the shortest first."""
    ends = [match.end() for match in re.finditer(r"[.;:](?= |$)", text)]
    return [text[:end] for end in ends if letters(text[:end]) >= LEAST_LETTERS] + [text]


def first_sentence(text):
    ends = [each for each in first_sentences(text) if each.endswith(".")]
    return ends[0] if ends else text


def is_warning(call):
    """Returns whether a call logs a message at level warning or above."""
    function = ast.unparse(call.func)
    if function.endswith("_warnings.say"):
        return True
    if function.startswith(("logging.log_first_n", "logging.log_every_n_seconds")):
        return ast.unparse(call.args[0]) in ("logging.WARNING", "logging.WARN", "logging.ERROR")
    return function in {f"logging.{level}" for level in LEVELS}


@functools.cache
def sources():
    files = (path for folder in ("tfdist", "strategies", "data") for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in files}


def logged():
    for file, module in sources().items():
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        for call in ast.walk(module):
            if not isinstance(call, ast.Call) or not is_warning(call):
                continue
            around = [each for each in functions if each.lineno <= call.lineno <= each.end_lineno]
            function = max(around, key=lambda each: each.lineno)  # the innermost
            argument = call.args["log_" in ast.unparse(call.func)]
            found = [text_of(argument)]
            if isinstance(argument, ast.Name):
                assigned = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
                found = [text_of(each.value) for each in assigned if ast.unparse(each.targets[0]) == argument.id]
            texts = tuple(plain(text) for text in found if text and letters(text) >= LEAST_LETTERS)
            yield Message(f"{file}:{call.lineno}", texts)


LOGGED = list(logged())


@functools.cache
def shown():
    """Returns the messages on the pages, by page: what they show as inline code."""
    spans = {}
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        found = re.findall(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", text)
        spans[page.name] = [plain(html.unescape(span)) for _, span in found]
    return spans


@functools.cache
def all_shown():
    return [span for spans in shown().values() for span in spans]


def pattern(text):
    return re.compile(".{0,200}?".join(map(re.escape, text.split("…"))))


def is_shown(text):
    wanted = first_sentence(text).rstrip(".:; ")
    return any(pattern(wanted).match(span) for span in all_shown())


def advice(message, text):
    nearest = difflib.get_close_matches(first_sentence(text), all_shown(), 1, cutoff=0.5)
    there = f"The pages have a similar one, perhaps before a change of words: {nearest[0]!r}." if nearest else ""
    return (
        f"{message.place} logs {text!r}, but no page of docs/troubleshooting/ shows its first sentence. {there} Show "
        f"{first_sentence(text)!r} there as inline code, in the row of a table with its cause and remedy."
    )


@pytest.mark.parametrize("name", errors.__all__)
def test_each_error_class_is_explained(name):
    lines = (ROOT / "docs/troubleshooting/index.md").read_text().splitlines()
    rows = [line for line in lines if line.startswith(f"| `{name}` |")]
    assert len(rows) == 1, f"docs/troubleshooting/index.md needs one row for {name} in its table of error classes"
    own = getattr(errors, name).__mro__
    bases = {each.__name__ for each in own[1:]} if name != "TfdistError" else {"Exception"}
    assert rows[0].split("|")[2].strip().strip("`") in bases


def test_warnings_are_found():
    assert len(LOGGED) > 60


@pytest.mark.parametrize("message", [each for each in LOGGED if each.texts], ids=lambda message: message.place)
def test_each_warning_is_explained(message):
    missing = [text for text in message.texts if not is_shown(text)]
    assert not missing, "\n".join(advice(message, text) for text in missing)


def test_warnings_with_words_from_elsewhere_are_explained():
    places = collections.defaultdict(list)
    for each in LOGGED:
        if not each.texts:
            places[each.place.partition(":")[0]].append(each.place)
    unknown = {file: lines for file, lines in places.items() if len(lines) != len(ELSEWHERE.get(file, []))}
    assert not unknown, (
        f"{unknown} log texts that are not written there, so this test cannot look for them. Write them there, or give "
        "ELSEWHERE in this file, for each of these lines, words that docs/troubleshooting/ has of such a message."
    )
    assert sorted(set(ELSEWHERE) - set(places)) == [], "these files of ELSEWHERE log no such text any more"
    pages = plain(" ".join(page.read_text() for page in PAGES))
    assert [words for each in ELSEWHERE.values() for words in each if words not in pages] == []


@functools.cache
def texts_of_sources():
    texts = (text_of(node) for module in sources().values() for node in ast.walk(module))
    return {plain(text) for text in texts if text and " " in text.strip()}


def is_of_sources(span):
    """Returns whether the sources have each part of a message of a page between values, in which they may divide it."""
    parts = [part.strip(" .,:;()") for part in span.split("…")]
    telling = [part for part in parts if letters(part) >= LEAST_LETTERS] or [max(parts, key=letters)]
    known = texts_of_sources()
    return all(any(part in text for text in known) for part in telling) or any(
        words in span for each in ELSEWHERE.values() for words in each
    )


@pytest.mark.parametrize("page", OF_TFDIST, ids=[page.name for page in OF_TFDIST])
def test_each_message_on_a_page_is_in_the_sources(page):
    messages = re.findall(r"^\| (`+) ?(.+?) ?\1 \|", page.read_text(), re.MULTILINE)
    assert len(messages) > 10
    past = [text for _, text in messages if not is_of_sources(plain(text))]
    assert past == [], "no text of the sources has all parts of these messages: correct or remove them"
