"""The engine loop: one thread that plans, sends, receives and gives out, until it is closed or the rank fails."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.detokenize import Decoder
from raysonar.driver.emission import Emitter, ResultLogprobs
from raysonar.driver.micro_batching import Decision, MicroBatcher
from raysonar.driver.outputs import Delta
from raysonar.driver.request import Answer, Request
from raysonar.driver.scheduler import Advance, Step
from raysonar.driver.worker import Worker
from raysonar.errors import EngineFailedError, InvalidRequestError, QueueFullError
from raysonar.observe.answers import AnswerTotals, Moments
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.counters import EngineStats
from raysonar.observe.steps import StepLog, StepRecord
from raysonar.ranks.channel import StepChannel
from raysonar.step import SECONDS, StepResult

logger = logging.getLogger(__name__)

STEP_TIMEOUT_S = 600.0
"""How long one step may take: the first ones may compile kernels."""
_POLL_S = 0.2
"""How often a wait for the rank looks whether the engine is being closed."""


@dataclass(frozen=True)
class _Sent:
    """A step whose results are not in yet."""

    seconds: float
    """That its plans took to make."""
    decision: Decision
    traced: bool
    after_idling: bool
    """Whether there was nothing to do before it."""


class EngineLoop:
    """Owns the scheduler, the step channel and every open request. All methods may be called from any thread."""

    def __init__(
        self,
        *,
        worker: Worker,
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
        self._idle = True
        """Whether there was nothing to do until just now."""
        self._sent: deque[_Sent] = deque()
        """The steps whose results are not in yet."""
        self._traced_in_flight = 0
        """How many of them are traced."""
        self._draft_before: float | None = None
        """What the draft run of the step before was expected to take."""
        self._answers = AnswerTotals()
        self.steps = StepLog()
        self._trace = threading.Lock()
        """Held while a trace is being made."""
        self._worker = worker
        self._end_of_run = worker.submit(self._run)

    @property
    def micro_batcher(self) -> MicroBatcher:
        """Decides which steps are split."""
        return self._scheduler.micro_batcher

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
                    answer.moments = Moments()
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
                split_steps=counters.split_steps,
                rank_seconds=counters.rank_seconds,
                wait_seconds=counters.wait_seconds,
                exposed_seconds=counters.exposed_seconds,
                requests=counters.requests,
                aborted=counters.aborted,
                preemptions=counters.preemptions,
                prompt_tokens=counters.prompt_tokens,
                generated_tokens=counters.generated_tokens,
                prefix_lookup_tokens=counters.prefix_lookup_tokens,
                prefix_hit_tokens=counters.prefix_hit_tokens,
                drafted=tuple(counters.drafted.tolist()),
                accepted=tuple(counters.accepted.tolist()),
                answers=self._answers.copy(),
            )

    def start_trace(self) -> None:
        """Let the ranks keep spans of the steps that are planned from now on.

        Raises InvalidRequestError while another trace is being made, EngineFailedError.
        """
        self.check_running()
        if not self._trace.acquire(blocking=False):
            raise InvalidRequestError("the engine is being traced already; end that trace first")
        try:
            self._channel.timelines(self._step_timeout)  # drops what a trace that failed has left
        except BaseException:
            self._trace.release()
            raise
        with self._changed:
            self._scheduler.tracing = True

    def stop_trace(self) -> list[RankTimeline]:
        """End the trace: each rank's spans, once the traced steps are done. Raises EngineFailedError."""
        try:
            with self._changed:
                self._scheduler.tracing = False
                if not self._changed.wait_for(lambda: self._closing or not self._traced_in_flight, self._step_timeout):
                    raise EngineFailedError(f"a traced step brought no result within {self._step_timeout:.0f} s")
                self.check_running()
            return self._channel.timelines(self._step_timeout)
        finally:
            self._trace.release()

    def check_running(self) -> None:
        """Raises EngineFailedError, caused by the root cause, when the loop has ended."""
        if self._failure is not None:
            raise _failed(self._failure) from self._failure
        if self._closing or self._end_of_run.done():
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
        if not self._worker.stop(timeout=60.0):
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
            while not (self._closing or scheduler.waiting or scheduler.running or scheduler.in_flight):
                self._idle = True
                self._changed.wait()
            return not self._closing

    def _send_plans(self) -> None:
        while len(self._sent) < self._plans_in_flight:
            began = time.perf_counter()
            with self._changed:
                step = self._scheduler.schedule()
                traced = step is not None and self._scheduler.tracing
                self._traced_in_flight += traced
            if step is None:
                break
            seconds = time.perf_counter() - began
            self._sent.append(_Sent(seconds, step.decision, traced=traced, after_idling=self._idle))
            self._idle = False
            self._channel.send([plan.pack() for plan in step.plans])

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
        sent = self._sent.popleft()
        with self._changed:
            self._traced_in_flight -= sent.traced
            self._changed.notify_all()
            steps = self._scheduler.commit(results)
            for step, result in zip(steps, results, strict=True):
                logprobs = ResultLogprobs(result)
                for advance in step.advances:
                    if not advance.answer.finished:  # its request may have been cut off by an answer before it
                        self._give_out(advance, logprobs)
            record = _record(steps, results, sent, self._draft_before)
            self._draft_before = sent.decision.draft_seconds
            self._scheduler.micro_batcher.learn(sent.decision, record.verify_seconds)
            self._count(record)
        self.steps.append(record)

    def _count(self, record: StepRecord) -> None:
        counters = self._scheduler.counters
        counters.split_steps += record.halves == 2
        counters.rank_seconds += record.seconds
        counters.wait_seconds += record.wait_seconds
        counters.exposed_seconds += record.exposed_seconds

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
        self._answers.gave_out(answer.moments, len(delta.token_ids))
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
        assert delta.finish_reason is not None
        self._answers.finish(answer.moments, delta.finish_reason, len(answer.request.prompt_token_ids))
        self._scheduler.finish(answer)
        del self._emitters[answer]
        if answer.request.finished:
            del self._requests[answer.request.id]
        return replace(delta, acceptance=answer.acceptance, moments=answer.moments)

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
            self._changed.notify_all()
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


def _record(
    steps: Sequence[Step], results: Sequence[StepResult], sent: _Sent, draft_before: float | None
) -> StepRecord:
    """One record of all data-parallel rows' step; times are those of the slowest."""
    expected = sent.decision.verify_seconds
    seconds = np.concatenate([result.seconds for result in results])
    slowest = {name: float(seconds[name].max()) for name in SECONDS.names or ()}
    return StepRecord(
        number=steps[0].number,
        rows=sum(step.rows for step in steps),
        prefill_tokens=sum(step.prefill_tokens for step in steps),
        decode_tokens=sum(step.decode_tokens for step in steps),
        drafted=sum(step.drafted for step in steps),
        accepted=sum(step.accepted for step in steps),
        halves=sent.decision.halves,
        reason=sent.decision.reason,
        predicted_seconds=None if expected is None else expected + (draft_before or 0.0),
        plan_seconds=sent.seconds,
        wait_seconds=0.0 if sent.after_idling else slowest["wait"],
        verify_seconds=slowest["verify"],
        verify_exposed_seconds=slowest["verify_exposed"],
        draft_seconds=slowest["draft"],
        draft_exposed_seconds=slowest["draft_exposed"],
    )


def _nowhere(_: object) -> None:
    """The sink of a request that nobody reads any more."""
