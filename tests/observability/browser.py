"""The distribution's Chromium without a window, told what to do through a pipe. It reaches this machine's loopback only."""

from __future__ import annotations

import base64
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

from prometheus import DEADLINE_S


class Browser:
    """One page. What it complains of (errors, and what a policy forbids) is in `complaints`.

    with Browser() as browser:
        browser.open("http://127.0.0.1:9467/")
        browser.wait_for("document.title == 'Holdfast'")
    """

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.navigations: list[str] = []
        self._next = 1
        self._session = ""
        self._unread = b""
        self._profile = tempfile.mkdtemp(prefix="hf-browser-")
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def place() -> None:  # 3 and 4 are where it looks for them
            high = [os.dup(to_browser), os.dup(from_browser)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self._process = subprocess.Popen(
            [
                shutil.which("chromium") or "chromium",
                "--headless=new",
                "--no-sandbox",  # of root it has none
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--remote-debugging-pipe",
                "--window-size=1240,1000",
                f"--user-data-dir={self._profile}",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,  # noqa: PLW1509 (nothing here has threads)
            close_fds=False,
        )
        os.close(to_browser)
        os.close(from_browser)

    def __enter__(self) -> Browser:
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self._call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(DEADLINE_S)
        os.close(self._out)
        os.close(self._in)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, address: str) -> None:
        answer = self._call("Page.navigate", url=address)
        assert "errorText" not in answer, answer

    def evaluate(self, expression: str) -> Any:
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> Any:
        """Until it is true of the page: what it then is."""
        end = time.monotonic() + DEADLINE_S
        while not (value := self.evaluate(expression)):
            assert time.monotonic() < end, f"{expression}: {self.text()}\n{self.complaints}"
            self._read(0.05)
        return value

    def text(self) -> str:
        return str(self.evaluate("document.body.innerText"))

    def screenshot(self, path: pathlib.Path) -> None:
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._next
        self._next += 1
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < end, f"the browser does not answer {method}"
            for answer in self._read(1):
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]

    def _read(self, at_most_s: float) -> list[dict[str, Any]]:
        readable, _, _ = select.select([self._in], [], [], at_most_s)
        if readable:
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._unread += data
        *whole, self._unread = self._unread.split(b"\0")
        messages = [json.loads(one) for one in whole]
        for message in messages:
            self._note(message)
        return messages

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Log.entryAdded" and parameters["entry"]["level"] in ("warning", "error"):
            self.complaints.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(json.dumps(parameters["args"]))
        elif method == "Page.javascriptDialogOpening":
            self.complaints.append(f"dialog: {parameters['message']}")
        elif method == "Network.requestWillBeSent":
            self.navigations.append(parameters["request"]["url"])
