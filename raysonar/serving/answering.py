"""From a checked body to what the driver is asked for, and to the answer that its deltas make."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from raysonar.config import ReasoningParserName, ToolParserName
from raysonar.driver.params import SamplingParams
from raysonar.errors import InvalidRequestError
from raysonar.serving.generation import Generation, Profile, Vocabulary
from raysonar.serving.held import calls_grammar
from raysonar.serving.parsers import TOOL_FORMATS, AnswerFormat
from raysonar.serving.protocol import ChatBody, CompletionBody, GenerationBody
from raysonar.serving.responses import Answer, ChatAnswer, CompletionAnswer


@dataclass(frozen=True)
class Answering:
    """What the model is like, asked when it is needed, and the parsers of ServiceConfig."""

    profile: Callable[[], Awaitable[Profile]]
    vocabulary: Callable[[], Awaitable[Vocabulary]]
    tool_parser: ToolParserName = "auto"
    reasoning_parser: ReasoningParserName = "auto"

    async def begin(self, body: GenerationBody) -> tuple[Answer, Generation]:
        """The answer in the making, and what to ask the driver for.

        Raises InvalidRequestError, naming the parameter, and what `profile` and `vocabulary` raise.
        """
        params = await asyncio.to_thread(body.sampling) if body.asked else body.sampling()  # a schema takes its time
        if isinstance(body, ChatBody):
            return await self._begin_chat(body, params)
        assert isinstance(body, CompletionBody)
        answer = CompletionAnswer(body, await self.vocabulary() if body.needs_vocabulary else None)
        return answer, Generation(answer.id, body.prompts, params, body.priority, whole=not body.stream)

    async def _begin_chat(self, body: ChatBody, params: SamplingParams) -> tuple[Answer, Generation]:
        form = answer_format(body, await self.profile(), self.tool_parser, self.reasoning_parser)
        if form.spelt:
            params = replace(params, skip_special_tokens=False)
        if form.tools and form.held:
            params = replace(params, grammar=await asyncio.to_thread(calls_grammar, form.tools, body))
        answer = ChatAnswer(body, await self.vocabulary() if body.needs_vocabulary or form.reasons else None, form)
        whole, thinking = not body.stream, answer.thinking
        return answer, Generation(answer.id, body.prompts, params, body.priority, whole, thinking)


def answer_format(
    body: ChatBody, profile: Profile, tool_parser: ToolParserName, reasoning_parser: ReasoningParserName
) -> AnswerFormat:
    """What to look for in the answers to a request; the parsers are those of ServiceConfig.

    Raises InvalidRequestError for tools whose calls would not be found.
    """
    tools = profile.tool_format if tool_parser == "auto" else None if tool_parser == "none" else tool_parser
    if body.calls_tools and not profile.knows_tools:
        raise InvalidRequestError("tools: the model's chat template does not write any", "tools")
    if body.calls_tools and tools is None:
        raise InvalidRequestError(f"tools: this server finds no calls in answers (tool_parser: {tool_parser})", "tools")
    reasons = profile.reasons if reasoning_parser == "auto" else reasoning_parser != "none"
    looked_for = TOOL_FORMATS[tools] if tools and body.calls_tools else None
    form = AnswerFormat(looked_for, reasons, held=body.holds_calls)
    return replace(form, spelt=bool(form.marks() & profile.special))
