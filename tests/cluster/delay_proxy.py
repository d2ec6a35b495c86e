"""Forwards the TCP connections that nftables redirects to it, late; links.py runs it in a node.

delay_proxy.py BY_MS JITTER_MS SEED     prints its port
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import sys

CHUNK_BYTES_MAX = 64 << 10
CHUNKS_UNDER_WAY_MAX = 256  # of one direction of one connection
SO_ORIGINAL_DST = 80
SO_MARK = 36
MARK = 0x4846  # links.py knows it
Chunk = tuple[float, bytes]  # when it is due; b"": the end


async def open_marked(address: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that is not redirected to this program again."""
    connection = socket.socket()
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, SO_MARK, MARK)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (address, port))
    except OSError:
        connection.close()
        raise
    return await asyncio.open_connection(sock=connection)


class Proxy:
    def __init__(self, by_ms: int, jitter_ms: int, seed: int) -> None:
        self.by_s = by_ms / 1000
        self.jitter_s = jitter_ms / 1000
        self.random = random.Random(seed)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        place = accepted.getsockopt(socket.SOL_IP, SO_ORIGINAL_DST, 16)
        (port,) = struct.unpack("!2xH", place[:4])
        writers = [writer]
        try:
            far_reader, far_writer = await open_marked(socket.inet_ntoa(place[4:8]), port)
            writers.append(far_writer)
            await asyncio.gather(self.forward(reader, far_writer), self.forward(far_reader, writer))
            for one in writers:
                one.close()
        except OSError:
            # Whatever went wrong at one end is told to the other as a reset.
            for one in writers:
                end = one.get_extra_info("socket")
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[Chunk] = asyncio.Queue(CHUNKS_UNDER_WAY_MAX)
        await asyncio.gather(self.take(reader, under_way), self.hand_on(under_way, writer))

    async def take(self, reader: asyncio.StreamReader, under_way: asyncio.Queue[Chunk]) -> None:
        clock = asyncio.get_running_loop().time
        due = 0.0
        while True:
            data = await reader.read(CHUNK_BYTES_MAX)
            due = max(due, clock() + self.by_s + self.random.random() * self.jitter_s)
            await under_way.put((due, data))
            if not data:
                return

    async def hand_on(self, under_way: asyncio.Queue[Chunk], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due, data = await under_way.get()
            await asyncio.sleep(max(0.0, due - clock()))
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()


async def main() -> None:
    by_ms, jitter_ms, seed = (int(word) for word in sys.argv[1:])
    server = await asyncio.start_server(Proxy(by_ms, jitter_ms, seed).serve, "0.0.0.0", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
