"""One request to an endpoint of OpenAI's API, watched."""

import json
import time
from collections.abc import Mapping
from typing import Any

import aiohttp

from raysonar.bench.prompts import Sample
from raysonar.bench.records import Record
from raysonar.errors import ConfigurationError

_CONNECT_S = 10.0


class Client:
    """Asks one endpoint; as many requests at a time as are made. Use as an async context manager."""

    def __init__(
        self,
        url: str,
        *,
        chat: bool,
        stream: bool,
        timeout_s: float,
        parameters: Mapping[str, Any],
        model: str | None = None,
        api_key: str | None = None,
    ) -> None:
        """url: up to and including /v1. chat: whether a prompt is a message. parameters: of every request. model: None
        asks for the endpoint's first."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat, self._stream, self._timeout_s = chat, stream, timeout_s
        self._parameters, self.model = dict(parameters), model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> "Client":
        """Raises ConfigurationError when there is no such endpoint."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S),
        )
        try:
            self.model = self.model or await self._first_model()
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _first_model(self) -> str:
        text = ""
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                text = await response.text()
                return str(json.loads(text)["data"][0]["id"])
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigurationError(f"no server answers at {self._url}: {error}") from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigurationError(f"{self._url}/v1/models names no model: {text[:200]}") from error

    def _body(self, sample: Sample) -> dict[str, Any]:
        asked = {"messages": [{"role": "user", "content": sample.text}]} if self._chat else {"prompt": sample.text}
        body = {"model": self.model, **asked, **self._parameters}
        if sample.max_tokens is not None:
            body["max_tokens"] = sample.max_tokens
        if self._stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def ask(self, sample: Sample, due: float, origin: float) -> Record:
        """Send the request and watch its answer; what goes wrong is in the record.

        due: when it should be sent, in seconds from `origin` on time.perf_counter's clock.
        """
        record = Record(due)
        began = origin + due
        try:
            async with self._session.post(self._url + self._path, json=self._body(sample)) as response:
                if response.status != 200:
                    record.error = f"HTTP status {response.status}"
                elif self._stream:
                    await self._watch(response, record, began)
                else:
                    record.count((await response.json()).get("usage") or {})
        except TimeoutError:
            record.error = f"no answer within {self._timeout_s:g} s"
        except (aiohttp.ClientError, ValueError, KeyError, TypeError, AttributeError) as error:
            record.error = f"{type(error).__name__}: {error}"[:200]
        record.seconds = time.perf_counter() - began
        return record

    async def _watch(self, response: aiohttp.ClientResponse, record: Record, began: float) -> None:
        pieces, ended = 0, False
        async for line in response.content:
            now = time.perf_counter() - began
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                ended = True
                break
            event = json.loads(data)
            if "error" in event:
                record.error = f"error event: {str(event['error'])[:150]}"
                return
            if any(self._text(choice) for choice in event.get("choices", ())):
                record.see(now)
                pieces += 1
                record.tokens = pieces
            if event.get("usage"):
                record.count(event["usage"])
        if not ended:
            record.error = "the stream ended without [DONE]"

    def _text(self, choice: dict[str, Any]) -> object:
        if not self._chat:
            return choice.get("text")
        delta = choice.get("delta") or {}
        return delta.get("content") or delta.get("reasoning_content") or delta.get("tool_calls")
