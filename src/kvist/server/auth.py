"""API keys, and the private cache namespace that belongs to each.

Responsible for reading the keys, checking the ``Authorization`` header and naming the tenant. Knows nothing of routes.

Invariants:
    1. Keys are kept and compared as digests only, and every key is compared on every request, so that neither the
       time taken nor a memory dump of this object tells which key is nearly right.
    2. The tenant is the key's name, or depends on the key alone where it has none: it is the same after a restart and
       on another replica. Keys of one name are one tenant, so a key can be replaced without losing the cache.
    3. With no keys configured everybody shares the tenant ``""``; with keys configured nobody has it.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.config import TENANT_NAME
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
        keys: Every accepted key, alone or after its name and a space; none means that no key is asked for.

    Raises:
        ConfigError: A key is empty, holds characters that no HTTP header can carry, or has a bad name or two names.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests: dict[bytes, str] = {}
        self._names: set[str] = set()
        for entry in keys:
            before, _, key = entry.rpartition(" ")
            name = before.strip()
            if not key or not entry.isascii() or not entry.isprintable() or " " in name:
                raise ConfigError(
                    "[auth] an API key must be printable ASCII without spaces and not empty, alone or after a name "
                    "and a space; check --api-key and --api-key-file"
                )
            if name and not TENANT_NAME.fullmatch(name):
                raise ConfigError(
                    "[auth] the name before an API key must be 1 to 63 letters, digits, '.', '_' or '-'; "
                    "check --api-key and --api-key-file"
                )
            raw = key.encode()
            digest = _digest(_KEY_DOMAIN, raw)
            tenant = name or _digest(_TENANT_DOMAIN, raw).hex()
            if self._digests.setdefault(digest, tenant) != tenant:
                raise ConfigError(
                    f"[auth] an API key belongs to one tenant, received one with two names "
                    f"({name or 'no name'!r} is the second); check --api-key and --api-key-file"
                )
            if name:
                self._names.add(name)

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

    @property
    def has_keys(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._digests)

    def check_names(self, names: Iterable[str], flag: str = "--cache-share") -> None:
        """Raise ConfigError when an option names a tenant that no key has: what it gives would be nobody's."""
        for name in names:
            if name not in self._names:
                raise ConfigError(
                    f"[auth] {flag} {name} is for a tenant that no API key belongs to (known: "
                    f"{', '.join(sorted(self._names)) or 'none'}); write the name and a space before its key"
                )

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
