"""Requests of every kind, at random: most are answered, others are wrong, late or left by their client."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

_TIMEOUT_S = 120.0
_MODEL = "raysonar-demo"
_QUESTIONS = ("What is the capital of France?", "Describe the climate of Norway.", "Who are you?", "Where is Chad?")
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Paris", "Oslo"]}, "big": {"type": "boolean"}},
    "required": ["name", "big"],
    "additionalProperties": False,
}
_BAD: tuple[tuple[int, dict[str, Any]], ...] = (
    (400, {"temperature": -1}),
    (400, {"no_such_parameter": 1}),
    (400, {"max_tokens": 10**9}),
    (400, {"messages": []}),
    (400, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}}),
    (400, {"messages": [{"role": "user", "content": "long " * 5000}]}),
    (404, {"model": "another"}),
)


class Traffic:
    """A client of the chat endpoint: `kinds` are requests; each raises RuntimeError when its answer is not as it should
    be."""

    def __init__(self, client: httpx.AsyncClient, seed: int, done: Counter[str]) -> None:
        """done: counts requests by kind."""
        self._client = client
        self._draw = random.Random(seed)
        self._done = done
        self.kinds: dict[str, tuple[int, Callable[[], Awaitable[None]]]] = {
            "stream": (6, self._stream),
            "whole": (5, self._whole),
            "schema": (2, self._schema),
            "disconnected stream": (3, self._leave_stream),
            "disconnected": (2, self._leave),
            "deadline": (1, self._deadline),
            "bad": (3, self._bad),
        }
        """Each with its weight."""

    async def go_on(self, until: Callable[[], bool], pause_s: float) -> None:
        """One request after the other, with pauses of this mean length."""
        names = list(self.kinds)
        weights = [weight for weight, _ in self.kinds.values()]
        while not until():
            [name] = self._draw.choices(names, weights)
            try:
                await self.kinds[name][1]()
            except (httpx.HTTPError, ValueError, KeyError) as error:
                raise RuntimeError(f"{name}: {type(error).__name__}: {error}") from error
            self._done[name] += 1
            if pause_s:
                await asyncio.sleep(self._draw.expovariate(1 / pause_s))

    def _body(self, **more: Any) -> dict[str, Any]:
        draw = self._draw
        body: dict[str, Any] = {
            "model": _MODEL,
            "messages": [{"role": "user", "content": draw.choice(_QUESTIONS)}],
            "max_tokens": draw.randint(1, 96),
            "ignore_eos": True,
            "n": draw.choice((1, 1, 1, 2)),
        }
        body |= {"temperature": 0.0} if draw.random() < 0.5 else {"temperature": 0.8, "seed": draw.randrange(1000)}
        body |= {"logprobs": True, "top_logprobs": 3} if draw.random() < 0.2 else {}
        return body | more

    async def _post(self, status: int, **more: Any) -> Any:
        response = await self._client.post("/v1/chat/completions", json=self._body(**more), timeout=_TIMEOUT_S)
        if response.status_code != status:
            raise RuntimeError(f"{more}: status {response.status_code} for {status}: {response.text[:300]}")
        return response.json()

    async def _whole(self) -> None:
        body = self._body()
        answer = await self._post(200, **body)
        tokens = answer["usage"]["completion_tokens"]
        if tokens != body["n"] * body["max_tokens"]:
            raise RuntimeError(f"{tokens} tokens for {body}")

    async def _schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "town", "schema": _SCHEMA}}
        answer = await self._post(200, response_format=form, max_tokens=96, ignore_eos=False)
        for choice in answer["choices"]:
            if json.loads(choice["message"]["content"]).keys() != {"name", "big"}:
                raise RuntimeError(f"not of the schema: {choice}")

    async def _lines(self, most: int | None, **more: Any) -> list[str]:
        body = self._body(stream=True, **more)
        lines: list[str] = []
        async with self._client.stream("POST", "/v1/chat/completions", json=body, timeout=_TIMEOUT_S) as response:
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if most is not None and len(lines) >= most:
                    break
        return lines

    async def _stream(self) -> None:
        lines = await self._lines(None)
        if lines[-1] != "data: [DONE]":
            raise RuntimeError(f"a stream ended with {lines[-1][:300]}")

    async def _leave_stream(self) -> None:
        await self._lines(self._draw.randint(1, 8), max_tokens=256)

    async def _leave(self) -> None:
        patience = self._draw.uniform(0.01, 0.3)
        try:
            await self._client.post("/v1/chat/completions", json=self._body(max_tokens=400), timeout=patience)
        except httpx.TimeoutException:
            return

    async def _deadline(self) -> None:
        answer = await self._post(504, max_tokens=480, n=2, timeout=0.2)
        if answer["error"]["code"] != "deadline_exceeded":
            raise RuntimeError(f"a late answer is {answer}")

    async def _bad(self) -> None:
        status, wrong = self._draw.choice(_BAD)
        answer = await self._post(status, **wrong)
        if not answer["error"]["message"]:
            raise RuntimeError(f"an error without a word: {answer}")
