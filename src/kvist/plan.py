"""From what the user asked for to what will happen: every number the engine uses, decided once.

Responsible for reading the machine (``detect_hardware``), for turning a configuration, a model and a machine into a
frozen ``EnginePlan`` (``resolve``), and for saying what a model's memory will be before anything is loaded
(``memory_estimate``). Allocates nothing and imports no tensor library; ``read_spec`` is
here for whoever plans without loading.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.cache.footprint import AgeProfile, AgeProfiles
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.spec_readers import read_spec
from kvist.precision import PRESETS, KVBudget, KVPrecision
from kvist.spec import (
    DTYPE_BYTES,
    GIB,
    LOSSY_CODECS,
    SPAN_CODEC_BITS,
    KVSpec,
    ModelSpec,
    native_weight_bytes,
    why_not_native,
)
from kvist.storage.slab_layout import slab_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.config import CacheConfig, EngineConfig, ModelConfig

__all__ = [
    "EnginePlan",
    "Hardware",
    "MemoryEstimate",
    "WeightFormat",
    "detect_hardware",
    "formats",
    "kv_spec_of",
    "memory_estimate",
    "precision_of",
    "read_spec",
    "resolve",
    "usable_bytes",
    "weight_format",
]

logger = logging.getLogger(__name__)

KV_MEMORY_FRACTION = 0.5
"""Share of the memory left after the weights that KV blocks take by default. The other half is for activations, the
tokeniser, the page cache of the checkpoint and whatever else runs on the machine."""

MIN_REQUEST_BLOCKS = 4
"""Blocks that must fit at the very least (fewer when the whole context is shorter): room for a prompt, its output and
the source of a partial copy."""


DEMOTED_BYTES_PER_STEP = 3 * 1024 * 1024
"""K and V in 16 bits that a step encodes in a smaller codec at most, or one block."""
ENCODED_PRODUCTS_PER_STEP = 40_000_000
"""Products of K and V's error feedback that a step computes at most, where a codec has one, or those of one block:
head_dim ** 2 for each token and KV head of a layer. Two threads of a Zen 3 take 1.75 ms for the 24 million of a block
of SmolLM2-135M, twice that while others use the machine, and a step shall not wait for longer than 5. To be measured
again when the encoder changes (``benchmarks.kv_demotion``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What this process may use of the machine."""

    cpus: int
    """Logical CPUs, >= 1: the smaller of the affinity mask and the control group's quota."""
    available_bytes: int
    """Memory that can be taken without swapping: the smaller of the system's and the control group's."""
    isa: str | None = None
    """Instruction set that the native kernels run in; None: there are no native kernels."""
    why_no_isa: str = ""
    """Why there are none, in words; empty where there are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """Where the model is computed, and what its weights are kept as."""

    plane: str
    """Which kernels compute: ``native`` or ``torch``."""
    kind: str
    """A key of ``spec.WEIGHT_BITS`` on the native plane, of ``spec.DTYPE_BYTES`` on torch."""

    @property
    def dtype(self) -> str:
        """Precision of activations between kernels: the native ones keep them in float32."""
        return "float32" if self.plane == "native" else self.kind

    def num_bytes(self, spec: ModelSpec) -> int:
        """Return the bytes of the model's weights in this format."""
        if self.plane == "native":
            return native_weight_bytes(spec, self.kind)
        return spec.num_parameters * DTYPE_BYTES[self.kind]


PORTABLE_ISA = "serial"
"""The native kernels without vector instructions: the oracle of the others."""
TORCH_FLOAT32 = WeightFormat(plane="torch", kind="float32")
"""What computes where nothing better does. Without AMX or AVX512-BF16 units a bfloat16 matrix product of torch on a CPU
is about six times slower than a float32 one, so half the memory would cost most of the speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """What the engine will do. Made by ``resolve`` only; nothing in it is left open and nothing changes it."""

    model: str
    """The model as the user named it."""
    vocab_size: int
    """Token ids are in [0, vocab_size)."""
    plane: str
    """Which kernels compute: ``native`` or ``torch``."""
    isa: str
    """Instruction set of the native kernels; empty on torch, which chooses by itself."""
    weights: str
    """Format of the weights: a key of ``spec.WEIGHT_BITS`` on the native plane, ``dtype`` on torch."""
    dtype: str
    """Precision of activations, a key of ``spec.DTYPE_BYTES``; float32 on the native plane."""
    codec: str
    """Format in which K and V are written: a key of ``spec.CODEC_BITS``."""
    precision: str = ""
    """Format of blocks by age, as ``--kv-precision``; empty: all blocks keep ``codec``."""
    transforms: str = ""
    """Where what int4 and int3 know of the model is from: ``auto``, ``none`` or a file; empty without those codecs."""
    kv_head_dim: int = 0
    """Dimensions of a head that K and V are kept in, where they are fewer than it has; 0: all."""
    demote_before_evict: bool = False
    """Whether cached blocks that nobody uses are made smaller before any is evicted."""
    max_demotions: int = 0
    """Blocks that a step makes smaller at most, unless its memory needs more; 0: as many as there are."""
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Blocks of ``codec`` that the pool holds."""
    raw_block_bytes: int = 0
    """Bytes of a block of whole heads in 16 bits, which others are compared with; 0 where nobody asks."""
    kv_bytes: int
    """Bytes of the whole pool. With one codec num_blocks times the block's bytes, else a little more."""
    weight_bytes: int
    """Bytes of the weights, as ``WeightFormat.num_bytes`` counts them."""
    weight_cache: bool
    """Whether packed weights are kept on disk; nothing is packed on torch."""
    max_context_len: int
    """Tokens per request at most, prompt and output; never more than the pool holds."""
    threads: int
    """CPU threads of the tensor library."""
    prefix_cache: bool
    """Whether blocks are shared between requests with equal prefixes."""
    keep_kv: bool
    """False: every token recomputes the whole sequence."""
    eviction: str
    """Which cached blocks go first."""
    cache_shares: tuple[tuple[str, float], ...]
    """Tenants with a share of the pool, by name, and the fraction; the others share the rest."""
    cache_ttl_s: float
    """Seconds that every prompt is kept before others; 0: by use alone."""
    pin_fraction: float
    """Fraction of the pool that pins may hold; no request may need more than the rest."""
    max_pinned_blocks: int = 0
    """Blocks that may be pinned at most, as small as they get."""
    explain_blocks: int = 32768
    """Blocks remembered after they left the cache."""
    layer_windows: tuple[int, ...] = ()
    """Sliding window of each layer, 0: none; empty where nobody asks."""
    audit_fraction: float = 0.0
    """Share of the reuses of blocks that are checked."""
    refresh_every: int = 0
    """Reuses of a lossy block after which its prefix is computed again; 0: never."""
    schedule: str
    """Order of waiting requests."""
    max_overtakes: int
    """Later requests that may start before one that waits."""
    max_batch_tokens: int
    """Token positions computed in one step at most."""
    max_running: int
    """Sequences running at once at most."""
    max_queue: int
    """Sequences waiting at most."""
    reserve_tokens: int
    """Output tokens reserved at admission for a request without ``max_tokens``."""
    notes: tuple[str, ...]
    """What was lowered to fit, and why; empty when nothing was."""

    @property
    def kv_format(self) -> str:
        """What K and V are kept in: a codec, or the rule by which blocks change theirs."""
        return self.precision or self.codec

    def one_line(self) -> str:
        """Return the plan for the log: every decision, no prompt and no path beyond the model's name."""
        parts = (
            f"model={self.model}",
            f"plane={self.plane}/{self.isa}" if self.isa else f"plane={self.plane}",
            f"weights={self.weights}",
            f"weight_memory={self.weight_bytes / GIB:.2f}GiB",
            f"weight_cache={'on' if self.weight_cache else 'off'}",
            f"dtype={self.dtype}",
            f"kv={self.kv_format}",
            f"kv_head_dim={self.kv_head_dim or 'all'}",
            f"kv_transforms={Path(self.transforms).name or 'unused'}",
            f"demote_before_evict={'on' if self.demote_before_evict else 'off'}",
            f"max_demotions={self.max_demotions or 'any'}",
            f"kv_memory={self.kv_bytes / GIB:.2f}GiB",
            f"blocks={self.num_blocks}x{self.block_size}",
            f"max_context={self.max_context_len}",
            f"threads={self.threads}",
            f"prefix_cache={'on' if self.prefix_cache else 'off'}",
            f"kv_cache={'on' if self.keep_kv else 'off'}",
            f"explain_blocks={self.explain_blocks}",
            f"audit_fraction={self.audit_fraction:g}",
            f"refresh_every={self.refresh_every or 'off'}",
            f"eviction={self.eviction}",
            f"cache_shares={','.join(f'{name}:{share:g}' for name, share in self.cache_shares) or 'none'}",
            f"cache_ttl_s={self.cache_ttl_s:g}",
            f"pin_fraction={self.pin_fraction:g}",
            f"schedule={self.schedule}",
            f"max_overtakes={self.max_overtakes}",
            f"max_batch_tokens={self.max_batch_tokens}",
            f"max_running={self.max_running}",
            f"max_queue={self.max_queue}",
            f"reserve_tokens={self.reserve_tokens}",
        )
        notes = "".join(f" ({note})" for note in self.notes)
        return " ".join(parts) + notes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a model's weights and KV cache weigh for a context and a number of requests at once. Plain integers."""

    context: int
    """Tokens per request, prompt and output."""
    concurrency: int
    """Requests at once."""
    block_size: int
    """Tokens per block."""
    token_bytes: int
    """K and V of one token over all layers, once it is old; only the KV heads count (GQA)."""
    old_block_bytes: int
    """One such block."""
    blocks_per_request: int
    """Whole blocks that a request of ``context`` tokens holds."""
    request_bytes: int
    """What this engine allocates for one request while it generates: every layer keeps all blocks, sliding windows
    included; the youngest blocks in the codec they are written in."""
    step_bytes: int
    """What is promised in addition while a prompt is computed, since its blocks get smaller after a step only; 0 where
    they never do."""
    windowed_request_bytes: int
    """What a request would need if each sliding-window layer kept its window only (whole blocks). Nothing in this
    version saves that; equal to request_bytes for models without windows."""
    kv_bytes: int
    """request_bytes times concurrency, and step_bytes."""
    num_parameters: int
    """Weights in all; tied embeddings counted once."""
    weight_bytes: int
    """Bytes of the weights."""
    total_bytes: int
    """Weights and KV."""

    def num_requests_that_fit(self, memory_bytes: int) -> int:
        """Return how many such requests fit beside the weights in ``memory_bytes``; 0 when not even the weights do."""
        return max(0, memory_bytes - self.weight_bytes - self.step_bytes) // self.request_bytes


def resolve(config: EngineConfig, spec: ModelSpec, hardware: Hardware) -> EnginePlan:
    """Decide everything that the configuration left open.

    ``weight_format`` says what ``weights`` and ``dtype`` come to. ``kv_cache_dtype`` auto is raw16.

    Without ``memory_gib`` the pool takes ``KV_MEMORY_FRACTION`` of what is available after the weights, but no more
    than ``max_running`` requests of the full context could hold. A pool smaller than one full context, pins aside,
    lowers ``max_context_len`` to what it holds and says so in ``notes``, unless the user asked for that context.

    Raises:
        ConfigError: The request for a context, a memory size or a model cannot be met; the message has the numbers.
    """
    weights, precision = formats(config, spec, hardware)
    kv_spec = _kv_spec(
        spec, config.cache.kv_cache_dtype, config.cache.block_size, config.cache.kv_head_dim
    )
    weight_bytes = weights.num_bytes(spec)
    context = _requested_context(config, spec)
    if precision is not None and (config.cache.audit_fraction or config.cache.refresh_every):
        raise ConfigError(
            "[plan] --audit-fraction and --refresh-every work on blocks that keep their codec, received "
            f"{_named_by(config.cache)}; leave them out, or keep blocks in raw16 or int8"
        )
    if precision is not None and config.cache.kv_cache == "off":
        raise ConfigError(
            "[plan] --kv-cache off keeps no blocks that could become smaller, received "
            f"{_named_by(config.cache)}; leave one of them out"
        )
    num_blocks, kv_bytes = _num_blocks(config, kv_spec, precision, context, weight_bytes, hardware)
    pin_fraction = config.cache.pin_fraction
    max_context_len, notes = _fit_context(config, kv_spec, precision, context, kv_bytes)
    if weights.plane == "torch" and config.model.dtype == "auto":
        reason = hardware.why_no_isa or why_not_native(spec)
        if hardware.isa == PORTABLE_ISA:
            reason = "no native kernels for this CPU's instruction sets; everything runs on torch"
        if reason:
            logger.warning("%s", reason)
            notes = (*notes, reason)
    keep_kv = config.cache.kv_cache == "on"
    return EnginePlan(
        model=config.model.model,
        vocab_size=spec.vocab_size,
        plane=weights.plane,
        isa=hardware.isa or "" if weights.plane == "native" else "",
        weights=weights.kind,
        dtype=weights.dtype,
        codec=kv_spec.codec,
        precision=str(precision or ""),
        transforms=_transforms(config.cache, precision),
        kv_head_dim=kv_spec.head_dim if kv_spec.head_dim < spec.head_dim else 0,
        demote_before_evict=precision is not None and config.cache.demote_before_evict != "off",
        max_demotions=0 if precision is None else _max_demotions(kv_spec, precision),
        block_size=kv_spec.block_size,
        num_blocks=num_blocks,
        raw_block_bytes=replace(kv_spec, codec="raw16", head_dim=spec.head_dim).block_bytes,
        kv_bytes=kv_bytes,
        weight_bytes=weight_bytes,
        weight_cache=weights.plane == "native" and config.model.weight_cache == "on",
        max_context_len=max_context_len,
        threads=config.model.threads or hardware.cpus,
        prefix_cache=keep_kv and config.cache.prefix_cache == "on",
        keep_kv=keep_kv,
        explain_blocks=config.cache.explain_blocks,
        layer_windows=tuple(layer.window or 0 for layer in spec.layers),
        audit_fraction=config.cache.audit_fraction,
        refresh_every=_refresh_every(config, kv_spec),
        eviction=config.cache.eviction,
        cache_shares=tuple(sorted(config.cache.cache_share.items())),
        cache_ttl_s=config.cache.cache_ttl_s or 0.0,
        pin_fraction=pin_fraction,
        max_pinned_blocks=_pinnable_bytes(kv_spec, precision, kv_bytes, pin_fraction)
        // min(_sizes(kv_spec, precision, kv_bytes)[0].values()),
        schedule=config.scheduler.schedule,
        max_overtakes=config.scheduler.max_overtakes,
        max_batch_tokens=config.scheduler.max_batch_tokens,
        max_running=config.scheduler.max_running,
        max_queue=config.scheduler.max_queue,
        reserve_tokens=config.scheduler.reserve_tokens,
        notes=notes,
    )


def _transforms(cache: CacheConfig, precision: KVPrecision | None) -> str:
    if precision is not None and precision.has_spans:
        return cache.kv_transforms
    if cache.kv_transforms != "auto":
        raise ConfigError(
            f"[plan] --kv-transforms {cache.kv_transforms} is for {' and '.join(SPAN_CODEC_BITS)}, which "
            f"{_named_by(cache)} does not use; leave it out, or set --kv-cache-dtype int4"
        )
    return ""


def _named_by(cache: CacheConfig) -> str:
    """Return the option by which the user said in what blocks are kept, with its value."""
    if cache.kv_profile is not None:
        return f"--kv-profile {cache.kv_profile}, which says {cache.kv_cache_dtype},"
    if cache.kv_precision is not None:
        return f"--kv-precision {cache.kv_precision}"
    return f"--kv-cache-dtype {cache.kv_cache_dtype}"


def _pinnable_bytes(
    kv_spec: KVSpec, precision: KVPrecision | None, kv_bytes: int, pin_fraction: float
) -> int:
    """Return what pins may hold of some KV memory: whole blocks where all have one size, as the pool counts it."""
    sizes, budget = _sizes(kv_spec, precision, kv_bytes)
    unit = 1 if precision is not None else sizes[kv_spec.codec]
    return int(budget // unit * pin_fraction) * unit


def _max_demotions(kv_spec: KVSpec, precision: KVPrecision) -> int:
    blocks = DEMOTED_BYTES_PER_STEP // kv_spec.block_bytes
    if not SPAN_CODEC_BITS.keys().isdisjoint(precision.codecs):
        heads = kv_spec.block_size * kv_spec.num_layers * kv_spec.num_kv_heads
        blocks = min(blocks, ENCODED_PRODUCTS_PER_STEP // (heads * kv_spec.head_dim**2))
    return max(1, blocks)


def _refresh_every(config: EngineConfig, kv_spec: KVSpec) -> int:
    every = config.cache.refresh_every or 0
    if every and kv_spec.codec not in LOSSY_CODECS:
        raise ConfigError(
            f"[plan] --refresh-every renews blocks of a lossy codec ({', '.join(sorted(LOSSY_CODECS))}), and "
            f"{kv_spec.codec} keeps what was computed; leave it out, or set --kv-cache-dtype"
        )
    return every


def memory_estimate(  # noqa: PLR0913  # each a number of its own
    spec: ModelSpec,
    *,
    codec: str | KVPrecision = "auto",
    weights: WeightFormat = TORCH_FLOAT32,
    context: int,
    concurrency: int,
    block_size: int,
    kv_head_dim: int | None = None,
    max_batch_tokens: int = 512,
) -> MemoryEstimate:
    """Return what ``concurrency`` requests of ``context`` tokens need, before anything is loaded.

    The figures are what the engine allocates for that many blocks and for the weights.

    Args:
        spec: The model.
        codec: As ``--kv-cache-dtype``, auto as in ``resolve``; or the rule by which blocks change their codec.
        weights: What ``weight_format`` returned.
        context: Tokens per request, prompt and output, >= 1.
        concurrency: Requests at once, >= 1.
        block_size: Tokens per block, >= 1.
        kv_head_dim: As the option of that name.
        max_batch_tokens: Positions of a step; they count where blocks change their codec, since they are written in the
            largest.

    Raises:
        ConfigError: A number is below 1, or the codec is unknown.
    """
    for name, value in (
        ("--context", context),
        ("--concurrency", concurrency),
        ("--block-size", block_size),
    ):
        if value < 1:
            raise ConfigError(f"[plan] {name} must be at least 1, received {value}")
    precision = _rule_of(codec) if isinstance(codec, str) else codec
    written = codec if isinstance(codec, str) else "auto"
    kv_spec = _kv_spec(spec, written, block_size, kv_head_dim)
    old = kv_spec if precision is None else replace(kv_spec, codec=precision.rest)
    blocks = kv_spec.num_blocks_for(context)
    sizes = block_bytes_by_codec(kv_spec, precision)
    profile = _profile(1, kv_spec, precision, sizes)
    request_bytes = profile.total(blocks)
    step_profile = _profile(max_batch_tokens, kv_spec, precision, sizes)
    step_bytes = step_profile.total(blocks) - request_bytes
    kv_bytes = request_bytes * concurrency + step_bytes
    weight_bytes = weights.num_bytes(spec)
    return MemoryEstimate(
        context=context,
        concurrency=concurrency,
        block_size=block_size,
        token_bytes=old.token_bytes,
        old_block_bytes=old.block_bytes,
        blocks_per_request=blocks,
        request_bytes=request_bytes,
        step_bytes=step_bytes,
        windowed_request_bytes=_windowed_request_bytes(spec, kv_spec, profile, context),
        kv_bytes=kv_bytes,
        num_parameters=spec.num_parameters,
        weight_bytes=weight_bytes,
        total_bytes=weight_bytes + kv_bytes,
    )


def formats(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware
) -> tuple[WeightFormat, KVPrecision | None]:
    """Return what weights are kept in, and the rule by which blocks change their codec; None: they do not.

    Raises:
        ConfigError: The options do not go together, or not with this model or machine.
    """
    precision = precision_of(config.cache)
    weights = weight_format(config.model, spec, config.cache.kv_cache_dtype, hardware)
    if precision is not None and weights.plane != "native":
        why = f"--dtype {config.model.dtype} computes in torch"
        if config.model.dtype == "auto":
            why = hardware.why_no_isa or why_not_native(spec) or "there are none for this CPU"
        raise ConfigError(
            f"[plan] blocks of several codecs need the native kernels, received {_named_by(config.cache)} where "
            f"weights are on {weights.plane}: {why}; keep blocks in one codec, as --kv-cache-dtype raw16, "
            "or leave --dtype at auto"
        )
    return weights, precision


def weight_format(
    model: ModelConfig, spec: ModelSpec, codec: str, hardware: Hardware
) -> WeightFormat:
    """Return what ``--weights`` and ``--dtype`` come to on this machine.

    Torch computes where the user set ``dtype``, where K and V are kept in float32, which the native kernels do not
    read, and where there are no native kernels for this machine or this model; portable ones are slower than torch and
    run only when ``weights`` asks for them. Otherwise the native kernels compute, in int8 unless ``weights`` says
    otherwise.

    Args:
        model: What the user asked for.
        spec: Which model it is.
        codec: Of K and V, as ``--kv-cache-dtype``.
        hardware: What there is.

    Raises:
        ConfigError: ``weights`` names a format of the native kernels, and something else rules them out.
    """
    why_not = hardware.why_no_isa if hardware.isa is None else why_not_native(spec)
    if model.weights == "auto":
        is_native_slow = hardware.isa in {None, PORTABLE_ISA}
        if model.dtype != "auto" or codec == "float32" or is_native_slow or why_not:
            return WeightFormat(
                plane="torch", kind="float32" if model.dtype == "auto" else model.dtype
            )
        return WeightFormat(plane="native", kind="int8")
    if model.dtype != "auto":
        raise ConfigError(
            f"[plan] --weights {model.weights} computes in the native kernels and --dtype {model.dtype} in torch; "
            "give one of them"
        )
    if codec == "float32":
        raise ConfigError(
            f"[plan] --weights {model.weights} computes in the native kernels, which do not read "
            "--kv-cache-dtype float32; set it to raw16 or int8, or leave --weights at auto"
        )
    if hardware.isa is None or why_not:
        raise ConfigError(
            f"[plan] --weights {model.weights} needs the native kernels: {why_not}; leave it at auto"
        )
    return WeightFormat(plane="native", kind=model.weights)


def kv_spec_of(plan: EnginePlan, spec: ModelSpec) -> KVSpec:
    """Return the block shape that the plan decided for this model."""
    return _kv_spec(spec, plan.codec, plan.block_size, plan.kv_head_dim)


def usable_bytes(
    spec: ModelSpec,
    precision: KVPrecision | None,
    block_size: int,
    num_bytes: int,
    kv_head_dim: int | None = None,
) -> int:
    """Return how much of some KV memory old blocks may fill: with several codecs a little stays free between them."""
    if precision is None:
        return num_bytes
    kv_spec = _kv_spec(spec, "auto", block_size, kv_head_dim)
    block_bytes = block_bytes_by_codec(kv_spec, precision)
    try:
        layout = slab_layout(block_bytes, num_bytes)
    except ConfigError:  # less than a few blocks
        return 0
    return layout.budget_bytes * block_bytes[precision.rest] // layout.cell_bytes[precision.rest]


def _sizes(
    kv_spec: KVSpec, precision: KVPrecision | None, num_bytes: int
) -> tuple[Mapping[str, int], int]:
    """Return what a block takes of a pool by codec, and the most that all blocks may take, as the arena counts it."""
    if precision is None:
        return {kv_spec.codec: kv_spec.block_bytes}, num_bytes
    layout = slab_layout(block_bytes_by_codec(kv_spec, precision), num_bytes)
    return layout.cell_bytes, layout.budget_bytes


def block_bytes_by_codec(kv_spec: KVSpec, precision: KVPrecision | None) -> dict[str, int]:
    """Return the bytes of a block in each codec that it may come to be in."""
    if precision is None:
        return {kv_spec.codec: kv_spec.block_bytes}
    return {codec: replace(kv_spec, codec=codec).block_bytes for codec in precision.codecs}


def precision_of(cache: CacheConfig) -> KVPrecision | None:
    """Return the rule by which blocks change their codec; None: they do not."""
    text = cache.kv_precision
    if text is None and cache.kv_cache_dtype not in PRESETS:
        if cache.demote_before_evict == "on":
            raise ConfigError(
                "[plan] --demote-before-evict on needs a smaller codec to demote blocks to; "
                f"set --kv-cache-dtype to {', '.join(PRESETS)}, or --kv-precision"
            )
        return None
    if text is not None and cache.kv_cache_dtype not in {"auto", "mixed"}:
        raise ConfigError(
            f"[plan] --kv-cache-dtype {cache.kv_cache_dtype} and --kv-precision {text} each say in which codecs blocks "
            "are kept; give one of them"
        )
    return _rule_of(cache.kv_cache_dtype) if text is None else KVPrecision.parse(text)


def _rule_of(codec: str) -> KVPrecision | None:
    """Return the rule that a value of ``--kv-cache-dtype`` stands for; None: all blocks keep one codec."""
    return KVPrecision.parse(PRESETS[codec]) if codec in PRESETS else None


def _kv_spec(
    spec: ModelSpec, codec: str, block_size: int, kv_head_dim: int | None = None
) -> KVSpec:
    """Return the shape of a block as it is written; ``kv_head_dim`` 0 or None: of whole heads."""
    if kv_head_dim and kv_head_dim > spec.head_dim:
        raise ConfigError(
            f"[plan] --kv-head-dim must be at most the {spec.head_dim} dimensions of this model's heads, "
            f"received {kv_head_dim}"
        )
    return KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=kv_head_dim or spec.head_dim,
        block_size=block_size,
        codec="raw16" if codec in {"auto", *PRESETS} else codec,
    )


def _requested_context(config: EngineConfig, spec: ModelSpec) -> int:
    context = config.model.max_context
    if context is None:
        return spec.max_context_len
    if context > spec.max_context_len:
        raise ConfigError(
            f"[plan] --max-context {context} is more than the {spec.max_context_len} tokens "
            f"{config.model.model} was made for; lower it"
        )
    return context


def _num_blocks(
    config: EngineConfig,
    kv_spec: KVSpec,
    precision: KVPrecision | None,
    context: int,
    weight_bytes: int,
    hardware: Hardware,
) -> tuple[int, int]:
    """Return the blocks of the pool, as they are written, and its bytes."""
    left = hardware.available_bytes - weight_bytes
    minimum = min(MIN_REQUEST_BLOCKS, kv_spec.num_blocks_for(context))
    if config.cache.memory_gib is None:
        most = config.scheduler.max_running * kv_spec.num_blocks_for(context)
        num_bytes = min(int(max(0, left) * KV_MEMORY_FRACTION), most * kv_spec.block_bytes)
        advice = "free memory, use a smaller model, or set --memory-gib"
    else:
        budget = int(config.cache.memory_gib * GIB)
        if budget > left:
            raise ConfigError(
                f"[plan] --memory-gib {config.cache.memory_gib:g} needs {budget:,} bytes beside the weights' "
                f"{weight_bytes:,}, and {hardware.available_bytes:,} are available; lower it to at most "
                f"{max(0, left) / GIB:.2f}"
            )
        num_bytes = budget
        advice = "raise --memory-gib"
    if precision is None:
        num_blocks = num_bytes // kv_spec.block_bytes
        num_bytes = num_blocks * kv_spec.block_bytes
    else:
        sizes, budget = _sizes(kv_spec, precision, num_bytes)
        num_blocks = budget // sizes[kv_spec.codec]
    if num_blocks - int(num_blocks * config.cache.pin_fraction) < minimum:
        raise ConfigError(
            f"[plan] not even one small request fits: {minimum} blocks of {kv_spec.block_bytes:,} bytes "
            f"({kv_spec.block_size} tokens) are needed, {num_blocks} fit (weights {weight_bytes:,} bytes, "
            f"{hardware.available_bytes:,} bytes available, --pin-fraction {config.cache.pin_fraction:g}); {advice}, "
            f"or lower --block-size"
        )
    return num_blocks, num_bytes


def _profile(
    max_chunk: int, kv_spec: KVSpec, precision: KVPrecision | None, sizes: Mapping[str, int]
) -> AgeProfile:
    """Return what the blocks of a request take, as admission counts them."""
    if precision is None:
        size = sizes[kv_spec.codec]
        return AgeProfile((), size, size)
    budget = KVBudget(num_bytes=0, block_bytes=sizes, precision=precision, max_chunk=max_chunk)
    return AgeProfiles(budget, kv_spec.block_size).of(max_chunk)


def _fit_context(
    config: EngineConfig,
    kv_spec: KVSpec,
    precision: KVPrecision | None,
    context: int,
    kv_bytes: int,
) -> tuple[int, tuple[str, ...]]:
    sizes, budget = _sizes(kv_spec, precision, kv_bytes)
    profile = _profile(config.scheduler.max_batch_tokens, kv_spec, precision, sizes)
    # Admission never counts on what pins may hold.
    usable = budget - _pinnable_bytes(kv_spec, precision, kv_bytes, config.cache.pin_fraction)
    num_fitting = profile.max_blocks(usable)
    capacity = num_fitting * kv_spec.block_size
    if capacity >= context:
        return context, ()
    usable_fraction = usable / budget
    needed_gib = profile.total(kv_spec.num_blocks_for(context)) / usable_fraction / GIB
    if config.model.max_context is not None:
        raise ConfigError(
            f"[plan] --max-context {context} needs {kv_spec.num_blocks_for(context)} blocks of "
            f"{kv_spec.block_size} tokens ({needed_gib:.2f} GiB), and {num_fitting} fit; lower --max-context to "
            f"{capacity} or set --memory-gib to at least {needed_gib:.2f}"
        )
    note = (
        f"max_context lowered from {context} to {capacity}: one full context needs {needed_gib:.2f} GiB "
        f"of KV memory; raise --memory-gib"
    )
    logger.warning("%s", note)
    return capacity, (note,)


def _windowed_request_bytes(
    spec: ModelSpec, kv_spec: KVSpec, profile: AgeProfile, context: int
) -> int:
    return sum(
        profile.total(
            kv_spec.num_blocks_for(context if layer.window is None else min(context, layer.window))
        )
        // kv_spec.num_layers
        for layer in spec.layers
    )


def detect_hardware(
    *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> Hardware:
    """Read what this process may use: affinity and quota for CPUs, free memory and the control group's limit, kernels.

    Args:
        proc: Where procfs is mounted.
        cgroup: Where the control groups (version 1 or 2) are mounted.

    Raises:
        ConfigError: The system does not say how much memory is available, or ``KVIST_ISA`` is wrong.
    """
    affinity = len(os.sched_getaffinity(0))
    groups = _own_groups(proc, cgroup)
    quotas = [quota for group in groups if (quota := _cpu_quota(group)) is not None]
    memories = [free for group in groups if (free := _group_memory(group)) is not None]
    return Hardware(
        cpus=max(1, min([affinity, *quotas])),
        available_bytes=max(0, min([_system_memory(proc), *memories])),
        isa=native.isa() if native.available() else None,
        why_no_isa=native.why_not(),
    )


def _own_groups(proc: Path, cgroup: Path) -> list[Path]:
    """Return the control-group folders of this process and their ancestors; a limit of any of them binds."""
    lines = _read(proc / "self" / "cgroup").splitlines()
    # Inside a container the namespace's root is mounted at ``cgroup`` itself, whatever path /proc shows.
    folders = {cgroup, cgroup / "cpu", cgroup / "memory"}
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        roots = [cgroup / name for name in controllers.split(",")] if controllers else [cgroup]
        for root in roots:
            parts = Path(path.lstrip("/")).parts
            folders.update(root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1))
    return sorted(folders)


def _cpu_quota(group: Path) -> int | None:
    """Return the whole CPUs the group may use, at least 1; None without a limit."""
    fields = _read(group / "cpu.max").split()
    if not fields:
        fields = [_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")]
    try:
        quota, period = (int(value) for value in fields)
    except ValueError:  # "max 100000", or no such file
        return None
    return max(1, quota // period) if quota > 0 and period > 0 else None


def _group_memory(group: Path) -> int | None:
    """Return the group's limit minus what it cannot give back; None without a limit."""
    for limit_name, usage_name, file_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, usage = _read(group / limit_name).strip(), _read(group / usage_name).strip()
        if limit.isdecimal() and usage.isdecimal():
            # Page cache counts as usage although the kernel drops it before it kills anyone.
            reclaimable = _field(_read(group / "memory.stat"), file_key)
            return int(limit) - int(usage) + (reclaimable or 0)
    return None


def _system_memory(proc: Path) -> int:
    kib = _field(_read(proc / "meminfo"), "MemAvailable:")
    if kib is None:
        raise ConfigError(
            f"[plan] expected MemAvailable in {proc / 'meminfo'}, found none; Kvist needs Linux's procfs "
            f"to know how much memory it may take"
        )
    return kib * 1024


def _field(text: str, key: str) -> int | None:
    """Return the integer after ``key`` at the start of a line."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key:
            return int(words[1])
    return None


def _read(path: Path) -> str:
    """Return the file's text, or nothing when there is no such file or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
