"""Slots: the running answers as numpy columns, one element a slot."""

import numpy as np
from numpy.typing import NDArray

from raysonar.driver.outputs import Acceptance
from raysonar.driver.request import Answer
from raysonar.step import Ints

Longs = NDArray[np.int64]


class Slots:
    """What the planner knows of every slot.

    Counts come in two kinds: `known` and `computed` say what the committed results say; the `_upper` ones say what
    they can be at the most when every plan in flight has run. Prefill chunks gain what they say, so for a slot that
    is still prefilling both kinds of `computed` differ by the chunks in flight only.
    """

    def __init__(self, *, slots: int, tokens: int, pages: int, drafts: int) -> None:
        """For answers of at most `tokens` tokens and `pages` pages, with at most `drafts` draft tokens a row."""
        self.answer: list[Answer | None] = [None] * slots
        self.tenancy: Longs = np.full(slots, -1, np.int64)
        """Which admission holds the slot; -1: none. Results of an earlier tenancy are void."""
        self.arrival: Longs = np.full(slots, -1, np.int64)
        self.priority: Longs = np.zeros(slots, np.int64)
        self.known: Ints = np.zeros(slots, np.int32)
        self.known_upper: Ints = np.zeros(slots, np.int32)
        self.computed: Ints = np.zeros(slots, np.int32)
        self.computed_upper: Ints = np.zeros(slots, np.int32)
        self.prefill_end: Ints = np.zeros(slots, np.int32)
        """Tokens known at admission: rows before are prefill."""
        self.limit: Ints = np.zeros(slots, np.int32)
        self.held: Ints = np.zeros(slots, np.int32)
        """Pages in the page table."""
        self.registered: Ints = np.zeros(slots, np.int32)
        """Leading pages whose contents the prefix cache knows of."""
        self.tokens: Ints = np.zeros((slots, tokens), np.int32)
        self.pages: Ints = np.zeros((slots, pages), np.int32)
        self.drafted: Longs = np.zeros((slots, drafts), np.int64)
        self.accepted: Longs = np.zeros((slots, drafts), np.int64)
        self._empty = list(range(slots - 1, -1, -1))
        self._tenancies = 0

    @property
    def total(self) -> int:
        """Slots, empty or not."""
        return len(self.answer)

    @property
    def empty(self) -> int:
        """Slots that nothing holds."""
        return len(self._empty)

    def in_order(self) -> Longs:
        """The slots that are held: lowest priority value first, then earliest arrival."""
        held = np.flatnonzero(self.tenancy >= 0)
        return held[np.lexsort((self.arrival[held], self.priority[held]))]

    def last(self) -> Answer:
        """The last answer in that order."""
        answer = self.answer[int(self.in_order()[-1])]
        assert answer is not None
        return answer

    def admit(self, answer: Answer, pages: list[int], cached_pages: int, cached_tokens: int) -> int:
        """Give an answer a slot: its known tokens, of which `cached_tokens` are computed already. Returns the slot."""
        slot, known = self._empty.pop(), len(answer.tokens)
        self.answer[slot] = answer
        self.tenancy[slot] = self._tenancies
        self._tenancies += 1
        self.priority[slot], self.arrival[slot] = answer.order
        self.known[slot] = self.known_upper[slot] = self.prefill_end[slot] = known
        self.computed[slot] = self.computed_upper[slot] = cached_tokens
        self.limit[slot] = answer.limit
        self.held[slot] = len(pages)
        self.registered[slot] = cached_pages
        self.tokens[slot, :known] = answer.tokens
        self.pages[slot, : len(pages)] = pages
        self.drafted[slot] = self.accepted[slot] = 0
        answer.slot = slot
        return slot

    def release(self, answer: Answer) -> list[int]:
        """Empty an answer's slot: its tokens and acceptance go back to it. Returns the pages it held."""
        slot = answer.slot
        answer.tokens = self.tokens[slot, : self.known[slot]].copy()
        answer.acceptance += Acceptance(tuple(self.drafted[slot].tolist()), tuple(self.accepted[slot].tolist()))
        answer.slot = -1
        self.answer[slot] = None
        self.tenancy[slot] = self.arrival[slot] = -1
        self._empty.append(slot)
        pages: list[int] = self.pages[slot, : self.held[slot]].tolist()
        self.held[slot] = 0
        return pages
