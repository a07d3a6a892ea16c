"""The planner: which rows every step computes, and where; what each result means for the answers."""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raysonar.driver.pages import PageAllocator, extend_keys
from raysonar.driver.request import Answer
from raysonar.driver.slots import Longs, Slots
from raysonar.observe.counters import Counters
from raysonar.step import SAMPLING, Ints, StepPlan, StepResult

_NO_ROWS: Longs = np.empty(0, np.int64)


class Advance(NamedTuple):
    """What one step gave one answer."""

    answer: Answer
    row: int
    start: int
    """Tokens computed before the step."""
    tokens: list[int]
    """The new ones."""
    drafts: int
    """How many were verified."""


@dataclass(frozen=True, eq=False)
class Step:
    """What a step was and what it brought."""

    number: int
    rows: int
    decode_tokens: int
    """Of decode rows, drafts too."""
    prefill_tokens: int
    drafted: int
    accepted: int
    advances: list[Advance]


@dataclass(frozen=True, eq=False)
class _Flight:
    """The rows of a plan whose result is not in yet; decode rows first."""

    number: int
    decode_rows: int
    slot: Longs
    tenancy: Longs
    start: Ints
    tokens: Ints
    drafts: Ints
    gain: Ints
    """Tokens that each row brings at the most: 0 for a row that does not sample."""


@dataclass
class _Draft:
    """The parts of a plan that Python makes one by one."""

    admitted: list[tuple[Answer, int]] = field(default_factory=list)
    """With the number of cached tokens."""
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    """(slot, index, page)."""
    chunks: list[tuple[int, int]] = field(default_factory=list)
    """(slot, tokens)."""


class Scheduler:
    """Continuous batching over slots and pages: by priority, then first come first served.

    Call `schedule` for the next plan, and `commit` with its result, in order. Several plans may be in flight: a row
    whose last result is not in yet is planned for the longest acceptance, in pages and in length, and a row that may
    have reached its limit waits. When pages run out the last in that order is preempted: it waits, with all of its
    tokens, to be computed again. The rank runs plans in their order, so pages and slots are free as soon as they are
    let go: a plan in flight that still writes there does so before any later plan's rows.
    """

    def __init__(
        self,
        *,
        slots: int,
        pages: int,
        page_size: int,
        max_tokens: int,
        token_budget: int,
        speculative_tokens: int,
        prefix_caching: bool = True,
    ) -> None:
        """`max_tokens` of prompt and answer together, at the most `pages * page_size + 1`."""
        self.page_size = page_size
        self.token_budget = token_budget
        self.speculative_tokens = speculative_tokens
        self.prefix_caching = prefix_caching
        self.pages = PageAllocator(pages)
        table = -(-(max_tokens - 1) // page_size)
        self.slots = Slots(slots=slots, tokens=max_tokens, pages=table, drafts=speculative_tokens)
        self.counters = Counters(speculative_tokens)
        self._flights: deque[_Flight] = deque()
        self._waiting: list[tuple[tuple[int, int], Answer]] = []
        self._waiting_count = 0
        self._plans = 0

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return self._waiting_count

    @property
    def running(self) -> int:
        """Answers that hold a slot."""
        return self.slots.total - self.slots.empty

    @property
    def in_flight(self) -> int:
        """Plans whose result is not in yet."""
        return len(self._flights)

    def add(self, answer: Answer) -> None:
        """Queue an answer by its priority and arrival."""
        heapq.heappush(self._waiting, (answer.order, answer))
        self._waiting_count += 1

    def finish(self, answer: Answer) -> None:
        """Let go of an answer, wherever it is: its slot and pages are free at once."""
        if answer.finished:
            return
        answer.finished = True
        if answer.slot >= 0:
            self.withdraw(answer)
        else:
            self._waiting_count -= 1  # its place in the heap is skipped when it comes up

    def withdraw(self, answer: Answer) -> None:
        """Take a running answer out of its slot, with the tokens it has; it does not wait for another."""
        self.pages.release(self.slots.release(answer))

    def restart(self) -> None:
        """The ranks hold nothing any more: every answer is withdrawn, pages are blank, plans in flight are void."""
        for answer in list(self.slots.answer):
            if answer is not None:
                self.slots.release(answer)
        self.pages = PageAllocator(self.pages.total)
        self._flights.clear()
        self._waiting.clear()
        self._waiting_count = 0

    def schedule(self) -> StepPlan | None:
        """The next step, or None when no row can be computed before a result is in or an answer is added."""
        draft, preemptions = _Draft(), self.counters.preemptions
        decode, drafts = self._choose_decode_rows()
        decode, drafts = self._grow(decode, drafts, draft)
        budget = self._continue_prefills(self.token_budget - decode.size - int(drafts.sum()), draft)
        if self.counters.preemptions == preemptions:
            self._admit(budget, draft)
        if not decode.size and not draft.chunks:
            return None
        return self._plan(decode, drafts, draft)

    def idle(self) -> StepPlan:
        """A plan without rows: the next step, when only others have something to do."""
        return self._plan(_NO_ROWS, np.empty(0, np.int32), _Draft())

    def _choose_decode_rows(self) -> tuple[Longs, Ints]:
        """Slots whose next row follows from known tokens only, and the drafts of each."""
        slots = self.slots
        held = slots.in_order()
        upper, limit = slots.known_upper[held], slots.limit[held]
        ready = (slots.computed_upper[held] >= slots.prefill_end[held]) & (upper < limit)
        chosen = held[ready][: self.token_budget]
        if not chosen.size:
            return _NO_ROWS, np.empty(0, np.int32)
        affordable = min(self.speculative_tokens, self.token_budget // chosen.size - 1)
        drafts: Ints = np.minimum(slots.limit[chosen] - slots.known_upper[chosen] - 1, affordable)
        return chosen, drafts

    def _grow(self, decode: Longs, drafts: Ints, draft: _Draft) -> tuple[Longs, Ints]:
        """Give the decode rows the pages they may write, preempting when there are not enough; the rows left."""
        slots = self.slots
        end = slots.computed_upper[decode] + 1 + drafts
        needed = -(-end // self.page_size) - slots.held[decode]
        short = np.flatnonzero(needed > 0)
        if not short.size:
            return decode, drafts
        for slot, count in zip(decode[short].tolist(), needed[short].tolist(), strict=True):
            while slots.answer[slot] is not None and self.pages.free < count:
                self._preempt(slots.last())
            if slots.answer[slot] is not None:
                held = int(slots.held[slot])
                pages = self.pages.take(count)
                slots.pages[slot, held : held + count] = pages
                slots.held[slot] += count
                draft.pages += [(slot, held + i, page) for i, page in enumerate(pages)]
        left = slots.tenancy[decode] >= 0
        return decode[left], drafts[left]

    def _preempt(self, answer: Answer) -> None:
        self.withdraw(answer)
        self.add(answer)
        self.counters.preemptions += 1

    def _continue_prefills(self, budget: int, draft: _Draft) -> int:
        """Chunks of admitted prompts (which hold all of their pages); returns what is left of the budget."""
        slots = self.slots
        held = slots.in_order()
        left = slots.prefill_end[held] - slots.computed_upper[held]
        for slot, tokens in zip(held[left > 0].tolist(), left[left > 0].tolist(), strict=True):
            if budget < 1:
                break
            chunk = min(tokens, budget)
            draft.chunks.append((slot, chunk))
            budget -= chunk
        return budget

    def _admit(self, budget: int, draft: _Draft) -> None:
        """Admit from the head of the queue while there are slots, pages for all known tokens, and budget."""
        while budget > 0 and self.slots.empty and (answer := self._head()) is not None:
            pages = self._pages_for(answer)
            if pages is None:
                return
            heapq.heappop(self._waiting)
            self._waiting_count -= 1
            shared, fresh = pages
            cached = len(shared) * self.page_size
            slot = self.slots.admit(answer, shared + fresh, len(shared), cached)
            draft.pages += [(slot, index, page) for index, page in enumerate(shared + fresh)]
            draft.admitted.append((answer, cached))
            chunk = min(len(answer.tokens) - cached, budget)
            draft.chunks.append((slot, chunk))
            budget -= chunk
            if not answer.admissions:
                answer.cached_tokens = min(cached, len(answer.request.prompt_token_ids))
            answer.admissions += 1
            answer.moments.admit()
            self.counters.prefix_hit_tokens += cached
            self.counters.prefix_lookup_tokens += len(answer.tokens)

    def _head(self) -> Answer | None:
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _pages_for(self, answer: Answer) -> tuple[list[int], list[int]] | None:
        """Hold pages for all known tokens of an answer: (cached ones, fresh ones); None when there are too few.

        A page is left for each running row to grow into, lest the newcomer be preempted at once.
        """
        shared: list[int] = []
        if self.prefix_caching:
            extend_keys(answer.keys, answer.tokens, self.page_size)
            if not answer.awaits_prompt_logprobs:
                shared = self.pages.match(answer.keys)
        fresh = -(-len(answer.tokens) // self.page_size) - len(shared)
        if fresh + self.pages.unreferenced(shared) + self.running > self.pages.free and self.running:
            return None
        self.pages.share(shared)
        return shared, self.pages.take(fresh)

    def _plan(self, decode: Longs, drafts: Ints, draft: _Draft) -> StepPlan:
        """Arrays of all rows, decode rows first; the slots' upper bounds move on."""
        slots = self.slots
        chunks = np.array(draft.chunks, np.int64).reshape(-1, 2)
        slot = np.concatenate((decode, chunks[:, 0]))
        row_tokens = np.concatenate((1 + drafts, chunks[:, 1])).astype(np.int32)
        row_drafts = np.concatenate((drafts, np.zeros(len(chunks), np.int32)))
        start = slots.computed_upper[slot]
        bound = start + row_tokens
        samples = bound >= slots.prefill_end[slot]
        gain = np.where(samples, 1 + row_drafts, 0).astype(np.int32)
        slots.computed_upper[slot] = bound
        slots.known_upper[slot] += gain
        flight = _Flight(self._plans, decode.size, slot, slots.tenancy[slot], start, row_tokens, row_drafts, gain)
        self._flights.append(flight)
        number = np.array([self._plans], np.int64)
        self._plans += 1
        pages = np.array(draft.pages, np.int32).reshape(-1, 3)
        return StepPlan(
            number=number,
            halves=np.ones(1, np.int64),
            draft_rounds=np.array([row_drafts.max(initial=0)], np.int64),
            **_admissions(draft.admitted),
            page_slot=pages[:, 0],
            page_index=pages[:, 1],
            page=pages[:, 2],
            row_slot=slot.astype(np.int32),
            row_tokens=row_tokens,
            row_drafts=row_drafts,
            row_samples=samples,
            row_bound=bound,
        )

    def commit(self, result: StepResult) -> Step:
        """Take in the oldest outstanding result; rows whose answer has left its slot since bring it nothing."""
        flight = self._flights.popleft()
        count = result.count
        if int(result.number[0]) != flight.number or count.shape != flight.gain.shape:
            raise ValueError(f"the rank sent the result of step {result.number[0]}, step {flight.number}'s was due")
        if np.any((count > flight.gain) | ((count < 1) & (flight.gain > 0))):
            raise ValueError(f"step {flight.number} brought {count.tolist()} tokens, at most {flight.gain.tolist()}")
        decode = flight.decode_rows
        drafted = int(flight.drafts.sum())
        self.counters.steps += 1
        return Step(
            number=flight.number,
            rows=flight.slot.size,
            decode_tokens=decode + drafted,
            prefill_tokens=int(flight.tokens[decode:].sum()),
            drafted=drafted,
            accepted=int(count[:decode].sum()) - decode,
            advances=self._advance(flight, result),
        )

    def _advance(self, flight: _Flight, result: StepResult) -> list[Advance]:
        slots = self.slots
        live = np.flatnonzero(slots.tenancy[flight.slot] == flight.tenancy)
        slot, count, tokens = flight.slot[live], result.count[live], result.tokens[live]
        for column in range(tokens.shape[1]):
            more = count > column
            slots.tokens[slot[more], slots.known[slot[more]] + column] = tokens[more, column]
        slack = flight.gain[live] - count
        slots.known[slot] += count
        slots.known_upper[slot] -= slack
        slots.computed[slot] += flight.tokens[live] - slack
        slots.computed_upper[slot] -= slack
        self._count_drafts(slot, count, flight.drafts[live])
        self._register(slot)
        return [
            Advance(answer, row, start, new[:n], drafts)
            for answer, row, start, new, n, drafts in zip(
                (slots.answer[s] for s in slot.tolist()),
                live.tolist(),
                flight.start[live].tolist(),
                tokens.tolist(),
                count.tolist(),
                flight.drafts[live].tolist(),
                strict=True,
            )
            if answer is not None
        ]

    def _count_drafts(self, slot: Longs, count: Ints, drafts: Ints) -> None:
        position = np.arange(self.speculative_tokens)
        drafted = position < drafts[:, None]
        accepted = drafted & (position < count[:, None] - 1)
        self.slots.drafted[slot] += drafted
        self.slots.accepted[slot] += accepted
        self.counters.drafted += drafted.sum(0)
        self.counters.accepted += accepted.sum(0)

    def _register(self, slot: Longs) -> None:
        """Let the prefix cache know of pages that are full since the step."""
        if not self.prefix_caching:
            return
        slots = self.slots
        full = slots.computed[slot] // self.page_size
        more: NDArray[np.bool_] = full > slots.registered[slot]
        for each, end in zip(slot[more].tolist(), full[more].tolist(), strict=True):
            answer = slots.answer[each]
            assert answer is not None
            extend_keys(answer.keys, slots.tokens[each, : slots.known[each]], self.page_size)
            for index in range(int(slots.registered[each]), end):
                self.pages.register(int(slots.pages[each, index]), answer.keys[index])
            slots.registered[each] = end


def _admissions(admitted: list[tuple[Answer, int]]) -> dict[str, NDArray[Any]]:
    """The plan's arrays for admitted answers."""
    if not admitted:
        return {}
    answers = [answer for answer, _ in admitted]
    bias = [(a.slot, token, value) for a in answers for token, value in a.request.params.logit_bias.items()]
    banned = np.array([(a.slot, token) for a in answers for token in a.request.banned], np.int32).reshape(-1, 2)
    return {
        "admitted_slot": np.array([a.slot for a in answers], np.int32),
        "admitted_length": np.array([len(a.tokens) for a in answers], np.int32),
        "admitted_cached": np.array([cached for _, cached in admitted], np.int32),
        "admitted_tokens": np.concatenate([a.tokens for a in answers]),
        "admitted_sampling": np.array([a.sampling() for a in answers], SAMPLING),
        "bias_slot": np.array([slot for slot, _, _ in bias], np.int32),
        "bias_token": np.array([token for _, token, _ in bias], np.int32),
        "bias_value": np.array([value for _, _, value in bias], np.float32),
        "banned_slot": banned[:, 0],
        "banned_token": banned[:, 1],
        **_grammars(answers),
    }


def _grammars(answers: list[Answer]) -> dict[str, NDArray[Any]]:
    """The plan's arrays for the grammars of admitted answers, each text once."""
    under = [(a.slot, grammar) for a in answers if (grammar := a.request.params.grammar) is not None]
    if not under:
        return {}
    places = {grammar: place for place, grammar in enumerate(dict.fromkeys(grammar for _, grammar in under))}
    texts = [grammar.text.encode() for grammar in places]
    return {
        "grammar_slot": np.array([slot for slot, _ in under], np.int32),
        "grammar_index": np.array([places[grammar] for _, grammar in under], np.int32),
        "grammar_kind": np.array([grammar.kind for grammar in places], np.int32),
        "grammar_size": np.array([len(text) for text in texts], np.int32),
        "grammar_text": np.frombuffer(b"".join(texts), np.uint8),
    }
