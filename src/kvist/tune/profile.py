"""What a measurement recommends, in a file that an engine can start with.

Responsible for the choice of a codec, for the file and for refusing one of another model. Knows neither how figures
come about nor what an engine does with a codec.

A profile is JSON: ``format``, ``version``, ``fingerprint`` (of the model), ``kv_cache_dtype`` and ``kv_precision`` (as
the options of these names; the second null unless the first is auto), ``transforms`` (the digest of those that int4 and
int3 were measured with; empty without), ``wanted`` (what it was chosen for), ``text`` (name of the file that was
scored) and ``measured`` (the figures of each setting, as ``kvist tune --json`` prints them).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import ConfigError
from kvist.files import replace_file
from kvist.precision import PRESETS, KVPrecision
from kvist.spec import GIB
from kvist.tune.settings import Setting

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.codecs.transforms import KVTransforms

FORMAT = "kvist-kv-profile"
VERSION = 2
LOSSLESS = "raw16"
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a setting is chosen for; one of the two."""

    max_loss: float | None = None
    """The fewest bits, and the perplexity rises by that at most, as a fraction."""
    budget_gib: float | None = None
    """The least divergence, and K and V of the requests fit into that."""

    def check(self) -> None:
        """Refuse what is no number.

        Raises:
            TypeError: It is none, or there are none or two.
        """
        numbers = [number for number in (self.max_loss, self.budget_gib) if number is not None]
        if len(numbers) != 1 or not isinstance(numbers[0], (int, float)):
            raise TypeError(f"expected one number as what is wanted, received {numbers}")

    def __str__(self) -> str:
        if self.budget_gib is not None:
            return f"the least loss in {self.budget_gib:g} GiB"
        return f"perplexity up by {self.max_loss:.2%} at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class KVProfile:
    """The codec or rule that was found good enough for a model, and why."""

    fingerprint: str
    """``content_fingerprint`` of the model."""
    kv_cache_dtype: str
    """As the option of that name; ``auto`` where ``kv_precision`` says more."""
    kv_precision: str | None
    """The rule, as the option of that name; None where ``kv_cache_dtype`` says it."""
    transforms: str
    """Digest of the transforms that it was measured with; empty where it needs none."""
    wanted: Wanted
    text: str
    """Name of the file that was scored."""
    measured: tuple[dict[str, Any], ...]  # Any: JSON values
    """Figures of each setting."""

    @property
    def name(self) -> str:
        """Of the setting."""
        return self.kv_precision or self.kv_cache_dtype

    def check(self, transforms: KVTransforms) -> None:
        """Refuse transforms with which the codec was not measured.

        Raises:
            ConfigError: They are others.
        """
        if self.transforms and self.transforms != transforms.digest:
            raise ConfigError(
                f"[profile] {self.name} was measured with other transforms than those of this start; "
                "run kvist tune --profile again, or leave --kv-profile"
            )


def choose(document: dict[str, Any], wanted: Wanted) -> str:  # Any: JSON values
    """Return the name of the setting that is best for what is wanted.

    Args:
        document: As ``run.measure`` returned it. Settings that no engine can start with, being emulated only, are
            passed over.
        wanted: With ``max_loss`` the setting with the fewest bits in a request, one standard error added to what was
            measured; LOSSLESS where there is none. With ``budget_gib`` the one with the least divergence that fits.

    Raises:
        ConfigError: Nothing that was measured fits into the budget.
    """
    servable = [codec for codec in document["codecs"] if "kv_bytes_total" in codec]
    if wanted.budget_gib is None:
        assert wanted.max_loss is not None
        good = [
            codec
            for codec in servable
            if codec["perplexity_delta"] + codec["perplexity_delta_se"] <= wanted.max_loss
        ]
        best = min(good, key=lambda codec: codec["request_bits_per_value"], default=None)
        return LOSSLESS if best is None else str(best["name"])
    if document["reference"]["fits"]:
        return LOSSLESS
    fitting = [codec for codec in servable if codec["fits"]]
    best = min(fitting, key=lambda codec: codec["kl"], default=None)
    if best is None:
        least = min((codec["kv_bytes_total"] for codec in servable), default=0)
        raise ConfigError(
            f"[profile] {document['concurrency']} requests of {document['context']:,} tokens do not fit into "
            f"--budget-gib {wanted.budget_gib:g}: the smallest of what was measured takes {least / GIB:.3f} and a "
            "little more between blocks; raise it, or lower --context or --concurrency, or add int3 to --codecs"
        )
    return str(best["name"])


def make_profile(document: dict[str, Any], wanted: Wanted) -> KVProfile:  # Any: JSON values
    """Return the profile that follows from what ``run.measure`` returned.

    Raises:
        ConfigError: As ``choose``.
    """
    setting = Setting.parse(choose(document, wanted))
    is_rule = setting.rule is not None and setting.name not in PRESETS
    return KVProfile(
        fingerprint=document["fingerprint"],
        kv_cache_dtype="auto" if is_rule else setting.name,
        kv_precision=setting.name if is_rule else None,
        transforms=document["transforms"] if setting.needs_transforms else "",
        wanted=wanted,
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
    kinds: dict[str, tuple[type, ...]] = {
        "fingerprint": (str,),
        "kv_cache_dtype": (str,),
        "kv_precision": (str, type(None)),
        "transforms": (str,),
        "wanted": (dict,),
        "text": (str,),
        "measured": (list,),
    }
    if set(document) != set(kinds) or not all(
        isinstance(document[name], kind) for name, kind in kinds.items()
    ):
        raise _unusable(path, f"should hold {', '.join(kinds)}")
    codec, rule = document["kv_cache_dtype"], document["kv_precision"]
    if codec not in ({LOSSLESS, "int8", *PRESETS} if rule is None else {"auto"}):
        raise _unusable(path, f"names the codec {codec!r}, which there is not")
    try:
        if rule is not None:
            KVPrecision.parse(rule)
        wanted = Wanted(**document["wanted"])
        wanted.check()
    except (ConfigError, TypeError) as error:
        raise _unusable(path, f"cannot be understood ({error})") from error
    return KVProfile(**{**document, "wanted": wanted, "measured": tuple(document["measured"])})


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"[profile] {path} {why}; make it anew with kvist tune --profile, or leave out --kv-profile"
    )
