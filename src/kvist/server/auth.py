"""API keys, and the private cache namespace that belongs to each.

Responsible for reading the keys, checking the ``Authorization`` header and naming the tenant. Knows nothing of routes.

Invariants:
    1. Keys are kept and compared as digests only, and every key is compared on every request, so that neither the
       time taken nor a memory dump of this object tells which key is nearly right.
    2. The tenant depends on the key alone: it is the same after a restart and on another replica.
    3. With no keys configured everybody shares the tenant ``""``; with keys configured nobody has it.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.errors import ConfigError
from kvist.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvist.config import ServerConfig

# Domain separation: the tenant must not equal any other digest of the key, the stored one included.
_KEY_DOMAIN = b"kvist api key v1\0"
_TENANT_DOMAIN = b"kvist tenant v1\0"


class Keyring:
    """The accepted keys.

    Args:
        keys: Every accepted key; none means that no key is asked for.

    Raises:
        ConfigError: A key is empty or holds characters that no HTTP header can carry.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: dict[bytes, str] = {}
        for key in keys:
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise ConfigError(
                    "[auth] an API key must be printable ASCII without spaces and not empty; "
                    "check --api-key and --api-key-file"
                )
            raw = key.encode()
            self._digests[_digest(_KEY_DOMAIN, raw)] = _digest(_TENANT_DOMAIN, raw).hex()

    @classmethod
    def from_config(cls, config: ServerConfig) -> Keyring:
        """Collect the keys of ``--api-key`` and ``--api-key-file``.

        Raises:
            ConfigError: The file cannot be read or holds no key, or a key is malformed.
        """
        keys = list(config.api_key)
        if config.api_key_file is not None:
            keys += _read_keys(Path(config.api_key_file))
        return cls(keys)

    def tenant(self, authorization: str | None) -> str:
        """Return the namespace of the key in an ``Authorization`` header.

        Args:
            authorization: The header's value, ``Bearer KEY``; None when it was not sent.

        Raises:
            HttpError: 401, when keys are configured and this is not one of them.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized(
                "[auth] no API key was sent; add the header 'Authorization: Bearer KEY'"
            )
        given = _digest(_KEY_DOMAIN, key.strip().encode("utf-8", "surrogatepass"))
        tenant = ""
        for digest, candidate in self._digests.items():
            if hmac.compare_digest(digest, given):
                tenant = candidate
        if not tenant:
            raise _unauthorized(
                "[auth] the API key is not one that this server accepts; check the key"
            )
        return tenant


def _read_keys(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"[auth] --api-key-file {path} cannot be read: {reason}") from error
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        # Going on would open the server to everybody, the opposite of what the option asks for.
        raise ConfigError(f"[auth] --api-key-file {path} holds no key; write one key a line")
    return keys


def _digest(domain: bytes, raw: bytes) -> bytes:
    return hashlib.sha256(domain + raw).digest()


def _unauthorized(message: str) -> HttpError:
    return HttpError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
