"""A scheduler and a FakeRank, joined by the least engine there can be."""

import itertools
from collections import Counter, deque

from support.fake_rank import FakeRank, HashModel

from raysonar.driver.params import SamplingParams
from raysonar.driver.request import Answer, Limits, make_request
from raysonar.driver.scheduler import Scheduler
from raysonar.ranks.channel import RankInfo
from raysonar.step import StepPlan

_ids = itertools.count()


def limits_of(info: RankInfo) -> Limits:
    """What requests to this rank are checked against."""
    return Limits(
        vocab=info.vocab,
        max_model_len=info.max_model_len,
        pages=info.pages,
        page_size=info.page_size,
        eos_token_ids=frozenset(info.eos_token_ids),
    )


class Bench:
    """Runs answers to their end: at their limit, or at a stop token inside a step's run of tokens."""

    def __init__(
        self,
        info: RankInfo,
        *,
        token_budget: int = 32,
        plans_in_flight: int = 1,
        prefix_caching: bool = True,
        stop: frozenset[int] = frozenset(),
    ) -> None:
        self.info, self.plans_in_flight, self.stop = info, plans_in_flight, stop
        self.limits = limits_of(info)
        self.model = HashModel(info.vocab)
        self.rank = FakeRank(info=info, token_budget=token_budget, model=self.model)
        self.scheduler = Scheduler(
            slots=info.slots,
            pages=info.pages,
            page_size=info.page_size,
            max_tokens=self.limits.tokens,
            token_budget=token_budget,
            speculative_tokens=info.speculative_tokens,
            prefix_caching=prefix_caching,
        )
        self.plans: deque[StepPlan] = deque()
        self.said: dict[Answer, list[int]] = {}
        self.open: list[Answer] = []

    def add(self, prompt: list[int], priority: int = 0, **params: object) -> Answer:
        """Queue a prompt."""
        request = make_request(
            request_id=str(next(_ids)),
            prompt=None,
            prompt_token_ids=prompt,
            params=SamplingParams(**params),
            limits=self.limits,
            sink=lambda _: None,
            priority=priority,
        )
        answer = request.answers[0]
        self.said[answer] = []
        self.open.append(answer)
        self.scheduler.add(answer)
        return answer

    def plan(self) -> bool:
        """Make the next plan, if there is one."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.plans.append(StepPlan.unpack(plan.pack()))
        return plan is not None

    def run_one(self) -> None:
        """Run the oldest plan and take in its result."""
        step = self.scheduler.commit(self.rank.step(self.plans.popleft()))
        for advance in step.advances:
            for token in advance.tokens:
                said = self.said[advance.answer]
                said.append(token)
                if self._ended(advance.answer):
                    self.finish(advance.answer)
                    break

    def crash(self) -> None:
        """The rank is lost, and another one comes in its place; answers are queued again with what they have said."""
        self.rank = FakeRank(info=self.info, token_budget=self.scheduler.token_budget, model=self.model)
        self.plans.clear()
        self.scheduler.restart()
        for answer in self.open:
            answer.rewind(len(answer.request.prompt_token_ids) + len(self.said[answer]))
            self.scheduler.add(answer)

    def finish(self, answer: Answer) -> None:
        """Let go of an answer."""
        self.scheduler.finish(answer)
        self.open.remove(answer)

    def drain(self, steps: int = 10_000) -> None:
        """Run until nothing is open; fails when that takes too many steps."""
        for _ in range(steps):
            while len(self.plans) < self.plans_in_flight and self.plan():
                pass
            if not self.plans:
                break
            self.run_one()
        assert not self.open, "answers are stuck"
        assert self.scheduler.running == self.scheduler.waiting == 0

    def _ended(self, answer: Answer) -> bool:
        said = self.said[answer]
        return said[-1] in self.stop or len(answer.request.prompt_token_ids) + len(said) == answer.limit

    def check_text(self, answer: Answer) -> None:
        """What an answer has said so far is what the model says, no token repeated or lost."""
        said = self.said[answer]
        assert said == self.model.continuation(answer.request.prompt_token_ids, len(said))

    def check_pages(self) -> None:
        """Allocated = free + referenced; each page is where the tables say, shared only where the texts are equal."""
        slots, pages = self.scheduler.slots, self.scheduler.pages
        holders: Counter[int] = Counter()
        places: dict[int, set[tuple[int, ...]]] = {}
        for slot, answer in enumerate(slots.answer):
            if answer is None:
                continue
            table = slots.pages[slot, : slots.held[slot]].tolist()
            assert len(set(table)) == len(table)
            holders.update(table)
            for index, page in enumerate(table):
                end = (index + 1) * self.info.page_size + 1
                text = tuple(slots.tokens[slot, : min(end, slots.known[slot])].tolist())
                places.setdefault(page, set()).add(text)
        assert pages.free + pages.referenced == pages.total
        assert pages.referenced == len(holders)
        assert pages.cached <= pages.free
        for page, count in holders.items():
            assert pages.references(page) == count
            assert len(places[page]) == 1, f"page {page} holds different texts"
