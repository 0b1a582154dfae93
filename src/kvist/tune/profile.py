"""What a measurement recommends, in a file that an engine can start with.

Responsible for the choice of a codec, for the file and for refusing one of another model. Knows neither how figures
come about nor what an engine does with a codec.

A profile is JSON: ``format``, ``version``, ``fingerprint`` (of the model), ``kv_cache_dtype`` (as the option of that
name), ``transforms`` (the digest of those that int4 and int3 were measured with; empty without), ``max_loss``, ``text``
(name of the file that was scored) and ``measured`` (the figures of each codec, as ``kvist tune --json`` prints them).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import ConfigError
from kvist.files import replace_file
from kvist.spec import SPAN_CODEC_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvist.codecs.transforms import KVTransforms

FORMAT = "kvist-kv-profile"
VERSION = 1
LOSSLESS = "raw16"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KVProfile:
    """The codec that was found good enough for a model, and why."""

    fingerprint: str
    """``content_fingerprint`` of the model."""
    kv_cache_dtype: str
    """The codec, as ``--kv-cache-dtype``."""
    transforms: str
    """Digest of the transforms that it was measured with; empty where it needs none."""
    max_loss: float
    """What the perplexity may rise by, as a fraction."""
    text: str
    """Name of the file that was scored."""
    measured: tuple[dict[str, Any], ...]  # Any: JSON values
    """Figures of each codec."""

    def check(self, transforms: KVTransforms) -> None:
        """Refuse transforms with which the codec was not measured.

        Raises:
            ConfigError: They are others.
        """
        if self.transforms and self.transforms != transforms.digest:
            raise ConfigError(
                f"[profile] {self.kv_cache_dtype} was measured with other transforms than those of this start; "
                "run kvist tune --profile again, or leave --kv-profile"
            )


def choose(codecs: Sequence[dict[str, Any]], max_loss: float) -> str:  # Any: JSON values
    """Return the codec with the fewest bits whose perplexity rises by no more than ``max_loss``.

    One standard error is added to what was measured. LOSSLESS where there is none.

    Args:
        codecs: Figures, as ``kvist tune --json`` prints them.
        max_loss: A fraction.
    """
    good = [
        codec
        for codec in codecs
        if codec["perplexity_delta"] + codec["perplexity_delta_se"] <= max_loss
    ]
    best = min(good, key=lambda codec: codec["bits_per_value"], default=None)
    return LOSSLESS if best is None else str(best["name"])


def make_profile(document: dict[str, Any], max_loss: float) -> KVProfile:  # Any: JSON values
    """Return the profile that follows from what ``run.measure`` returned."""
    codec = choose(document["codecs"], max_loss)
    return KVProfile(
        fingerprint=document["fingerprint"],
        kv_cache_dtype=codec,
        transforms=document["transforms"] if codec in SPAN_CODEC_BITS else "",
        max_loss=max_loss,
        text=document["text"],
        measured=tuple(document["codecs"]),
    )


def save_profile(path: Path, profile: KVProfile) -> None:
    """Write a profile, replacing what is there in one step.

    Raises:
        OSError: The file cannot be written.
    """
    document = {"format": FORMAT, "version": VERSION, **asdict(profile)}
    replace_file(path, (json.dumps(document, indent=1) + "\n").encode())


def load_profile(path: Path, fingerprint: str) -> KVProfile:
    """Return the profile of a file.

    Args:
        path: Written by ``save_profile``.
        fingerprint: Of the model it is wanted for.

    Raises:
        ConfigError: The file cannot be read, is no profile, or belongs to another model; the message says which.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise _unusable(path, f"is larger than {MAX_FILE_BYTES:,} bytes")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unusable(path, f"cannot be read ({error})") from error
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise _unusable(path, "is no profile")
    version = document.pop("version", None)
    if version != VERSION:
        raise _unusable(path, f"has version {version!r}, expected {VERSION}")
    profile = _from_document(path, document)
    if profile.fingerprint != fingerprint:
        raise _unusable(path, "was made for another model")
    return profile


def _from_document(path: Path, document: dict[str, Any]) -> KVProfile:  # Any: JSON values
    kinds: dict[str, type | tuple[type, ...]] = {
        "fingerprint": str,
        "kv_cache_dtype": str,
        "transforms": str,
        "max_loss": (int, float),
        "text": str,
        "measured": list,
    }
    if set(document) != set(kinds) or not all(
        isinstance(document[name], kind) for name, kind in kinds.items()
    ):
        raise _unusable(path, f"should hold {', '.join(kinds)}")
    if document["kv_cache_dtype"] not in {LOSSLESS, "int8", *SPAN_CODEC_BITS}:
        raise _unusable(path, f"names the codec {document['kv_cache_dtype']!r}, which there is not")
    return KVProfile(**{**document, "measured": tuple(document["measured"])})


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"[profile] {path} {why}; make it anew with kvist tune --profile, or leave out --kv-profile"
    )
