"""A request goes on with another engine behind what the first has given out: nothing is lost, repeated or changed."""

import asyncio
from contextlib import aclosing

import pytest
from support.fake_rank import HashModel

from raysonar.driver.params import SamplingParams
from raysonar.driver.request import Progress
from raysonar.errors import InvalidRequestError

PROMPT = [5, 6, 7, 8, 9]


def params(**values) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 30, "ignore_eos": True, **values})


class Story:
    """What a stream has told, answer by answer."""

    def __init__(self, answers: int) -> None:
        self.tokens = [[] for _ in range(answers)]
        self.texts, self.logprobs, self.ends = [""] * answers, [[] for _ in range(answers)], {}

    def take(self, delta) -> None:
        self.tokens[delta.index] += delta.token_ids
        self.texts[delta.index] += delta.text
        self.logprobs[delta.index] += delta.logprobs or []
        if delta.finish_reason is not None:
            self.ends[delta.index] = (delta.finish_reason, delta.stop_reason)

    @property
    def progress(self) -> Progress:
        return Progress(tuple(map(tuple, self.tokens)), frozenset(self.ends))


def tell(engine, story, asked, progress=None, deltas=None) -> int:
    """Take at most `deltas` deltas of the request; how many there were."""

    async def read() -> int:
        taken = 0
        async with aclosing(engine.stream(PROMPT, asked, progress=progress)) as stream:
            async for delta in stream:
                assert (delta.prompt_token_ids is not None) == (progress is None and not taken)
                story.take(delta)
                taken += 1
                if taken == deltas:
                    break
        return taken

    return asyncio.run(read())


@pytest.mark.parametrize(
    "asked",
    [
        params(logprobs=2),
        params(n=3, logprobs=0, prompt_logprobs=0),
        params(max_tokens=None, min_tokens=4, ignore_eos=False),
        params(stop=["e", "th"], min_tokens=9),
        params(stop=["\u00fc", "xyz"], include_stop_str_in_output=True),
        params(frequency_penalty=0.5, stop_token_ids=[77, 88]),
    ],
    ids=["logprobs", "three answers", "end of sequence", "stop strings", "stop strings kept", "stop tokens"],
)
def test_a_request_goes_on_at_every_point(start_engine, tokenizer, asked):
    model = HashModel(384)  # every token: bytes of characters, too
    first, second = start_engine(model=model, k=2), start_engine(model=model, k=1)
    whole = Story(asked.n)
    deltas = tell(first, whole, asked)
    assert len(whole.ends) == asked.n
    assert deltas > 3
    for cut in range(1, deltas):
        story = Story(asked.n)
        tell(first, story, asked, deltas=cut)
        assert story.tokens != whole.tokens
        tell(second, story, asked, progress=story.progress)
        assert vars(story) == vars(whole), f"cut after {cut} deltas"
    for engine in (first, second):
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)


@pytest.mark.parametrize(
    ("progress", "message"),
    [
        (Progress(((5,), (6,))), "the progress is of 2 answers, 1 are asked for"),
        (Progress(((9999,),)), "token id 9999"),
        (Progress(((5,) * 30,)), "as long as it may be"),
        (Progress(((5,) * 30,), frozenset({0})), "nothing to go on with"),
    ],
)
def test_progress_that_cannot_be_is_refused(start_engine, progress, message):
    with pytest.raises(InvalidRequestError, match=message) as refused:
        start_engine().stream(PROMPT, params(), progress=progress)
    assert refused.value.field == "progress"


def test_progress_survives_a_restart_of_the_ranks(start_engine):
    model, failed = HashModel(384), []

    def fail(plan):
        if start_engine.channel.rank.steps == 3 and not failed:
            failed.append(plan)
            raise MemoryError("the device is on fire")

    whole, story = Story(2), Story(2)
    first = start_engine(model=model)
    tell(first, whole, params(n=2))
    tell(first, story, params(n=2), deltas=5)
    tell(start_engine(model=model, before=fail, restarts=1), story, params(n=2), progress=story.progress)
    assert failed
    assert vars(story) == vars(whole)
