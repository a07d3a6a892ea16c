"""A service whose model says what its prompt tells it to: tests of answers' formats, through the whole stack but the
tensors.

A prompt that holds `say(TEXT)` is answered with TEXT and the end of sequence; any other one with some tokens made of
hashes.
Drafts are right two times in three, so texts come in pieces of one to three tokens.
"""

import re
from pathlib import Path

from support.checkpoints import make_llama
from support.fake_rank import FakeChannel, FakeRank, HashModel, extend, hash_of, rank_info
from support.tokenizers import write_tokenizer

from raysonar.config import EngineConfig
from raysonar.driver.engine import Engine
from raysonar.driver.params import SamplingParams
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer
from raysonar.ranks.channel import RankInfo
from raysonar.serving import driver as driver_module
from raysonar.serving.driver import Driver
from raysonar.step import StepPlan

VOCAB, EOS = 420, 1
LENGTH = 4096
TEMPLATES = Path(__file__).parents[2] / "serve_configs" / "chat_templates"
MARKS = (
    "<think> </think> <｜User｜> <｜Assistant｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> "
    "<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜> "
    "<｜tool▁output▁end｜>"
).split()


def say(text: str) -> str:
    """A prompt's part that makes the model say `text`."""
    return f"say({text.encode().hex()})"


def make_folder(path: Path, *, template: str, special: bool = False) -> Path:
    """A model's folder with DeepSeek's marks in its vocabulary (as `special` tokens or not) and this chat template."""
    folder = make_llama(path, vocab_size=VOCAB, max_position_embeddings=LENGTH, tokenizer=False)
    return write_tokenizer(folder, template=template, template_file=True, added=MARKS, special=special)


class Script(HashModel):
    """Says what it was told, where it was told anything."""

    def __init__(self, vocab: int) -> None:
        super().__init__(vocab)
        self.lines: dict[int, int] = {}
        """The token after a text, by the text's hash."""

    def next(self, history: int) -> int:
        by_chance = EOS if (history >> 11) % 8 == 0 else super().next(history)
        return self.lines.get(history, by_chance)


class ScriptedRank(FakeRank):
    """Reads its lines in the prompts."""

    def __init__(self, *, info: RankInfo, token_budget: int, tokenizer: Tokenizer) -> None:
        self.script = Script(info.vocab)
        super().__init__(info=info, token_budget=token_budget, model=self.script)
        self.tokenizer = tokenizer

    def _admit(self, plan: StepPlan) -> None:
        super()._admit(plan)
        for slot in plan.admitted_slot.tolist():
            self._learn(self.slots[slot].tokens[: int(self.slots[slot].record["prompt_tokens"])])

    def _learn(self, prompt: list[int]) -> None:
        told = re.findall(r"say\(([0-9a-f]*)\)", self.tokenizer.decode(prompt))
        if told:
            history = hash_of(prompt)
            for token in [*self.tokenizer.encode(bytes.fromhex(told[-1]).decode(), add_special_tokens=False), EOS]:
                self.script.lines[history] = token
                history = extend(history, token)


def start_engine(config: EngineConfig) -> Engine:
    """An engine over a scripted rank that has generated tokens."""
    tokenizer = Tokenizer.from_folder(open_folder(config.model))
    info = rank_info(pages=2048, page_size=16, slots=8, max_model_len=config.max_model_len or LENGTH, vocab=VOCAB)
    rank = ScriptedRank(info=info, token_budget=config.scheduling.token_budget, tokenizer=tokenizer)
    engine = Engine(config, start=lambda _: (FakeChannel(rank), info))
    engine.generate([[0]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    return engine


class ScriptedDriver(Driver):
    """The driver deployment over a scripted rank."""

    def __init__(self, *args: object, **options: object) -> None:
        driver_module._started_engine = start_engine
        super().__init__(*args, **options)
