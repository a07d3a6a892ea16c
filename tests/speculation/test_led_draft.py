"""A draft that one rank of a row runs: the others propose the same, and see the same scores and token table."""

from collections import deque

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.sampling import records, table_of

from raysonar.moe.communicator import Communicator, Place
from raysonar.speculation.draft import DraftRows, Proposal, Verified
from raysonar.speculation.sampler import SamplingTable
from raysonar.speculation.target_draft import LedDraft
from raysonar.step import Rule

VOCAB, LENGTH, ROUNDS = 11, 16, 3


class End(Communicator):
    """One rank's end of a row of two; what the first broadcasts waits for the second."""

    def __init__(self, rank: int, link: deque[torch.Tensor]) -> None:
        super().__init__(Place(rank=rank, tensor=2), None, None)
        self._link = link
        self.calls: list[tuple[int, ...]] = []

    def broadcast_over_row(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(tuple(x.shape))
        if self.place.rank == 0:
            self._link.append(x.clone())
            return x
        return x.copy_(self._link.popleft())


class RandomDraft:
    """Proposes by random logits."""

    def __init__(self, sampling: SamplingTable) -> None:
        self._sampling = sampling

    def propose(
        self, rows: DraftRows, tokens: torch.Tensor, *, rounds: int, halves: int, capacities: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        dice = torch.Generator().manual_seed(5)
        proposal = Proposal(rows, tokens, rounds, self._sampling)
        for _ in range(int(rows.counts.max(initial=0))):
            proposal.narrow()
            proposal.add(torch.randn(len(proposal.rows.counts), VOCAB, generator=dice))
        return proposal.drafts, proposal.scores

    def refill(self, verified: Verified, tokens: torch.Tensor) -> None:
        raise AssertionError("not called here")


def rows_of(counts: list[int], starts: list[int]) -> DraftRows:
    slots = np.arange(len(counts), dtype=np.int32)
    return DraftRows(
        host_slots=slots,
        slots=torch.from_numpy(slots).long(),
        starts=torch.tensor(starts, dtype=torch.int64),
        page_table=torch.zeros((len(counts), 1), dtype=torch.int64),
        counts=np.array(counts, np.int32),
        bounds=np.array(starts, np.int32) + 1 + np.array(counts, np.int32),
    )


@pytest.mark.parametrize(
    ("rules", "counts", "starts"),
    [
        ([Rule.GREEDY, Rule.COUPLED, Rule.GREEDY], [3, 1, 2], [4, 14, 0]),
        ([Rule.GREEDY, Rule.REJECTION, Rule.REJECTION], [2, 3, 1], [1, 12, 14]),
        ([Rule.REJECTION], [1], [14]),
        ([], [], []),
    ],
    ids=["no scores", "scores of some", "fewer drafts than rounds, at the table's end", "no rows"],
)
def test_every_rank_of_a_row_proposes_what_its_first_does(
    rules: list[Rule], counts: list[int], starts: list[int]
) -> None:
    sampling = table_of(records(len(rules), rule=np.array(rules, np.int32)), VOCAB)
    link: deque[torch.Tensor] = deque()
    ends = [End(rank, link) for rank in range(2)]
    made, tables = [], []
    for end in ends:
        own = RandomDraft(sampling) if end.place.rank == 0 else None
        tokens = torch.full((len(rules), LENGTH), -7, dtype=torch.int32)
        draft = LedDraft(own, sampling, end)
        capacities = np.zeros((ROUNDS, 1), np.int64)
        made.append(draft.propose(rows_of(counts, starts), tokens, rounds=ROUNDS, halves=1, capacities=capacities))
        tables.append(tokens)
    (drafts, scores), (heard, heard_scores) = made
    assert torch.equal(drafts, heard)
    assert torch.equal(tables[0], tables[1])
    assert [(row >= 0).sum() for row in drafts] == counts
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        assert tables[0][row, start + 1 : start + 1 + count].tolist() == drafts[row, :count].tolist()
        assert (tables[0][row] >= 0).sum() == count
    rejecting = [row for row, rule in enumerate(rules) if rule == Rule.REJECTION]
    assert (scores is None) == (heard_scores is None) == (not rejecting)
    if scores is not None and heard_scores is not None:
        assert torch.equal(scores[rejecting], heard_scores[rejecting])
        assert scores[rejecting].abs().sum() > 0
    assert len(ends[0].calls) == 2, "the same collectives, scores or none"
    assert ends[0].calls == ends[1].calls
    assert not link


def test_a_rank_without_the_draft_has_nothing_to_refill() -> None:
    verified = Verified(
        batches=[],
        **dict.fromkeys(("inputs", "positions", "token_slots", "hidden", "slots", "last"), torch.empty(0)),  # type: ignore[arg-type]
    )
    LedDraft(None, table_of(records(1), VOCAB), End(1, deque())).refill(verified, torch.empty(0))
