"""The driver deployment: one replica hosts the engine and hands its deltas to the ingress."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from raysonar.config import EngineConfig, LimitsConfig
from raysonar.driver.outputs import Delta
from raysonar.driver.params import SamplingParams
from raysonar.driver.request import check_tokens
from raysonar.errors import EngineFailedError, InvalidRequestError, RaysonarError
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.counters import EngineStats
from raysonar.observe.metrics import engine_readings
from raysonar.observe.steps import StepRecord
from raysonar.serving.feed import Link, Wire, feed
from raysonar.serving.generation import Batch, Chat, Generation, Profile, Prompt, Reader, Vocabulary, begins_thinking
from raysonar.serving.held import reasoned
from raysonar.serving.lengths import Lengths
from raysonar.serving.metrics import RayExporter, Source, replica_labels
from raysonar.serving.parsers import reasons, tool_format_of
from raysonar.serving.problems import Problem, problem_of, unavailable
from raysonar.serving.replicas import actor_name

if TYPE_CHECKING:
    from raysonar.driver.engine import Engine

ANSWER_WITHIN_S = 60.0
"""How long a driver that is up may take to say what it serves."""
_STUCK_MARGIN_S = 10.0
"""A step that is so much over its time cannot be mended by the engine: it is stuck."""

_BATCHES_PER_S = 1000.0
"""What the driver sends to all streams together: each batch costs processor time on its way to the client."""
_LONGEST_PAUSE_S = 0.05

_WARM_UP_TOKENS = 4
_NO_LIMITS = LimitsConfig()
_READER_GONE = unavailable("The connection to the ingress is lost", "engine_unavailable").problem

logger = logging.getLogger("ray.serve")


class Driver:
    """Hosts one engine. A replica that is up has generated tokens through it."""

    def __init__(
        self, config: EngineConfig, start_timeout_s: float, model: str, limits: LimitsConfig = _NO_LIMITS
    ) -> None:
        """`model` is what clients call it.

        Raises what the engine raises for a model it cannot load, and TimeoutError when that takes too long.
        """
        starter = ThreadPoolExecutor(1, "engine-start")
        try:
            self._engine = starter.submit(_started_engine, config).result(start_timeout_s)
        finally:
            starter.shutdown(wait=False)
        self._streams = 0
        self._links: dict[Reader, Link] = {}
        self._stuck_after_s = config.recovery.step_timeout_s + _STUCK_MARGIN_S
        self._lengths = Lengths(self._engine.max_length, limits.max_prompt_tokens, limits.max_answer_tokens)
        self._labels = replica_labels(model)
        engine = self._engine  # not self: the thread must not keep a driver that Serve lets go of
        self._exporter = RayExporter(lambda: engine_readings(engine.stats()), self._labels)

    async def stream(self, generation: Generation) -> AsyncGenerator[Batch]:
        """The deltas of all the request's prompts, after an empty batch that says that the request has arrived.

        All go to the generation's reader, where it has one that is reached, and else come from here. Cancelling this
        aborts the prompts and frees their slots and pages, as does the reader's end.
        """
        news: asyncio.Queue[tuple[int, Delta] | Problem | None] = asyncio.Queue()
        batches = self._batches(generation, news)
        try:
            wire = await self._wire_to(generation.reader)
        except ConnectionError:
            yield _READER_GONE
            return
        if wire is not None:
            with wire.watched(lambda: news.put_nowait(_READER_GONE)):
                await feed(wire, generation.request_id, batches)
            return
        yield []
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    async def _wire_to(self, reader: Reader | None) -> Wire | None:
        if reader is None:
            return None
        if reader not in self._links:
            self._links[reader] = Link(reader, actor_name())
        return await self._links[reader].wire()

    async def _batches(
        self, generation: Generation, news: "asyncio.Queue[tuple[int, Delta] | Problem | None]"
    ) -> AsyncGenerator[Batch]:
        """What the prompts' pumps put into `news`, until all have ended."""
        self._streams += 1
        finished = generation.finished
        pumps = [
            asyncio.create_task(self._pump(news, generation, place, prompt))
            for place, prompt in enumerate(generation.prompts)
            if place not in finished
        ]
        try:
            running, held = len(pumps), list[tuple[int, Delta]]()
            now, due = asyncio.get_running_loop().time, 0.0
            while running:
                ready = [await news.get()]
                if (early := due - now()) > 0:
                    await asyncio.sleep(early)
                while not news.empty():
                    ready.append(news.get_nowait())
                held += [item for item in ready if isinstance(item, tuple)]
                running -= ready.count(None)
                if held and not (generation.whole and running):
                    yield held
                    held = []
                    due = now() + min(_LONGEST_PAUSE_S, self._streams / _BATCHES_PER_S)
                for item in ready:
                    if isinstance(item, Problem):
                        yield item
                        return
        finally:
            self._streams -= 1
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self,
        news: "asyncio.Queue[tuple[int, Delta] | Problem | None]",
        generation: Generation,
        place: int,
        prompt: Prompt,
    ) -> None:
        """Put one prompt's deltas into `news`, then None; or what went wrong."""
        try:
            engine, priority = self._engine, generation.priority
            request_id = f"{generation.request_id}-{place}"
            # In threads: a long text and a grammar take their time, and other streams must go on meanwhile.
            tokens = await asyncio.to_thread(self._token_ids, prompt)
            params = self._lengths.checked(len(tokens), self._behind_reasoning(generation, tokens))
            if generation.whole:
                result = await engine.complete(tokens, params, request_id=request_id, priority=priority)
                for delta in result.deltas():
                    news.put_nowait((place, delta))
            else:
                progress = generation.progress.get(place)
                stream = await asyncio.to_thread(
                    engine.stream, tokens, params, request_id=request_id, priority=priority, progress=progress
                )
                async with aclosing(stream) as deltas:
                    async for delta in deltas:
                        news.put_nowait((place, delta))
            news.put_nowait(None)
        except Exception as error:
            problem = problem_of(error)
            if problem.status >= 500 and not isinstance(error, EngineFailedError):  # whose cause the engine has logged
                logger.exception("Request %s failed", generation.request_id)
            news.put_nowait(problem)

    def _behind_reasoning(self, generation: Generation, prompt: list[int]) -> SamplingParams:
        """The request's parameters, with room for reasoning in their grammar where the prompt ends inside of it."""
        params = generation.params
        if params.grammar is None:
            return params
        thinks = begins_thinking(generation.thinking, prompt, self._engine.tokenizer.token_bytes)
        return replace(params, grammar=reasoned(params.grammar)) if thinks else params

    def _token_ids(self, prompt: Prompt, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: what the tokenizer adds around a text; a chat template writes all that there is."""
        tokenizer, most = self._engine.tokenizer, self._lengths.longest_prompt
        match prompt:
            case Chat():
                if prompt.tools and not tokenizer.knows_tools:
                    raise InvalidRequestError("tools: the model's chat template does not write any", "tools")
                text = tokenizer.chat_text(
                    prompt.messages,
                    prompt.add_generation_prompt,
                    prompt.tools or None,
                    continue_final_message=prompt.continue_final_message,
                    **prompt.variables,
                )
                return tokenizer.encode(text, add_special_tokens=False, at_most=most)
            case str():
                return tokenizer.encode(prompt, add_special_tokens, at_most=most)
            case _:
                return prompt

    async def tokenize(self, prompt: Prompt, add_special_tokens: bool) -> list[int] | Problem:
        """The prompt's token ids, as a generation would take them."""
        try:
            return await asyncio.to_thread(self._token_ids, prompt, add_special_tokens)
        except InvalidRequestError as error:
            return problem_of(error)

    async def detokenize(self, tokens: list[int]) -> str | Problem:
        """The text of token ids, special tokens spelt out."""
        try:
            check_tokens("tokens", tokens, self._engine.info.vocab)
            return await asyncio.to_thread(self._engine.tokenizer.decode, tokens, False)
        except InvalidRequestError as error:
            return problem_of(error)

    def profile(self) -> Profile:
        """Constant as long as the model is."""
        tokenizer = self._engine.tokenizer
        templates = tokenizer.template_sources
        return Profile(
            max_model_len=self._engine.max_length,
            has_chat_template=tokenizer.has_chat_template,
            knows_tools=tokenizer.knows_tools,
            tool_format=tool_format_of(templates),
            reasons=reasons(templates),
            special=tokenizer.special_tokens,
        )

    def vocabulary(self) -> Vocabulary:
        """Constant as long as the model is. A model without a tokenizer has its tokens spelt by their ids."""
        tokenizer, ids = self._engine.tokenizer, range(self._engine.info.vocab)
        if not tokenizer.available:
            return Vocabulary([f"token_id:{token}".encode() for token in ids])
        return Vocabulary([tokenizer.token_bytes(token) for token in ids])

    def stats(self) -> EngineStats:
        """The engine's slots, pages and counters."""
        return self._engine.stats()

    def report(self) -> Source:
        """All metrics of the engine now."""
        return Source(self._labels, list(engine_readings(self.stats())))

    def steps(self, last: int) -> tuple[str, list[StepRecord]]:
        """This replica's name, and the records of its last steps, oldest first."""
        return self._labels["replica"], self._engine.steps.last(last)

    async def trace(self, steps: int, timeout: float) -> list[RankTimeline] | Problem:
        """Every rank's spans of the next `steps` steps, or of the fewer that are planned within `timeout` seconds."""
        try:
            return await asyncio.to_thread(self._engine.trace_steps, steps, timeout)
        except (RaysonarError, TimeoutError) as error:
            return problem_of(error)

    async def check_health(self) -> None:
        """Raises EngineFailedError when the engine's loop has died or is stuck. Serve then replaces the replica."""
        await asyncio.to_thread(self._engine.check_health, self._stuck_after_s)

    def close(self) -> None:
        """Let go of the engine; may be called again."""
        if hasattr(self, "_exporter"):
            self._exporter.stop()
        if hasattr(self, "_engine"):
            self._engine.close()

    def __del__(self) -> None:
        """Serve calls it when the replica stops."""
        self.close()


def _started_engine(config: EngineConfig) -> "Engine":
    """An engine that has generated tokens."""
    # Imported here, where the engine runs: the process that builds the application needs no torch.
    from raysonar.driver.engine import Engine

    engine = Engine(config)
    tokens = min(_WARM_UP_TOKENS, engine.info.max_model_len - 1)
    engine.generate([[0]], SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))
    return engine
