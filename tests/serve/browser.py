"""A real browser without a window, driven over a pipe by the protocol of its developer tools."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--remote-debugging-pipe",
    "--hide-scrollbars",
    "--disable-background-networking",
    "--disable-component-update",
)


class Tab:
    """One page."""

    def __init__(self, reads, writes):
        self._reads = reads
        self._writes = writes
        self._received = b""
        self._number = 0
        self._session = None
        self.said = []
        self.asked = []
        """errors that the page has logged; every address that it has asked for"""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            self._note(told)

    def _next(self):
        while b"\0" not in self._received:
            chunk = os.read(self._reads, 1 << 20)
            assert chunk, "the browser has ended"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, told):
        method, parameters = told.get("method"), told.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.said.append(parameters["exceptionDetails"]["exception"].get("description", "an exception"))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.said.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.asked.append(parameters["request"]["url"])

    def look(self, width, height, *, dark=False, is_phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        self.asked = []
        self.call("Page.navigate", url=url)

    def run(self, expression):
        """The value of an expression of the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, timeout_s=60.0):
        """Wait until an expression is true, and give its value."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < end_s, (expression, self.run("document.body.innerText"))
            time.sleep(0.05)  # another process draws: there is no clock to inject
        return value

    def picture(self):
        """All of the page, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(told["data"])


@contextlib.contextmanager
def browsing(folder):
    """A tab of a browser of its own. folder: for its files."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser speaks on the descriptors 3 and 4.
    command = ["bash", "-c", f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}', BROWSER, *_FLAGS]
    process = subprocess.Popen(
        [*command, f"--user-data-dir={folder}"],
        pass_fds=[to_read, from_write],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Tab(from_read, to_write)
    finally:
        process.terminate()
        process.wait(20)
        os.close(to_write)
        os.close(from_read)
