"""What the commands print: answers as they come, and figures."""

import io
import json
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from raysonar.driver.outputs import Acceptance, Delta


@dataclass
class Figures:
    """Of all prompts together. Times are from when the prompts were handed in, in seconds."""

    first: list[float] = field(default_factory=list)
    """When each prompt's first token came."""
    seconds: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    acceptance: Acceptance = Acceptance()

    def of(self, news: Iterator[tuple[int, Delta]]) -> Iterator[tuple[int, Delta]]:
        """`news` as it is, counted."""
        began = time.perf_counter()
        for place, delta in news:
            self.seconds = time.perf_counter() - began
            self.completion_tokens += len(delta.token_ids)
            if delta.prompt_token_ids is not None:
                self.first.append(self.seconds)
                self.prompt_tokens += len(delta.prompt_token_ids)
            self.acceptance += delta.acceptance or Acceptance()
            yield place, delta

    @property
    def first_token_seconds(self) -> float:
        """The mean."""
        return sum(self.first) / len(self.first)

    def json(self) -> dict[str, object]:
        """The summary object."""
        return {
            "prompts": len(self.first),
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.completion_tokens / self.seconds,
            "first_token_seconds": self.first_token_seconds,
            "acceptance": _acceptance_json(self.acceptance),
        }

    def text(self) -> str:
        """The summary for people."""
        rates = ", ".join(f"{rate:.0%} at {place}" for place, rate in enumerate(self.acceptance.rates, 1))
        return (
            f"[{self.completion_tokens} tokens in {self.seconds:.2f} s: {self.completion_tokens / self.seconds:.1f} "
            f"tokens/s; first token after {1000 * self.first_token_seconds:.0f} ms"
            f"; drafts accepted by position: {rates or 'none were made'}]"
        )


def _acceptance_json(acceptance: Acceptance) -> dict[str, object]:
    """By position in the draft."""
    return {"drafted": acceptance.drafted, "accepted": acceptance.accepted, "rates": acceptance.rates}


def in_order(news: Iterator[tuple[int, Delta]]) -> Iterator[tuple[int, Delta]]:
    """Prompt after prompt: deltas of a later one wait until the earlier ones have finished."""
    waiting: defaultdict[int, deque[Delta]] = defaultdict(deque)
    turn = 0
    for place, fresh in news:
        waiting[place].append(fresh)
        while waiting[turn]:
            delta = waiting[turn].popleft()
            yield turn, delta
            turn += delta.finish_reason is not None


def write_text(prompts: list[str], news: Iterator[tuple[int, Delta]]) -> None:
    """The answer alone; several, each under its prompt."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding lacks is shown as "?"
    begun = -1
    for place, delta in news:
        if place != begun and len(prompts) > 1:
            print(f"> {prompts[place]}")
        begun = place
        print(delta.text, end="\n" if delta.finish_reason else "", flush=True)


def write_json(prompts: list[str], news: Iterator[tuple[int, Delta]]) -> None:
    """An object a line for each prompt."""
    texts: list[str] = []
    token_ids: list[int] = []
    opening: Delta | None = None
    for place, delta in news:
        opening = opening or delta
        texts.append(delta.text)
        token_ids += delta.token_ids
        if delta.finish_reason is not None:
            result = {
                "index": place,
                "prompt": prompts[place],
                "text": "".join(texts),
                "token_ids": token_ids,
                "finish_reason": delta.finish_reason,
                "stop_reason": delta.stop_reason,
                "prompt_tokens": len(opening.prompt_token_ids or ()),
                "cached_tokens": opening.cached_tokens,
                "acceptance": _acceptance_json(delta.acceptance or Acceptance()),
            }
            print(json.dumps(result), flush=True)  # ASCII, so that a line is a line to every reader
            texts, token_ids, opening = [], [], None
