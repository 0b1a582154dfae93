"""What the user asked for: frozen, validated on its own, ``None`` meaning "choose for me".

Responsible for the names, defaults, units and help texts of every user-visible option; the command line is generated
from these dataclasses. Knows nothing of the machine or the model: ``kvist.plan`` turns a configuration into an
``EnginePlan``.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping  # noqa: TC003  # flags are made from the types of the fields
from dataclasses import dataclass, field
from typing import Any

from kvist.errors import ConfigError
from kvist.precision import PRESETS
from kvist.spec import CODEC_BITS, DTYPE_BYTES, WEIGHT_BITS
from kvist.typecheck import mismatch

MAX_THREADS = 1024
"""More than any machine has CPUs for one process; a tensor library that cannot start its threads ends the process."""
MAX_GIB = 2.0**30
"""An exbibyte: above it a number of bytes is a slip, and no memory."""
MAX_TTL_S = 30 * 86_400.0
"""A month. What is to be kept for longer than anybody's server runs is a slip of the unit."""
TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Names of tenants. Shorter than the 64 hexadecimal digits that stand for a key without a name."""


# Any: the declared type of the field is the real one.
def option(default: Any, help_text: str, **extra: Any) -> Any:  # noqa: ANN401
    """Return a dataclass field with the help text that the command line shows.

    Args:
        default: Value when the user says nothing; None means "choose for me".
        help_text: One line; the unit is in the field's name.
        extra: ``choices`` (tuple of str) limits a string option.
    """
    return field(default=default, metadata={"help": help_text, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, and in which precision it computes."""

    model: str = option(
        "smollm2-135m", "known name (kvist pull --list), hub id, folder, or .gguf file"
    )
    weights: str = option(
        "auto",
        "format of the weights in the native kernels; auto: int8, or torch where there are no such kernels",
        choices=("auto", *WEIGHT_BITS),
    )
    dtype: str = option(
        "auto",
        "compute in torch instead, with weights and activations of this precision",
        choices=("auto", *DTYPE_BYTES),
    )
    weight_cache: str = option(
        "on", "keep packed weights on disk, so that the next start is fast", choices=("on", "off")
    )
    max_context: int | None = option(
        None, "tokens per request at most, prompt and output; default: the model's own limit"
    )
    threads: int | None = option(None, "CPU threads; default: the CPUs this process may use")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache: how much memory, in which precision, shared or not."""

    memory_gib: float | None = option(
        None, "memory for KV blocks in GiB; default: a fraction of what is free"
    )
    block_size: int = option(64, "tokens per block")
    kv_cache_dtype: str = option(
        "auto",
        "codec of KV blocks; int4 and int3: of all complete blocks but a sequence's first; mixed: by their age, as "
        f"--kv-precision {PRESETS['mixed']}",
        choices=("auto", *CODEC_BITS, *PRESETS),
    )
    kv_precision: str | None = option(
        None,
        "codec of KV blocks by age: sink=CODEC,recent:TOKENS=CODEC,...,rest=CODEC, out of raw16, int8, int4 and int3; "
        "implies --kv-cache-dtype mixed",
    )
    kv_head_dim: int | None = option(
        None,
        "dimensions of a head that K and V are kept in, a multiple of 8: those that matter least to the model are left "
        "out, at a loss that kvist tune measures; default: all",
    )
    kv_transforms: str = option(
        "auto",
        "what int4 and int3 know of the model: a file that kvist tune made; none: nothing; auto: what is kept of it, "
        "or made at this start, in about a minute",
    )
    kv_profile: str | None = option(
        None,
        "file that kvist tune --profile made of this model: takes the codec of KV blocks that was found good enough",
    )
    demote_before_evict: str = option(
        "auto",
        "make cached blocks that nobody uses smaller before any is evicted; auto: where --kv-precision allows less "
        "than raw16",
        choices=("auto", "on", "off"),
    )
    prefix_cache: str = option("on", "reuse the blocks of equal prefixes", choices=("on", "off"))
    explain_blocks: int = option(
        32768, "blocks remembered after they left the cache, so that misses can be explained"
    )
    kv_cache: str = option(
        "on",
        "off: keep no K and V at all and recompute everything for every token",
        choices=("on", "off"),
    )
    eviction: str = option(
        "default",
        "which cached blocks go first; default: those never hit, lru: those used longest ago",
        choices=("default", "lru"),
    )
    cache_share: Mapping[str, float] = field(
        default_factory=dict,
        metadata={
            "help": "fraction of the KV memory that a tenant may fill before its blocks go first; repeatable. "
            "Others borrow what it does not use",
            "metavar": "NAME=FRACTION",
        },
    )
    cache_ttl_s: float | None = option(
        None,
        "seconds that every prompt is kept before others, as long as requests leave room; default: by use alone",
    )
    pin_fraction: float = option(
        0.0, "fraction of the KV memory that requests may pin (cache_control); 0 allows no pins"
    )
    audit_fraction: float = option(
        0.0,
        "fraction of the reuses of blocks that are checked: checksum at once, computed again in idle time",
    )
    refresh_every: int | None = option(
        None,
        "reuses of a block after which its prefix is computed again in idle time, for lossy --kv-cache-dtype; "
        "default: never",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How requests share the engine."""

    schedule: str = option(
        "fcfs",
        "order of waiting requests",
        choices=("fcfs", "shortest", "prefix", "fair", "static"),
    )
    max_overtakes: int = option(64, "later requests that may start before one that waits, at most")
    max_batch_tokens: int = option(512, "token positions computed in one step at most")
    max_running: int = option(64, "requests running at once at most")
    max_queue: int = option(1024, "requests waiting at most; more are refused with 429")
    reserve_tokens: int = option(
        256, "output tokens reserved at admission for a request that sets no max_tokens"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        for group in (self.model, self.cache, self.scheduler):
            check_choices(group)
            _check_types(group)
        _check_at_least(self.cache.block_size, 1, "--block-size")
        _check_at_least(self.cache.explain_blocks, 0, "--explain-blocks")
        _check_at_least(self.scheduler.max_batch_tokens, 1, "--max-batch-tokens")
        _check_at_least(self.scheduler.max_running, 1, "--max-running")
        _check_at_least(self.scheduler.max_queue, 1, "--max-queue")
        _check_at_least(self.scheduler.reserve_tokens, 1, "--reserve-tokens")
        _check_at_least(self.scheduler.max_overtakes, 0, "--max-overtakes")
        if self.model.max_context is not None:
            _check_at_least(self.model.max_context, 2, "--max-context")
        if self.model.threads is not None:
            _check_at_least(self.model.threads, 1, "--threads")
            if self.model.threads > MAX_THREADS:
                msg = f"[config] --threads must be at most {MAX_THREADS}, received {self.model.threads}"
                raise ConfigError(msg)
        if self.cache.memory_gib is not None and not 0.0 < self.cache.memory_gib <= MAX_GIB:
            msg = f"[config] --memory-gib must be in (0, {MAX_GIB:g}], received {self.cache.memory_gib}"
            raise ConfigError(msg)
        kept = self.cache.kv_head_dim
        if kept is not None and (kept < 8 or kept % 8):
            raise ConfigError(f"[config] --kv-head-dim must be a multiple of 8, received {kept}")
        _check_cache(self.cache)

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:  # noqa: ANN401  # checked against the fields
        """Build a configuration from flat option names, as keyword arguments or command-line flags give them.

        Raises:
            ConfigError: An option is unknown (with a suggestion) or its value is invalid.
        """
        groups = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig}
        owners = {f.name: group for group, kind in groups.items() for f in dataclasses.fields(kind)}
        values: dict[str, dict[str, Any]] = {group: {} for group in groups}
        for name, value in options.items():
            if name not in owners:
                close = difflib.get_close_matches(name, owners, n=1)
                hint = (
                    f"; did you mean {close[0]!r}?"
                    if close
                    else f"; known options: {', '.join(sorted(owners))}"
                )
                msg = f"[config] unknown option {name!r}{hint}"
                raise ConfigError(msg)
            values[owners[name]][name] = value
        return cls(
            model=ModelConfig(**values["model"]),
            cache=CacheConfig(**values["cache"]),
            scheduler=SchedulerConfig(**values["scheduler"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP front end."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    api_key: tuple[str, ...] = option(
        (),
        "API key that is accepted, or 'NAME KEY'; repeatable. Each name, or key without one, has a private cache",
    )
    api_key_file: str | None = option(None, "file with one such key a line")
    admin: tuple[str, ...] = option(
        (), "name of a tenant whose API keys may reset the cache of all; repeatable"
    )
    served_name: str | None = option(
        None, "model name in requests and /v1/models; default: the name given as --model"
    )
    max_body_mib: float = option(
        8.0, "request bodies larger than this are refused with 413, in MiB"
    )
    drain_s: float = option(
        1.0,
        "seconds that running requests get to finish after SIGTERM; new ones are refused with 503",
    )
    prefill_rendered_history: str = option(
        "off",
        "while nothing else runs, compute what a conversation's next turn will send, where its chat template does not "
        "write what was generated",
        choices=("on", "off"),
    )
    otel_endpoint: str | None = option(
        None,
        "URL that takes OpenTelemetry spans over HTTP, such as http://127.0.0.1:4318; needs kvist[otel]; default: "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or no spans",
    )
    stop_degenerate: bool = option(
        False,
        "end outputs that go round in circles, unless a request says otherwise; they are told of in any case",
    )

    def __post_init__(self) -> None:
        check_choices(self)
        _check_types(self)
        if not 0 <= self.port <= 65535:
            msg = f"[config] --port must be in [0, 65535], received {self.port}"
            raise ConfigError(msg)
        if not 0.0 < self.max_body_mib <= 1024.0:
            msg = f"[config] --max-body-mib must be in (0, 1024], received {self.max_body_mib}"
            raise ConfigError(msg)
        endpoint = self.otel_endpoint
        if endpoint is not None and not re.match(r"https?://[^\s/]+", endpoint):
            msg = f"[config] --otel-endpoint must be an http:// or https:// URL, received {endpoint!r}"
            raise ConfigError(msg)
        if not 0.0 <= self.drain_s < float("inf"):
            msg = f"[config] --drain-s must be a number of seconds, 0 or more, received {self.drain_s}"
            raise ConfigError(msg)


def _check_types(group: object) -> None:
    wrong = mismatch(group)
    if wrong is not None:
        flag = f"--{wrong.name.replace('_', '-')}"
        raise ConfigError(f"[config] {flag} must be {wrong.expected}, received {wrong.value!r}")


def check_choices(group: object) -> None:
    """Raise ConfigError if a field of the dataclass instance holds a value outside its ``choices``."""
    for f in dataclasses.fields(group):  # type: ignore[arg-type]  # every caller passes a dataclass instance
        choices = f.metadata.get("choices")
        value = getattr(group, f.name)
        if choices and value not in choices:
            flag = f"--{f.name.replace('_', '-')}"
            msg = f"[config] {flag} must be one of {', '.join(choices)}, received {value!r}"
            raise ConfigError(msg)


def _check_cache(cache: CacheConfig) -> None:
    """Raise ConfigError when what is to be kept makes no sense, or there is no cache to keep it in."""
    for name, share in cache.cache_share.items():
        if not TENANT_NAME.fullmatch(name):
            msg = (
                f"[config] --cache-share must be for a name of 1 to 63 letters, digits, '.', '_' or '-', "
                f"received {name[:80]!r}"
            )
            raise ConfigError(msg)
        if not 0.0 < share <= 1.0:
            msg = f"[config] --cache-share must be in (0, 1] for {name!r}, received {share}"
            raise ConfigError(msg)
    # Written in decimal: three of 0.1 and one of 0.7 make a little more than 1.
    total = sum(cache.cache_share.values())
    if total > 1.0 + 1e-9:
        msg = f"[config] --cache-share must be 1 at most in all, received {total:g}"
        raise ConfigError(msg)
    if cache.cache_ttl_s is not None and not 0.0 < cache.cache_ttl_s <= MAX_TTL_S:
        msg = (
            f"[config] --cache-ttl-s must be in (0, {MAX_TTL_S:.0f}], received {cache.cache_ttl_s}"
        )
        raise ConfigError(msg)
    if not 0.0 <= cache.pin_fraction < 1.0:
        msg = f"[config] --pin-fraction must be in [0, 1), received {cache.pin_fraction}"
        raise ConfigError(msg)
    _check_guards(cache)
    if cache.prefix_cache == "on" and cache.kv_cache == "on":
        return
    kept = {
        "--cache-share": cache.cache_share,
        "--cache-ttl-s": cache.cache_ttl_s,
        "--pin-fraction": cache.pin_fraction,
        "--audit-fraction": cache.audit_fraction,
        "--refresh-every": cache.refresh_every,
    }
    for flag, value in kept.items():
        if value:
            msg = f"[config] {flag} must be left out without a prefix cache, received {value}"
            raise ConfigError(msg)


def _check_guards(cache: CacheConfig) -> None:
    if not 0.0 <= cache.audit_fraction <= 1.0:
        msg = f"[config] --audit-fraction must be in [0, 1], received {cache.audit_fraction}"
        raise ConfigError(msg)
    if cache.refresh_every is not None:
        _check_at_least(cache.refresh_every, 1, "--refresh-every")


def _check_at_least(value: int, minimum: int, flag: str) -> None:
    if value < minimum:
        msg = f"[config] {flag} must be at least {minimum}, received {value}"
        raise ConfigError(msg)
