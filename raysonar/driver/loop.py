"""The engine loop: one thread that plans, sends, receives and gives out, until it is closed or the rank fails."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.detokenize import Decoder
from raysonar.driver.emission import Emitter, ResultLogprobs
from raysonar.driver.outputs import Delta
from raysonar.driver.request import Answer, Request
from raysonar.driver.scheduler import Advance, Step
from raysonar.errors import EngineFailedError, InvalidRequestError, QueueFullError
from raysonar.observe.counters import EngineStats
from raysonar.observe.steps import StepLog, StepRecord
from raysonar.ranks.channel import StepChannel
from raysonar.step import StepResult

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 600.0
"""How long one step may take: the first ones may compile kernels."""
_POLL_S = 0.2
"""How often a wait for the rank looks whether the engine is being closed."""


class EngineLoop:
    """Owns the scheduler, the step channel and every open request. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        channel: StepChannel,
        scheduler: DataParallel,
        decoder: Decoder | None,
        eos_token_ids: frozenset[int],
        plans_in_flight: int,
        max_waiting: int,
        step_timeout: float = STEP_TIMEOUT_S,
    ) -> None:
        """`step_timeout` in seconds: a rank that is silent for longer has failed."""
        self._channel = channel
        self._scheduler = scheduler
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._plans_in_flight = plans_in_flight
        self._max_waiting = max_waiting
        self._step_timeout = step_timeout
        self._changed = threading.Condition()
        """Guards all that follows, and the scheduler."""
        self._requests: dict[str, Request] = {}
        self._emitters: dict[Answer, Emitter] = {}
        self._held_back = 0
        """Answers that wait for the first one of their request to fill the prefix cache."""
        self._closing = False
        self._failure: BaseException | None = None
        self._busy_since: float | None = None
        self._sent: deque[float] = deque()
        """Of the plans whose result is not in yet: the seconds each took to make."""
        self.steps = StepLog()
        self._thread = threading.Thread(target=self._run, name="raysonar-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises EngineFailedError, QueueFullError, InvalidRequestError (a known id)."""
        with self._changed:
            self.check_running()
            waiting = self._scheduler.waiting + self._held_back
            room = self._scheduler.empty + self._max_waiting - waiting
            more = sum(len(request.answers) for request in requests)
            if more > room:
                raise QueueFullError(f"{waiting} answers are waiting and {more} more were asked for; {room} find room")
            for request in requests:
                if request.id in self._requests:
                    raise InvalidRequestError(f"request id {request.id!r} is in use", "request_id")
            for request in requests:
                self._requests[request.id] = request
                self._scheduler.add(request.answers[0])
                self._held_back += len(request.answers) - 1
                for answer in request.answers:
                    self._emitters[answer] = Emitter(answer, self._decoder, self._eos_token_ids)
                self._scheduler.counters.requests += 1
                self._scheduler.counters.prompt_tokens += len(request.prompt_token_ids)
            self._changed.notify_all()

    def abort(self, request_id: str) -> bool:
        """End a request now: slot and pages are free when this returns. Its stream ends with finish_reason "abort".

        Returns whether the request was open.
        """
        with self._changed:
            request = self._requests.get(request_id)
            if request is not None:
                self.drop(request)
            return request is not None

    def drop(self, request: Request) -> None:
        """As `abort`; does nothing for a request that is not open."""
        with self._changed:
            if self._requests.get(request.id) is request:
                self._scheduler.counters.aborted += 1
                self._cut_off(request)

    def stats(self) -> EngineStats:
        """The engine now."""
        with self._changed:
            scheduler, counters, rows = self._scheduler, self._scheduler.totals(), self._scheduler.rows
            return EngineStats(
                slots=sum(row.slots.total for row in rows),
                running=scheduler.running,
                waiting=scheduler.waiting + self._held_back,
                pages=sum(row.pages.total for row in rows),
                pages_free=sum(row.pages.free for row in rows),
                pages_referenced=sum(row.pages.referenced for row in rows),
                pages_cached=sum(row.pages.cached for row in rows),
                steps_in_flight=scheduler.in_flight,
                steps=counters.steps,
                requests=counters.requests,
                aborted=counters.aborted,
                preemptions=counters.preemptions,
                prompt_tokens=counters.prompt_tokens,
                generated_tokens=counters.generated_tokens,
                prefix_lookup_tokens=counters.prefix_lookup_tokens,
                prefix_hit_tokens=counters.prefix_hit_tokens,
                drafted=tuple(counters.drafted.tolist()),
                accepted=tuple(counters.accepted.tolist()),
            )

    def check_running(self) -> None:
        """Raises EngineFailedError, caused by the root cause, when the loop has ended."""
        if self._failure is not None:
            raise _failed(self._failure) from self._failure
        if self._closing or not self._thread.is_alive():
            raise EngineFailedError("the engine is closed")

    def check_health(self, deadline: float) -> None:
        """Raises EngineFailedError when the loop has ended, or is at one step for more than `deadline` seconds."""
        self.check_running()
        since = self._busy_since
        if since is not None and (silent := time.monotonic() - since) > deadline:
            raise EngineFailedError(f"the engine has been at one step for {silent:.1f} s, over {deadline:.1f} s: stuck")

    def close(self) -> None:
        """End the loop and the channel; open requests end with EngineFailedError. May be called again."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=60.0)
        if self._thread.is_alive():
            raise EngineFailedError("the engine loop did not end within 60 s")
        self._channel.close()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._await_work():
                self._busy_since = time.monotonic()
                self._send_plans()
                results = self._receive()
                if results is not None:
                    self._take_in(results)
                self._busy_since = None
        except BaseException as error:  # whatever ends the loop must reach those who wait
            cause = error.__cause__ if isinstance(error, EngineFailedError) and error.__cause__ else error
            logger.error("the engine has failed", exc_info=cause)
            failure = cause
        self._end(failure)

    def _await_work(self) -> bool:
        """Block until there is something to do; False when the engine is being closed."""
        with self._changed:
            scheduler = self._scheduler
            self._changed.wait_for(
                lambda: self._closing or scheduler.waiting or scheduler.running or scheduler.in_flight
            )
            return not self._closing

    def _send_plans(self) -> None:
        while len(self._sent) < self._plans_in_flight:
            began = time.perf_counter()
            with self._changed:
                plans = self._scheduler.schedule()
            if plans is None:
                break
            self._sent.append(time.perf_counter() - began)
            self._channel.send([plan.pack() for plan in plans])

    def _receive(self) -> list[StepResult] | None:
        """The oldest outstanding step's results, one a row; None when there is none or the engine is being closed."""
        if not self._sent:
            return None
        deadline = time.monotonic() + self._step_timeout
        while not self._closing:
            try:
                results = [StepResult.unpack(each) for each in self._channel.receive(_POLL_S)]
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise EngineFailedError(f"a step brought no result within {self._step_timeout:.0f} s") from None
            else:
                return results
        return None

    def _take_in(self, results: list[StepResult]) -> None:
        plan_seconds = self._sent.popleft()
        with self._changed:
            steps = self._scheduler.commit(results)
            for step, result in zip(steps, results, strict=True):
                logprobs = ResultLogprobs(result)
                for advance in step.advances:
                    if not advance.answer.finished:  # its request may have been cut off by an answer before it
                        self._give_out(advance, logprobs)
        self.steps.append(_record(steps, results, plan_seconds))

    def _give_out(self, advance: Advance, logprobs: ResultLogprobs) -> None:
        answer = advance.answer
        request, params = answer.request, answer.request.params
        logprobs.of_prompt(advance.row, advance.start, answer)
        if not advance.tokens:
            return
        chosen = None
        if params.logprobs is not None:
            chosen = logprobs.of_tokens(advance.row, advance.tokens, params.logprobs)
        delta = self._emitters[answer].advance(advance.tokens, chosen)
        self._scheduler.counters.generated_tokens += len(delta.token_ids)
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
        self._held_back -= len(others)
        return replace(
            delta,
            prompt_token_ids=request.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
        )

    def _finish(self, answer: Answer, delta: Delta) -> Delta:
        """The answer's last delta; its slot and pages are free."""
        self._scheduler.finish(answer)
        del self._emitters[answer]
        if answer.request.finished:
            del self._requests[answer.request.id]
        return replace(delta, acceptance=answer.acceptance)

    def _cut_off(self, request: Request) -> None:
        for answer in request.answers:
            if not answer.finished:
                delta = self._emitters[answer].abort()
                if not request.started:
                    delta = self._start(request, delta)
                self._deliver(request, self._finish(answer, delta))

    def _deliver(self, request: Request, delta: Delta) -> None:
        try:
            request.sink(delta)
        except Exception:  # whoever asked is gone (a closed event loop): that must not end the others' requests
            logger.exception("request %s: its stream takes no more", request.id)
            request.sink = _nowhere
            self._cut_off(request)

    def _end(self, failure: BaseException | None) -> None:
        """Tell every open request that the engine has ended."""
        with self._changed:
            self._failure = failure
            self._closing = True
            for request in self._requests.values():
                error = EngineFailedError("the engine was closed") if failure is None else _failed(failure)
                error.__cause__ = failure
                try:
                    request.sink(error)
                except Exception:
                    logger.exception("request %s: its stream takes no more", request.id)
            self._requests.clear()
            self._emitters.clear()


def _failed(cause: BaseException) -> EngineFailedError:
    return EngineFailedError(f"the engine has failed: {type(cause).__name__}: {cause}")


def _record(steps: Sequence[Step], results: Sequence[StepResult], plan_seconds: float) -> StepRecord:
    """One record of all data-parallel rows' step; times are those of the slowest."""
    verify, draft = (max(times) for times in zip(*(result.seconds.tolist() for result in results), strict=True))
    return StepRecord(
        number=steps[0].number,
        rows=sum(step.rows for step in steps),
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        decode_tokens=sum(step.decode_tokens for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
        plan_seconds=plan_seconds,
        verify_seconds=verify,
        draft_seconds=draft,
    )


def _nowhere(_: object) -> None:
    """The sink of a request that nobody reads any more."""
