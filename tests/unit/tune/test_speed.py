"""What is timed: full contexts, their blocks as a setting has them. Never how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tests.support.tiny_engine import load_tiny_decoder

from kvist.codecs.transforms import uncalibrated
from kvist.kernels import native
from kvist.model.native_decoder import NativeDecoder, pack_weights
from kvist.storage.slabs import SlabArena
from kvist.tune import speed
from kvist.tune.speed import measure_speed, num_sequences

if TYPE_CHECKING:
    from kvist.codecs.transforms import KVTransforms

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> NativeDecoder:
    tiny = load_tiny_decoder(tmp_path_factory.mktemp("tiny"))
    pool = native.extension().Pool(1)
    tensors = ((name, tensor.clone()) for name, tensor in tiny.weights.items())
    return NativeDecoder(tiny.spec, pack_weights(tiny.spec, tensors, "int8", pool), pool)


@pytest.fixture(scope="module")
def transforms(decoder: NativeDecoder) -> KVTransforms:
    spec = decoder.spec
    return uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)


def test_settings_take_turns_with_blocks_as_they_have_them(
    decoder: NativeDecoder, transforms: KVTransforms, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    original = decoder.step

    def step(sequences: Any, arena: Any) -> Any:
        steps.append((sequences, arena))
        return original(sequences, arena)

    monkeypatch.setattr(decoder, "step", step)
    monkeypatch.setattr(speed, "MAX_SEQUENCES", 2)
    rule = "sink=raw16,recent:64=raw16,recent:128=int8,rest=int3"
    told: list[int] = []
    speeds = measure_speed(decoder, transforms, ["int8", "int4", rule], 256, 3, told.append)
    assert list(speeds) == ["raw16", "int8", "int4", rule]
    assert told == [0, 1, 2, 3]
    arenas = [arena for _, arena in steps]
    assert arenas == 4 * arenas[:4]
    assert [arena.kv_spec.codec for arena in arenas[:2]] == ["raw16", "int8"]
    codecs = [
        [arena.codec_of(block) for block in range(8)]
        for arena in arenas[2:4]
        if isinstance(arena, SlabArena)
    ]
    assert codecs == [
        2 * ["int8", "int4", "int4", "raw16"],
        2 * ["raw16", "int8", "raw16", "raw16"],
    ]
    for sequences, _ in steps:
        assert [(each.start, len(each.token_ids), each.block_table) for each in sequences] == [
            (255, 1, (0, 1, 2, 3)), (255, 1, (4, 5, 6, 7))
        ]  # fmt: skip
    assert speeds["raw16"].ratio == 1.0
    assert speeds["raw16"].encode_ms is speeds["int8"].encode_ms is None
    assert speeds[rule].encode_ms > 0
    assert all(each.tokens_per_s > 0 and each.attention_ms > 0 for each in speeds.values())


def test_long_sequences_are_fewer(decoder: NativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_sequences(decoder, 256) == speed.MAX_SEQUENCES
    token_bytes = 2 * 2 * decoder.spec.num_layers * decoder.spec.num_kv_heads
    token_bytes *= decoder.spec.head_dim
    monkeypatch.setattr(speed, "MAX_BYTES", 3 * 256 * token_bytes)
    assert [num_sequences(decoder, tokens) for tokens in (256, 512, 1024)] == [3, 1, 1]
