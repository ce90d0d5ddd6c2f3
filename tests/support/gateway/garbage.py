"""Requests of an agent of the gateway that misbehaves: large, deep, slow, without end, or many at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

CALL = {"model": "m", "messages": [{"role": "user", "content": "1+1="}]}
SLOW, BURST = 50, 300  # requests at once


async def ordinary(url: str) -> None:
    await _post(url, json.dumps(CALL).encode())


async def longest(url: str) -> None:
    """Send a prompt that just fits into the row of 4,096 tokens."""
    await _post(url, json.dumps({**CALL, "messages": [{**CALL["messages"][0], "content": "1+" * 1900}]}).encode())


async def large(url: str) -> None:
    """Send a tool result of 20 MB."""
    await _post(url, json.dumps({**CALL, "messages": [{**CALL["messages"][0], "content": "1+" * 10_000_000}]}).encode())


async def deep(url: str) -> None:
    await _post(url, b'{"model":"m","messages":' + b"[" * 100_000)


async def many(url: str) -> None:
    """Send 20,000 messages without content."""
    await _post(url, json.dumps({**CALL, "messages": [{**CALL["messages"][0], "content": ""}] * 20_000}).encode())


async def endless(url: str) -> None:
    """Send a body without a declared length that has no end."""
    async with _opened(url) as (reader, writer, head):
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b"10000\r\n" + b"[" * 65536 + b"\r\n")
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):  # wait_for loses a cancellation that comes with the answer
                    await reader.read(1 << 16)
                return


async def slow(url: str) -> None:
    """Send SLOW bodies at once, byte by byte."""

    async def one() -> None:
        async with _opened(url) as (_, writer, head):
            writer.write(head + b"content-length: 1000\r\n\r\n")
            for _ in range(20):
                writer.write(b"[")
                await writer.drain()
                await asyncio.sleep(0.05)

    await asyncio.gather(*(one() for _ in range(SLOW)))


async def burst(url: str) -> None:
    """Send BURST calls at once, each on its own connection."""
    await asyncio.gather(*(ordinary(url) for _ in range(BURST)))


KINDS = {each.__name__: each for each in (ordinary, longest, large, deep, many, endless, slow, burst)}


@contextlib.asynccontextmanager
async def _opened(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
    try:
        yield reader, writer, head.encode()
    finally:
        writer.transport.abort()  # what is not sent yet would keep it open beyond the end of the loop
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _post(url: str, body: bytes) -> None:
    """Send a request and read what comes until the server closes; the answer does not matter."""
    async with _opened(url) as (reader, writer, head):
        writer.write(head + f"connection: close\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await reader.read()


async def misbehave(kind: Callable[[str], Awaitable[None]], url: str, most: int = 1 << 60) -> None:
    """Do it ``most`` times, however the server takes it."""
    for _ in range(most):
        with contextlib.suppress(OSError):
            await kind(url)
