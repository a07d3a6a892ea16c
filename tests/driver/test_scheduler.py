"""The scheduler against a rank that checks every plan: whatever happens, every answer says what it must."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.fake_rank import rank_info
from support.planning import Bench

from raysonar.driver.request import Answer

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

    @rule(prompt=PROMPTS, tokens=st.integers(1, 30), prompt_logprobs=st.sampled_from([None, None, None, 1]))
    def add(self, prompt, tokens, prompt_logprobs):
        room = self.bench.limits.tokens - 1
        prompt = prompt[:room]
        tokens = min(tokens, room + 1 - len(prompt))
        self.answers.append(self.bench.add(prompt, max_tokens=tokens, prompt_logprobs=prompt_logprobs))

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
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSchedulerMachine = SchedulerMachine.TestCase
