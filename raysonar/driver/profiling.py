"""Measures at start-up what steps cost: made-up steps of growing size, traced, through the real channel."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import numpy as np

from raysonar.driver.micro_batching import capacities
from raysonar.moe.cost_model import CostModel, Curve, LayerCost, PassCost, StepCost
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.timeline import Lane, Span
from raysonar.ranks.channel import RankInfo, StepChannel
from raysonar.step import SAMPLING, Rule, StepPlan, StepResult, Tracing

_SECONDS = 5.0
"""For each kind of step. After so many no larger size and no further round is begun."""
_STEP_TIMEOUT_S = 600.0
"""Of one step: the first may compile kernels."""
_ROUNDS = 5
_CONTEXT = 128
"""Tokens that a decode row has computed before."""
_CHUNK = 256
"""Tokens of a prefill row."""


@dataclass(frozen=True)
class _Rows:
    """A made-up step: equal rows on every data-parallel row of ranks."""

    count: int
    tokens: int
    context: int
    drafts: int

    @property
    def total(self) -> int:
        """Tokens of the batch."""
        return self.count * self.tokens


def profile(channel: StepChannel, info: RankInfo, *, token_budget: int, rows: int) -> CostModel:
    """Costs of decode and of prefill steps, a few seconds after the ranks are up and before anything is served.

    rows: data-parallel ones. What the steps leave behind in slots and pages is overwritten before it is read.
    """
    steps = _Steps(channel, info, rows)
    decode = steps.run(_decode_sizes(info, token_budget))
    prefill = steps.run(_prefill_sizes(info, token_budget))
    ranks = channel.timelines(_STEP_TIMEOUT_S)
    return CostModel(decode=_step_cost(decode, ranks), prefill=_step_cost(prefill, ranks))


def _decode_sizes(info: RankInfo, token_budget: int) -> Iterator[_Rows]:
    """1, 2, 4, ... rows of 1 + k tokens (fewer, where no more fit), up to all slots."""
    room = min(info.max_model_len - 1, info.pages * info.page_size)  # of one text
    drafts = min(info.speculative_tokens, token_budget - 1, room - 1)
    context = min(_CONTEXT, room - 1 - drafts)
    pages = -(-(context + 1 + drafts) // info.page_size)
    most = min(info.slots, info.pages // pages, token_budget // (1 + drafts))
    count = 1
    while count <= most:
        yield _Rows(count, 1 + drafts, context, drafts)
        count *= 2


def _prefill_sizes(info: RankInfo, token_budget: int) -> Iterator[_Rows]:
    """16, 64, ... tokens in rows of one chunk, up to what a step holds."""
    chunk = min(_CHUNK, info.max_model_len - 1, info.pages * info.page_size, token_budget)
    per_row = -(-chunk // info.page_size)
    most = min(token_budget, chunk * min(info.slots, info.pages // per_row))
    size = min(16, chunk)
    while size <= most:
        yield _Rows(max(size // chunk, 1), min(size, chunk), 0, 0)
        size *= 4


@dataclass
class _Measured:
    """Steps of one size."""

    traced: list[tuple[int, float]] = field(default_factory=list)
    """(number, seconds until the result), of unsplit ones."""
    tried: dict[int, list[float]] = field(default_factory=lambda: {1: [], 2: []})
    """Seconds with the draft run, of untraced ones, by halves."""


class _Steps:
    """Sends made-up steps and remembers which were which."""

    def __init__(self, channel: StepChannel, info: RankInfo, rows: int) -> None:
        self._channel, self._info, self._rows = channel, info, rows
        self._number = 0
        self._random = np.random.default_rng(0)

    def run(self, sizes: Iterable[_Rows]) -> dict[int, _Measured]:
        """What steps of each size take, by tokens.

        Each size once a round: a slow spell of the machine then spoils a few steps of all sizes, not all of one.
        """
        deadline = time.perf_counter() + _SECONDS
        measured: dict[_Rows, _Measured] = {}
        for size in sizes:
            if measured and time.perf_counter() > deadline:
                break
            self._run_one(size, 1)  # allocates, compiles
            measured[size] = _Measured()
        for number in range(_ROUNDS):
            if number and time.perf_counter() > deadline:
                break
            for size, steps in measured.items():
                _, whole, _ = self._run_one(size, 1)
                _, split, draft_of_whole = self._run_one(size, 2)
                number_traced, seconds, draft_of_split = self._run_one(size, 1, Tracing.SETTLED)
                steps.tried[1].append(whole + draft_of_whole)
                steps.tried[2].append(split + draft_of_split)
                steps.traced.append((number_traced, seconds))
        return {size.total: steps for size, steps in measured.items()}

    def _run_one(self, size: _Rows, halves: int, tracing: Tracing = Tracing.OFF) -> tuple[int, float, float]:
        """(number, seconds until its result, seconds of the draft run of the step before it)."""
        self._number -= 1  # no real step has such a number
        plan = replace(self._plan(size), halves=np.array([halves]), traced=np.array([tracing], np.int64))
        plans = [plan] * self._rows
        packed = replace(plan, capacities=capacities(plans, size.drafts, halves)).pack()
        self._channel.send([packed] * self._rows)
        seconds = [StepResult.unpack(each).seconds[0] for each in self._channel.receive(_STEP_TIMEOUT_S)]
        return (
            self._number,
            max(float(each["verify"]) for each in seconds),
            max(float(each["draft"]) for each in seconds),
        )

    def _plan(self, size: _Rows) -> StepPlan:
        """Random tokens, so that experts get about the same, as if the prefix cache held all but the last rows'."""
        slots = np.arange(size.count, dtype=np.int32)
        bound = size.context + size.tokens
        known = bound - size.drafts
        pages = -(-bound // self._info.page_size)
        sampling = np.zeros(size.count, SAMPLING)
        for name, value in {"rule": Rule.GREEDY, "temperature": 1, "top_p": 1, "repetition_penalty": 1}.items():
            sampling[name] = value
        sampling["logprobs"] = sampling["prompt_logprobs"] = -1
        return StepPlan(
            number=np.array([self._number], np.int64),
            draft_rounds=np.array([size.drafts], np.int64),
            admitted_slot=slots,
            admitted_length=np.full(size.count, known, np.int32),
            admitted_cached=np.full(size.count, size.context, np.int32),
            admitted_tokens=self._random.integers(self._info.vocab, size=size.count * known).astype(np.int32),
            admitted_sampling=sampling,
            page_slot=np.repeat(slots, pages),
            page_index=np.tile(np.arange(pages, dtype=np.int32), size.count),
            page=np.arange(size.count * pages, dtype=np.int32),
            row_slot=slots,
            row_tokens=np.full(size.count, size.tokens, np.int32),
            row_drafts=np.full(size.count, size.drafts, np.int32),
            row_samples=np.ones(size.count, np.bool_),
            row_bound=np.full(size.count, bound, np.int32),
        )


@dataclass
class _Times:
    """Nanoseconds of one rank in the layers of one kind, of one pass."""

    layers: int = 0
    total: int = 0
    waited: int = 0
    travelled: int = 0


def _step_cost(measured: dict[int, _Measured], ranks: Sequence[RankTimeline]) -> StepCost:
    by_rank = [_by_step(rank.spans) for rank in ranks]
    verify, draft = _Points(), _Points()
    for tokens, steps in measured.items():
        for step, seconds in steps.traced:
            spans = [each[step] for each in by_rank]
            frames = [{span.name: span for span in each if span.lane is Lane.STEP} for each in spans]
            proposing = max(_seconds(each["propose"]) for each in frames)
            verify.add(
                tokens, seconds - proposing, [_layers(s, f["target"]) for s, f in zip(spans, frames, strict=True)]
            )
            if all("draft" in each for each in frames):
                took = max(_seconds(each["draft"]) for each in frames)
                draft.add(tokens, took, [_layers(s, f["draft"]) for s, f in zip(spans, frames, strict=True)])
    tried = {halves: _curve({tokens: steps.tried[halves] for tokens, steps in measured.items()}) for halves in (1, 2)}
    return StepCost(verify=verify.cost(), draft=draft.cost() if draft.outside else None, tried=tried)


def _curve(points: Mapping[int, Sequence[float]]) -> Curve:
    """By the medians."""
    return Curve.of({tokens: median(values) for tokens, values in points.items()})


def _by_step(spans: Sequence[Span]) -> dict[int, list[Span]]:
    steps: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        steps[span.step].append(span)
    return steps


def _seconds(span: Span) -> float:
    return (span.end - span.start) / 1e9


def _layers(spans: Sequence[Span], frame: Span) -> dict[str, _Times]:
    """A rank's times in the layers that lie in a frame, by kind."""
    layers: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        if span.layer is not None and frame.start <= span.start and span.end <= frame.end:
            layers[span.layer].append(span)
    kinds: dict[str, _Times] = defaultdict(_Times)
    for own in layers.values():
        transfers = [span for span in own if span.kind == "transfer"]
        waits = {f"wait for {span.name}" for span in transfers}
        times = kinds["experts" if transfers else "dense"]
        times.layers += 1
        times.total += max(span.end for span in own) - min(span.start for span in own)
        times.waited += sum(span.end - span.start for span in own if span.name in waits)
        times.travelled += sum(span.end - span.start for span in transfers)
    return kinds


class _Points:
    """What a pass takes, by tokens, from several steps each."""

    def __init__(self) -> None:
        self.outside: dict[int, list[float]] = defaultdict(list)
        self._layers: dict[str, int] = {}
        self._kinds: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, tokens: int, seconds: float, ranks: Sequence[dict[str, _Times]]) -> None:
        """One step: the pass's seconds, and each rank's times.

        The slowest rank's computation counts; what a layer takes beyond it is communication, since faster ranks' waits
        are for the slowest too.
        """
        for kind in {kind for rank in ranks for kind in rank}:
            times = [rank[kind] for rank in ranks]
            self._layers[kind] = times[0].layers
            slowest = max(times, key=lambda each: each.total - each.waited)
            compute = slowest.total - slowest.waited
            total = max(each.total for each in times)
            hidden = max(slowest.travelled - slowest.waited, 0)
            seconds -= total / 1e9
            for name, value in {
                "compute": compute,
                "communication": total - compute + hidden,
                "hidden": hidden,
            }.items():
                self._kinds[kind, name][tokens].append(value / times[0].layers / 1e9)
        self.outside[tokens].append(max(seconds, 0.0))

    def cost(self) -> PassCost:
        """By the medians."""
        layers = {
            kind: (
                count,
                LayerCost(
                    compute=_curve(self._kinds[kind, "compute"]),
                    communication=_curve(self._kinds[kind, "communication"]),
                    hidden=_curve(self._kinds[kind, "hidden"]),
                ),
            )
            for kind, count in self._layers.items()
        }
        return PassCost(layers=layers, outside=_curve(self.outside))
