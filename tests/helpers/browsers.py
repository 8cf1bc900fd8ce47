"""a page → a tab of a real browser in which nothing may go wrong"""

import shutil
from pathlib import Path

import pytest
from page_data import sample

from ngramloss.report import page

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("no browser is installed: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS, headless=True)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The address of a page, each written once."""
    kept = {}

    def address(make):
        if make not in kept:
            made = make()
            kept[make] = (
                made if isinstance(made, Path) else page.write_page(made, tmp_path_factory.mktemp("report"))
            ).as_uri()
        return kept[make]

    return address


@pytest.fixture
def visit(browser, written):
    """Open a page; at the end nothing may have gone wrong in it, and nothing may have been asked for."""
    contexts, wrong = [], []

    def open_page(make=sample, hash="", before="", **options):
        options.setdefault("viewport", {"width": 1280, "height": 900})
        context = browser.new_context(**options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        address = written(make)
        tab.on(
            "request",
            lambda request: wrong.append(request.url) if not request.url.startswith((address, "data:,")) else None,
        )
        if before:
            tab.add_init_script(before)
        tab.goto(address + hash)
        if tab.query_selector("#cases"):
            tab.wait_for_selector("#texts .text")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
