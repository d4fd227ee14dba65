"""A headless Chromium, controlled through a pipe with the Chrome DevTools Protocol."""

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
    """A browser tab.

    Args:
        read_fd: File descriptor of the browser's messages.
        write_fd: File descriptor for messages to the browser.
    """

    def __init__(self, read_fd, write_fd):
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._received = b""
        self._message_id = 0
        self._session = None
        self.errors = []
        """Errors that the page logged."""
        self.requested_urls = []
        """URLs that the page requested."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Call a method of the protocol and return its result."""
        self._message_id += 1
        message = {"id": self._message_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_fd, json.dumps(message).encode() + b"\0")
        while True:
            received = self._next_message()
            if received.get("id") == self._message_id:
                assert "error" not in received, received
                return received["result"]
            self._record_event(received)

    def _next_message(self):
        while b"\0" not in self._received:
            chunk = os.read(self._read_fd, 1 << 20)
            assert chunk, "the browser exited"
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _record_event(self, event):
        method = event.get("method")
        parameters = event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["exception"].get("description", "an exception"))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested_urls.append(parameters["request"]["url"])

    def set_viewport(self, width, height, *, dark=False, is_phone=False):
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url):
        self.requested_urls = []
        self.call("Page.navigate", url=url)

    def run(self, expression):
        """Return the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression, timeout_s=60.0):
        """Wait until an expression is true, and return its value."""
        end_s = time.monotonic() + timeout_s
        while not (value := self.run(expression)):
            assert time.monotonic() < end_s, (expression, self.run("document.body.innerText"))
            time.sleep(0.05)  # another process renders the page: there is no clock to inject
        return value

    def screenshot(self):
        """Return the full page as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        captured = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(captured["data"])


@contextlib.contextmanager
def browsing(folder):
    """Start a browser with its profile in a folder, and yield a tab."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser reads messages from descriptor 3 and writes messages to descriptor 4.
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
