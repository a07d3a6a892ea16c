"""Answers under suspicion run alone, over all data-parallel rows, and then everything goes on."""

import numpy as np
import pytest
from support.fake_rank import rank_info
from support.planning import limits_of

from raysonar.driver.data_parallel import DataParallel, PlannedStep
from raysonar.driver.micro_batching import MicroBatcher
from raysonar.driver.params import SamplingParams
from raysonar.driver.recovery import PROVEN_TOKENS, Suspicion
from raysonar.driver.request import Answer, make_request
from raysonar.driver.scheduler import Scheduler
from raysonar.errors import RankLostError
from raysonar.step import SECONDS, StepPlan, StepResult

INFO = rank_info(pages=64, page_size=4, slots=4, max_model_len=80, k=0)


@pytest.fixture
def group() -> DataParallel:
    rows = [
        Scheduler(
            slots=INFO.slots,
            pages=INFO.pages,
            page_size=INFO.page_size,
            max_tokens=limits_of(INFO).tokens,
            token_budget=64,
            speculative_tokens=0,
        )
        for _ in range(2)
    ]
    return DataParallel(rows, micro_batcher=MicroBatcher("never", None))


def answers(count: int) -> list[Answer]:
    made = []
    for number in range(count):
        request = make_request(
            request_id=str(number),
            prompt=None,
            prompt_token_ids=[number + 1] * 6,
            params=SamplingParams(max_tokens=40),
            limits=limits_of(INFO),
            sink=lambda _: None,
        )
        made += request.answers
    return made


def run(group: DataParallel, step: PlannedStep) -> list[Answer]:
    """One new token for each row that samples; answers at their limit end. Returns whom the step was for."""
    ran = []
    for plan, row in zip(step.plans, group.rows, strict=True):
        ran += [row.slots.answer[slot] for slot in plan.row_slot.tolist()]
    for committed in group.commit([_result(plan) for plan in step.plans]):
        for advance in committed.advances:
            answer = advance.answer
            if len(advance.tokens) and int(group.rows[answer.data_rank].slots.known[answer.slot]) == answer.limit:
                group.finish(answer)
    return ran


def _result(plan: StepPlan) -> StepResult:
    rows = len(plan.row_slot)
    return StepResult(
        number=plan.number,
        count=plan.row_samples.astype(np.int32),
        tokens=np.full((rows, 1), 9, np.int32),
        seconds=np.zeros(1, SECONDS),
    )


def test_suspects_run_alone_one_after_the_other_and_then_all_go_on(group: DataParallel):
    made = answers(9)
    for answer in made:
        group.add(answer)
    for _ in range(3):
        assert len(run(group, group.schedule())) == 8
    assert len({answer.data_rank for answer in made}) == 2
    suspects = [answer for answer in made if answer.slot >= 0][:5]
    group.restart(suspects)
    for answer in made:
        group.add(answer)
    assert group.waiting == len(made)
    order, steps = [], 0
    group.finish(suspects[3])  # cut off while it waits
    while (step := group.schedule()) is not None:
        alone = group.alone
        ran = run(group, step)
        if alone is not None:
            assert ran == [alone]
            order += [alone] if not order or order[-1] is not alone else []
            steps += 1
    assert order == [suspects[0], suspects[1], suspects[2], suspects[4]]
    assert steps == len(order) * PROVEN_TOKENS
    assert all(answer.finished for answer in made)
    assert [len(answer.tokens) for answer in made if answer is not suspects[3]] == [46] * 8
    assert group.waiting == group.running == 0
    assert all(row.pages.free == row.pages.total for row in group.rows)


def test_who_ran_at_the_same_failure_and_has_come_no_further_is_suspected():
    first, second, third = answers(3)
    error, other = ValueError("an index is out of bounds"), ValueError("another")

    def after(*failures):
        suspicion = Suspicion()
        return [suspicion.suspects(*failure) for failure in failures][-1]

    before = {first: 5, second: 5}
    assert after((error, before)) == []
    assert after((error, before), (error, {first: 5, third: 1})) == [first]
    assert after((error, before), (error, {first: 5 + PROVEN_TOKENS, second: 4 + PROVEN_TOKENS})) == [second]
    assert after((error, before), (other, before)) == []
    assert after((error, before), (other, before), (error, before)) == []
    lost = RankLostError("rank 1 is gone")
    assert after((lost, before), (lost, before), (lost, before)) == []
