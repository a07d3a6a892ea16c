"""The base of all JSON bodies: strictly typed, null stands for "not given", unknown parameters are refused."""

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError


def refused(param: str, message: str, code: str | None = None) -> PydanticCustomError:
    """A fault of `param`, found where several parameters are looked at together."""
    return PydanticCustomError("refused", message, {"param": param, "code": code})  # type: ignore[arg-type]


def wrong(message: str) -> PydanticCustomError:
    """A fault of the parameter that is being validated."""
    return PydanticCustomError("wrong", message)  # type: ignore[arg-type]


class Body(BaseModel):
    """Strictly typed, null of a known parameter dropped, unknown parameters refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_null(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in values.items() if value is not None or name not in known}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Every parameter that may be left out may be null."""
        schema = handler.resolve_ref_schema(handler(core))
        required: list[str] = schema.get("required", [])
        for name, value in schema.get("properties", {}).items():
            value.pop("title", None)
            if name not in required:
                schema["properties"][name] = _nullable(value)
        return schema


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    schema.pop("default", None)
    options = schema.get("anyOf", [schema])
    return {"anyOf": [*options, *([] if {"type": "null"} in options else [{"type": "null"}])]}
