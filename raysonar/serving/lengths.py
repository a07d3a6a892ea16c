"""How long prompts and answers may be in this service."""

from dataclasses import dataclass, replace

from raysonar.driver.params import SamplingParams
from raysonar.errors import InvalidRequestError


@dataclass(frozen=True)
class Lengths:
    """Tokens at the most; `total` of prompt and answer together, by the model and its cache."""

    total: int
    prompt: int | None = None
    answer: int | None = None

    @property
    def longest_prompt(self) -> int:
        """An answer needs at least one token."""
        return min(self.total - 1, self.prompt or self.total)

    def checked(self, prompt_tokens: int, params: SamplingParams) -> SamplingParams:
        """The parameters, with an end to the answer where none was asked for. Raises InvalidRequestError."""
        if self.prompt is not None and prompt_tokens > self.prompt:
            message = f"the prompt has {prompt_tokens} tokens; this service takes at most {self.prompt}"
            raise InvalidRequestError(message, "prompt")
        if self.answer is None:
            return params
        if params.max_tokens is None:
            return replace(params, max_tokens=max(1, min(self.answer, self.total - prompt_tokens)))
        if params.max_tokens > self.answer:
            message = f"max_tokens is {params.max_tokens}; this service gives at most {self.answer}"
            raise InvalidRequestError(message, "max_tokens")
        return params
