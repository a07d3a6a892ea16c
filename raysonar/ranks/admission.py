"""What a plan says of admitted slots, read back."""

from collections.abc import Iterator

import numpy as np

from raysonar.grammar import Grammar, GrammarKind
from raysonar.step import StepPlan


def grammars_of(plan: StepPlan) -> Iterator[tuple[int, Grammar, list[int]]]:
    """Each admitted slot that has a grammar, the grammar, and the tokens that its answer has so far."""
    if not plan.grammar_slot.size:
        return
    ends = np.cumsum(plan.grammar_size).tolist()
    grammars = [
        Grammar(GrammarKind(kind), plan.grammar_text[end - size : end].tobytes().decode())
        for kind, size, end in zip(plan.grammar_kind.tolist(), plan.grammar_size.tolist(), ends, strict=True)
    ]
    last = np.cumsum(plan.admitted_length)
    place = {slot: place for place, slot in enumerate(plan.admitted_slot.tolist())}
    for slot, index in zip(plan.grammar_slot.tolist(), plan.grammar_index.tolist(), strict=True):
        admitted = place[slot]
        first = last[admitted] - plan.admitted_length[admitted] + plan.admitted_sampling["prompt_tokens"][admitted]
        yield slot, grammars[index], plan.admitted_tokens[first : last[admitted]].tolist()
