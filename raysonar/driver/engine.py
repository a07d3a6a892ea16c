"""Engine: prompts in, text out."""

import asyncio
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, get_args

import numpy as np
from pydantic import ValidationError

from raysonar.config import (
    CacheConfig,
    DType,
    EngineConfig,
    MicroBatching,
    MtpHidden,
    ParallelConfig,
    SchedulingConfig,
    SpeculationConfig,
    describe,
)
from raysonar.driver.collect import Collector
from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.loop import EngineLoop
from raysonar.driver.mailbox import Mailbox, settle
from raysonar.driver.micro_batching import MicroBatcher
from raysonar.driver.outputs import Delta, GenerationResult
from raysonar.driver.params import Prompt, SamplingParams, paired
from raysonar.driver.profiling import profile
from raysonar.driver.recovery import Recovery
from raysonar.driver.request import Limits, Progress, Request, Sink, make_request
from raysonar.driver.scheduler import Scheduler
from raysonar.driver.worker import Worker
from raysonar.errors import ConfigurationError, InvalidRequestError, RaysonarError
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer
from raysonar.moe.cost_model import CostModel
from raysonar.observe.chrome import RankTimeline, write_trace
from raysonar.observe.counters import EngineStats
from raysonar.observe.steps import StepLog
from raysonar.ranks.channel import RankInfo, StepChannel
from raysonar.ranks.start import start_ranks
from raysonar.speculation.grammar import GrammarCompiler

_News = SimpleQueue[tuple[int, Delta | RaysonarError]]
StartRank = Callable[[EngineConfig], tuple[StepChannel, RankInfo]]


class Engine:
    """One model replica: loads it, and answers requests from any thread until it is closed.

    Attributes:
        tokenizer: the folder's.
        steps: records of the last steps.
        costs: what the layers take, as measured when the engine started with micro_batching "auto"; else None.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        start: StartRank = start_ranks,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`tokenizer` None takes the folder's.

        Raises ConfigurationError or ModelFolderError when the model cannot be served so.
        """
        self.config = config
        self.tokenizer = Tokenizer.from_folder(open_folder(config.model)) if tokenizer is None else tokenizer
        worker = Worker("raysonar-engine")
        try:
            channel, info, self.costs = worker.submit(lambda: _start(config, start)).result()
        except BaseException:
            worker.stop(timeout=1.0)
            raise
        self._compiler = GrammarCompiler(lambda: self.tokenizer, info.vocab)
        eos = frozenset(info.eos_token_ids) | frozenset(self.tokenizer.eos_token_ids)
        self._limits = Limits(
            vocab=info.vocab,
            max_model_len=info.max_model_len,
            pages=info.pages,
            page_size=info.page_size,
            eos_token_ids=eos,
        )
        rows = [
            Scheduler(
                slots=info.slots,
                pages=info.pages,
                page_size=info.page_size,
                max_tokens=self._limits.tokens,
                token_budget=config.scheduling.token_budget,
                speculative_tokens=info.speculative_tokens,
                prefix_caching=config.cache.prefix_caching,
            )
            for _ in range(config.parallel.data)
        ]
        self._loop = EngineLoop(
            worker=worker,
            channel=channel,
            recovery=Recovery(channel, info, config.recovery),
            scheduler=DataParallel(
                rows,
                micro_batcher=MicroBatcher(config.parallel.micro_batching, self.costs),
                rebalance_steps=config.parallel.rebalance_steps,
            ),
            decoder=self.tokenizer if self.tokenizer.available else None,
            eos_token_ids=eos,
            plans_in_flight=config.scheduling.plans_in_flight or (2 if config.parallel.world > 1 else 1),
            max_waiting=config.scheduling.max_waiting,
            step_timeout=config.recovery.step_timeout_s,
        )
        self._finalizer = weakref.finalize(self, self._loop.close)

    @classmethod
    def from_folder(
        cls,
        path: str | PathLike[str],
        *,
        dtype: DType = "auto",
        device: str = "auto",
        threads: int | None = None,
        max_model_len: int | None = None,
        draft_model: str | PathLike[str] | None = None,
        speculative_tokens: int | None = None,
        mtp_hidden: MtpHidden = "auto",
        mtp_recycled: MtpHidden = "auto",
        page_size: int = 16,
        pages: int | None = None,
        cache_bytes: int = 1 << 30,
        prefix_caching: bool = True,
        max_running: int = 64,
        token_budget: int = 1024,
        max_waiting: int = 65536,
        plans_in_flight: int | None = None,
        tensor_parallel: int = 1,
        data_parallel: int = 1,
        micro_batching: MicroBatching = "auto",
        progress: bool = False,
    ) -> Self:
        """Serve a Hugging Face folder; every option is a field of EngineConfig, where it is explained.

        `progress` shows a bar on standard error while weights load. Raises as the constructor does.
        """
        values: dict[str, Any] = {
            "model": path,
            "dtype": dtype,
            "device": device,
            "threads": threads,
            "max_model_len": max_model_len,
        }
        try:
            config = EngineConfig(
                **values,
                cache=CacheConfig(
                    page_size=page_size, pages=pages, memory_bytes=cache_bytes, prefix_caching=prefix_caching
                ),
                speculation=SpeculationConfig(
                    draft=None if draft_model is None else Path(draft_model),
                    tokens=speculative_tokens,
                    hidden=mtp_hidden,
                    recycled=mtp_recycled,
                ),
                scheduling=SchedulingConfig(
                    max_running=max_running,
                    token_budget=token_budget,
                    max_waiting=max_waiting,
                    plans_in_flight=plans_in_flight,
                ),
                parallel=ParallelConfig(tensor=tensor_parallel, data=data_parallel, micro_batching=micro_batching),
            )
        except ValidationError as error:
            raise ConfigurationError(describe(error)) from error
        return cls(config, start=partial(start_ranks, progress=progress))

    @property
    def info(self) -> RankInfo:
        """What the model takes and the cache holds, and the ranks' processes now."""
        return self._loop.info

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer at the most, by the model and by the cache."""
        return self._limits.tokens

    @property
    def micro_batching(self) -> MicroBatching:
        """Whether steps run as two halves; may be set at any time.

        Setting "auto" raises ConfigurationError in an engine that was not started with it; so does an unknown word.
        """
        return self._loop.micro_batcher.policy

    @micro_batching.setter
    def micro_batching(self, policy: MicroBatching) -> None:
        if policy not in get_args(MicroBatching):
            raise ConfigurationError(f"micro_batching: {policy!r} is none of {', '.join(get_args(MicroBatching))}")
        if policy == "auto" and self.costs is None:
            raise ConfigurationError('micro_batching: "auto" needs costs, measured when an engine starts with it')
        self._loop.micro_batcher.policy = policy

    @property
    def steps(self) -> StepLog:
        """Records of the last steps."""
        return self._loop.steps

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int = 0,
    ) -> list[GenerationResult]:
        """Answer prompts, in their order; `params` is one for all (None: the defaults) or one for each.

        Of all open requests those with the lowest `priority` are served first, and of equals the earliest.

        Raises InvalidRequestError before anything is queued, EngineFailedError when the engine fails.
        """
        collectors: list[Collector] = []
        requests = self._requests(
            prompts, params, lambda position: lambda item: collectors[position].take(item), priority
        )
        finished: SimpleQueue[RaysonarError | None] = SimpleQueue()
        collectors += [Collector(request, finished.put) for request in requests]
        try:
            self._loop.submit(requests)
            for _ in requests:
                error = finished.get()  # comes without fail: the loop's last act is to tell every open request
                if error is not None:
                    raise error
        finally:
            for request in requests:
                self._loop.drop(request)
        return [collector.result for collector in collectors]

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> GenerationResult:
        """As `generate`, one prompt, for an event loop, which is woken once. Cancelling it aborts the request.

        Raises as `generate` does.
        """
        self._loop.check_running()
        home = asyncio.get_running_loop()
        finished: asyncio.Future[None] = home.create_future()
        collectors: list[Collector] = []
        request = await asyncio.to_thread(  # a long text and a grammar take their time
            self._request,
            prompt,
            params or SamplingParams(),
            lambda item: collectors[0].take(item),
            request_id,
            priority,
        )
        collectors.append(Collector(request, lambda error: home.call_soon_threadsafe(settle, finished, error)))
        self._loop.submit([request])
        try:
            await finished
        finally:
            self._loop.drop(request)
        return collectors[0].result

    def generate_stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[tuple[int, Delta]]:
        """As `generate`, but deltas as they come, each with its prompt's position; closing it aborts what is open.

        Raises InvalidRequestError here, before anything is queued; the requests are queued with the first `next`.
        """
        news: _News = SimpleQueue()
        requests = self._requests(prompts, params, lambda position: lambda item: news.put((position, item)))
        return self._deltas(requests, news)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        progress: Progress | None = None,
    ) -> AsyncGenerator[Delta]:
        """Deltas of one request. Closing or cancelling it aborts the request: slot and pages are free at once.

        `progress` lets it go on behind what another engine of the same model has given out, as if it were the same one.

        Raises InvalidRequestError here, before anything is queued; the request is queued with the first `anext`.
        """
        self._loop.check_running()
        mailbox = Mailbox()
        request = self._request(prompt, params or SamplingParams(), mailbox.put, request_id, priority, progress)
        return self._stream(request, mailbox)

    def abort(self, request_id: str) -> bool:
        """End a request now; its stream ends with finish_reason "abort". Returns whether it was open."""
        return self._loop.abort(request_id)

    def stats(self) -> EngineStats:
        """Slots, pages and totals now."""
        return self._loop.stats()

    @contextmanager
    def trace(self, path: str | PathLike[str]) -> Iterator[None]:
        """Keep what every rank does in the steps of this `with` block, and write it as one Chrome trace to `path`.

        Perfetto (ui.perfetto.dev) shows it: a process a rank, a thread for each half of the steps and for its
        transfers. Raises InvalidRequestError when `path` cannot be written or another trace is being made,
        EngineFailedError when the engine fails.
        """
        try:
            Path(path).write_text("")
        except OSError as error:
            raise InvalidRequestError(f"cannot write the trace: {error}", "path") from error
        self._loop.start_trace()
        try:
            yield
        finally:
            timelines = self._loop.stop_trace()
        write_trace(Path(path), timelines)

    def trace_steps(self, steps: int, timeout: float) -> list[RankTimeline]:
        """What every rank does in the next `steps` steps, or in the fewer that are planned within `timeout` seconds.

        Raises TraceInProgressError while another trace is being made, EngineFailedError when the engine fails,
        TimeoutError when a rank does not hand out its spans.
        """
        return self._loop.trace_steps(steps, timeout)

    def check_health(self, deadline: float = 60.0) -> None:
        """Raises EngineFailedError when the engine has failed, is closed, or has been in one step for `deadline` s."""
        self._loop.check_health(deadline)

    def close(self) -> None:
        """Stop, and let go of the model; open requests end with EngineFailedError. May be called again."""
        self._finalizer.detach()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        sink: Callable[[int], Sink],
        priority: int = 0,
    ) -> list[Request]:
        """Checked requests; `sink` makes the sink of the prompt at a position."""
        self._loop.check_running()
        pairs = paired(prompts, params)
        return [
            self._request(prompt, each, sink(position), priority=priority)
            for position, (prompt, each) in enumerate(pairs)
        ]

    def _deltas(self, requests: list[Request], news: _News) -> Generator[tuple[int, Delta]]:
        """Queue requests: (prompt's position, delta) until all are finished."""
        self._loop.submit(requests)
        open_answers = sum(len(request.answers) for request in requests)
        try:
            while open_answers:
                position, item = news.get()
                if isinstance(item, RaysonarError):
                    raise item
                open_answers -= item.finish_reason is not None
                yield position, item
        finally:
            for request in requests:
                self._loop.drop(request)

    async def _stream(self, request: Request, mailbox: Mailbox) -> AsyncGenerator[Delta]:
        mailbox.open()
        self._loop.submit([request])
        open_answers = sum(not answer.finished for answer in request.answers)
        try:
            while open_answers:
                for item in await mailbox.take():
                    if isinstance(item, RaysonarError):
                        raise item
                    open_answers -= item.finish_reason is not None
                    yield item
        finally:
            self._loop.drop(request)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        request_id: str | None = None,
        priority: int = 0,
        progress: Progress | None = None,
    ) -> Request:
        if not self.tokenizer.available and params.stop:
            raise InvalidRequestError("stop strings need a tokenizer, and the model's folder has none", "stop")
        if params.grammar is not None:
            self._compiler.compile(params.grammar)
        if not isinstance(prompt, Sequence | np.ndarray):
            raise InvalidRequestError(f"a prompt is a text or a list of token ids, got {prompt!r}", "prompt")
        text = prompt if isinstance(prompt, str) else None
        return make_request(
            request_id=f"request-{uuid.uuid4().hex}" if request_id is None else request_id,
            prompt=text,
            prompt_token_ids=self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt,
            params=params,
            limits=self._limits,
            sink=sink,
            priority=priority,
            progress=progress,
        )


def _start(config: EngineConfig, start: StartRank) -> tuple[StepChannel, RankInfo, CostModel | None]:
    """The ranks, and what their layers take, where that is to decide anything."""
    channel, info = start(config)
    if config.parallel.micro_batching != "auto" or not info.experts_travel:
        return channel, info, None
    try:
        costs = profile(channel, info, token_budget=config.scheduling.token_budget, rows=config.parallel.data)
    except BaseException:
        channel.close()
        raise
    return channel, info, costs
