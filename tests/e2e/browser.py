"""Drives headless Chromium over a pair of pipes (the DevTools protocol), without any package.

A Page collects what must not happen: console errors, exceptions, blocked resources.
"""

import base64
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading

NAMES = ["chromium", "chromium-browser", "google-chrome"]
FLAGS = [
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-sync", "--disable-dev-shm-usage",
    "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", "--no-proxy-server",
]  # fmt: skip

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowUp": 38, "Space": 32}
SHIFT = 8


def find_browser():
    return next((path for path in map(shutil.which, NAMES) if path), None)


class BrowserError(Exception):
    pass


class Browser:
    def __init__(self, program):
        self.profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()
        # The browser reads from 3 and writes to 4; far away from those, nothing is overwritten.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_browser, from_browser)]
        command = f'exec "$@" 3<&{ends[0]} 4>&{ends[1]}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "bash", program, *FLAGS, f"--user-data-dir={self.profile.name}"],
            pass_fds=ends,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (to_browser, from_browser, *ends):
            os.close(end)
        self.ids = itertools.count(1)
        self.lock = threading.Condition()
        self.answers = {}
        self.pages = {}
        self.closed = False
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self):
        rest = b""
        while data := os.read(self.read_end, 1 << 20):
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                with self.lock:
                    if "id" in message:
                        self.answers[message["id"]] = message
                        self.lock.notify_all()
                    elif page := self.pages.get(message.get("sessionId")):
                        page.heard(message["method"], message["params"])
        with self.lock:
            self.closed = True
            self.lock.notify_all()

    def call(self, method, session=None, **params):
        message = {"id": next(self.ids), "method": method, "params": params}
        if session:
            message["sessionId"] = session
        try:
            os.write(self.write_end, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError("the browser went away") from None
        with self.lock:
            self.lock.wait_for(lambda: message["id"] in self.answers or self.closed)
            answer = self.answers.pop(message["id"], {"error": {"message": "the browser went away"}})
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def page(self, url, **options):
        return Page(self, url, **options)

    def close(self):
        try:
            self.call("Browser.close")
        except BrowserError:
            pass
        os.close(self.write_end)
        self.process.wait()
        self.profile.cleanup()


class Page:
    """A tab with its own storage. errors: what a console would show in red."""

    def __init__(self, browser, url, width=1280, height=800, phone=False, dark=False):
        self.browser = browser
        self.errors = []
        self.context = browser.call("Target.createBrowserContext")["browserContextId"]
        target = browser.call("Target.createTarget", url="about:blank", browserContextId=self.context)["targetId"]
        self.session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        with browser.lock:
            browser.pages[self.session] = self
        for domain in ("Page", "Runtime", "Log", "Audits"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=2 if phone else 1, mobile=phone)
        if phone:
            self.call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.scheme("dark" if dark else "light")
        self.open(url)

    def heard(self, method, params):
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif method == "Audits.issueAdded" and params["issue"]["code"] == "ContentSecurityPolicyIssue":
            self.errors.append(json.dumps(params["issue"]["details"]))

    def call(self, method, **params):
        return self.browser.call(method, self.session, **params)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def scheme(self, value):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def js(self, expression):
        """The value of an expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise BrowserError(result["exceptionDetails"].get("exception", {}).get("description", "exception"))
        return result["result"].get("value")

    def until(self, condition):
        """Waits until a condition holds in the page. It may navigate meanwhile."""
        wait = f"new Promise(r => {{ const f = () => ({condition}) ? r(true) : setTimeout(f, 10); f(); }})"
        while True:
            try:
                return self.js(wait)
            except BrowserError as error:
                if "context was destroyed" not in str(error) and "navigated" not in str(error):
                    raise

    def text(self, selector):
        return self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector):
        self.js(f"document.querySelector({json.dumps(selector)}).click()")

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, shift=False):
        code = {"Space": " "}.get(key, key)
        common = {"key": code, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": SHIFT if shift else 0}
        text = {"Enter": "\r", "Space": " "}.get(key)
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def screenshot(self, path):
        shot = self.call("Page.captureScreenshot", format="png")
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def close(self):
        self.browser.call("Target.disposeBrowserContext", browserContextId=self.context)
