"""Opens each page of the built documentation site in Chromium, and checks it as a reader would see it.

    make docs-browser

It looks at each page at two widths, in the light and the dark scheme. It fails if a page logs an error or scrolls
sideways, or if the search does not find a term. Needs the package `playwright` and a Chromium on PATH.
"""

import contextlib
import functools
import http.server
import pathlib
import re
import shutil
import sys
import threading

from playwright.sync_api import Browser, Error, Page, sync_playwright

SITE = pathlib.Path(__file__).parents[1] / "site"
SIZES = ((1280, 900), (400, 800))
SCHEMES = ("light", "dark")
TERMS = ("TF_CONFIG", "BalancedSharding", "exit code 75")
SECONDS = 60  # Deadline of each page and each search.


@contextlib.contextmanager
def served(folder: pathlib.Path):
    """Serves a folder on a free port of this machine, and gives its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Logs nothing."""

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_):
            """Logs nothing when the browser closes a connection early."""

    server = Server(("127.0.0.1", 0), functools.partial(Handler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def faults_of(page: Page, address: str) -> list[str]:
    """Opens an address and returns its errors, and whether it scrolls sideways."""
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(address, wait_until="load", timeout=1000 * SECONDS)
    wide, seen = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.clientWidth]")
    if wide > seen:
        faults.append(f"scrolls sideways: {wide} of {seen} pixels")
    return faults


def looked_at(browser: Browser, root: str, paths: list[str]) -> list[str]:
    """Returns the faults of all pages."""
    faults = []
    for (width, height), scheme in ((size, scheme) for size in SIZES for scheme in SCHEMES):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        context.route(lambda url: not url.startswith(root), lambda route: route.abort())  # The site needs no network.
        for path in paths:
            page = context.new_page()
            faults += [f"{path} ({width} pixels, {scheme}): {fault}" for fault in faults_of(page, f"{root}/{path}")]
            page.close()
        context.close()
    return faults


def not_found(browser: Browser, root: str) -> list[str]:
    """Returns the terms that the search does not find."""
    faults = []
    for term in TERMS:
        page = browser.new_page()
        page.goto(root, timeout=1000 * SECONDS)
        try:
            page.locator("input.md-search__input").click(timeout=1000 * SECONDS)
            page.locator("input.md-search__input").press_sequentially(term)
            page.locator(".md-search-result__item").first.wait_for(timeout=1000 * SECONDS)
        except Error as error:
            faults.append(f"The search does not find {term!r}: {error}")
        page.close()
    return faults


def main() -> None:
    """Checks the site, prints each fault, and exits with 1 if there is one."""
    browser_path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser_path is None:
        sys.exit("Chromium must be on PATH. Found neither `chromium` nor `google-chrome`. Install one of them.")
    if not (SITE / "sitemap.xml").exists():
        sys.exit(f"The site must be built. There is no {SITE / 'sitemap.xml'}. Run `make docs` first.")
    pages = sorted(str(path.parent.relative_to(SITE)) for path in SITE.rglob("index.html"))
    pages = [re.sub(r"^\.$", "", page) for page in pages]
    with served(SITE) as root, sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        faults = looked_at(browser, root, pages) + not_found(browser, root)
        browser.close()
    print("\n".join(faults))
    print(f"{len(pages)} pages, {len(SIZES) * len(SCHEMES)} views of each, {len(TERMS)} searches: {len(faults)} faults")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
