"""The one tree of errors: each has a stable code, whose fault it is, and whether trying again can help."""

from enum import StrEnum
from typing import ClassVar


class Fault(StrEnum):
    """Who can put it right."""

    USER = "user"
    OPERATOR = "operator"
    PEER = "peer"
    KITE = "kite"


class KiteError(Exception):
    """Base of every error that KITE raises on purpose.

    `str(error)` says what happened and with which values; `hint` says what to do next. Subclasses set `code`, `fault`
    and `retryable`, and keep the values of the message as attributes.
    """

    code: ClassVar[str] = "kite"
    fault: ClassVar[Fault] = Fault.KITE
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(KiteError):
    """The command or the setting as given makes no sense."""

    code = "usage"
    fault = Fault.USER


class MissingPath(KiteError):
    """A file or folder that was named is not there."""

    code = "missing_path"
    fault = Fault.USER


class Unreachable(KiteError):
    """A service of the fleet does not answer."""

    code = "unreachable"
    fault = Fault.OPERATOR
    retryable = True
