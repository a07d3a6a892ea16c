"""From a step's tokens to deltas: text, log-probabilities and where an answer ends, token by token."""

from dataclasses import dataclass, field

import numpy as np

from raysonar.driver.detokenize import Decoder, Detokenizer, StopScanner
from raysonar.driver.outputs import Delta, FinishReason, TokenLogprob, origins_of
from raysonar.driver.request import Answer
from raysonar.step import StepResult


class Emitter:
    """One answer's way out. Nothing after the token that ends it leaves: neither text, ids nor log-probabilities."""

    def __init__(self, answer: Answer, decoder: Decoder | None, eos_token_ids: frozenset[int]) -> None:
        """Without a decoder the text stays empty."""
        params = answer.request.params
        self._answer = answer
        self._params = params
        self._eos: frozenset[int] = frozenset() if params.ignore_eos else eos_token_ids
        self._most = answer.limit - len(answer.request.prompt_token_ids)
        self._text = None if decoder is None else Detokenizer(decoder, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stop, include=params.include_stop_str_in_output)
        self.tokens = 0
        """Those of the answer that have gone through."""
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        for token in answer.tokens[len(answer.request.prompt_token_ids) :].tolist():
            self._add(token)  # given out by an engine that is gone: the text goes on where that one's ended

    def advance(self, tokens: list[int], logprobs: list[TokenLogprob] | None, drafts: int = 0) -> Delta:
        """The delta of a step's new tokens; its finish_reason says whether the answer ended with one of them.

        `drafts`: how many the step verified for the answer.
        """
        texts: list[str] = []
        while len(texts) < len(tokens) and self._finish_reason is None:
            texts.append(self._add(tokens[len(texts)]))
        used = len(texts)
        return Delta(
            index=self._answer.index,
            text="".join(texts),
            token_ids=tokens[:used],
            logprobs=None if logprobs is None else logprobs[:used],
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            origins=origins_of(len(tokens), drafts)[:used],
            lengths=[len(text) for text in texts],
        )

    def abort(self) -> Delta:
        """The last delta of an answer that is cut off; text held back for a stop string is let go."""
        return Delta(index=self._answer.index, text=self._rest(), token_ids=[], finish_reason="abort")

    def _add(self, token: int) -> str:
        self.tokens += 1
        stops = token in self._params.stop_token_ids
        if stops or token in self._eos:
            self._finish_reason, self._stop_reason = "stop", token if stops else None
            shown = self._characters(token) if stops and self._params.include_stop_str_in_output else ""
            return self._scanner.flush() + shown + self._rest()
        text, stop = self._scanner.add(self._characters(token), may_stop=self.tokens >= self._params.min_tokens)
        if stop is not None:
            self._finish_reason, self._stop_reason = "stop", stop
        elif self.tokens == self._most:
            self._finish_reason = "length"
            text += self._rest()
        return text

    def _characters(self, token: int) -> str:
        return "" if self._text is None else self._text.add(token)

    def _rest(self) -> str:
        return self._scanner.flush() + ("" if self._text is None else self._text.flush())


@dataclass(eq=False)
class ResultLogprobs:
    """Reads the log-probabilities of one StepResult, row by row."""

    result: StepResult
    _prompt_end: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._prompt_end = np.cumsum(self.result.prompt_count).tolist()

    def of_tokens(self, row: int, tokens: list[int], top: int) -> list[TokenLogprob]:
        """Of a row's new tokens, with the `top` likeliest tokens of each."""
        result = self.result
        chosen = result.logprob[row].tolist()
        if not top:
            return [TokenLogprob(token, chosen[i]) for i, token in enumerate(tokens)]
        ids, values = result.top_token[row, :, :top].tolist(), result.top_logprob[row, :, :top].tolist()
        return [
            TokenLogprob(token, chosen[i], dict(zip(ids[i], values[i], strict=True))) for i, token in enumerate(tokens)
        ]

    def of_prompt(self, row: int, start: int, answer: Answer) -> None:
        """Append what a row that began at token `start` brought for its prompt; what is known already is skipped."""
        logprobs = answer.prompt_logprobs
        if logprobs is None or not self._prompt_end:
            return
        result, top = self.result, answer.request.params.prompt_logprobs or 0
        end = self._prompt_end[row]
        first = end - int(result.prompt_count[row])
        for position, entry in enumerate(range(first, end), start + 1):
            if position == len(logprobs):
                ids = result.prompt_top_token[entry, :top].tolist() if top else []
                values = result.prompt_top_logprob[entry, :top].tolist() if top else []
                token = answer.request.prompt_token_ids[position]
                likeliest = dict(zip(ids, values, strict=True))
                logprobs.append(TokenLogprob(token, float(result.prompt_logprob[entry]), likeliest))
