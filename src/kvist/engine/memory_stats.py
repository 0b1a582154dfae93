"""What the blocks are in bytes, by state and by layer.

Responsible for turning counts of blocks into memory, and for what each kind of layer made of reused tokens. Knows no
manager and no arena.

A block holds all layers (``spec.KVSpec``), so every layer has the same number of blocks and of bytes, sliding windows
or not. What differs is how much of it a layer reads: one with a window never attends to a position further back than
that, so of a long hit it needed the end only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.cache.stats import CacheStats
    from kvist.engine.metrics import RequestStats
    from kvist.plan import EnginePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStats:
    """Layers that have the same window, each of them alike."""

    num_layers: int
    window: int | None
    """Positions that a query attends to, its own included; None: all."""
    block_bytes: int
    """Of one block, what is one layer's."""
    held_bytes: int
    """One layer's part of the blocks that leases or pins hold."""
    evictable_bytes: int
    """One layer's part of the cached blocks that nobody holds."""
    num_reused_tokens: int
    """Prompt tokens of ended sequences whose K and V came out of the cache."""
    num_read_tokens: int
    """Subset of num_reused_tokens: those that the first token computed could attend to in such a layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryStats:
    """The pool in bytes, at one moment."""

    codec: str
    """In which blocks are kept, or the rule by which theirs changes."""
    block_bytes: int
    """One block as it is written, all layers."""
    bytes_by_state: Mapping[str, int]
    """Free, evictable and held; together the pool."""
    bytes_by_codec: Mapping[str, int]
    """Of the blocks that hold something, by codec; together evictable and held."""
    blocks_by_codec: Mapping[str, int]
    """Those blocks."""
    saved_fraction: float
    """What blocks in smaller codecs save of what they would take as they were written, in [0, 1)."""
    compression: float
    """What the blocks would take in 16 bits, divided by what they take with all metadata; 1 where there are none."""
    layers: tuple[LayerStats, ...]
    """By window, in the order of the model; empty where the model's layers are not known."""


def memory_stats(plan: EnginePlan, cache: CacheStats, requests: RequestStats) -> MemoryStats:
    """Return the pool of a plan in bytes.

    Args:
        plan: Sizes and windows.
        cache: Blocks by state.
        requests: What ended sequences reused.
    """
    unit_bytes = cache.unit_bytes or plan.kv_bytes // plan.num_blocks
    block_bytes = cache.block_units * unit_bytes
    states = {
        "free": cache.free_units * unit_bytes,
        "evictable": cache.evictable_units * unit_bytes,
        "held": cache.held_units * unit_bytes,
    }
    used_bytes = states["evictable"] + states["held"]
    num_used = cache.num_evictable + cache.num_held
    written_bytes = num_used * block_bytes
    num_layers_in_all = max(1, len(plan.layer_windows))
    windows = Counter(plan.layer_windows)
    return MemoryStats(
        codec=plan.kv_format,
        block_bytes=block_bytes,
        bytes_by_state=states,
        bytes_by_codec=cache.bytes_by_codec or {plan.codec: used_bytes},
        blocks_by_codec=cache.blocks_by_codec or {plan.codec: num_used},
        compression=num_used * plan.raw_block_bytes / used_bytes if used_bytes else 1.0,
        saved_fraction=1 - used_bytes / written_bytes if written_bytes else 0.0,
        layers=tuple(
            LayerStats(
                num_layers=num_layers,
                window=window or None,
                block_bytes=block_bytes // num_layers_in_all,
                held_bytes=states["held"] // num_layers_in_all,
                evictable_bytes=states["evictable"] // num_layers_in_all,
                num_reused_tokens=requests.num_reused_tokens,
                num_read_tokens=(
                    requests.reused_by_window[window] if window else requests.num_reused_tokens
                ),
            )
            for window, num_layers in windows.items()
        ),
    )
