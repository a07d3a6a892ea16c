"""Sampling a grid of options so that every pair of values meets."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(options: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases in which every value of every option meets every value of every other at least once: greedy, seeded."""
    names, rng = list(options), random.Random(seed)
    wanted = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(names, 2)
        for a in range(len(options[one]))
        for b in range(len(options[two]))
    }
    cases = []
    while wanted:
        (one, a), (two, b) = min(wanted)
        candidates = [{name: rng.randrange(len(options[name])) for name in names} | {one: a, two: b} for _ in range(40)]
        best = max(candidates, key=lambda case: len(wanted & set(itertools.combinations(case.items(), 2))))
        wanted -= set(itertools.combinations(best.items(), 2))
        cases.append({name: options[name][at] for name, at in best.items()})
    return cases
