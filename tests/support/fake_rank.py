"""A rank without a model that checks everything about its plans: the scheduler's partner in tests.

Its "KV cache" entries are hashes of the text up to their position (for the draft: up to the position after), written
into the plan's pages and read back from them before every row, so a page that was reused too early, shared wrongly or
never computed is seen the moment a row reads it. The next token is a hash of the text, and so are the drafts; about two
drafts in three are right.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from raysonar.errors import EngineFailedError
from raysonar.observe.chrome import RankTimeline
from raysonar.ranks.channel import RankInfo
from raysonar.step import SAMPLING, SECONDS, StepPlan, StepResult

MASK = (1 << 61) - 1


def extend(history: int, token: int) -> int:
    """The hash of a text with one more token."""
    return (history * 1_000_003 + token + 1) * 2_654_435_761 & MASK


def hash_of(tokens: list[int]) -> int:
    """The hash of a text."""
    history = 17
    for token in tokens:
        history = extend(history, token)
    return history


@dataclass
class HashModel:
    """Next tokens and drafts as functions of the text so far."""

    vocab: int = 13
    never: frozenset[int] = frozenset()
    """Tokens that are never chosen."""

    def next(self, history: int) -> int:
        """The token after a text."""
        token = (history >> 7) % self.vocab
        while token in self.never:
            token = (token + 1) % self.vocab
        return token

    def draft(self, history: int) -> int:
        """A guess of it."""
        return (self.next(history) + ((history >> 17) % 3 == 0)) % self.vocab

    def continuation(self, tokens: list[int], count: int) -> list[int]:
        """The next `count` tokens: what every answer must say."""
        history, out = hash_of(tokens), []
        for _ in range(count):
            out.append(self.next(history))
            history = extend(history, out[-1])
        return out

    def logprob(self, position: int, token: int) -> float:
        """A made-up log-probability that tells position and token apart."""
        return -(position + token / 100)


@dataclass
class Slot:
    """What the rank keeps of a request."""

    tokens: list[int]
    computed: int
    record: np.void
    pages: list[int] = field(default_factory=list)


class FakeRank:
    """Runs plans; raises AssertionError on the first one that breaks a rule."""

    def __init__(self, *, info: RankInfo, token_budget: int, model: HashModel | None = None) -> None:
        self.info, self.token_budget = info, token_budget
        self.model = model or HashModel(info.vocab)
        self.slots: dict[int, Slot] = {}
        size = info.page_size
        self.target_cache = [[None] * size for _ in range(info.pages)]
        self.draft_cache = [[None] * size for _ in range(info.pages)]
        self.steps = 0

    def step(self, plan: StepPlan) -> StepResult:
        """Check a plan, run it, check what it reads."""
        if not self.steps:  # the first since the rank was started
            self.steps = int(plan.number[0])
        assert plan.number.tolist() == [self.steps], "plans are numbered in order"
        self.steps += 1
        self._admit(plan)
        self._grow(plan)
        rows = len(plan.row_slot)
        assert rows > 0, "a plan has rows"
        assert len(set(plan.row_slot.tolist())) == rows, "a slot has one row"
        assert len(plan.row_tokens) == len(plan.row_drafts) == len(plan.row_samples) == len(plan.row_bound) == rows
        assert plan.row_tokens.sum() <= self.token_budget, "the token budget holds"
        width = 1 + int(plan.row_drafts.max())
        count, tokens = np.zeros(rows, np.int32), np.zeros((rows, width), np.int32)
        starts = [self.slots[slot].computed for slot in plan.row_slot.tolist()]
        for row in range(rows):
            gained = self._row(plan, row)
            count[row] = len(gained)
            tokens[row, : len(gained)] = gained
        return StepResult(
            number=plan.number,
            count=count,
            tokens=tokens,
            seconds=np.array([(0.125, 0.5, 0.0625, 0.25, 0.03125)], SECONDS),
            **self._logprobs(plan, count, tokens),
            **self._prompt_logprobs(plan, starts),
        )

    def _admit(self, plan: StepPlan) -> None:
        admitted = plan.admitted_slot.tolist()
        assert len(set(admitted)) == len(admitted)
        assert plan.admitted_sampling.dtype == SAMPLING
        assert plan.admitted_length.sum() == len(plan.admitted_tokens)
        ends = np.cumsum(plan.admitted_length)
        for slot, length, cached, end, record in zip(
            admitted, plan.admitted_length, plan.admitted_cached, ends, plan.admitted_sampling, strict=True
        ):
            assert 0 <= slot < self.info.slots
            assert 0 < length < self.info.max_model_len, "an admitted request has room for a token"
            assert 0 <= cached < length, "at least one token is computed"
            assert cached % self.info.page_size == 0, "whole pages are cached"
            assert not (cached and record["prompt_logprobs"] >= 0), "prompt log-probabilities are computed"
            assert 0 < record["prompt_tokens"] <= length
            tokens = plan.admitted_tokens[end - length : end].tolist()
            assert all(0 <= token < self.info.vocab for token in tokens)
            self.slots[slot] = Slot(tokens, int(cached), record.copy())
        assert set(admitted) <= set(plan.row_slot.tolist()), "who is admitted has a row"
        assert set(plan.banned_slot.tolist()) | set(plan.bias_slot.tolist()) <= set(admitted)

    def _grow(self, plan: StepPlan) -> None:
        for slot, index, page in zip(plan.page_slot, plan.page_index, plan.page, strict=True):
            table = self.slots[int(slot)].pages
            assert index == len(table), "page tables grow at their end"
            assert 0 <= page < self.info.pages
            assert page not in table
            table.append(int(page))
            assert len(table) * self.info.page_size < self.info.max_model_len - 1 + self.info.page_size

    def _row(self, plan: StepPlan, row: int) -> list[int]:
        slot = self.slots[int(plan.row_slot[row])]
        tokens, drafts = int(plan.row_tokens[row]), int(plan.row_drafts[row])
        known, end = len(slot.tokens), slot.computed + tokens
        assert tokens >= 1
        assert 0 <= drafts <= self.info.speculative_tokens
        if drafts:
            assert slot.computed == known - 1, "only a decode row has drafts"
            assert tokens == 1 + drafts
            assert plan.row_samples[row]
            assert known + 1 + drafts <= self.info.max_model_len, "no row can outgrow the model"
        else:
            assert end <= known, "a prefill row's tokens are known"
            assert plan.row_samples[row] == (end == known), "a row samples with its last token"
        assert end <= plan.row_bound[row] <= len(slot.pages) * self.info.page_size, "pages cover the row"
        assert plan.row_bound[row] < self.info.max_model_len
        texts = self._history(slot)
        gained = self._verify(slot, texts, tokens, drafts) if plan.row_samples[row] else []
        if not plan.row_samples[row]:
            self._write_target(slot, texts, slot.tokens[slot.computed : end])
        start = slot.computed
        slot.tokens += gained
        slot.computed = end - drafts + max(0, len(gained) - 1)
        if self.info.speculative_tokens:
            self._refill(slot, start, end)
        return gained

    def _history(self, slot: Slot) -> int:
        """The hash of the computed text, read from the cache; every entry must be right."""
        history = 17
        for position in range(slot.computed):
            history = extend(history, slot.tokens[position])
            page, offset = self._place(slot, position)
            assert self.target_cache[page][offset] == history, f"target entry {position} is not this text's"
            if self.info.speculative_tokens and position < len(slot.tokens) - 1:
                following = extend(history, slot.tokens[position + 1])
                assert self.draft_cache[page][offset] == following, f"draft entry {position} is not this text's"
        return history

    def _verify(self, slot: Slot, history: int, tokens: int, drafts: int) -> list[int]:
        known = slot.tokens[slot.computed :]
        after_known = history
        for token in known:
            after_known = extend(after_known, token)
        proposed, guess = [], after_known
        for number in range(drafts):
            proposed.append(self.model.draft(guess))
            guess = extend(guess, proposed[-1])
            if number + 1 < drafts:  # the draft's own run writes entries, which the refill replaces
                page, offset = self._place(slot, len(slot.tokens) - 1 + number)
                self.draft_cache[page][offset] = -1
        assert len(known) + drafts == tokens
        self._write_target(slot, history, known + proposed)
        gained = [self.model.next(after_known)]
        for draft in proposed:
            if draft != gained[-1]:
                break
            after_known = extend(after_known, draft)
            gained.append(self.model.next(after_known))
        return gained

    def _write_target(self, slot: Slot, history: int, tokens: list[int]) -> None:
        for position, token in enumerate(tokens, slot.computed):
            history = extend(history, token)
            page, offset = self._place(slot, position)
            self.target_cache[page][offset] = history

    def _refill(self, slot: Slot, start: int, end: int) -> None:
        for position in range(start, end):
            page, offset = self._place(slot, position)
            known = position + 1 < len(slot.tokens)
            self.draft_cache[page][offset] = hash_of(slot.tokens[: position + 2]) if known else -2

    def _place(self, slot: Slot, position: int) -> tuple[int, int]:
        return slot.pages[position // self.info.page_size], position % self.info.page_size

    def _top(self, position: int, token: int, count: int) -> list[tuple[int, float]]:
        likeliest = [(token + i) % self.info.vocab for i in range(count)]
        return [(each, self.model.logprob(position, each)) for each in likeliest]

    def _logprobs(self, plan: StepPlan, count: np.ndarray, tokens: np.ndarray) -> dict[str, np.ndarray]:
        wanted = [int(self.slots[slot].record["logprobs"]) for slot in plan.row_slot.tolist()]
        if max(wanted) < 0:
            return {}
        rows, width = tokens.shape
        chosen = np.zeros((rows, width), np.float32)
        top_token = np.zeros((rows, width, max(wanted)), np.int32)
        top_logprob = np.zeros((rows, width, max(wanted)), np.float32)
        for row, slot in enumerate(plan.row_slot.tolist()):
            first = len(self.slots[slot].tokens) - count[row]
            for column in range(count[row] if wanted[row] >= 0 else 0):
                token = int(tokens[row, column])
                chosen[row, column] = self.model.logprob(first + column, token)
                for place, (each, value) in enumerate(self._top(first + column, token, wanted[row])):
                    top_token[row, column, place], top_logprob[row, column, place] = each, value
        return {"logprob": chosen, "top_token": top_token, "top_logprob": top_logprob}

    def _prompt_logprobs(self, plan: StepPlan, starts: list[int]) -> dict[str, np.ndarray]:
        records = [self.slots[slot].record for slot in plan.row_slot.tolist()]
        most = max(int(record["prompt_logprobs"]) for record in records)
        if most < 0:
            return {}
        counts, entries = [], []
        for row, record in enumerate(records):
            slot = self.slots[int(plan.row_slot[row])]
            positions = range(starts[row] + 1, starts[row] + int(plan.row_tokens[row]) + 1)
            asked = record["prompt_logprobs"] >= 0 and not plan.row_drafts[row]
            covered = [p for p in positions if asked and p < record["prompt_tokens"]]
            counts.append(len(covered))
            entries += [(p, slot.tokens[p]) for p in covered]
        tops = [self._top(position, token, most) for position, token in entries]
        return {
            "prompt_count": np.array(counts, np.int32),
            "prompt_logprob": np.array([self.model.logprob(p, t) for p, t in entries], np.float32),
            "prompt_top_token": np.array([[t for t, _ in top] for top in tops], np.int32).reshape(len(entries), most),
            "prompt_top_logprob": np.array([[v for _, v in top] for top in tops], np.float32).reshape(-1, most)
            if most
            else np.zeros((len(entries), 0), np.float32),
        }


class FakeChannel:
    """A StepChannel over a FakeRank."""

    def __init__(self, rank: FakeRank, before: Callable[[StepPlan], None] = lambda plan: None) -> None:
        """`before` is called with each plan before it runs; what it raises fails the rank, TimeoutError excepted."""
        self.rank, self.before = rank, before
        self.closed = self.restarts = 0
        self.restart_error: Callable[[], Exception | None] = lambda: None
        """What a restart raises, if anything."""
        self.idle_error: Exception | None = None
        """What a rank at rest fails with."""
        self._plans: deque[bytes] = deque()

    def send(self, plans: Sequence[bytes]) -> None:
        [plan] = plans
        self._plans.append(plan)

    def receive(self, timeout: float) -> list[bytes]:
        plan = StepPlan.unpack(self._plans[0])
        try:
            self.before(plan)
            result = self.rank.step(plan).pack()
        except TimeoutError:
            raise
        except BaseException as error:
            raise EngineFailedError("the rank has failed") from error
        self._plans.popleft()
        return [result]

    def check(self) -> None:
        error, self.idle_error = self.idle_error, None
        if error is not None:
            raise error

    def restart(self) -> RankInfo:
        self.restarts += 1
        self._plans.clear()
        if (error := self.restart_error()) is not None:
            raise error
        old = self.rank
        self.rank = FakeRank(info=old.info, token_budget=old.token_budget, model=old.model)
        return old.info

    def timelines(self, timeout: float) -> list[RankTimeline]:
        return []

    def close(self) -> None:
        self.closed += 1


def rank_info(
    *, pages: int = 64, page_size: int = 4, slots: int = 8, max_model_len: int = 96, vocab: int = 13, k: int = 2
) -> RankInfo:
    """A small rank's."""
    return RankInfo(
        max_model_len=max_model_len,
        pages=pages,
        page_size=page_size,
        slots=slots,
        vocab=vocab,
        speculative_tokens=k,
        eos_token_ids=(1,),
        dtype="float32",
        device="cpu",
        cache_bytes=0,
        experts_travel=False,
        processes=(),
    )
