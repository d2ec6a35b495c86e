"""A ckptd on a node.

    daemon = Daemon(node).start()
    daemon.kill()
    daemon.start()      # finds what the last one left
    print(daemon.ctl("status", "job"))

It runs as uid 0 of its node, as the packaged unit does, with memory in /dev/shm/holdfast, state in /var/lib/holdfast, nvme in
/nvme/holdfast and remote in /remote. `settings` are laid over that, section by section; None takes a section away:

    Daemon(node, {"nvme": None, "policy": {"remote": {"every_steps": 1}}})
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from typing import Any

from .node import Node
from .process import DEADLINE_S, Process

SOCKET = "/run/holdfast/ckptd.sock"
_ADMIN = "/run/holdfast/admin.sock"
_CONFIG = "/run/holdfast/ckptd.yaml"
_MEMORY_SHARE = 0.75


class Daemon:
    def __init__(self, node: Node, settings: Mapping[str, Any] | None = None) -> None:
        self.node = node
        self.process: Process | None = None
        self.settings = _laid_over(
            {
                "node_name": node.name,
                "state_dir": "/var/lib/holdfast",
                "socket": {"path": SOCKET},
                "admin": {"path": _ADMIN},
                "memory": {
                    "dir": "/dev/shm/holdfast",
                    "bytes_max": int(node.memory_bytes * _MEMORY_SHARE),
                },
                "nvme": {"dirs": ["/nvme/holdfast"]},
                "remote": {"dir": "/remote"},
                "metrics": {"address": "off"},
            },
            settings or {},
        )

    def start(
        self, *, wait: bool = True, clock_offset_s: float | None = None, **env: str
    ) -> Daemon:
        """Returns when it has said that it is ready, or at once unless `wait`. `env`: HOLDFAST_SYNC_POINT="…" and the like."""
        ready_path = self.node.path("/run/holdfast/ready.sock")
        ready_path.unlink(missing_ok=True)
        # JSON is YAML.
        self.node.path(_CONFIG).write_text(json.dumps(self.settings))
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ready:
            ready.bind(str(ready_path))
            ready_path.chmod(0o666)
            self.process = self.node.start(
                [self.node.programs / "ckptd", f"--config={_CONFIG}"],
                env={"NOTIFY_SOCKET": "/run/holdfast/ready.sock", **env},
                clock_offset_s=clock_offset_s,
            )
            if wait:
                end = self.process.exit_pipe
                readable, _, _ = select.select([ready, end], [], [], DEADLINE_S)
                assert ready in readable, f"ckptd did not become ready: {self.log()}"
        return self

    def kill(self) -> None:
        """SIGKILL, as a crash."""
        assert self.process is not None
        self.process.kill()

    def terminate(self) -> int:
        """SIGTERM, as systemd stops it; its exit code."""
        assert self.process is not None
        return self.process.terminate()

    def log(self) -> str:
        assert self.process is not None
        return self.process.log()

    def ctl(self, *arguments: str, uid: int = 0) -> str:
        """What `ckptctl` prints on this node; raises when it fails."""
        return self.node.run(
            [self.node.programs / "ckptctl", *arguments, f"--socket={_ADMIN}"], uid=uid
        )


def _laid_over(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for name, value in over.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(result.get(name), Mapping):
            result[name] = _laid_over(result[name], value)
        else:
            result[name] = value
    return result
