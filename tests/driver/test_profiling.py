"""What costs are measured with: steps that any engine can take, however small, and at least one of each kind."""

from collections import deque
from collections.abc import Sequence

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raysonar.driver.profiling import profile
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.timeline import Lane, Span
from raysonar.ranks.channel import RankInfo
from raysonar.step import SECONDS, StepPlan, StepResult, Tracing
from tests.support.fake_rank import rank_info


class CheckingChannel:
    """A StepChannel that checks plans against the limits; its steps take a second, its draft runs half of one."""

    def __init__(self, info: RankInfo, token_budget: int) -> None:
        self.info, self.token_budget = info, token_budget
        self.spans: list[Span] = []
        self.results: deque[bytes] = deque()

    def send(self, plans: Sequence[bytes]) -> None:
        """Check a step's plan."""
        plan = StepPlan.unpack(plans[0])
        rows, info = len(plan.row_slot), self.info
        assert plan.row_tokens.sum() <= self.token_budget
        assert 1 <= rows <= info.slots
        assert (plan.row_drafts <= info.speculative_tokens).all()
        assert (plan.admitted_length + plan.row_drafts < info.max_model_len).all(), "there is room for a token more"
        assert (plan.admitted_cached + plan.row_tokens == plan.row_bound).all()
        assert (plan.row_bound == plan.admitted_length + plan.row_drafts).all()
        assert (plan.page < info.pages).all()
        assert len(set(plan.page.tolist())) == len(plan.page)
        assert (np.bincount(plan.page_slot) * info.page_size >= plan.row_bound).all(), "pages cover the rows"
        if plan.traced[0] > Tracing.OFF:
            number = int(plan.number[0])
            for name in ("propose", "target", "draft"):
                self.spans.append(Span(name, "work", 0, 10**8, Lane.STEP, number, None))
        seconds = np.array([(0, 1, 0, 0.5, 0)], SECONDS)
        self.results.append(StepResult(number=plan.number, seconds=seconds).pack())

    def receive(self, timeout: float) -> list[bytes]:
        """The oldest step's result."""
        return [self.results.popleft()]

    def check(self) -> None:
        """All is well."""

    def restart(self) -> RankInfo:
        """Not expected."""
        raise NotImplementedError

    def timelines(self, timeout: float) -> list[RankTimeline]:
        """One rank's."""
        return [RankTimeline(host="here", process=1, spans=self.spans, clock_offset=0)]

    def close(self) -> None:
        """Nothing to end."""


@settings(deadline=None, max_examples=50)
@given(
    pages=st.integers(2, 40),
    page_size=st.sampled_from([1, 2, 16, 1024]),
    slots=st.integers(1, 20),
    max_model_len=st.integers(2, 300),
    k=st.integers(0, 8),
    token_budget=st.integers(1, 300),
)
@example(pages=64, page_size=16, slots=64, max_model_len=1024, k=1, token_budget=1)
@example(pages=2, page_size=1, slots=64, max_model_len=1024, k=4, token_budget=1024)
@example(pages=64, page_size=16, slots=1, max_model_len=2, k=4, token_budget=1024)
def test_any_engine_can_be_measured(
    pages: int, page_size: int, slots: int, max_model_len: int, k: int, token_budget: int
) -> None:
    info = rank_info(pages=pages, page_size=page_size, slots=slots, max_model_len=max_model_len, k=k)
    costs = profile(CheckingChannel(info, token_budget), info, token_budget=token_budget, rows=1)
    for cost in (costs.decode, costs.prefill):
        for passes in ([1], [7, 3], [1000, 1, 1]):
            assert sum(cost.seconds(passes)) > 0
            assert cost.tried_ratio(1, passes, passes) > 0
            assert cost.tried_ratio(2, passes, passes) > 0
