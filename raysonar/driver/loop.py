"""The engine loop: one thread that plans, sends, receives and gives out, until it is closed or the rank fails."""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.detokenize import Decoder
from raysonar.driver.emission import ResultLogprobs
from raysonar.driver.micro_batching import Decision, MicroBatcher
from raysonar.driver.open_requests import OpenRequests
from raysonar.driver.recovery import Recovery, Suspicion, root_cause
from raysonar.driver.request import Request
from raysonar.driver.scheduler import Step
from raysonar.driver.worker import Worker
from raysonar.errors import EngineFailedError, TraceInProgressError
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.counters import EngineStats
from raysonar.observe.steps import StepLog, StepRecord
from raysonar.ranks.channel import RankInfo, StepChannel
from raysonar.step import SECONDS, StepResult

logger = logging.getLogger(__name__)

_POLL_S = 0.2
"""How often a wait for the rank looks whether the engine is being closed."""
_IDLE_POLL_S = 1.0
"""How often an engine with nothing to do looks whether its ranks are well."""


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
        recovery: Recovery,
        scheduler: DataParallel,
        decoder: Decoder | None,
        eos_token_ids: frozenset[int],
        plans_in_flight: int,
        max_waiting: int,
        step_timeout: float,
    ) -> None:
        """`step_timeout` in seconds: a rank that is silent for longer has failed."""
        self._channel = channel
        self._recovery = recovery
        self._suspicion = Suspicion()
        self._scheduler = scheduler
        self._plans_in_flight = plans_in_flight
        self._step_timeout = step_timeout
        self._changed = threading.Condition()
        """Guards all that follows, and the scheduler."""
        self._open = OpenRequests(scheduler, decoder, eos_token_ids, max_waiting)
        self._closing = False
        self._failure: BaseException | None = None
        self._restarting = False
        """Whether the ranks have failed and are being started again."""
        self._trace_lost = False
        """Whether they failed under the trace that is being made."""
        self._busy_since: float | None = None
        self._idle = True
        """Whether there was nothing to do until just now."""
        self._sent: deque[_Sent] = deque()
        """The steps whose results are not in yet."""
        self._traced_in_flight = 0
        """How many of them are traced."""
        self._before: tuple[Decision, float] | None = None
        """The step before: its draft run's time comes with the next result, here is what it took until its own."""
        self.steps = StepLog()
        self._trace = threading.Lock()
        """Held while a trace is being made."""
        self._worker = worker
        self._end_of_run = worker.submit(self._run)

    @property
    def info(self) -> RankInfo:
        """What the ranks that run now are."""
        return self._recovery.info

    @property
    def micro_batcher(self) -> MicroBatcher:
        """Decides which steps are split."""
        return self._scheduler.micro_batcher

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, all or none. Raises EngineFailedError, QueueFullError, InvalidRequestError (a known id)."""
        emitters = self._open.emitters(requests)
        with self._changed:
            self.check_running()
            self._open.add(requests, emitters)
            self._changed.notify_all()

    def abort(self, request_id: str) -> bool:
        """End a request now: slot and pages are free when this returns. Its stream ends with finish_reason "abort".

        Returns whether the request was open.
        """
        with self._changed:
            request = self._open.get(request_id)
            if request is not None:
                self.drop(request)
            return request is not None

    def drop(self, request: Request) -> None:
        """As `abort`; does nothing for a request that is not open."""
        with self._changed:
            if self._open.get(request.id) is request:
                self._scheduler.counters.aborted += 1
                self._open.cut_off(request)

    def stats(self) -> EngineStats:
        """The engine now."""
        with self._changed:
            return self._scheduler.stats(self._open.held_back, self._open.totals.copy())

    def trace_steps(self, steps: int, timeout: float) -> list[RankTimeline]:
        """Each rank's spans of the next `steps` steps, or of the fewer that are planned within `timeout` seconds.

        Raises as `start_trace` and `stop_trace` do.
        """
        self.start_trace(steps)
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._trace_lost or not self._scheduler.to_trace, timeout)
        return self.stop_trace()

    def start_trace(self, steps: float = math.inf) -> None:
        """Let the ranks keep spans of the `steps` steps that are planned next.

        Raises TraceInProgressError while another trace is being made, EngineFailedError.
        """
        self.check_running()
        if not self._trace.acquire(blocking=False):
            raise TraceInProgressError("the engine is being traced already; try again when that trace has ended")
        try:
            if self._restarting:
                raise EngineFailedError("the ranks have failed and are being started again; trace them when they run")
            self._channel.timelines(self._step_timeout)  # drops what a trace that failed has left
        except BaseException:
            self._trace.release()
            raise
        with self._changed:
            self._scheduler.to_trace, self._trace_lost = steps, False

    def stop_trace(self) -> list[RankTimeline]:
        """End the trace: each rank's spans, once the traced steps are done. Raises EngineFailedError."""
        try:
            with self._changed:
                self._scheduler.to_trace = 0
                if not self._changed.wait_for(lambda: self._closing or not self._traced_in_flight, self._step_timeout):
                    raise EngineFailedError(f"a traced step brought no result within {self._step_timeout:.0f} s")
                self.check_running()
                if self._trace_lost:
                    raise EngineFailedError("the ranks failed under the trace and were started again; trace once more")
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
            restarting = self._restarting
        if restarting:
            self._channel.close()  # ends the wait for ranks that nobody wants any more
        # on the thread that started the ranks: a Ray of our own is killed by Linux when the thread that began it ends
        closed = self._worker.submit(self._channel.close)
        if not self._worker.stop(timeout=60.0):
            raise EngineFailedError("the engine loop did not end within 60 s")
        if closed.done():  # else it was closed before, or is when this thread, the worker's own, comes to it
            closed.result()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._await_work():
                failed = self._step()
                if failed is not None:
                    self._recover(failed)
        except BaseException as error:  # whatever ends the loop must reach those who wait
            failure = root_cause(error)
            logger.error("the engine has failed", exc_info=failure)
        self._end(failure)

    def _await_work(self) -> bool:
        """Block until there is something to do, a while at the most; False when the engine is being closed."""
        with self._changed:
            scheduler = self._scheduler
            if not (self._closing or scheduler.waiting or scheduler.running or scheduler.in_flight):
                self._idle = True
                self._changed.wait(_IDLE_POLL_S)
            return not self._closing

    def _step(self) -> Exception | None:
        """Plan ahead, and take in the oldest step's results; returns what went wrong."""
        self._busy_since = time.monotonic()
        try:
            self._send_plans()
            if not self._sent:
                self._channel.check()
            results = self._receive()
            if results is not None:
                self._take_in(results)
        except Exception as error:
            return error
        finally:
            self._busy_since = None
        return None

    def _recover(self, failure: Exception) -> None:
        """Start the ranks again. Every running answer waits for them, with the tokens that it has given out."""
        with self._changed:
            if self._closing:
                return
            self._restarting = True
            self._start_over(failure)
        try:
            self._recovery.restart(failure, self._closed_within)
            self._scheduler.counters.recoveries += 1
        finally:
            self._restarting = False

    def _start_over(self, failure: Exception) -> None:
        """Forget all that was under way; an answer that made the ranks fail alone is not begun again."""
        cause = root_cause(failure)
        suspects = self._suspicion.suspects(cause, self._open.running())
        if self._scheduler.alone in suspects:
            self._open.fail(suspects[0].request, cause)
            suspects = []
        self._scheduler.restart(suspects)
        self._open.queue_again()
        self._sent.clear()
        self._trace_lost |= bool(self._scheduler.to_trace or self._traced_in_flight)
        self._traced_in_flight = 0
        self._before = None
        self._idle = True
        self._changed.notify_all()

    def _closed_within(self, seconds: float) -> bool:
        """Wait; whether the engine is being closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing, seconds)

    def _send_plans(self) -> None:
        while len(self._sent) < self._plans_in_flight:
            began = time.perf_counter()
            with self._changed:
                step = self._scheduler.schedule()
                if step is None:
                    break
                self._traced_in_flight += step.traced
            seconds = time.perf_counter() - began
            self._sent.append(_Sent(seconds, step.decision, traced=step.traced, after_idling=self._idle))
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
            record = _record(steps, results, sent, self._before[0] if self._before else None)
            if self._before is not None:
                decision, verify_seconds = self._before
                self._scheduler.micro_batcher.learn(decision, verify_seconds + record.draft_seconds)
            self._before = sent.decision, record.verify_seconds
            self._count(record)
            self.steps.append(record)  # who has a step's tokens finds its record
            for step, result in zip(steps, results, strict=True):
                self._open.give_out(step.advances, ResultLogprobs(result))

    def _count(self, record: StepRecord) -> None:
        counters = self._scheduler.counters
        counters.decisions.count(record)
        counters.split_steps += record.halves == 2
        counters.rank_seconds += record.seconds
        counters.wait_seconds += record.wait_seconds
        counters.exposed_seconds += record.exposed_seconds

    def _end(self, failure: BaseException | None) -> None:
        """Tell every open request that the engine has ended."""
        with self._changed:
            self._failure = failure
            self._closing = True
            self._changed.notify_all()
            self._open.end(self._ended)

    def _ended(self) -> EngineFailedError:
        """What open requests are told."""
        if self._failure is None:
            return EngineFailedError("the engine was closed")
        error = _failed(self._failure)
        error.__cause__ = self._failure
        return error


def _failed(cause: BaseException) -> EngineFailedError:
    return EngineFailedError(f"the engine has failed: {type(cause).__name__}: {cause}")


def _record(steps: Sequence[Step], results: Sequence[StepResult], sent: _Sent, before: Decision | None) -> StepRecord:
    """One record of all data-parallel rows' step; times are those of the slowest."""
    expected = sent.decision.verify_seconds
    draft_expected = (before.draft_seconds if before else None) or 0.0
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
        predicted_seconds=None if expected is None else expected + draft_expected,
        plan_seconds=sent.seconds,
        wait_seconds=0.0 if sent.after_idling else slowest["wait"],
        verify_seconds=slowest["verify"],
        verify_exposed_seconds=slowest["verify_exposed"],
        draft_seconds=slowest["draft"],
        draft_exposed_seconds=slowest["draft_exposed"],
    )
