"""Puts a request's deltas together."""

import time
from collections.abc import Callable

from raysonar.driver.outputs import Acceptance, Completion, Delta, GenerationResult
from raysonar.driver.request import Request
from raysonar.errors import RaysonarError

Finished = Callable[[RaysonarError | None], object]
"""Called once a request, on the engine's thread: with None, or what went wrong."""


class Collector:
    """One request's result in the making. Takes deltas on the engine's thread: whoever waits sleeps until the end."""

    def __init__(self, request: Request, finished: Finished) -> None:
        """`finished` is called when every answer is in."""
        self._began = time.perf_counter()
        self._finished = finished
        self._open = request.params.n
        logprobs = request.params.logprobs is not None
        self._texts: list[list[str]] = [[] for _ in range(request.params.n)]
        self.result = GenerationResult(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            completions=[Completion(index, logprobs=[] if logprobs else None) for index in range(request.params.n)],
        )

    def take(self, item: Delta | RaysonarError) -> None:
        """The request's sink."""
        if isinstance(item, RaysonarError):
            self._finished(item)
            return
        self._add(item)
        if item.finish_reason is not None:
            self._open -= 1
            if not self._open:
                self._finished(None)

    def _add(self, delta: Delta) -> None:
        result, completion = self.result, self.result.completions[delta.index]
        self._texts[delta.index].append(delta.text)
        completion.token_ids += delta.token_ids
        completion.origins += delta.origins
        if completion.logprobs is not None:
            completion.logprobs += delta.logprobs or []
        if delta.prompt_token_ids is not None:
            result.prompt_logprobs, result.cached_tokens = delta.prompt_logprobs, delta.cached_tokens
            result.first_token_seconds = time.perf_counter() - self._began
        if delta.finish_reason is not None:
            completion.text = "".join(self._texts[delta.index])
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            completion.moments = delta.moments
            result.acceptance += delta.acceptance or Acceptance()
            result.seconds = time.perf_counter() - self._began
