"""Codecs by name.

Responsible for the table that turns the name in an option or a stored block into a codec. Its names are those of
``kvist.spec.CODEC_BITS``, which the control plane reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.codecs.int8 import INT8
from kvist.codecs.raw import FLOAT32, RAW16
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.codecs.base import KVCodec

_CODECS: dict[str, KVCodec] = {codec.name: codec for codec in (RAW16, INT8, FLOAT32)}


def get(name: str) -> KVCodec:
    """Return the codec of that name.

    Raises:
        ConfigError: There is none; the message lists those there are.
    """
    if name not in _CODECS:
        raise ConfigError(
            f"[codecs] codec must be one of {', '.join(_CODECS)}, received {name!r}; set --kv-cache-dtype"
        )
    return _CODECS[name]


def names() -> tuple[str, ...]:
    """Return the names of all codecs."""
    return tuple(_CODECS)
