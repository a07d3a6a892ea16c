"""Errors in OpenAI's shape: the one place that decides which error is which HTTP status."""

from dataclasses import asdict, dataclass

from pydantic import ValidationError
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException
from starlette.requests import ClientDisconnect

from raysonar.errors import EngineFailedError, InvalidRequestError, QueueFullError, TraceInProgressError


@dataclass(frozen=True)
class Problem:
    """What went wrong, as plain data that may cross between processes."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        return {"error": {name: value for name, value in asdict(self).items() if name != "status"}}

    @property
    def headers(self) -> dict[str, str]:
        """A client may try again soon where the service is only busy or starting."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": "1"} if self.status in (429, 503) else {}


class ProblemError(Exception):
    """Raised to answer a request with `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def unavailable(message: str, code: str) -> ProblemError:
    """503: the same request may succeed later."""
    return ProblemError(Problem(503, message, "server_error", code=code))


def model_not_found(model: str, served: str) -> ProblemError:
    """404: another model than the one served was asked for."""
    message = f"The model {model!r} does not exist; this server has {served!r}"
    return ProblemError(Problem(404, message, param="model", code="model_not_found"))


def too_large(size: int, limit: int) -> ProblemError:
    """413: the body is longer than it may be."""
    return ProblemError(Problem(413, f"The body has {size} bytes; at most {limit} are taken", code="body_too_large"))


def too_slow(seconds: float) -> ProblemError:
    """408: the body does not come."""
    return ProblemError(Problem(408, f"Nothing of the body came for {seconds:g} s", code="body_too_slow"))


def out_of_time(seconds: float) -> ProblemError:
    """504: the request's own deadline, or the service's, has passed."""
    message = f"The request was not answered within its deadline of {seconds:g} s, and was stopped"
    return ProblemError(Problem(504, message, "timeout_error", code="deadline_exceeded"))


def route_problem(status: int, method: str, path: str) -> Problem:
    """404 and 405: no such route, or not with this method."""
    if status == 405:
        return Problem(405, f"{method} is not allowed on {path}", code="method_not_allowed")
    return Problem(status, f"There is no route {method} {path}", code="unknown_url")


def problem_of(error: BaseException) -> Problem:
    """The answer to any error that ends a request."""
    if isinstance(error, ProblemError):
        return error.problem
    if isinstance(error, ClientDisconnect):
        return Problem(400, "The client has left before its request was complete", code="client_disconnected")
    if isinstance(error, QueueFullError):
        return unavailable(str(error), "overloaded").problem
    if isinstance(error, TraceInProgressError):
        return Problem(409, str(error), code="trace_in_progress")
    if isinstance(error, InvalidRequestError):
        return Problem(400, str(error), param=error.field)
    if isinstance(error, ValidationError):
        return _of_validation(error)
    if isinstance(error, BackPressureError):
        return unavailable("Too many requests are waiting", "overloaded").problem
    lost = isinstance(error, RayError | RayServeException) and not isinstance(error, RayTaskError)
    if lost or isinstance(error, EngineFailedError | TimeoutError):
        return unavailable("The engine is starting, or starting again", "engine_unavailable").problem
    return Problem(500, f"The server failed: {type(error).__name__}", "server_error", code="internal_error")


def _of_validation(error: ValidationError) -> Problem:
    """The first of pydantic's faults, in words that name the parameter."""
    fault = error.errors(include_url=False)[0]
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".") or None
    if fault["type"] == "json_invalid":
        return Problem(400, f"The body is not valid JSON: {fault['ctx']['error']}", code="invalid_json")
    if fault["type"] == "missing":
        return Problem(400, f"Missing required parameter: {param!r}", param=param, code="missing_required_parameter")
    if fault["type"] == "extra_forbidden":
        return Problem(400, f"Unknown parameter: {param!r}", param=param, code="unknown_parameter")
    if fault["type"] == "refused":
        inner, code = fault["ctx"]["param"], fault["ctx"]["code"]
        if param is None:
            return Problem(400, fault["msg"], param=inner, code=code)
        return Problem(400, f"Invalid {param!r}: {fault['msg']}", param=f"{param}.{inner}", code=code)
    if param is None:
        return Problem(400, f"The body must be a JSON object: {fault['msg']}", code="invalid_type")
    return Problem(400, f"Invalid {param!r}: {fault['msg']}, got {_short(fault['input'])}", param=param)


def _short(value: object, limit: int = 100) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
