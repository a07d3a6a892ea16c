"""Every rank knows, before a step and without asking, the most tokens that any rank will dispatch."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_rank import rank_info
from support.planning import limits_of

from raysonar.driver.data_parallel import DataParallel
from raysonar.driver.micro_batching import MicroBatcher
from raysonar.driver.params import SamplingParams
from raysonar.driver.request import make_request
from raysonar.driver.scheduler import Scheduler
from raysonar.model.batch import half_tokens, pack, packing_order
from raysonar.step import StepPlan, StepResult


def packed(row_tokens: np.ndarray, halves: int, capacities: tuple[int, ...] = ()) -> list[int]:
    """The tokens of each half that `pack` makes of rows in packing order."""
    batches = pack(
        row_tokens,
        row_tokens,
        torch.zeros(len(row_tokens), dtype=torch.int64),
        torch.zeros((len(row_tokens), 64), dtype=torch.int64),
        page_size=4,
        dtype=torch.float32,
        halves=halves,
        capacities=capacities,
    )
    assert all(batch.capacities == capacities for batch in batches)
    return [len(batch.positions) for batch in batches]


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 90)), max_size=12), st.sampled_from([1, 2]))
@settings(max_examples=150, deadline=None)
def test_the_fuller_half_is_as_full_as_foretold(rows: list[tuple[int, int]], halves: int) -> None:
    tokens = np.array([count for count, _ in rows], np.int32)
    order = packing_order(tokens, np.array([sum(row) for row in rows], np.int32), 4)
    sizes = packed(tokens[order], halves, capacities=(3, 5))
    assert sum(sizes) == tokens.sum()
    assert max(sizes) == half_tokens(tokens, halves)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=12), st.data())
@settings(max_examples=25, deadline=None)
def test_every_plan_foretells_every_pass_of_every_row(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    k, halves, width = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 2])), data.draw(st.integers(1, 3))
    info = rank_info(k=k)
    limits = limits_of(info)
    schedulers = [
        Scheduler(
            slots=info.slots,
            pages=info.pages,
            page_size=info.page_size,
            max_tokens=limits.tokens,
            token_budget=24,
            speculative_tokens=k,
        )
        for _ in range(width)
    ]
    group = DataParallel(schedulers, micro_batcher=MicroBatcher("always" if halves == 2 else "never"))
    answers = []
    for index, (prompt, length) in enumerate(requests):
        params = SamplingParams(max_tokens=length, temperature=0)
        request = make_request(
            request_id=str(index),
            prompt=None,
            prompt_token_ids=[(index + i) % info.vocab for i in range(prompt)],
            params=params,
            limits=limits,
            sink=lambda _: None,
        )
        answers += request.answers
        group.add(request.answers[0])
    steps = 0
    while (step := group.schedule()) is not None:
        plans = step.plans
        steps += 1
        check(plans, halves)
        group.commit([result_of(plan) for plan in plans])
        for answer in answers:
            if not answer.finished and answer.slot >= 0:
                row = schedulers[answer.data_rank].slots
                if row.known[answer.slot] >= answer.limit:
                    group.finish(answer)
        assert steps < 2000
    assert steps > 0


def check(plans: list[StepPlan], halves: int) -> None:
    rounds = int(plans[0].draft_rounds[0])
    capacities = plans[0].capacities
    assert capacities.shape == (max(rounds, 1), len(plans))
    for row, plan in enumerate(plans):
        plan = StepPlan.unpack(plan.pack())
        assert (plan.capacities == capacities).all(), "all ranks must know the same"
        order = packing_order(plan.row_tokens, plan.row_bound, 4)
        assert max(packed(plan.row_tokens[order], halves)) == capacities[0, row]
        for step in range(1, rounds):
            extended = np.ones(int((plan.row_drafts > step).sum()), np.int32)
            assert max(packed(extended, halves)) == capacities[step, row]


def result_of(plan: StepPlan) -> StepResult:
    """Every sampling row gains one token."""
    rounds = int(plan.draft_rounds[0])
    return StepResult(
        number=plan.number,
        count=plan.row_samples.astype(np.int32),
        tokens=np.ones((len(plan.row_slot), 1 + rounds), np.int32),
        seconds=np.zeros(2),
    )
