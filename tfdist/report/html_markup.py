"""Makes HTML of elements. Text is escaped by construction: only `Markup` enters a page as it is."""

import html
from collections.abc import Iterable, Sequence

_VOID = ("br", "hr", "meta")


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
    return Markup(f"<{tag}{told}>" if tag in _VOID else f"<{tag}{told}>{joined(children)}</{tag}>")


def joined(children: Child) -> Markup:
    """Returns several children one after another."""
    if children is None:
        return Markup("")
    if isinstance(children, str):
        return children if isinstance(children, Markup) else Markup(html.escape(_printable(children)))
    return Markup("".join(joined(child) for child in children))


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
