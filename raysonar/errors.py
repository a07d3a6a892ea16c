"""The errors raysonar raises on purpose: each says what was wrong and what would be right."""


class RaysonarError(Exception):
    """The root of every error raised on purpose."""


class ConfigurationError(RaysonarError, ValueError):
    """A configuration, or a combination of options, that cannot work; raised at start-up."""


class ModelFolderError(RaysonarError, ValueError):
    """A folder that does not hold the model it should; names the file, the tensor, expected and found."""


class InvalidRequestError(RaysonarError, ValueError):
    """A request that cannot be honoured.

    Attributes:
        field: the parameter at fault (None when it is none in particular), as the API spells it.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(InvalidRequestError):
    """Too many requests wait already; the same request may be sent again later."""


class TraceInProgressError(InvalidRequestError):
    """Another trace of the engine is being made; the same request may be sent again later."""


class RequestFailedError(RaysonarError, RuntimeError):
    """A request that the engine fails to answer, again and again; others are not affected. Its `__cause__` says how."""


class EngineFailedError(RaysonarError, RuntimeError):
    """The engine has stopped working; its `__cause__` is the root cause."""


class RankLostError(EngineFailedError):
    """A rank's process has ended without a word."""
