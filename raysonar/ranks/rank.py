"""One rank: it takes plans, verifies, publishes, and drafts."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.balancing import ExpertBalancer
from raysonar.model.batch import Batch, pack
from raysonar.model.cache import KvCache
from raysonar.model.loading import LoadedModel
from raysonar.moe.executor import run
from raysonar.observe.timeline import Timeline, now
from raysonar.ranks.admission import grammars_of
from raysonar.ranks.layout import Layout
from raysonar.ranks.logprobs import answer_logprobs, prompt_logprobs
from raysonar.ranks.slots import SlotTable
from raysonar.speculation.acceptance import accept
from raysonar.speculation.draft import Draft, DraftRows, Verified
from raysonar.speculation.grammar import GrammarCompiler
from raysonar.speculation.sampler import SamplingTable
from raysonar.step import SECONDS, StepPlan, StepResult, Tracing


class _Stopwatch:
    """Measures from now on: what a rank's work takes, and how much of it waits for other ranks."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._began, self._waited = timeline, now(), timeline.waited

    def seconds(self) -> tuple[float, float]:
        """(in all, of it blocked in waits for other ranks)."""
        return (now() - self._began) / 1e9, (self._timeline.waited - self._waited) / 1e9


class Rank:
    """The target, its draft, and the slots of one rank.

    A step is `verify`, whose result is published at once, and `draft`, which makes ready for the next step. Nothing of
    the draft waits for the driver.
    """

    def __init__(
        self,
        model: LoadedModel,
        cache: KvCache,
        slots: SlotTable,
        sampling: SamplingTable,
        draft: Draft | None,
        timeline: Timeline,
        compiler: GrammarCompiler,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        self._target, self._cache, self._slots = model.target, cache, slots
        self._sampling, self._draft, self._balancer = sampling, draft, balancer
        self._verified: Verified | None = None
        self._compiler = compiler
        self.timeline = timeline
        self._draft_seconds = (0.0, 0.0)
        """The last draft run, and what of it was exposed."""

    @torch.inference_mode()
    def verify(self, plan: StepPlan) -> StepResult:
        """Take the plan in, propose, verify, accept; returns what the rows have gained."""
        timeline, span = self.timeline, self.timeline.frame.span
        tracing = Tracing(int(plan.traced[0])) if plan.traced.size else Tracing.OFF
        timeline.begin(int(plan.number[0]), traced=tracing > Tracing.OFF, settled=tracing is Tracing.SETTLED)
        watch = _Stopwatch(timeline)
        load: dict[str, NDArray[Any]] = {}
        if self._balancer is not None and plan.rebalance.any():
            with span("move experts"):
                had = self._balancer.rebalance()
            load = {"expert_tokens": np.array(had.by_rank), "expert_imbalance": np.array([had.imbalance])}
        with span("take plan in"):
            self._admit(plan)
            layout = Layout.of(plan, self._cache.page_size)
            slots, starts, batches = self._pack(layout)
        with span("propose"):
            drafts, draft_scores = self._propose(layout, slots, starts)
            # fetched before the target is launched: behind it, they would be waited for until it is done
            seen = layout.seen(drafts.tolist()) if self._sampling.grammars.cover(layout.logit_slots) else []
        token_slots = self._upload(np.repeat(layout.slots, layout.tokens))
        all_positions = torch.cat([batch.positions for batch in batches])
        tokens_in = self._slots.tokens[token_slots, all_positions].long()
        inputs = tokens_in.split_with_sizes([len(batch.positions) for batch in batches])
        passes = [self._target(*each, self._cache) for each in zip(inputs, batches, strict=True)]
        with span("target"):
            hidden = torch.cat(run(passes))
        prompt = prompt_logprobs(layout, self._slots, self._target, hidden, inputs=(token_slots, all_positions))

        rows = self._sampling.rows(layout.logit_slots, lambda: seen)
        places = self._upload(layout.logit_rows)
        with span("logits"):
            logits = self._target.logits(hidden if len(places) == layout.size else hidden[places])
        with span("accept"):
            positions = all_positions[places] + 1
            scores = rows.scores(logits, positions, self._slots.tokens[:, : layout.longest])
            sampling_drafts = layout.drafts[layout.sampling]
            count, tokens = accept(rows, scores, positions, drafts, sampling_drafts, draft_scores)
            last = self._commit(layout, slots, starts, count, tokens)
        self._verified = Verified(
            batches=batches,
            inputs=tokens_in,
            positions=all_positions,
            token_slots=token_slots,
            hidden=hidden,
            slots=slots[self._upload(layout.sampling)],
            last=last,
        )
        answer = answer_logprobs(layout, self._slots, logits, tokens)
        seconds = np.array([(timeline.plan_wait / 1e9, *watch.seconds(), *self._draft_seconds)], SECONDS)
        result = self._result(plan, layout, count, tokens, seconds, **prompt, **answer, **load)
        self._follow_grammars(result, plan.row_slot)
        return result

    @torch.inference_mode()
    def draft(self) -> None:
        """Run the draft over the batch just verified; nothing to do without one."""
        verified, self._verified = self._verified, None
        if verified is None or self._draft is None:
            return
        watch = _Stopwatch(self.timeline)
        with self.timeline.frame.span("draft"):
            self._draft.refill(verified, self._slots.tokens)
            self._sampling.grammars.prepare()
        self._draft_seconds = watch.seconds()

    def _admit(self, plan: StepPlan) -> None:
        self._slots.update(plan)
        self._sampling.admit(
            plan.admitted_slot,
            plan.admitted_sampling,
            plan.bias_slot,
            plan.bias_token,
            plan.bias_value,
            plan.banned_slot,
            plan.banned_token,
        )
        for slot, grammar, answer in grammars_of(plan):
            self._sampling.constrain(slot, self._compiler.compile(grammar), answer)

    def _follow_grammars(self, result: StepResult, slots: NDArray[np.int32]) -> None:
        """Tell the grammars which tokens the rows have gained."""
        if self._sampling.grammars.cover(slots):
            new = [tokens[:count] for tokens, count in zip(result.tokens.tolist(), result.count.tolist(), strict=True)]
            self._sampling.grammars.accept(slots, new)

    def _pack(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor, list[Batch]]:
        """The rows' slots and starts, int64 [R], and their batch, or its halves."""
        slots = self._upload(layout.slots)
        starts = self._slots.computed[slots]
        batches = pack(
            layout.tokens,
            layout.bounds,
            starts,
            self._slots.page_table[slots],
            page_size=self._cache.page_size,
            dtype=self._target.dtype,
            halves=layout.halves,
            capacities=layout.capacities[0],
        )
        return slots, starts, batches

    def _propose(
        self, layout: Layout, slots: torch.Tensor, starts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Drafts of the S sampling rows, int64 [S, K], -1 where there is none, and the scores they were drawn from."""
        drafting = np.flatnonzero(layout.drafts)
        if self._draft is None or not layout.rounds:
            return slots.new_full((len(layout.sampling), 0), -1), None
        index = self._upload(drafting)
        rows = DraftRows(
            host_slots=layout.slots[drafting],
            slots=slots[index],
            starts=starts[index],
            page_table=self._slots.page_table[slots[index]],
            counts=layout.drafts[drafting],
            bounds=layout.bounds[drafting],
        )
        drafts, scores = self._draft.propose(
            rows,
            self._slots.tokens[:, : layout.longest],
            rounds=layout.rounds,
            halves=layout.halves,
            capacities=layout.capacities,
        )
        if len(drafting) == len(layout.sampling):
            return drafts, scores
        place = self._upload(np.searchsorted(layout.sampling, drafting))
        padded = drafts.new_full((len(layout.sampling), drafts.shape[1]), -1)
        padded[place] = drafts
        if scores is None:
            return padded, None
        padded_scores = scores.new_zeros((len(layout.sampling), *scores.shape[1:]))
        padded_scores[place] = scores
        return padded, padded_scores

    def _commit(
        self, layout: Layout, slots: torch.Tensor, starts: torch.Tensor, count: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Append the new tokens, move the computed lengths on.

        Tokens behind a row's `count` are written too; what is known ends at the computed length + 1. Returns each
        sampling row's last accepted place in the packed batch, int64 [S].
        """
        computed = starts + self._upload(layout.tokens)
        sampling = self._upload(layout.sampling)
        verified = self._upload(layout.drafts[layout.sampling])
        gained_from = computed[sampling] - verified
        width = torch.arange(tokens.shape[1], device=tokens.device)
        self._slots.tokens[slots[sampling, None], gained_from[:, None] + width] = tokens.to(torch.int32)
        computed[sampling] = gained_from + (count - 1)
        self._slots.computed[slots] = computed
        first = self._upload(layout.ends[layout.sampling]) - verified - 1
        return first + (count - 1)

    def _result(
        self,
        plan: StepPlan,
        layout: Layout,
        count: torch.Tensor,
        tokens: torch.Tensor,
        seconds: NDArray[Any],
        **more: NDArray[Any],
    ) -> StepResult:
        rows = layout.order[layout.sampling]
        gained = torch.cat((count[:, None], tokens), 1).to(torch.int32).cpu().numpy()
        counts = np.zeros(len(layout.order), np.int32)
        counts[rows] = gained[:, 0]
        new_tokens = np.zeros((len(layout.order), layout.width), np.int32)
        new_tokens[rows, : gained.shape[1] - 1] = gained[:, 1:]
        return StepResult(number=plan.number, count=counts, tokens=new_tokens, seconds=seconds, **more)

    def _upload(self, array: NDArray[np.generic]) -> torch.Tensor:
        """int64 on the device."""
        return torch.from_numpy(array.astype(np.int64)).to(self._slots.device, non_blocking=True)
