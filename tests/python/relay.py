"""A socket between a client and its daemon that counts what the client asks for."""

from __future__ import annotations

import array
import collections
import contextlib
import pathlib
import socket
import struct
import threading
from collections.abc import Iterator

_HEADER_BYTES = 4
# Field numbers of ClientFrame (proto/holdfast/v1/client.proto).
ATTACH, READ_RECORDS = 11, 18


class Relay:
    """Listens at `path` and passes everything on to `daemon`, with descriptors."""

    def __init__(self, path: pathlib.Path, daemon: pathlib.Path) -> None:
        self.requests: collections.Counter[int] = collections.Counter()
        self._daemon = daemon
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen()
        self._sockets = [self._listening]
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _start(self, target: object, *args: object) -> None:
        thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            daemon.connect(str(self._daemon))
            self._sockets += [client, daemon]
            self._start(self._pass, client, daemon, bytearray())
            self._start(self._pass, daemon, client, None)

    def _pass(self, source: socket.socket, to: socket.socket, frames: bytearray | None) -> None:
        with contextlib.suppress(OSError):
            while True:
                data, ancillary, _, _ = source.recvmsg(1 << 16, socket.CMSG_SPACE(4 * 64))
                if not data:
                    break
                if frames is not None:
                    frames += data
                    self._count(frames)
                sent = to.sendmsg([data], ancillary)
                for _, _, descriptors in ancillary:
                    for fd in array.array("i", descriptors):
                        socket.close(fd)
                to.sendall(data[sent:])
        with contextlib.suppress(OSError):
            to.shutdown(socket.SHUT_RDWR)

    def _count(self, frames: bytearray) -> None:
        """Takes whole frames from the front. Each is its id and one request."""
        while len(frames) >= _HEADER_BYTES:
            (length,) = struct.unpack_from("<I", frames)
            if len(frames) < _HEADER_BYTES + length:
                return
            at = _HEADER_BYTES + 1  # behind the tag of the id
            while frames[at] & 0x80:
                at += 1
            field, shift = 0, 0
            for byte in frames[at + 1 : at + 6]:
                field |= (byte & 0x7F) << shift
                shift += 7
                if not byte & 0x80:
                    break
            self.requests[field >> 3] += 1
            del frames[: _HEADER_BYTES + length]


@contextlib.contextmanager
def relayed(path: pathlib.Path, daemon: pathlib.Path) -> Iterator[Relay]:
    relay = Relay(path, daemon)
    try:
        yield relay
    finally:
        relay.close()
