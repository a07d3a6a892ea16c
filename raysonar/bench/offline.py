"""`raysonar bench offline`: an engine in this process, all requests handed in at once."""

import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from raysonar.bench.prompts import Sample
from raysonar.bench.records import Record
from raysonar.driver.engine import Engine
from raysonar.driver.params import SamplingParams


def run_offline(
    engine: Engine,
    samples: Iterator[Sample],
    parameters: Mapping[str, Any],
    *,
    requests: int,
    warm_up: int,
    chat: bool,
) -> list[Record]:
    """One record a request, all due at 0. parameters: SamplingParams' fields. chat: whether prompts are messages."""

    def ask(count: int) -> list[Record]:
        chosen = list(islice(samples, count))
        prompts = [_tokens(engine, sample.text, chat=chat) for sample in chosen]
        params = [_params(parameters, sample) for sample in chosen]
        records = [Record(0.0) for _ in chosen]
        began = time.perf_counter()
        for place, delta in engine.generate_stream(prompts, params):
            record = records[place]
            record.tokens += len(delta.token_ids)
            if delta.prompt_token_ids is not None:
                record.prompt_tokens = len(delta.prompt_token_ids)
            if delta.token_ids:
                record.see(time.perf_counter() - began)
            if delta.acceptance is not None:
                record.drafted += sum(delta.acceptance.drafted)
                record.accepted += sum(delta.acceptance.accepted)
        return records

    if warm_up:
        ask(warm_up)
    return ask(requests)


def _tokens(engine: Engine, text: str, *, chat: bool) -> list[int]:
    if chat:
        return list(engine.tokenizer.render_chat([{"role": "user", "content": text}]))
    return list(engine.tokenizer.encode(text))


def _params(parameters: Mapping[str, Any], sample: Sample) -> SamplingParams:
    own = {} if sample.max_tokens is None else {"max_tokens": sample.max_tokens}
    return SamplingParams(**{**parameters, **own})
