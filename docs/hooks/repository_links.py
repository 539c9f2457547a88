"""MkDocs hook: links from a page to files outside of `docs/` lead to copies of these files in the site.

Pages link to files of the repository by relative paths, so the links also work where the repository is shown. The
copies are in `repository/` of the site. A Markdown file among them becomes a page, and its own links are followed too.
"""

import pathlib
import posixpath
import re
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = pathlib.Path(__file__).parents[2]
COPIES = "repository"
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")


def place_of(path: str) -> str:
    """Returns the path in the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{COPIES}/{path}"


def path_of(place: str) -> str:
    """Returns the path in the repository of a file of the site."""
    return place.removeprefix(f"{COPIES}/") if place.startswith(f"{COPIES}/") else f"docs/{place}"


def linked(page: str, text: str) -> list[str]:
    """Returns the files outside of `docs/` that a page of the repository links to."""
    targets = (posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for _, link, _ in LINK.findall(text))
    return [target for target in targets if not target.startswith(("docs/", "..")) and (ROOT / target).is_file()]


def on_files(files: Any, *, config: Any) -> Any:
    """Adds the files that pages link to."""
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for path in linked(path_of(page.src_uri), page.content_string):
            if files.get_file_from_path(place_of(path)) is None:
                copy = File.generated(config, place_of(path), abs_src_path=str(ROOT / path))
                copy.inclusion = InclusionLevel.NOT_IN_NAV
                files.append(copy)
                if copy.is_documentation_page():
                    pages.append(copy)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lets each link lead to the place of its file in the site."""
    if page.file.src_uri.startswith(f"{COPIES}/"):
        page.meta["search"] = {"boost": 0.5}  # The changelog names everything; other pages explain it.
    here, place = path_of(page.file.src_uri), posixpath.dirname(page.file.src_uri)

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        if not (ROOT / target).is_file() or files.get_file_from_path(place_of(target)) is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(place_of(target), place or '.')}{match[3] or ''}"

    return LINK.sub(led, markdown)
