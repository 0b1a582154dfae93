"""From bytes to one JSON object: size, encoding and syntax of request bodies.

Responsible for refusing what is too large, not JSON, or JSON only by somebody's extension (NaN, repeated names). Knows
nothing of the meaning of any field.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from kvist.errors import RequestError
from kvist.server.errors import ClientDisconnected, HttpError, cut, shorten

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    from starlette.datastructures import Headers

    Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]  # Any: ASGI's own message type


def check_headers(headers: Headers, max_bytes: int) -> None:
    """Refuse a body by what its headers say, before any of it is read.

    Args:
        headers: The request's headers.
        max_bytes: Largest body accepted.

    Raises:
        HttpError: 413 when the declared length is too large, 415 when it is not plain UTF-8 JSON.
    """
    length = headers.get("content-length", "")
    # Compared by digits first: a length of thousands of digits is not worth an integer.
    if length.isdecimal() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large(max_bytes)
    media_type, _, parameters = headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if media_type.strip().lower() != "application/json" or charset not in {"", "charset=utf-8"}:
        raise HttpError(
            415,
            "[request] the body must be JSON in UTF-8; send the header 'Content-Type: application/json'",
            code="unsupported_media_type",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(
            415,
            "[request] compressed bodies are not accepted; send it without Content-Encoding",
            code="unsupported_media_type",
        )


async def read_body(receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body, counting while it arrives: chunked bodies declare no length.

    Raises:
        HttpError: 413 as soon as more than ``max_bytes`` have arrived.
        ClientDisconnected: The client went away before the body was complete.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(body)


def too_large(max_bytes: int) -> HttpError:
    """Return the 413 error that names the limit."""
    return HttpError(
        413,
        f"[request] the body is larger than the {max_bytes} bytes this server accepts; "
        "send less, or start the server with a larger --max-body-mib",
        code="request_too_large",
    )


def parse_object(body: bytes) -> dict[str, Any]:  # Any: a JSON document
    """Return the JSON object in ``body``.

    Raises:
        RequestError: The body is not UTF-8, not JSON as the standard defines it, or not an object.
    """
    try:
        text = body.decode("utf-8")
        document = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique)
        if "\\ud" in text or "\\uD" in text:
            # Escapes can spell half of a surrogate pair, which is no Unicode text and would fail far from here.
            json.dumps(document, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            "[request] the body holds half of a surrogate pair, which is not Unicode text; send whole characters",
            code="invalid_json",
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(
            f"[request] the body is not UTF-8: invalid byte at position {error.start}",
            code="invalid_json",
        ) from error
    except json.JSONDecodeError as error:
        raise RequestError(
            f"[request] the body is not valid JSON: {error.msg} at line {error.lineno}, "
            f"column {error.colno}",
            code="invalid_json",
        ) from error
    except RecursionError as error:
        raise RequestError(
            "[request] the body's JSON is nested too deeply; no request needs more than five levels",
            code="invalid_json",
        ) from error
    except ValueError as error:
        # int() refuses numbers of more than 4300 digits.
        raise RequestError(
            "[request] the body holds a number with too many digits", code="invalid_json"
        ) from error
    if not isinstance(document, dict):
        raise RequestError(
            "[request] the body must be a JSON object with parameters by name", code="invalid_json"
        )
    return document


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(
        f"[request] the body holds {name}, which is not JSON; numbers must be finite",
        code="invalid_json",
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:  # Any: a JSON document
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RequestError(
                    f"[request] the name {shorten(name)} is given twice in one object; "
                    "only one of them could take effect",
                    param=cut(name),
                    code="invalid_json",
                )
            seen.add(name)
    return document
