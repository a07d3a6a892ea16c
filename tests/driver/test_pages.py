"""Pages: the prefix cache finds what is there, forgets the oldest, and never takes one text for another."""

import numpy as np
import pytest
from support.fake_rank import rank_info
from support.planning import Bench

from raysonar.driver.pages import PageAllocator, extend_keys


def keys_of(tokens, page_size=4):
    keys = []
    extend_keys(keys, np.array(tokens, np.int32), page_size)
    return keys


def test_a_page_has_a_key_only_once_the_token_after_it_is_known():
    assert len(keys_of(range(4))) == 0
    assert len(keys_of(range(5))) == 1
    assert len(keys_of(range(8))) == 1
    assert len(keys_of(range(9))) == 2


def test_a_key_covers_all_tokens_before_the_page_and_the_one_after_it():
    base = keys_of(range(9))
    for position in range(9):
        changed = list(range(9))
        changed[position] = 99
        differing = [a != b for a, b in zip(base, keys_of(changed), strict=True)]
        assert differing == [position <= 4, True]


def test_keys_grow_as_tokens_do():
    keys = []
    for length in range(1, 30):
        extend_keys(keys, np.arange(length, dtype=np.int32), 4)
        assert keys == keys_of(range(length))


def test_contents_are_forgotten_longest_free_first_and_only_when_no_blank_page_is_left():
    pages = PageAllocator(4)
    first, second = pages.take(2)
    pages.register(first, b"first")
    pages.register(second, b"second")
    pages.release([first])
    pages.release([second])
    assert (pages.free, pages.cached, pages.referenced) == (4, 2, 0)
    assert {*pages.take(2)}.isdisjoint({first, second})
    assert pages.match([b"first"]) == [first]
    assert pages.take(1) == [first]
    assert pages.match([b"first"]) == []
    assert pages.match([b"second"]) == [second]


def test_a_prefix_outlives_what_follows_it():
    pages = PageAllocator(2)
    table = pages.take(2)
    keys = keys_of(range(9))
    for page, key in zip(table, keys, strict=True):
        pages.register(page, key)
    pages.release(table)
    pages.take(1)
    assert pages.match(keys) == table[:1]


def test_a_shared_page_is_free_when_its_last_holder_lets_go():
    pages = PageAllocator(2)
    (page,) = pages.take(1)
    pages.register(page, b"key")
    pages.share([page])
    pages.release([page])
    assert (pages.free, pages.referenced) == (1, 1)
    pages.release([page])
    assert (pages.free, pages.referenced, pages.cached) == (2, 0, 1)
    with pytest.raises(ValueError, match="more often"):
        pages.release([page])


def test_more_pages_than_are_free_are_not_given():
    pages = PageAllocator(2)
    with pytest.raises(ValueError, match="3 pages were asked for, 2 are free"):
        pages.take(3)


@pytest.mark.parametrize("k", [0, 2])
def test_a_prompt_computes_only_what_no_earlier_one_has(k):
    bench = Bench(rank_info(pages=64, page_size=4, k=k))
    prompt = [number % 13 for number in range(22)]
    first = bench.add(prompt, max_tokens=3)
    bench.drain()
    again = bench.add(prompt, max_tokens=3)
    bench.plan()
    assert bench.plans[0].admitted_cached.tolist() == [20]
    assert bench.plans[0].row_tokens.tolist() == [2]
    bench.drain()
    assert (first.cached_tokens, again.cached_tokens) == (0, 20)
    assert bench.said[again] == bench.said[first]


def test_a_page_is_found_only_by_prompts_that_go_on_with_the_same_token():
    bench = Bench(rank_info(page_size=4))
    bench.add([1, 2, 3, 4, 5], max_tokens=1)
    bench.drain()
    same = bench.add([1, 2, 3, 4, 5, 9], max_tokens=1)
    other = bench.add([1, 2, 3, 4, 6], max_tokens=1)
    ends_there = bench.add([1, 2, 3, 4], max_tokens=1)
    bench.drain()
    assert [same.cached_tokens, other.cached_tokens, ends_there.cached_tokens] == [4, 0, 0]


def test_generated_tokens_are_found_too():
    bench = Bench(rank_info(page_size=4))
    answer = bench.add([1, 2, 3], max_tokens=12)
    bench.drain()
    follow_up = bench.add([1, 2, 3, *bench.said[answer], 5], max_tokens=2)
    bench.drain()
    assert follow_up.cached_tokens == 12, "14 tokens were computed"


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed():
    bench = Bench(rank_info(page_size=4))
    bench.add([1] * 20, max_tokens=1)
    bench.drain()
    asks = bench.add([1] * 20, max_tokens=1, prompt_logprobs=0)
    bench.drain()
    assert asks.cached_tokens == 0


def test_without_prefix_caching_nothing_is_kept():
    bench = Bench(rank_info(page_size=4), prefix_caching=False)
    bench.add([1] * 20, max_tokens=1)
    bench.drain()
    again = bench.add([1] * 20, max_tokens=1)
    bench.drain()
    assert again.cached_tokens == bench.scheduler.pages.cached == 0
