"""What structured output costs a rank: the masks of one step's rows, by vocabulary.

    python benchmarks/grammar.py --rows 32 --drafts 1

The vocabulary is the demo model's, filled up with pairs of its tokens to the size that is asked for. Times are CPU
time of one thread.
"""

import argparse
import random
import time
from collections.abc import Sequence

import numpy as np
import torch

from raysonar.demo import TARGET
from raysonar.grammar import Grammar
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer
from raysonar.speculation.grammar import GrammarCompiler, GrammarTable

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
        "sub": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "k": {"enum": ["red", "green", "blue"]}},
            "required": ["x", "k"],
        },
    },
    "required": ["name", "age", "tags", "sub"],
}
TEXT = '{"name": "Oslo and Bergen", "age": 12, "tags": ["north", "a fjord", "cold"], "sub": {"x": 1.5, "k": "green"}}'


class Vocabulary(Tokenizer):
    """The demo model's tokens and pairs of them, `size` in all."""

    def pieces(self) -> list[bytes]:
        pieces = super().pieces()
        words, seen, draw = [piece for piece in pieces if piece.strip()], set(pieces), random.Random(0)
        while len(pieces) < self.size:
            pair = draw.choice(words) + draw.choice(words)
            if pair not in seen:
                seen.add(pair)
                pieces.append(pair)
        return pieces

    size = 0


def steps(table: GrammarTable, tokens: Sequence[int], rows: int, drafts: int) -> list[float]:
    """CPU seconds of the masks of each step, until the text is through."""
    slots = np.arange(rows, dtype=np.int32)
    verified, seconds = np.repeat(slots, drafts + 1), []
    for at in range(0, len(tokens) - drafts, drafts + 1):
        began = time.process_time()
        for made in range(drafts):
            table.masks(slots, [tokens[at : at + made]] * rows)
        table.masks(verified, [tokens[at : at + made] for _ in slots for made in range(drafts + 1)])
        table.accept(slots, [tokens[at : at + drafts + 1]] * rows)
        seconds.append(time.process_time() - began)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for vocab in (2048, 32768, 129280):
        tokenizer = Vocabulary.from_folder(open_folder(TARGET))
        tokenizer.size = vocab
        compiler = GrammarCompiler(lambda made=tokenizer: made, vocab)  # type: ignore[misc]
        compiler.compile(Grammar.json_object())  # the library and the vocabulary are loaded once
        began = time.process_time()
        compiled = compiler.compile(Grammar.json_schema(SCHEMA))
        compiling = time.process_time() - began
        table = GrammarTable(vocab)
        for slot in range(options.rows):
            table.admit(slot, compiled, [])
        taken = steps(table, tokenizer.encode(TEXT, add_special_tokens=False), options.rows, options.drafts)
        print(
            f"vocabulary {vocab:>6}: compile {compiling * 1e3:5.1f} ms; masks of {options.rows} rows, {options.drafts} "
            f"drafts: median {np.median(taken) * 1e3:.2f} ms a step, most {max(taken) * 1e3:.2f} ms"
        )


if __name__ == "__main__":
    main()
