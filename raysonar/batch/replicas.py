"""What answers rows: an engine in this process, engines in Ray actors, or a service that runs already."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol, cast

from raysonar.batch.answers import DriverAnswers, EndpointAnswers, ReplicaError
from raysonar.batch.outcome import Outcome
from raysonar.batch.rows import Asking, Row
from raysonar.config import EngineConfig, ReasoningParserName, ServiceConfig, ToolParserName
from raysonar.errors import ConfigurationError, ModelFolderError
from raysonar.serving.answering import Answering
from raysonar.serving.app import driver_resources, model_name, on_device
from raysonar.serving.driver import ANSWER_WITHIN_S, Driver
from raysonar.serving.generation import Batch, Generation, Profile, Vocabulary

_TOGETHER_S = 0.01
"""Rows that finish so close to each other travel together."""


class Replica(Protocol):
    """Answers rows, many at a time."""

    async def start(self) -> int:
        """Returns how many rows it should have at a time. Raises RaysonarError when it cannot be had."""
        ...

    async def exchange(self, rows: list[Row]) -> list[Outcome]:
        """Take more rows; wait until some that it has are finished, and return them. Raises ReplicaError when
        it is lost, and the rows with it."""
        ...

    async def close(self) -> None:
        """Let go of it and of the rows that it has; it may be started again."""
        ...


class Exchange:
    """Answers rows side by side."""

    def __init__(self, answer: Callable[[Row], Awaitable[Outcome]]) -> None:
        self._answer = answer
        self._running: set[asyncio.Task[None]] = set()
        self._finished: list[Outcome] = []
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    async def __call__(self, rows: list[Row]) -> list[Outcome]:
        """As Replica.exchange; raises what `answer` raised."""
        for row in rows:
            task = asyncio.create_task(self._one(row))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        await self._news.wait()
        await asyncio.sleep(_TOGETHER_S)
        if self._failure is not None:
            raise self._failure
        self._news.clear()
        finished, self._finished = self._finished, []
        return finished

    async def _one(self, row: Row) -> None:
        try:
            outcome = await self._answer(row)
            self._finished.append(outcome)
        except Exception as error:
            self._failure = error
        self._news.set()

    async def close(self) -> None:
        """Cancel what runs."""
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


def window_of(config: EngineConfig) -> int:
    """Rows that an engine should have: while all its slots are full, as many again wait to take them."""
    return 2 * config.scheduling.max_running * config.parallel.data


class _Exchanging:
    """What replicas share that answer rows in this process; `start` sets the exchange."""

    _exchange: Exchange | None = None

    async def exchange(self, rows: list[Row]) -> list[Outcome]:
        assert self._exchange is not None
        return await self._exchange(rows)

    async def close(self) -> None:
        if self._exchange is not None:
            await self._exchange.close()
        self._exchange = None


class EngineReplica(_Exchanging):
    """An engine in this process; also what a Ray actor runs."""

    def __init__(self, config: ServiceConfig, asking: Asking) -> None:
        self._config, self._asking = config, asking
        self._driver: Driver | None = None

    async def start(self) -> int:
        config = self._config
        name = model_name(config)
        if self._driver is None:
            self._driver = await asyncio.to_thread(Driver, config.engine, config.start_timeout_s, name, config.limits)
        driver = self._driver
        answers = _driver_answers(
            driver.profile(),
            driver.vocabulary(),
            config.tool_parser,
            config.reasoning_parser,
            stream=driver.stream,
            check=driver.check_health,
            model=name,
            asking=self._asking,
        )
        self._exchange = Exchange(answers)
        return window_of(config.engine)

    async def close(self) -> None:
        await super().close()
        if self._driver is not None:
            await asyncio.to_thread(self._driver.close)
        self._driver = None


class ActorReplica:
    """An engine in a Ray actor of its own, which is started again when it is lost."""

    def __init__(self, config: ServiceConfig, asking: Asking) -> None:
        self._config, self._asking = config, asking
        self._actor: Any = None

    async def start(self) -> int:
        import ray

        config = self._config.model_copy(update={"engine": on_device(self._config.engine)})
        remote: Any = ray.remote(EngineReplica)
        self._actor = remote.options(**driver_resources(config.engine)).remote(config, self._asking)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                return cast(int, await self._actor.start.remote())
        except TimeoutError:
            needs, has = driver_resources(config.engine), ray.cluster_resources()  # type: ignore[no-untyped-call]
            have = {name: has.get(name, 0) for name in ("CPU", "GPU")}
            raise ConfigurationError(
                f"a replica was not up within {config.start_timeout_s:.0f} s; it needs {needs} in one place, "
                f"and the cluster has {have} in all"
            ) from None
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error

    async def exchange(self, rows: list[Row]) -> list[Outcome]:
        import ray

        try:
            return cast(list[Outcome], await self._actor.exchange.remote(rows))
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> Exception:
        import ray

        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, ConfigurationError | ModelFolderError):  # would be the same the next time
            return cause
        return ReplicaError(f"a replica was lost: {type(cause).__name__}: {' '.join(str(cause).split())[:500]}")

    async def close(self) -> None:
        import ray

        if self._actor is not None:
            actor, self._actor = self._actor, None
            await asyncio.to_thread(ray.kill, actor)


class EndpointReplica(_Exchanging):
    """A server with OpenAI's API."""

    def __init__(self, answers: EndpointAnswers, *, concurrency: int, model: str | None = None) -> None:
        """concurrency: requests at a time. model: as EndpointAnswers.start has it."""
        self._answers, self._concurrency, self._model = answers, concurrency, model

    async def start(self) -> int:
        await self._answers.start(self._model)
        self._exchange = Exchange(self._answers)
        return 2 * self._concurrency  # as many again wait for a connection

    async def close(self) -> None:
        await super().close()
        await self._answers.close()


class ServeReplica(_Exchanging):
    """An application of ours that runs on this Ray cluster, by its handle."""

    def __init__(self, application: str, asking: Asking, *, concurrency: int) -> None:
        """concurrency: requests at a time."""
        self._application, self._asking, self._concurrency = application, asking, concurrency

    async def start(self) -> int:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            driver: Any = serve.get_deployment_handle("Driver", self._application)
            ingress: Any = serve.get_app_handle(self._application)
            async with asyncio.timeout(ANSWER_WITHIN_S):
                model, tools, reasoning = await ingress.settings.remote()
                profile = cast(Profile, await driver.profile.remote())
                vocabulary = cast(Vocabulary, await driver.vocabulary.remote())
        except (RayServeException, TimeoutError) as error:
            raise ConfigurationError(f"no application {self._application!r} of raysonar runs here: {error}") from error

        async def stream(generation: Generation) -> AsyncGenerator[Batch]:
            batches = driver.options(stream=True).stream.remote(generation)
            try:
                async for batch in batches:
                    yield batch
            finally:
                batches.cancel()

        async def check() -> None:
            """A driver that is away comes back: Serve sees to it."""

        answers = _driver_answers(
            profile, vocabulary, tools, reasoning, stream=stream, check=check, model=model, asking=self._asking
        )
        self._exchange = Exchange(answers)
        return self._concurrency


def _driver_answers(
    profile: Profile,
    vocabulary: Vocabulary,
    tool_parser: ToolParserName,
    reasoning_parser: ReasoningParserName,
    *,
    stream: Callable[[Generation], AsyncGenerator[Batch]],
    check: Callable[[], Awaitable[None]],
    model: str,
    asking: Asking,
) -> DriverAnswers:
    """Answers of a driver whose `profile` and `vocabulary` are known. Raises ConfigurationError as _chats does."""

    async def the_profile() -> Profile:
        return profile

    async def the_vocabulary() -> Vocabulary:
        return vocabulary

    answering = Answering(the_profile, the_vocabulary, tool_parser, reasoning_parser)
    chat = _chats(profile, asking)
    return DriverAnswers(stream=stream, answering=answering, check=check, model=model, chat=chat, asking=asking)


def _chats(profile: Profile, asking: Asking) -> bool:
    """Whether prompts are messages. Raises ConfigurationError when they should be and cannot."""
    if asking.chat and not profile.has_chat_template:
        raise ConfigurationError("--chat: the model has no chat template")
    return profile.has_chat_template if asking.chat is None else asking.chat
