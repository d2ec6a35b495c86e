"""A Prometheus of the distribution's, on loopback, with a directory of its own.

with Prometheus(tmp_path, targets={"holdfast": ["127.0.0.1:9464"]}, rules=text) as prometheus:
    prometheus.wait_for("up == 1")
"""

from __future__ import annotations

import json
import pathlib
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from typing import TypeVar

DEADLINE_S = 90
_LOOK_EVERY_S = 0.1  # there is nothing to wait for but the answer to the next question
_INTERVAL = "250ms"  # of scrapes and evaluations

T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def wait_until(what: str, look: Callable[[], T | None], deadline_s: float = DEADLINE_S) -> T:
    """What `look` returns once it returns something."""
    end = time.monotonic() + deadline_s
    while True:
        found = look()
        if found:
            return found
        assert time.monotonic() < end, f"within {deadline_s} s: {what}"
        time.sleep(_LOOK_EVERY_S)


class Prometheus:
    def __init__(
        self,
        root: pathlib.Path,
        targets: dict[str, list[str]],
        rules: str,
        *,
        more: Sequence[dict] = (),  # scrape jobs as Prometheus has them
    ) -> None:
        self._root = root
        (root / "rules.yaml").write_text(rules)
        config = {
            "global": {
                "scrape_interval": _INTERVAL,
                "scrape_timeout": _INTERVAL,
                "evaluation_interval": _INTERVAL,
            },
            "rule_files": [str(root / "rules.yaml")],
            "scrape_configs": [
                {"job_name": job, "static_configs": [{"targets": addresses}]}
                for job, addresses in targets.items()
            ]
            + list(more),
        }
        (root / "prometheus.yaml").write_text(json.dumps(config))  # JSON is YAML, too
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""

    def __enter__(self) -> Prometheus:
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        with open(self._root / "prometheus.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._root / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={self._root / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            wait_until("Prometheus is ready", self._is_ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)

    def log(self) -> str:
        return (self._root / "prometheus.log").read_text(errors="replace")[-4000:]

    def _is_ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=DEADLINE_S):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False

    def ask(self, path: str, **parameters: str) -> dict:
        """The `data` of an answer of its API; fails with its words."""
        query = urllib.parse.urlencode(parameters)
        url = f"{self._url}/api/v1/{path}?{query}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as reply:
                return json.load(reply)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path} {parameters}: {error.read().decode()}") from error

    def query(self, expression: str) -> list[dict]:
        return self.ask("query", query=expression)["result"]

    def wait_for(self, expression: str) -> list[dict]:
        return wait_until(expression, lambda: self.query(expression))

    def firing(self, alert: str) -> list[dict]:
        return [
            one
            for one in self.ask("alerts")["alerts"]
            if one["labels"]["alertname"] == alert and one["state"] == "firing"
        ]
