"""An HTTP server with OpenAI's API whose answers a test chooses, on a thread of its own."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

Handler = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
"""Gets a request's body; `path`, `headers` and `hang_up`, to be called, are in it too."""


@asynccontextmanager
async def _running(handler: Handler) -> AsyncIterator[int]:
    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "echo", "object": "model"}]})

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        more = {"path": request.path, "headers": dict(request.headers), "hang_up": request.transport.abort}
        return await handler({**await request.json(), **more})

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/v1/{route:.*}", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


@contextmanager
def endpoint(handler: Handler) -> Iterator[str]:
    """The server's URL."""
    ports: list[int] = []
    started, loop, stop = threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        async with _running(handler) as port:
            ports.append(port)
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(30)
        yield f"http://127.0.0.1:{ports[0]}/v1"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


def echo(body: dict[str, Any]) -> web.Response:
    """The whole answer that repeats the prompt."""
    chat = "messages" in body
    text = body["messages"][-1]["content"] if chat else body["prompt"]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}} if chat else {"index": 0, "text": text}
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    answer = {"id": "answer", "choices": [choice], "usage": {**usage, "completion_tokens_details": details}}
    return web.Response(body=json.dumps(answer), content_type="application/json")


def events(*data: dict[str, Any] | str) -> web.Response:
    """Server-sent events."""
    lines = (each if isinstance(each, str) else json.dumps(each) for each in data)
    return web.Response(text="".join(f"data: {line}\n\n" for line in lines), content_type="text/event-stream")
