"""What the two endpoints answer, in OpenAI's shapes.

An answer is a sequence of pieces: a stream sends each one, a whole answer is their sum. Completion i of prompt p is
choice p * n + i.
"""

import codecs
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raysonar.driver.outputs import Acceptance, Delta, TokenLogprob
from raysonar.serving.choices import ChoiceReader, Piece
from raysonar.serving.generation import Thinking, Vocabulary, begins_thinking
from raysonar.serving.parsers import AnswerFormat, is_thinking
from raysonar.serving.protocol import ChatBody, CompletionBody, GenerationBody

Json = dict[str, object]

DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity."""


def event(data: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


@dataclass
class Usage:
    """Tokens of one request, over all its prompts and completions."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    reasoning: int = 0
    acceptance: Acceptance = Acceptance()

    def add(self, delta: Delta) -> None:
        """Count a delta."""
        self.completion += len(delta.token_ids)
        if delta.prompt_token_ids is not None:
            self.prompt += len(delta.prompt_token_ids)
            self.cached += delta.cached_tokens
        if delta.acceptance is not None:
            self.acceptance += delta.acceptance

    def json(self) -> Json:
        """OpenAI's usage object."""
        accepted = sum(self.acceptance.accepted)
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.reasoning,
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(self.acceptance.drafted) - accepted,
            },
        }


class Answer(ABC):
    """The answer to one request."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, body: GenerationBody, vocabulary: Vocabulary | None) -> None:
        """`vocabulary` is needed where the body `needs_vocabulary`."""
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.body = body
        self._n = body.n or 1
        self._vocabulary = vocabulary or Vocabulary([])
        self._usage = Usage()

    @abstractmethod
    def _pieces(self, prompt: int, delta: Delta) -> Iterator[Piece]:
        """What a delta of the prompt's adds to its choices."""

    @abstractmethod
    def _chunk_choice(self, piece: Piece) -> Json: ...

    @abstractmethod
    def _whole_choice(self, piece: Piece) -> Json: ...

    def _own_piece(self, prompt: int, delta: Delta) -> Piece:
        index = prompt * self._n + delta.index
        logprobs: list[TokenLogprob | None] = [*(delta.logprobs or [])]
        origins = delta.origins[:] if self.body.return_token_origins else []
        tokens, reasons = delta.token_ids[:], (delta.finish_reason, delta.stop_reason)
        return Piece(index, delta.text, tokens, logprobs, *reasons, origins=origins)

    def _head(self, kind: str) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.body.model}

    def events(self, news: Iterable[tuple[int, Delta]]) -> bytes:
        """The server-sent events of deltas that came together; none for tokens whose text is still held back."""
        events = []
        for prompt, delta in news:
            self._usage.add(delta)
            parts = delta.by_token() if self.body.return_token_origins else (delta,)
            for piece in (piece for part in parts for piece in self._pieces(prompt, part)):
                if piece.says_something:
                    choices = [{**self._chunk_choice(piece), **self._origins(piece)}]
                    events.append(event({**self._head(self.chunk_object), "choices": choices, **self._no_usage()}))
        return b"".join(events)

    def opening(self) -> bytes:
        """The events before the first token."""
        return b""

    def closing(self) -> bytes:
        """The events after the last token."""
        if not self.body.include_usage:
            return DONE
        return event({**self._head(self.chunk_object), "choices": [], "usage": self._usage.json()}) + DONE

    def _no_usage(self) -> Json:
        """Chunks before the one with the usage say that they have none."""
        return {"usage": None} if self.body.include_usage else {}

    def whole(self, news: Iterable[tuple[int, Delta]]) -> Json:
        """The answer in one object, from all its deltas."""
        choices: dict[int, Piece] = {}
        prompt_logprobs: dict[int, Json] = {}
        for prompt, delta in news:
            self._usage.add(delta)
            if self.body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
                prompt_logprobs[prompt] = {"prompt_logprobs": self._prompt_logprobs(delta.prompt_logprobs)}
            for piece in self._pieces(prompt, delta):
                choices.setdefault(piece.index, Piece(piece.index)).extend(piece)
        return {
            **self._head(self.whole_object),
            "choices": [
                {
                    **self._whole_choice(choices[index]),
                    **self._origins(choices[index]),
                    **prompt_logprobs.get(index // self._n, {}),
                }
                for index in sorted(choices)
            ],
            "usage": self._usage.json(),
        }

    def _origins(self, piece: Piece) -> Json:
        return {"token_origins": piece.origins} if self.body.return_token_origins else {}

    def _prompt_logprobs(self, logprobs: list[TokenLogprob | None]) -> list[Json | None]:
        """vLLM's shape: for each prompt token {token id: {logprob, decoded_token}}, the token itself first."""

        def row(entry: TokenLogprob) -> Json:
            values = {entry.token_id: entry.logprob} | entry.top
            return {
                str(token): {"logprob": _finite(value), "decoded_token": self._vocabulary.text(token)}
                for token, value in values.items()
            }

        return [None if entry is None else row(entry) for entry in logprobs]


class ChatAnswer(Answer):
    """/v1/chat/completions."""

    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    body: ChatBody

    def __init__(self, body: ChatBody, vocabulary: Vocabulary | None, form: AnswerFormat | None = None) -> None:
        """`form` says what to look for in the answer; with reasoning, the vocabulary is needed."""
        super().__init__(body, vocabulary)
        self._form = form or AnswerFormat()
        self._readers: dict[int, ChoiceReader] = {}
        self._opened = False

    @property
    def thinking(self) -> Thinking:
        """As far as the request tells."""
        if not self._form.reasons:
            return "never"
        goes_on = self.body.continue_final_message and is_thinking(self.body.messages[-1].content or "")
        return "at once" if goes_on else "as prompted"

    def opening(self) -> bytes:
        """Each choice's role."""
        delta = {"role": "assistant", "content": ""}
        return b"".join(
            event(
                {
                    **self._head(self.chunk_object),
                    "choices": [_chat_choice(Piece(i), "delta", delta)],
                    **self._no_usage(),
                }
            )
            for i in range(self._n)
        )

    def _pieces(self, prompt: int, delta: Delta) -> Iterator[Piece]:
        piece = self._own_piece(prompt, delta)
        if not self._form.looks_for_something:
            yield piece
            return
        if delta.prompt_token_ids is not None:
            self._opened = begins_thinking(self.thinking, delta.prompt_token_ids, self._vocabulary.tokens.__getitem__)
        if piece.index not in self._readers:
            self._readers[piece.index] = ChoiceReader(
                self._form,
                opened=self._opened,
                reasoning=self.body.include_reasoning,
                parallel=self.body.parallel_tool_calls,
            )
        reader = self._readers[piece.index]
        if self._form.reasons:
            tokens = [self._vocabulary.tokens[token] for token in delta.token_ids]
            self._usage.reasoning += reader.reasoning_tokens(tokens)
        yield from reader.pieces(piece)

    def _chunk_choice(self, piece: Piece) -> Json:
        delta: Json = {}
        if piece.reasoning:
            delta["reasoning_content"] = piece.reasoning
        elif piece.calls:
            delta["tool_calls"] = [call.json(whole=False) for call in piece.calls]
        elif piece.text or piece.logprobs:
            delta["content"] = piece.text
        return _chat_choice(piece, "delta", delta, self._logprobs(piece))

    def _whole_choice(self, piece: Piece) -> Json:
        message: Json = {"role": "assistant", "content": piece.text, "refusal": None}
        if self._form.reasons:
            message["reasoning_content"] = piece.reasoning or None
        if piece.calls:
            message["content"] = piece.text or None
            message["tool_calls"] = [call.json(whole=True) for call in piece.calls]
        return _chat_choice(piece, "message", message, self._logprobs(piece))

    def _logprobs(self, piece: Piece) -> Json | None:
        if not self.body.logprobs:
            return None
        entries = [entry for entry in piece.logprobs if entry is not None]
        content = [
            {
                **self._entry(entry.token_id, entry.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in entry.top.items()],
            }
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        vocabulary = self._vocabulary
        return {"token": vocabulary.text(token), "logprob": _finite(logprob), "bytes": [*vocabulary.tokens[token]]}


class CompletionAnswer(Answer):
    """/v1/completions."""

    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    body: CompletionBody

    def __init__(self, body: CompletionBody, vocabulary: Vocabulary | None) -> None:
        super().__init__(body, vocabulary)
        self._offsets: dict[int, _Offsets] = {}

    def _pieces(self, prompt: int, delta: Delta) -> Iterator[Piece]:
        if self.body.echo and delta.prompt_token_ids is not None:
            given = self.body.prompt[prompt]
            text = given if isinstance(given, str) else self._vocabulary.decode(given)
            logprobs = [] if self.body.logprobs is None else delta.prompt_logprobs or []
            for index in range(prompt * self._n, (prompt + 1) * self._n):
                yield Piece(index, text, delta.prompt_token_ids[:], logprobs[:])
        yield self._own_piece(prompt, delta)

    def _chunk_choice(self, piece: Piece) -> Json:
        return {
            "index": piece.index,
            "text": piece.text,
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    _whole_choice = _chunk_choice

    def _logprobs(self, piece: Piece) -> Json | None:
        if self.body.logprobs is None:
            return None
        offsets = self._offsets.setdefault(piece.index, _Offsets())
        return {
            "tokens": [self._token(token) for token in piece.token_ids],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in piece.logprobs],
            "top_logprobs": [self._top(entry) for entry in piece.logprobs],
            "text_offset": [offsets.next(self._vocabulary.tokens[token]) for token in piece.token_ids],
        }

    def _top(self, entry: TokenLogprob | None) -> Json | None:
        """The likeliest tokens, and the chosen one where it is not among them."""
        if entry is None:
            return None
        return {
            self._token(token): _finite(value) for token, value in (entry.top | {entry.token_id: entry.logprob}).items()
        }

    def _token(self, token: int) -> str:
        """Bytes that are no whole characters are spelt as OpenAI does, `bytes:\\xe2\\x82`, so that keys stay apart."""
        data = self._vocabulary.tokens[token]
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class _Offsets:
    """Where each token starts in its choice's text, in characters."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def next(self, token: bytes) -> int:
        start = self._characters
        self._characters += len(self._decoder.decode(token))
        return start


def _chat_choice(piece: Piece, key: str, value: object, logprobs: Json | None = None) -> Json:
    return {
        "index": piece.index,
        key: value,
        "logprobs": logprobs,
        "finish_reason": piece.finish_reason,
        "stop_reason": piece.stop_reason,
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
