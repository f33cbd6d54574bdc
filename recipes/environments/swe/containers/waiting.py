"""Waiting in the event loop for descriptors and for the end of a child."""

from __future__ import annotations

import asyncio
import os
import subprocess


def settle(future: asyncio.Future[None]) -> None:
    """Set a future that may be set already."""
    if not future.done():
        future.set_result(None)


async def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait until a descriptor can be read, or is at its end; False when it is not within `seconds`."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(descriptor, settle, ready)
    try:
        await asyncio.wait([ready], timeout=seconds)
    finally:
        loop.remove_reader(descriptor)
    return ready.done()


async def has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a child and reap it; False when it still runs after `seconds`."""
    if process.poll() is None:
        handle = os.pidfd_open(process.pid)
        try:
            await is_readable(handle, seconds)
        finally:
            os.close(handle)
    return process.poll() is not None
