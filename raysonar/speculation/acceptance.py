"""Which drafts the target accepts, and what it says where it disagrees.

Every draw is keyed by (seed, position, stream), never by step. A draft that is discarded because one before it was
rejected is drawn again for the same position in the next step, with the same noise. That is unbiased: whether position
i's token is drafted in a step, what is drafted for it, and whether it is accepted depend on the noise of positions up
to i only (by induction: the tokens before it do), and a discarded draft leaves no trace in what is emitted. So when
position j's token is at last decided, the text before it is independent of all of position j's noise, used for a
discarded draft or not, and the rules below hold for it as with fresh noise. The same argument lets the recovery draw
and the bonus draw share the TARGET stream: at one position only one of them is ever emitted. What must not be shared is
noise that decides about one token at one position twice: the rejection rule's draft, its acceptance and its recovery
use three streams.
"""

import numpy as np
import torch
from torch import Tensor

from raysonar.kernels import noise
from raysonar.kernels.noise import Stream
from raysonar.speculation.sampler import SamplingRows
from raysonar.step import Ints, Rule


def choose(rows: SamplingRows, scores: Tensor, positions: Tensor) -> Tensor:
    """The target's tokens, without regard to drafts.

    GREEDY rows take the likeliest token (of equals the lowest), the others draw from softmax(scores) with the noise of
    (seed, position).

    Args:
        rows: N rows.
        scores: float32 [N, V], from `SamplingRows.scores`.
        positions: int64 [N], the index of the token that each row chooses.

    Returns:
        int64 [N].
    """
    return _draw(rows, scores, positions, drafting=False)


def propose(rows: SamplingRows, scores: Tensor, positions: Tensor) -> Tensor:
    """The draft's tokens: as `choose`, on the draft's scores.

    COUPLED rows share the target's noise, so that equal scores choose equal tokens; REJECTION rows draw with noise of
    their own, and their scores must be kept for `accept`.
    """
    return _draw(rows, scores, positions, drafting=True)


def accept(
    rows: SamplingRows,
    scores: Tensor,
    positions: Tensor,
    drafts: Tensor,
    draft_count: Ints,
    draft_scores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify R texts' drafts, at most K each, and add the target's own token.

    Text r has 1 + draft_count[r] consecutive logit rows, its last known token's and its drafts', in the order of texts.
    GREEDY and COUPLED accept a draft that is the target's choice. REJECTION (Leviathan et al., 2211.17192, section 2.3)
    accepts x with probability min(1, p(x)/q(x)), else draws from norm(max(0, p - q)).

    Args:
        rows: the N logit rows (each with its text's slot), N = sum(1 + draft_count).
        scores: the target's, float32 [N, V].
        positions: int64 [N], the index of the token that each logit row chooses.
        drafts: int64 [R, K], -1 after each text's last.
        draft_count: drafts of each text, [R], on the host.
        draft_scores: what REJECTION texts' drafts were proposed by, float32 [R, K, V], arbitrary elsewhere; None when
            no REJECTION text has drafts.

    Returns:
        count: int64 [R], accepted drafts plus one.
        tokens: int64 [R, K + 1], the accepted drafts and the target's token; arbitrary behind these.

    Raises:
        ValueError: REJECTION texts have drafts, but there are no draft_scores.
    """
    texts, most = drafts.shape
    first = np.cumsum(draft_count + 1) - (draft_count + 1)
    rejection = (rows.rules[first] == Rule.REJECTION) & (draft_count > 0)
    if rejection.any() and not rejection.all():
        count = torch.empty(texts, dtype=torch.int64, device=drafts.device)
        tokens = torch.empty(texts, most + 1, dtype=torch.int64, device=drafts.device)
        for part in (rejection, ~rejection):
            text = torch.from_numpy(np.flatnonzero(part)).to(drafts.device)
            inside = np.flatnonzero(np.repeat(part, draft_count + 1))
            row = torch.from_numpy(inside).to(drafts.device)
            count[text], tokens[text] = accept(
                rows.take(inside),
                scores[row],
                positions[row],
                drafts[text],
                draft_count[part],
                None if draft_scores is None else draft_scores[text],
            )
        return count, tokens
    if texts * (most + 1) == len(rows):
        place = torch.arange(len(rows), device=drafts.device).view(texts, most + 1)
    else:
        spread = np.minimum(first[:, None] + np.arange(most + 1), len(rows) - 1)
        place = torch.from_numpy(spread).to(drafts.device)
    if rejection.any():
        if draft_scores is None:
            raise ValueError("texts under the rejection rule need the scores their drafts were proposed by")
        return _reject(rows, scores, positions, drafts, place, draft_scores)
    return _match(rows, scores, positions, drafts, place)


def _draw(rows: SamplingRows, scores: Tensor, positions: Tensor, *, drafting: bool) -> Tensor:
    if not rows.noisy.size:
        return scores.argmax(1)
    if rows.noisy.size == len(rows):
        stream = rows.integers.draft_stream if drafting else Stream.TARGET
        return scores.add(noise.gumbel(rows.integers.noise_key, positions, stream, scores.shape[1])).argmax(1)
    chosen = scores.argmax(1)
    index = torch.from_numpy(rows.noisy).to(scores.device)
    chosen[index] = _draw(rows.take(rows.noisy), scores[index], positions[index], drafting=drafting)
    return chosen


def _match(
    rows: SamplingRows, scores: Tensor, positions: Tensor, drafts: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    """A draft is accepted when it is the target's choice: so what is emitted is the target's choices anyway."""
    tokens = choose(rows, scores, positions)[place]
    return (drafts == tokens[:, :-1]).cumprod(1).sum(1) + 1, tokens


def _reject(
    rows: SamplingRows, scores: Tensor, positions: Tensor, drafts: Tensor, place: Tensor, draft_scores: Tensor
) -> tuple[Tensor, Tensor]:
    """The full-distribution rule; `place` [R, K + 1] are the texts' logit rows."""
    texts, most = drafts.shape
    key, drafted = rows.integers.noise_key, place[:, :-1]
    p, q = scores.softmax(1), draft_scores.softmax(2)
    real, known = drafts >= 0, drafts.clamp(min=0)
    q_draft = q.gather(2, known[:, :, None]).squeeze(2)
    u = noise.uniform(key[drafted].flatten(), positions[drafted].flatten(), Stream.ACCEPT, 1).view(texts, most)
    accepted = ((u * q_draft < p[drafted, known]) & real).cumprod(1).sum(1, keepdim=True)

    last = place.gather(1, accepted).squeeze(1)
    refused_at = accepted.clamp(max=most - 1).squeeze(1)
    residual = (p[last] - q[torch.arange(texts, device=q.device), refused_at]).clamp_(min=0)
    # An empty residual means p = q, where only rounding can refuse a draft: p itself is then the right draw.
    recovering = (accepted < real.sum(1, keepdim=True)) & (residual.amax(1, keepdim=True) > 0)
    final = torch.where(recovering, residual.log_(), scores[last])
    token = final.add_(noise.gumbel(key[last], positions[last], Stream.TARGET, final.shape[1])).argmax(1, keepdim=True)
    tokens = torch.cat([known, token], 1).scatter_(1, accepted, token)
    return accepted.squeeze(1) + 1, tokens
