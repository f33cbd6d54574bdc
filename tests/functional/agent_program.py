"""An agent program of somebody else: a server with plain HTTP calls that knows nothing of this project.

It asks the policy, runs the tools that it calls or answers it with a note, and reports that it is done.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request

WAIT = 60.0


async def work(row: dict[str, Any]) -> dict[str, Any]:
    """Call the policy in one conversation, as often as the row says; with tools, until it calls none."""
    asked = row["responses_create_params"]
    tools = [
        {"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in asked.get("tools", ())
    ]
    fields = {"model": row["model_server"]["model"], "max_tokens": 64} | ({"tools": tools} if tools else {})
    address, messages = f"{row['model_server']['base_url']}/chat/completions", list(asked["input"])
    async with httpx.AsyncClient(timeout=WAIT) as client:
        for step in range(row.get("num_calls", 4)):
            reply = await client.post(address, json={"messages": messages, **fields})
            if row.get("gives_up") and reply.is_server_error:
                break
            reply.raise_for_status()
            message = reply.json()["choices"][0]["message"]
            calls = message.get("tool_calls", ())
            if tools and not calls:
                break
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "Email deleted."} for call in calls]
            messages += [message, *(results or [{"role": "user", "content": f"note {step}"}])]
        if row.get("asks_again"):
            again = [*messages[:-2], {"role": "user", "content": "in other words?"}]
            (await client.post(address, json={"messages": again})).raise_for_status()
    return {**row, "note": "all done", "reward": 77.0}


Work = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def create_app(work: Work = work) -> FastAPI:
    """Return the server of an agent that works so; rows may ask it to fail."""
    app = FastAPI()
    app.state.refused = None

    @app.post("/run")
    async def run(request: Request) -> dict[str, Any]:
        row = await request.json()
        if row.get("fails") == "late":
            await asyncio.sleep(WAIT)
        if row.get("fails") == "at the door" and not app.state.refused:
            app.state.refused = asyncio.create_task(work(row))  # and yet it works, beside the second attempt
            raise HTTPException(502, "a proxy lost the answer")
        done = await work(row)
        if row.get("fails") == "hangs at the end":
            await asyncio.sleep(WAIT)
        if row.get("fails") == "at the end":
            raise HTTPException(500, "the agent broke down")
        return done

    return app


@contextmanager
def running_agent(work: Work = work) -> Iterator[str]:
    """Run the agent's server in a thread of its own; yields its URL."""
    server = uvicorn.Server(uvicorn.Config(create_app(work), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        thread.join(0.05)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = server.force_exit = True
    thread.join(WAIT)
