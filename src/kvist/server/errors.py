"""Every failure as the client sees it: HTTP status, headers and OpenAI's error envelope.

Responsible for the wire form ``{"error": {"message", "type", "param", "code"}}`` of Kvist's own exceptions and of the
failures that only exist in HTTP (unknown path, missing key, oversized body). Knows nothing of routes or engines.

Invariant: a message never contains prompt text; received values are shown only when they are numbers or flags.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from kvist.errors import DeadlineExceeded, EngineOverloaded, EngineStopped, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_LEN = 80
"""Characters of a client's own parameter or model name that a message repeats at most."""

# One for all: ``json.dumps`` makes one each time it is asked for anything but its defaults.
_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class HttpError(Exception):
    """A failure of the HTTP exchange itself, before any request reaches the engine.

    Args:
        status: HTTP status code.
        message: What was expected, what was received, what to do.
        code: Machine-readable code in OpenAI's vocabulary.
        param: The parameter at fault; None when it is the exchange as a whole.
        headers: Extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})


class ClientDisconnected(Exception):
    """The client went away; there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """One failure in wire form."""

    status: int
    """HTTP status code; meaningless once a stream has begun."""
    message: str
    """For a person."""
    kind: str
    """OpenAI's ``type``."""
    code: str | None
    """For a program."""
    param: str | None = None
    """The request parameter at fault."""
    headers: dict[str, str] = field(default_factory=dict)
    """Extra response headers."""

    @property
    def envelope(self) -> dict[str, Any]:  # Any: a JSON document
        """The body: ``{"error": {...}}``."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def to_response(self) -> Response:
        """Return the HTTP response."""
        return json_response(self.envelope, status=self.status, headers=self.headers)


def to_reply(error: Exception) -> ErrorReply:
    """Return the wire form of ``error``; anything that is not the client's doing becomes a server error."""
    message = str(error)
    if isinstance(error, HttpError):
        return ErrorReply(
            status=error.status,
            message=message,
            kind="invalid_request_error",
            code=error.code,
            param=error.param,
            headers=error.headers,
        )
    if isinstance(error, RequestError):
        return ErrorReply(
            status=400,
            message=message,
            kind="invalid_request_error",
            code=error.code,
            param=error.param,
        )
    if isinstance(error, EngineOverloaded):
        return ErrorReply(
            status=429,
            message=message,
            kind="rate_limit_error",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
        )
    if isinstance(error, DeadlineExceeded):
        # Not 408: that says the client was slow to send, and makes clients send the same again at once.
        return ErrorReply(
            status=504, message=message, kind="timeout_error", code="deadline_exceeded"
        )
    if isinstance(error, EngineStopped):
        return ErrorReply(status=503, message=message, kind="server_error", code="engine_stopped")
    # The cause of an engine failure may quote internal state; it goes to the log, not to the client.
    return ErrorReply(
        status=500,
        message="[server] the request failed inside the engine; the server's log has the cause",
        kind="server_error",
        code="internal_error",
    )


def json_response(
    document: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return ``document`` as a JSON response."""
    return Response(
        encode_json(document), status_code=status, headers=headers, media_type="application/json"
    )


def encode_json(document: object) -> bytes:
    r"""Return compact UTF-8 JSON. A lone surrogate (from a client's own names) becomes its ``\ud800`` escape."""
    return _encoder.encode(document).encode("utf-8", "backslashreplace")


def shorten(name: str) -> str:
    """Return a client's own name, quoted and cut so that a message stays readable."""
    return repr(cut(name))


def cut(name: str) -> str:
    """Return a client's own name, cut so that an answer stays small."""
    return name if len(name) <= MAX_NAME_LEN else name[:MAX_NAME_LEN] + "…"


def describe(value: object) -> str:
    """Return what ``value`` is, in JSON's words; only numbers and flags are shown themselves."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return f"the number {_shown_int(value)}"
    if isinstance(value, float):
        return f"the number {value:.17g}"
    kinds = {type(None): "null", str: "a string", list: "an array", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def _shown_int(value: int) -> str:
    # Turning an integer of thousands of digits into text is quadratic, and Python refuses past 4300 digits.
    return str(value) if value.bit_length() <= 128 else f"of {value.bit_length()} bits"
