"""As much of the Kubernetes API as an init container asks for, by TLS with an authority of its own: GET of one node."""

from __future__ import annotations

import http.server
import json
import pathlib
import ssl
import subprocess
import threading
from collections.abc import Mapping
from typing import Any

TOKEN = "eyJhbGciOi.token-of-the-service-account"


def _certificates(folder: pathlib.Path) -> None:
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-days", "2", "-subj", "/CN=kubernetes", "-addext"]
        + ["subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "ca.crt"],
        check=True,
        capture_output=True,
    )


class KubernetesApi:
    """Close it. `failures`: so many requests are answered with 503 before one is answered well."""

    def __init__(
        self, folder: pathlib.Path, nodes: Mapping[str, Any], *, failures: int = 0
    ) -> None:
        _certificates(folder)
        (folder / "token").write_text(TOKEN)
        self.account = folder
        self.requests: list[str] = []
        answers = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers.requests.append(self.path)
                if len(answers.requests) <= failures:
                    return self._answer(503, {"message": "not yet"})
                if self.headers["Authorization"] != f"Bearer {TOKEN}":
                    return self._answer(401, {"message": "who is that?"})
                node = nodes.get(self.path.removeprefix("/api/v1/nodes/"))
                if node is None:
                    return self._answer(403, {"message": "nodes is forbidden"})
                return self._answer(200, node)

            def _answer(self, code: int, what: Any) -> None:
                body = what if isinstance(what, bytes) else json.dumps(what).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "ca.crt", folder / "key.pem")
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def variables(self) -> dict[str, str]:
        return {
            "SERVICE_ACCOUNT_DIR": str(self.account),
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_port),
        }

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def node(**labels: Any) -> dict[str, Any]:
    """Of labels, with / and . written as they are by `**{"a/b": "c"}`."""
    return {"kind": "Node", "metadata": {"name": "n", "labels": labels}, "status": {"images": []}}
