"""Makes HTML of elements. Text is escaped by construction: only `Markup` enters a page as it is."""

import html
import re
from collections.abc import Callable, Iterable, Sequence

_VOID = ("br", "hr", "meta")
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|min|h|B|kB|MB|GB|TB|%)(?!\w))")


class Markup(str):
    """HTML that is already escaped."""

    __slots__ = ()


Child = str | Markup | Iterable["Child"] | None
"""Content of an element: text, which is escaped, markup, or several of both."""


def element(tag: str, *children: Child, **attributes: str | None) -> Markup:
    """Returns an element.

    Args:
      tag: Its name.
      *children: Its content. `None` is left out.
      **attributes: Its attributes. `class_` stands for `class`, and `_` in other names for `-`. `None` is left out.
    """
    told = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(_printable(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    if tag in _VOID:
        return Markup(f"<{tag}{told}>")
    return Markup(f"<{tag}{told}>{joined(children, _escaped if tag == 'pre' else _unbroken)}</{tag}>")


def _escaped(text: str) -> Markup:
    return Markup(html.escape(_printable(text)))


def _unbroken(text: str) -> Markup:
    """Returns a text as markup in which each number stays on the line of its unit, such as "38 s"."""
    return _escaped(_BEFORE_UNIT.sub("\N{NO-BREAK SPACE}", text))


def joined(children: Child, markup_of: Callable[[str], Markup] = _unbroken) -> Markup:
    """Returns several children one after another.

    Args:
      children: Text, markup, or several of both.
      markup_of: Makes markup of a text.
    """
    if children is None:
        return Markup("")
    if isinstance(children, str):
        return children if isinstance(children, Markup) else markup_of(children)
    return Markup("".join(joined(child, markup_of) for child in children))


def paragraph(text: str, class_: str | None = None) -> Markup:
    """Returns a paragraph. Text between backticks becomes code."""
    parts = text.split("`")
    children = [element("code", part) if number % 2 else part for number, part in enumerate(parts)]
    return element("p", children, class_=class_)


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """Returns a table that scrolls by itself if the page is narrow; the first cell of a row is its heading."""
    head = element("tr", [element("th", name, scope="col") for name in columns])
    body = [
        element("tr", element("th", first, scope="row"), [element("td", cell) for cell in cells])
        for first, *cells in rows
    ]
    content = element("table", element("caption", caption), element("thead", head), element("tbody", body))
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _printable(text: str) -> str:
    """Returns a text without surrogates and control characters, which HTML forbids."""
    text = text.encode("utf-8", "replace").decode()
    return "".join(char if char >= " " or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
