"""What the service tells of its engines' steps: their last records, and traces of the next ones."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from ray.serve.handle import DeploymentHandle

from raysonar.observe.chrome import trace_of
from raysonar.observe.steps import KEPT_STEPS
from raysonar.serving.body import Body
from raysonar.serving.problems import Problem, ProblemError
from raysonar.serving.replicas import answers_of_all

Value = TypeVar("Value")

ANSWER_TIMEOUT_S = 5.0
"""An engine that does not tell its steps for this long is left out."""
_TRACE_GRACE_S = 15.0
"""That the traced steps may take to end, and their spans to come from the ranks."""


class StepsQuery(BaseModel):
    """GET /v1/steps: values are texts."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    last: Annotated[int, Field(ge=1, le=KEPT_STEPS)] = 64
    """Of each engine's steps, so many."""


class TraceBody(Body):
    """POST /v1/steps/trace."""

    steps: Annotated[int, Field(ge=1, le=32)] = 4
    """Of each engine's next steps, so many."""
    timeout: Annotated[float, Field(gt=0, le=30)] = 10.0
    """Seconds to wait for them to be planned; there are none while nobody asks for anything."""


class Steps:
    """Asks every replica of the driver."""

    def __init__(self, driver: DeploymentHandle[Any]) -> None:
        self._driver = driver

    async def records(self, query: Mapping[str, str]) -> dict[str, object]:
        """A StepList. Raises ValidationError, and what the replicas raise where none answers."""
        asked = StepsQuery.model_validate(dict(query))
        told = await self._all(tuple, "steps", asked.last, timeout_s=ANSWER_TIMEOUT_S)
        data = [{"replica": name, "steps": [asdict(record) for record in records]} for name, records in told]
        return {"object": "list", "data": data}

    async def trace(self, body: bytes) -> bytes:
        """A trace in Chrome's format, of the replicas that could be traced.

        Raises ValidationError, and what the replicas raise where none could be.
        """
        asked = TraceBody.model_validate_json(body)
        wait = asked.timeout + _TRACE_GRACE_S
        groups = await self._all(list, "trace", asked.steps, asked.timeout, timeout_s=wait)
        return await asyncio.to_thread(lambda: json.dumps(trace_of(*groups)).encode())  # there may be many spans

    async def _all(self, kind: type[Value], method: str, *args: object, timeout_s: float) -> list[Value]:
        """What the replicas answer that can; there may be none. Raises what one of them raises when none can."""
        answers = await answers_of_all(self._driver, method, *args, timeout_s=timeout_s)
        told = [each for each in answers if isinstance(each, kind)]
        if answers and not told:
            raise ProblemError(answers[0]) if isinstance(answers[0], Problem) else answers[0]
        return told
