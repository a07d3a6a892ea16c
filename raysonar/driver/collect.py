"""Puts a request's deltas together."""

import time

from raysonar.driver.outputs import Acceptance, Completion, Delta, GenerationResult
from raysonar.driver.request import Request


class Collector:
    """One request's result in the making."""

    def __init__(self, request: Request) -> None:
        self._began = time.perf_counter()
        logprobs = request.params.logprobs is not None
        self._texts: list[list[str]] = [[] for _ in range(request.params.n)]
        self._result = GenerationResult(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            completions=[Completion(index, logprobs=[] if logprobs else None) for index in range(request.params.n)],
        )

    def add(self, delta: Delta) -> None:
        """Take in the next delta, as it comes."""
        result, completion = self._result, self._result.completions[delta.index]
        self._texts[delta.index].append(delta.text)
        completion.token_ids += delta.token_ids
        if completion.logprobs is not None:
            completion.logprobs += delta.logprobs or []
        if delta.prompt_token_ids is not None:
            result.prompt_logprobs, result.cached_tokens = delta.prompt_logprobs, delta.cached_tokens
            result.first_token_seconds = time.perf_counter() - self._began
        if delta.finish_reason is not None:
            completion.text = "".join(self._texts[delta.index])
            completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
            result.acceptance += delta.acceptance or Acceptance()
            result.seconds = time.perf_counter() - self._began

    def result(self) -> GenerationResult:
        """The result, once every answer has finished."""
        return self._result
