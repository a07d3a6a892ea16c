"""The scheduler against a rank that checks every plan: whatever happens, every answer says what it must."""

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_rank import rank_info
from support.planning import Bench

from raysonar.driver.request import Answer
from raysonar.step import StepResult

PROMPTS = st.one_of(
    st.lists(st.integers(0, 12), min_size=1, max_size=30),
    st.tuples(st.sampled_from([4, 8, 11, 16, 20]), st.lists(st.integers(0, 2), max_size=6)).map(
        lambda parts: [7] * parts[0] + parts[1]  # prompts that share prefixes
    ),
).filter(bool)


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps are planned ahead, run, and answers end or are cut off, in any order."""

    @initialize(
        k=st.integers(0, 4),
        page_size=st.sampled_from([1, 2, 4]),
        pages=st.integers(12, 40),
        slots=st.integers(1, 6),
        budget=st.integers(1, 40),
        plans_in_flight=st.integers(1, 3),
        prefix_caching=st.booleans(),
        stop=st.sampled_from([frozenset(), frozenset({5})]),
    )
    def start(self, k, page_size, pages, slots, budget, plans_in_flight, prefix_caching, stop):
        info = rank_info(pages=pages, page_size=page_size, slots=slots, max_model_len=64, k=k)
        self.bench = Bench(
            info, token_budget=budget, plans_in_flight=plans_in_flight, prefix_caching=prefix_caching, stop=stop
        )
        self.answers: list[Answer] = []

    @rule(
        prompt=PROMPTS,
        tokens=st.integers(1, 30),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        priority=st.integers(-1, 1),
    )
    def add(self, prompt, tokens, prompt_logprobs, priority):
        room = self.bench.limits.tokens - 1
        prompt = prompt[:room]
        tokens = min(tokens, room + 1 - len(prompt))
        self.answers.append(self.bench.add(prompt, priority, max_tokens=tokens, prompt_logprobs=prompt_logprobs))

    @precondition(lambda self: len(self.bench.plans) < self.bench.plans_in_flight)
    @rule()
    def plan(self):
        self.bench.plan()

    @precondition(lambda self: self.bench.plans)
    @rule()
    def run_one(self):
        self.bench.run_one()

    @precondition(lambda self: self.bench.open)
    @rule(data=st.data())
    def abort(self, data):
        self.bench.finish(data.draw(st.sampled_from(self.bench.open)))

    @rule()
    def crash(self):
        self.bench.crash()
        assert self.bench.scheduler.pages.free == self.bench.info.pages

    @invariant()
    def pages_add_up(self):
        if hasattr(self, "bench"):
            self.bench.check_pages()

    def teardown(self):
        if hasattr(self, "bench"):
            aborted = [answer for answer in self.answers if answer.finished]
            self.bench.drain()
            self.bench.check_pages()
            assert self.bench.scheduler.pages.free == self.bench.info.pages
            for answer in self.answers:
                self.bench.check_text(answer)
                assert answer in aborted or self.bench.said[answer]


SchedulerMachine.TestCase.settings = settings(
    max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase


@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
@pytest.mark.parametrize("k", range(5))
def test_answers_stop_at_their_limit_at_every_offset(k, plans_in_flight):
    """Exactly max_tokens tokens, whether the limit is max_tokens' or the model's; the rank checks every page."""
    for tokens in range(1, 13):
        info = rank_info(pages=8, page_size=4, slots=2, max_model_len=17, k=k)
        bench = Bench(info, plans_in_flight=plans_in_flight)
        short = bench.add([3, 1, 4, 1], max_tokens=tokens)
        to_the_end = bench.add([2] * (17 - tokens))
        bench.drain()
        assert [len(bench.said[short]), len(bench.said[to_the_end])] == [tokens, tokens]
        bench.check_text(short)
        bench.check_text(to_the_end)


@pytest.mark.parametrize("plans_in_flight", [1, 2, 3])
def test_preempted_answers_say_the_same_and_the_earliest_is_never_preempted(plans_in_flight):
    info = rank_info(pages=20, page_size=2, slots=6, max_model_len=41, k=3)
    bench = Bench(info, plans_in_flight=plans_in_flight)
    answers = [bench.add([number], max_tokens=35) for number in range(6)]
    bench.drain()
    assert bench.scheduler.counters.preemptions > 0
    assert answers[0].admissions == 1
    assert max(answer.admissions for answer in answers) > 1
    for answer in answers:
        assert len(bench.said[answer]) == 35
        bench.check_text(answer)
    assert bench.scheduler.pages.free == 20


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_the_lowest_priority_value_is_never_preempted_however_late_it_came(plans_in_flight):
    info = rank_info(pages=20, page_size=2, slots=6, max_model_len=41, k=3)
    bench = Bench(info, plans_in_flight=plans_in_flight)
    answers = [bench.add([number], -number, max_tokens=35) for number in range(6)]
    bench.drain()
    assert bench.scheduler.counters.preemptions > 0
    assert answers[-1].admissions == 1
    assert answers[0].admissions > 1
    for answer in answers:
        bench.check_text(answer)


def test_waiting_answers_are_admitted_by_priority_then_arrival():
    bench = Bench(rank_info(slots=1, k=0))
    bench.add([1], max_tokens=3)
    bench.plan()
    order = [3, 0, -2, 0, -2]
    answers = [bench.add([2], priority, max_tokens=1) for priority in order]
    admitted = []
    while bench.plans:
        bench.run_one()
        bench.plan()
        admitted += [at for at, answer in enumerate(answers) if answer.slot >= 0 and at not in admitted]
    assert admitted == [2, 4, 1, 3, 0]


def test_a_plan_that_preempts_admits_nobody():
    bench = Bench(rank_info(pages=20, page_size=2, slots=6, max_model_len=41, k=3))
    for number in range(6):
        bench.add([number], max_tokens=35)
    preempting = 0
    while bench.open:
        before = bench.scheduler.counters.preemptions
        bench.plan()
        if bench.scheduler.counters.preemptions > before:
            preempting += 1
            assert not bench.plans[0].admitted_slot.size, "pages just freed belong to those who needed them"
        bench.run_one()
    assert preempting > 0


@pytest.mark.parametrize(("length", "admitted"), [(28, True), (29, False)])
def test_a_newcomer_leaves_each_running_answer_a_page_to_grow_into(length, admitted):
    bench = Bench(rank_info(pages=10, page_size=4, slots=4, max_model_len=33), token_budget=64)
    bench.add([1] * 5, max_tokens=8)
    bench.plan()
    bench.run_one()
    newcomer = bench.add([2] * length, max_tokens=4)
    bench.plan()
    assert (newcomer.slot >= 0) is admitted
    bench.drain()


def test_a_preempted_answer_finds_its_own_pages_again():
    bench = Bench(rank_info(pages=16, page_size=2, slots=2, max_model_len=33, k=0))
    bench.add([1], max_tokens=25)
    bench.add([2], max_tokens=25)
    bench.drain()
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.prefix_hit_tokens > 0


def test_an_answer_that_needs_every_page_gets_them():
    bench = Bench(rank_info(pages=8, page_size=4, slots=2, max_model_len=96, k=4), plans_in_flight=2)
    assert bench.limits.tokens == 33
    answer = bench.add([1, 2, 3])
    bench.drain()
    assert len(bench.said[answer]) == 30


def test_decode_rows_come_first_and_prompts_fill_the_rest_of_the_budget():
    bench = Bench(rank_info(pages=64, page_size=4, slots=4, k=1), token_budget=10)
    bench.add([1, 2, 3], max_tokens=40)
    bench.add([4, 5], max_tokens=40)
    bench.plan()
    bench.run_one()
    bench.add(list(range(12)), max_tokens=4)
    bench.plan()
    plan = bench.plans[0]
    assert plan.row_drafts.tolist() == [1, 1, 0], "a mixed batch speculates too"
    assert plan.row_tokens.tolist() == [2, 2, 6]
    assert plan.row_samples.tolist() == [True, True, False]
    bench.run_one()
    bench.plan()
    assert bench.plans[0].row_tokens.tolist() == [2, 2, 6]
    assert bench.plans[0].row_samples.all()
    bench.drain()


def test_drafts_give_way_when_the_budget_is_short_of_decode_rows():
    bench = Bench(rank_info(pages=64, page_size=4, slots=4, k=4), token_budget=5)
    answers = [bench.add([number], max_tokens=10) for number in range(4)]
    bench.plan()
    bench.run_one()
    bench.plan()
    assert bench.plans[0].row_tokens.tolist() == [1, 1, 1, 1]
    bench.drain()
    for answer in answers:
        bench.check_text(answer)


def test_answers_are_admitted_in_the_order_they_arrived():
    bench = Bench(rank_info(pages=8, page_size=4, slots=8, max_model_len=33, k=1))
    large = bench.add([1] * 20, max_tokens=2)
    larger = bench.add([2] * 20, max_tokens=2)
    small = bench.add([3], max_tokens=2)
    bench.plan()
    assert large.slot >= 0
    assert larger.slot == small.slot == -1, "the small one does not overtake"
    bench.drain()


def test_a_plan_ahead_waits_for_a_result_that_may_end_an_answer():
    bench = Bench(rank_info(k=1), plans_in_flight=3)
    bench.add([1, 2], max_tokens=3)
    assert bench.plan()
    assert bench.plan(), "one token is certain after the prompt's step; two more may come"
    assert bench.plans[1].row_drafts.tolist() == [1]
    assert not bench.plan(), "the answer may be finished by then"
    bench.drain()


def test_a_finished_answers_steps_in_flight_are_void_and_its_slot_can_be_used_at_once():
    bench = Bench(rank_info(pages=24, page_size=1, slots=1, max_model_len=24, k=2), plans_in_flight=2)
    first = bench.add([1, 2, 3], max_tokens=15)
    bench.plan()
    bench.plan()
    bench.finish(first)
    assert bench.scheduler.pages.free == 24
    second = bench.add([4, 5], max_tokens=15)
    bench.drain()
    assert bench.said[first] == []
    assert len(bench.said[second]) == 15
    bench.check_text(second)


def test_a_planner_call_for_256_running_rows_takes_under_a_millisecond():
    info = rank_info(pages=256 * 20, page_size=16, slots=256, max_model_len=320, k=1)
    bench = Bench(info, token_budget=4096)
    for number in range(256):
        bench.add([number % 13, number // 13 % 13], max_tokens=300)
    times = []
    for _ in range(40):
        began = time.perf_counter()
        plan = bench.scheduler.schedule()
        times.append(time.perf_counter() - began)
        assert plan is not None
        count = np.where(plan.row_drafts > 0, 2, 1).astype(np.int32)
        tokens = np.ones((256, 2), np.int32)
        bench.scheduler.commit(StepResult(number=plan.number, count=count, tokens=tokens))
    assert len(plan.row_slot) == 256
    assert sorted(times)[len(times) // 2] < 1e-3


@pytest.mark.parametrize(
    ("number", "count"), [(7, [1]), (0, [2]), (0, [0]), (0, [1, 1])], ids=["number", "many", "few", "rows"]
)
def test_a_result_that_is_not_the_plans_is_refused(number, count):
    bench = Bench(rank_info())
    bench.add([1, 2], max_tokens=4)
    bench.plan()
    result = StepResult(
        number=np.array([number]), count=np.array(count, np.int32), tokens=np.zeros((len(count), 3), np.int32)
    )
    with pytest.raises(ValueError, match="step"):
        bench.scheduler.commit(result)
