"""Blocks in bytes, and what layers with windows make of hits."""

from __future__ import annotations

from tests.support.engine_fakes import make_parts

from kvist.engine.core import RequestGroup
from kvist.engine.memory_stats import memory_stats
from kvist.engine.metrics import RequestMetrics
from kvist.types import SamplingParams

WINDOWS = (0, 6, 6, 0, 20)


def run(parts, name, prompt):
    parts.core.add(
        RequestGroup(
            request_id=name,
            prompt_token_ids=tuple(prompt),
            params=SamplingParams(max_tokens=1, ignore_eos=True),
        )
    )
    while parts.core.has_work:
        parts.core.step()


def test_bytes_by_state_are_the_pool_and_layers_share_them_alike():
    parts = make_parts(
        num_blocks=64, kv_bytes=64 * 1000, layer_windows=WINDOWS, raw_block_bytes=500
    )
    parts.core._metrics = RequestMetrics({6, 20})
    for name in ("a", "b"):
        run(parts, name, range(33))
    stats = parts.core.stats()
    memory = memory_stats(parts.plan, stats.cache, stats.requests)
    assert memory.codec == "float32"
    assert memory.block_bytes == 1000
    # 32 bits for each value.
    assert memory.compression == 0.5
    assert memory.blocks_by_codec == {"float32": stats.cache.num_evictable}
    assert sum(memory.bytes_by_state.values()) == 64 * 1000
    assert memory.bytes_by_state["evictable"] == stats.cache.num_evictable * 1000 > 0
    assert [(layer.num_layers, layer.window) for layer in memory.layers] == [
        (2, None),
        (2, 6),
        (1, 20),
    ]
    assert {layer.block_bytes for layer in memory.layers} == {200}
    assert {layer.evictable_bytes for layer in memory.layers} == {stats.cache.num_evictable * 200}
    # The second request reused 32 tokens; its 33rd attends to itself and window - 1 before it.
    assert {layer.num_reused_tokens for layer in memory.layers} == {32}
    assert [layer.num_read_tokens for layer in memory.layers] == [32, 5, 19]


def test_without_a_known_model_there_are_no_layers():
    parts = make_parts()
    stats = parts.core.stats()
    assert memory_stats(parts.plan, stats.cache, stats.requests).layers == ()
