"""The published schema (OpenAPI 3.1): made of what checks the requests, and of the answers' shapes."""

from importlib.metadata import version
from typing import Any

from pydantic import TypeAdapter

from raysonar.serving.protocol import ChatBody, CompletionBody
from raysonar.serving.schemas import PUBLISHED
from raysonar.serving.steps import StepsQuery, TraceBody
from raysonar.serving.tokens import DetokenizeBody, TokenizeBody

Json = dict[str, Any]

_BODIES = {body.__name__: body for body in (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, TraceBody)}
_REASONS = {
    "200": "The answer.",
    "400": "A parameter is unknown, wrong or not supported; `param` names it.",
    "401": "The service asks for an API key, and there is none, or not a valid one.",
    "404": "This server has no such model.",
    "408": "The body has stopped coming.",
    "409": "A trace is being made; try again when it has ended.",
    "413": "The body is too large.",
    "429": "Too many requests with this API key; try again after `Retry-After` seconds.",
    "500": "The server failed.",
    "503": "Too much to do, or the engine is starting; try again after `Retry-After` seconds.",
    "504": "The request's time is over.",
}


def document(model: str, *, asks_for_keys: bool = False) -> Json:
    """The schema of a service that serves `model`."""
    adapters = {name: TypeAdapter[Any](shape) for name, shape in (_BODIES | PUBLISHED).items()}
    _, definitions = TypeAdapter.json_schemas(
        [(name, "validation", adapter) for name, adapter in adapters.items()],
        ref_template="#/components/schemas/{model}",
    )
    schemas = definitions["$defs"]
    for name in _BODIES:
        if "model" not in schemas[name]["properties"]:
            continue
        schemas[name]["properties"]["model"] |= {"type": "string", "enum": [model]}
        schemas[name]["properties"]["model"].pop("anyOf", None)
    security: Json = {"security": [{"key": []}]} if asks_for_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "raysonar", "version": version("raysonar")},
        "paths": _paths(model),
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        **security,
    }


def _paths(model: str) -> Json:
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "enum": [model]}}
    return {
        "/v1/models": {"get": _operation("List the model", "ModelList", "401", "429")},
        "/v1/models/{model}": {
            "get": _operation("Find a model by its name", "Model", "401", "404", "429") | {"parameters": [name]}
        },
        "/v1/completions": _post("Continue prompts", CompletionBody, "Completion", stream="Completion"),
        "/v1/chat/completions": _post("Answer a chat", ChatBody, "ChatCompletion", stream="ChatCompletionChunk"),
        "/tokenize": _post("A prompt's token ids", TokenizeBody, "Tokens"),
        "/detokenize": _post("The text of token ids", DetokenizeBody, "Detokenized"),
        "/v1/steps": {"get": _steps()},
        "/v1/steps/trace": _post("Trace the next steps", TraceBody, "Trace", "409"),
        "/health": {"get": _operation("Whether the engine is alive", "Status", "503")},
        "/ready": {"get": _operation("Whether the engine has generated a token", "Status", "503")},
        "/metrics": {"get": _metrics()},
    }


def _post(summary: str, body: type, answer: str, *errors: str, stream: str | None = None) -> Json:
    operation = _operation(summary, answer, "400", "401", "404", "408", *errors, "413", "429", "500", "503", "504")
    if stream is not None:
        events = f"With `stream`, events of `data: {stream}`, then `data: [DONE]`."
        operation["responses"]["200"] |= {"description": events}
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"post": operation | {"requestBody": {"required": True, "content": _json(body.__name__)}}}


def _operation(summary: str, answer: str, *errors: str) -> Json:
    responses: Json = {"200": {"description": _REASONS["200"], "content": _json(answer)}}
    responses |= {status: {"description": _REASONS[status], "content": _json("Error")} for status in errors}
    return {"summary": summary, "responses": responses}


def _steps() -> Json:
    properties = StepsQuery.model_json_schema()["properties"]
    parameters = [{"name": name, "in": "query", "schema": schema} for name, schema in properties.items()]
    operation = _operation("Records of the last steps", "StepList", "400", "401", "429", "500", "503")
    return operation | {"parameters": parameters}


def _metrics() -> Json:
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {"summary": "Prometheus' text format", "responses": {"200": {"description": "Metrics.", "content": text}}}


def _json(schema: str) -> Json:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
