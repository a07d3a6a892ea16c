"""Prompts go to who has their beginning: what is remembered, for how much, and who is chosen."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raysonar.serving.generation import Chat, Prompt
from raysonar.serving.prefixes import BLOCK_BYTES, MAX_BLOCKS, Prefixes, choose, prefix_keys

REPLICAS = ["a", "b", "c"]
MOST = 12

texts = st.text(st.characters(codec="utf-8"), max_size=3 * BLOCK_BYTES)


def common_blocks(first: bytes, second: bytes) -> int:
    """Full blocks of both that are equal up to there."""
    blocks = 0
    end = BLOCK_BYTES
    while end <= min(len(first), len(second)) and first[:end] == second[:end]:
        blocks, end = blocks + 1, end + BLOCK_BYTES
    return blocks


def common_keys(first: Prompt, second: Prompt) -> int:
    """Leading keys of both that are equal; none after them is."""
    pairs = list(zip(prefix_keys(first), prefix_keys(second), strict=False))
    count = next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))
    assert not any(one == other for one, other in pairs[count:])
    return count


@settings(max_examples=200, deadline=None)
@given(texts, texts, texts)
def test_two_prompts_have_the_keys_of_their_common_blocks_in_common(beginning: str, one: str, other: str):
    first, second = beginning + one, beginning + other
    assert len(prefix_keys(first)) == len(first.encode()) // BLOCK_BYTES
    assert common_keys(first, second) == common_blocks(first.encode(), second.encode())


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1 << 40), max_size=80), st.integers(0, 80), st.integers(0, 1 << 40))
def test_token_ids_have_keys_too(tokens: list[int], place: int, token: int):
    other = [*tokens[:place], token, *tokens[place + 1 :]]
    per_block = BLOCK_BYTES // 8
    same = next(
        (at for at, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), min(len(tokens), len(other))
    )
    assert common_keys(tokens, other) == same // per_block


def test_a_chat_that_goes_on_begins_as_it_did():
    first = ({"role": "system", "content": "s" * 300}, {"role": "user", "content": "q" * 300})
    more = ({"role": "assistant", "content": "a"}, {"role": "user", "content": "and then?" * 30})
    keys, longer = prefix_keys(Chat(first)), prefix_keys(Chat(first + more))
    assert len(longer) > len(keys) > 4
    assert longer[: len(keys)] == keys


def test_what_a_template_reads_tells_chats_apart():
    messages = ({"role": "user", "content": "q" * 300},)
    tools: tuple[dict[str, Any], ...] = ({"type": "function", "function": {"name": "f"}},)
    keys = [prefix_keys(chat) for chat in (Chat(messages), Chat(messages, tools), Chat(messages, variables={"x": 1}))]
    assert len({each[0] for each in keys}) == 3


def test_long_prompts_are_looked_at_up_to_a_point():
    assert prefix_keys("x" * (MAX_BLOCKS + 9) * BLOCK_BYTES) == prefix_keys("x" * MAX_BLOCKS * BLOCK_BYTES)
    assert len(prefix_keys(Chat(({"role": "user", "content": "ü" * 10**6},)))) == MAX_BLOCKS
    assert len(prefix_keys([7] * 10**6)) == MAX_BLOCKS


def test_half_a_surrogate_does_no_harm():
    assert len(prefix_keys("\ud800" * BLOCK_BYTES)) == 3
    assert prefix_keys(Chat(({"role": "user", "content": "\ud800" * BLOCK_BYTES},)))


class PrefixMachine(RuleBasedStateMachine):
    """Prompts of up to 5 blocks of two kinds, 62 in all, against a list of what went where."""

    def __init__(self) -> None:
        super().__init__()
        self.prefixes: Prefixes[str] = Prefixes(MOST)
        self.went: list[tuple[str, str]] = []

    @rule(kinds=st.text("xy", min_size=0, max_size=5), replica=st.sampled_from(REPLICAS))
    def note(self, kinds: str, replica: str) -> None:
        self.prefixes.note(keys_of(kinds), replica)
        self.went.append((kinds, replica))
        # what was used last is remembered whole
        assert self.prefixes.depths(keys_of(kinds)).get(replica, 0) == len(kinds)

    @rule(kept=st.sets(st.sampled_from(REPLICAS)))
    def keep(self, kept: set[str]) -> None:
        self.prefixes.keep(kept)
        self.went = [(kinds, replica) for kinds, replica in self.went if replica in kept]

    @rule(kinds=st.text("xy", min_size=0, max_size=5))
    def depths_are_of_prompts_that_went_there(self, kinds: str) -> None:
        for replica, depth in self.prefixes.depths(keys_of(kinds)).items():
            assert any(other.startswith(kinds[:depth]) for other, where in self.went if where == replica)

    @rule(kinds=st.text("xy", min_size=1, max_size=5))
    def who_has_a_block_has_those_before_it(self, kinds: str) -> None:
        whole, part = (self.prefixes.depths(keys_of(each)) for each in (kinds, kinds[:-1]))
        assert {replica: min(depth, len(kinds) - 1) for replica, depth in whole.items() if len(kinds) > 1} == part

    @invariant()
    def memory_is_bounded_and_counted(self) -> None:
        assert len(self.prefixes) <= MOST
        assert all(0 <= self.prefixes.held(replica) <= len(self.prefixes) for replica in REPLICAS)
        assert sum(map(self.prefixes.held, REPLICAS)) >= len(self.prefixes)
        if not self.went:
            assert len(self.prefixes) == 0


def keys_of(kinds: str) -> list[bytes]:
    """Those of a prompt of such blocks."""
    return prefix_keys("".join(kind * BLOCK_BYTES for kind in kinds))


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@settings(max_examples=300, deadline=None)
@given(
    loads=st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 20), min_size=1),
    depths=st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 5)),
    held=st.dictionaries(st.sampled_from(REPLICAS), st.integers(0, 5)),
    spread=st.integers(0, 8),
)
def test_the_deepest_that_is_not_overloaded_is_chosen(loads, depths, held, spread):
    chosen = choose(loads, depths, held, spread)
    assert loads[chosen] - min(loads.values()) <= spread
    for other, load in loads.items():
        if depths.get(other, 0) > depths.get(chosen, 0):
            assert load - min(loads.values()) > spread
        elif depths.get(other, 0) == depths.get(chosen, 0):
            assert (loads[chosen], held.get(chosen, 0)) <= (load, held.get(other, 0)) or load - min(
                loads.values()
            ) > spread


def test_requests_of_one_beginning_are_shared_when_they_are_many():
    prefixes: Prefixes[str] = Prefixes()
    loads = dict.fromkeys(REPLICAS, 0)
    keys = prefix_keys("x" * 1000)
    for _ in range(90):
        chosen = choose(loads, prefixes.depths(keys), {}, spread=4)
        prefixes.note(keys, chosen)
        loads[chosen] += 1
    assert max(loads.values()) - min(loads.values()) <= 5
