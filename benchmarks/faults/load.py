"""Requests in the middle of which something breaks: what they brought, and how long nothing came."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

_TIMEOUT_S = 300.0


class Brought:
    """What one request has brought: tokens, their places, text and end of each choice, and the usage."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, int] = {}

    def take(self, data: dict[str, Any]) -> None:
        """A whole answer or an event of a stream. Raises RuntimeError for an error."""
        if "error" in data:
            raise RuntimeError(json.dumps(data["error"]))
        for choice in data["choices"]:
            mine = self.choices.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": [], "end": None})
            logprobs = choice["logprobs"] or {"tokens": [], "text_offset": []}
            mine["text"] += choice["text"]
            mine["tokens"] += logprobs["tokens"]
            mine["offsets"] += logprobs["text_offset"]
            mine["end"] = choice["finish_reason"]
        if data.get("usage"):
            self.usage = {name: data["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}

    @property
    def tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice["tokens"]) for choice in self.choices.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Brought) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Ear:
    """Hears the lines of all streams, strikes a blow after some of them, and times the silence that follows."""

    def __init__(self, blow: Callable[[], None] | None, after: int) -> None:
        self._blow, self._after = blow, after
        self._lines = 0
        self._last: float | None = None
        self.silence_s = 0.0
        """The longest time without a line since the blow."""

    @property
    def struck(self) -> bool:
        """Whether the blow was struck."""
        return self._last is not None

    def hear(self) -> None:
        """A line has come."""
        self._lines += 1
        if self._last is not None:
            now = time.monotonic()
            self.silence_s = max(self.silence_s, now - self._last)
            self._last = now
        elif self._blow is not None and self._lines > self._after:
            self._last = time.monotonic()
            self._blow()


@dataclass
class Outcome:
    """Of all requests."""

    brought: list[Brought]
    """By request; what a failed one brought is incomplete."""
    failures: list[str] = field(default_factory=list)
    silence_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(each.tokens for each in self.brought)

    def different(self, other: "Outcome") -> int:
        """How many requests brought something else."""
        return sum(mine != theirs for mine, theirs in zip(self.brought, other.brought, strict=True))


@dataclass(frozen=True)
class Load:
    """So many streams and as many whole answers at once, half of them greedy and half seeded; some have two choices."""

    url: str
    model: str
    requests: int
    tokens: int
    prompts: tuple[str, ...]
    """Taken in turn."""

    def body(self, place: int, *, stream: bool) -> dict[str, Any]:
        """Of the request at a place."""
        values: dict[str, Any] = {"model": self.model, "prompt": self.prompts[place % len(self.prompts)]}
        values |= {"max_tokens": self.tokens, "ignore_eos": True, "logprobs": 0, "frequency_penalty": 0.1}
        values |= {"n": 1 + (place % 4 == 0)}
        values |= {"temperature": 0} if place % 2 else {"temperature": 0.9, "seed": place}
        return values | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    def run(self, blow: Callable[[], None] | None = None, after: int = 0) -> Outcome:
        """All at once; `blow` is struck when `after` lines have come. Raises RuntimeError when it never is."""
        ear = Ear(blow, after)
        outcome = Outcome([Brought() for _ in range(2 * self.requests)])
        asyncio.run(self._all(outcome, ear))
        if blow is not None and not ear.struck:
            raise RuntimeError("all answers were complete before the blow was due: ask for more tokens")
        outcome.silence_s = ear.silence_s
        return outcome

    async def _all(self, outcome: Outcome, ear: Ear) -> None:
        limits = httpx.Limits(max_connections=None)

        async def one(work: Awaitable[None]) -> None:
            try:
                await work
            except (httpx.HTTPError, RuntimeError, ValueError) as error:
                outcome.failures.append(f"{type(error).__name__}: {error}")

        async with httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT_S, limits=limits) as client:
            streams, wholes = outcome.brought[: self.requests], outcome.brought[self.requests :]
            await asyncio.gather(
                *(one(self._stream(client, place, brought, ear)) for place, brought in enumerate(streams)),
                *(one(self._whole(client, place, brought)) for place, brought in enumerate(wholes)),
            )

    async def _stream(self, client: httpx.AsyncClient, place: int, brought: Brought, ear: Ear) -> None:
        body = self.body(place, stream=True)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            last = ""
            async for data in _events(response):
                ear.hear()
                last = data
                if data != "[DONE]":
                    brought.take(json.loads(data))
        if last != "[DONE]":
            raise RuntimeError(f"the stream ended with {last!r}")

    async def _whole(self, client: httpx.AsyncClient, place: int, brought: Brought) -> None:
        response = await client.post("/v1/completions", json=self.body(place, stream=False))
        brought.take(response.json())


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of server-sent events; of an error response its body."""
    if response.status_code != 200:
        yield (await response.aread()).decode()
        return
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")
