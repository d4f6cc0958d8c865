"""What the tests of the web page share: a browser, pages in it, servers of both kinds, and asking.

Nothing here waits for a fixed time: a condition is awaited in the page. A test ends with a look at
what the console would show in red; there must be nothing, blocked resources included.
"""

import re
import subprocess

import pytest

from browser import Browser, BrowserError, find_browser
from conftest import HADAL, ROOT
from page_mock import Server

IDLE = "!document.body.classList.contains('running')"
MODEL = ROOT / "models" / "tiny-v4"


@pytest.fixture(scope="module")
def browser():
    program = find_browser()
    if not program:
        pytest.skip("needs a browser: Chromium is not installed")
    browser = Browser(program)
    try:
        browser.call("Browser.getVersion")
    except BrowserError as error:
        browser.close()
        pytest.skip(f"{program} does not start: {error}")
    yield browser
    browser.close()


@pytest.fixture
def mock():
    servers = []

    def start(**options):
        server = Server(**options)
        servers.append(server)
        server.address = server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def visit(browser):
    """visit(address, ...): a page in a fresh profile that must stay free of errors."""
    pages = []

    def open_page(address, expected=(), **options):
        page = browser.page(address, **options)
        pages.append((page, expected))
        return page

    yield open_page
    for page, expected in pages:
        page.close()
        unexpected = [e for e in page.errors if not any(word in e for word in expected)]
        assert unexpected == []


@pytest.fixture(scope="module")
def served():
    """hadal serve with the shipped model: its address."""
    process = subprocess.Popen([HADAL, "serve", str(MODEL), "--port", "0"], stdin=subprocess.DEVNULL,
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)  # fmt: skip
    for line in process.stdout:
        if found := re.search(r"http://[0-9.:]+", line):
            break
    else:
        pytest.fail("hadal serve ended without an address")
    yield found.group(0) + "/"
    process.terminate()
    process.communicate()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def scratch(browser):
    """One page for all who only want to call its functions."""
    server = Server()
    page = browser.page(server.start())
    yield page
    page.close()
    server.stop()
    assert page.errors == []


def write(page, text):
    page.js("document.getElementById('prompt').focus()")
    page.type(text)


def ask(page, text):
    """Sends and waits until the answer, or the failure, is there."""
    before = page.js("document.querySelectorAll('.answer, .error').length")
    write(page, text)
    page.press("Enter")
    page.until(f"{IDLE} && document.querySelectorAll('.answer, .error').length > {before}")


def wait_for_answers(page, n):
    """Waits until so many answers are there and nothing runs any more; a failure fails."""
    page.until(f"{IDLE} && (document.querySelectorAll('.answer').length === {n} || document.querySelector('.error'))")
    assert page.text(".error") == ""


def last_answer(page):
    return page.js("[...document.querySelectorAll('.answer .body')].at(-1).innerText").strip()
