"""The requests that are open: how they are queued, what each step gives them, and how they end."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.detokenize import Decoder
from raysonar.driver.emission import Emitter, ResultLogprobs
from raysonar.driver.outputs import Delta
from raysonar.driver.request import Answer, Request
from raysonar.driver.scheduler import Advance
from raysonar.errors import EngineFailedError, InvalidRequestError, QueueFullError, RaysonarError, RequestFailedError
from raysonar.observe.answers import AnswerTotals, Moments

logger = logging.getLogger(__name__)


class OpenRequests:
    """Not to be called from two threads at once.

    Attributes:
        held_back: answers that wait for the first one of their request to fill the prefix cache.
        totals: what answers took.
    """

    def __init__(
        self, scheduler: DataParallel, decoder: Decoder | None, eos_token_ids: frozenset[int], max_waiting: int
    ) -> None:
        """max_waiting: answers that may wait beyond those that find a slot."""
        self._scheduler = scheduler
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._max_waiting = max_waiting
        self._requests: dict[str, Request] = {}
        self._emitters: dict[Answer, Emitter] = {}
        self.held_back = 0
        self.totals = AnswerTotals()

    def get(self, request_id: str) -> Request | None:
        """The open request of this id."""
        return self._requests.get(request_id)

    def emitters(self, requests: Sequence[Request]) -> dict[Answer, Emitter]:
        """Of all answers that have not ended; may be called from any thread."""
        return {
            answer: Emitter(answer, self._decoder, self._eos_token_ids)
            for request in requests
            for answer in request.answers
            if not answer.finished
        }

    def add(self, requests: Sequence[Request], emitters: dict[Answer, Emitter]) -> None:
        """Queue requests, all or none, with the emitters of their answers.

        Raises QueueFullError, InvalidRequestError (a known id).
        """
        waiting = self._scheduler.waiting + self.held_back
        room = self._scheduler.empty + self._max_waiting - waiting
        more = len(emitters)
        if more > room:
            raise QueueFullError(f"{waiting} answers are waiting and {more} more were asked for; {room} find room")
        for request in requests:
            if request.id in self._requests:
                raise InvalidRequestError(f"request id {request.id!r} is in use", "request_id")
        self._emitters |= emitters
        for request in requests:
            self._requests[request.id] = request
            ready = request.queued
            self.held_back += len(request.answers) - len(ready)
            for answer in request.answers:
                answer.moments = Moments()
            for answer in ready:
                if not answer.finished:
                    self._scheduler.add(answer)
            self._scheduler.counters.requests += 1
            self._scheduler.counters.prompt_tokens += len(request.prompt_token_ids)

    def give_out(self, advances: Sequence[Advance], logprobs: ResultLogprobs) -> None:
        """What a step brought. What cannot be given out ends its request, not the others."""
        for advance in advances:
            request = advance.answer.request
            if advance.answer.finished:  # its request was cut off by an answer before it
                continue
            try:
                self._give_out(advance, logprobs)
            except Exception as error:
                logger.exception("request %s: its tokens cannot be given out", request.id)
                self.fail(request, error)

    def cut_off(self, request: Request) -> None:
        """End a request; its stream ends with finish_reason "abort"."""
        for answer in request.answers:
            if not answer.finished:
                delta = self._emitters[answer].abort()
                if not request.started:
                    delta = self._start(request, delta)
                self._deliver(request, self._finish(answer, delta))

    def fail(self, request: Request, cause: BaseException) -> None:
        """End a request with RequestFailedError."""
        for answer in request.answers:
            if self._emitters.pop(answer, None) is not None and answer in request.queued:
                self._scheduler.finish(answer)
            answer.finished = True
        self.held_back -= len(request.answers) - len(request.queued)
        if self._requests.pop(request.id, None) is not None:
            error = RequestFailedError(f"request {request.id} cannot be answered: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
            _tell(request, error)

    def running(self) -> dict[Answer, int]:
        """The answers that hold a slot, each with the tokens that it has given out."""
        return {answer: emitter.tokens for answer, emitter in self._emitters.items() if answer.slot >= 0}

    def queue_again(self) -> None:
        """Queue all answers that ever were, with the tokens they have given out and none else."""
        for answer, emitter in self._emitters.items():
            request = answer.request
            answer.rewind(len(request.prompt_token_ids) + emitter.tokens)
            if answer in request.queued:
                self._scheduler.add(answer)

    def end(self, error: Callable[[], EngineFailedError]) -> None:
        """Tell every request that the engine has ended."""
        for request in self._requests.values():
            _tell(request, error())
        self._requests.clear()
        self._emitters.clear()

    def _give_out(self, advance: Advance, logprobs: ResultLogprobs) -> None:
        answer = advance.answer
        request, params = answer.request, answer.request.params
        logprobs.of_prompt(advance.row, advance.start, answer)
        if not advance.tokens:
            return
        chosen = None
        if params.logprobs is not None:
            chosen = logprobs.of_tokens(advance.row, advance.tokens, params.logprobs)
        delta = self._emitters[answer].advance(advance.tokens, chosen, advance.drafts)
        self._scheduler.counters.generated_tokens += len(delta.token_ids)
        self.totals.gave_out(answer.moments, len(delta.token_ids))
        if not request.started:
            delta = self._start(request, delta)
        if delta.finish_reason is not None:
            delta = self._finish(answer, delta)
        self._deliver(request, delta)

    def _start(self, request: Request, delta: Delta) -> Delta:
        """The request's first delta; its other answers find the prompt in the prefix cache from now on."""
        request.started = True
        first, *others = request.answers
        for answer in others:
            self._scheduler.add(answer)
        self.held_back -= len(others)
        return replace(
            delta,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
        )

    def _finish(self, answer: Answer, delta: Delta) -> Delta:
        """The answer's last delta; its slot and pages are free."""
        assert delta.finish_reason is not None
        self.totals.finish(answer.moments, delta.finish_reason, len(answer.request.prompt_token_ids))
        self._scheduler.finish(answer)
        del self._emitters[answer]
        if answer.request.finished:
            del self._requests[answer.request.id]
        return replace(delta, acceptance=answer.acceptance, moments=answer.moments)

    def _deliver(self, request: Request, delta: Delta) -> None:
        try:
            request.sink(delta)
        except Exception:  # whoever asked is gone (a closed event loop): that must not end the others' requests
            logger.exception("request %s: its stream takes no more", request.id)
            request.sink = _nowhere
            self.cut_off(request)


def _tell(request: Request, error: RaysonarError) -> None:
    try:
        request.sink(error)
    except Exception:
        logger.exception("request %s: its stream takes no more", request.id)


def _nowhere(_: object) -> None:
    """The sink of a request that nobody reads any more."""
