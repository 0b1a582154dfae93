"""The arena: bytes as promised, writes where the slots say, copies of block heads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvist.codecs import registry
from kvist.errors import ConfigError
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena, allocate

CODECS = registry.names()


def make_arena(codec: str = "float32", num_blocks: int = 6, block_size: int = 4) -> BlockArena:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=block_size, codec=codec)
    arena = BlockArena(spec, num_blocks)
    for block in range(num_blocks):
        arena.block_bytes(block).zero_()
    return arena


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("block_size", [1, 3, 64])
def test_bytes_are_those_of_the_spec(codec: str, block_size: int) -> None:
    arena = make_arena(codec, 5, block_size)
    spec = arena.kv_spec
    assert arena.num_bytes == 5 * spec.block_bytes
    assert arena.block_bytes(2).shape == (spec.block_bytes,)
    assert arena.layer(0).shape == (5, 2, 2, block_size, arena.codec.stored_dim(8))
    per_value = arena.codec.bits_per_value(spec.head_dim)
    assert spec.block_bytes * 8 == 2 * 3 * 2 * block_size * 8 * per_value


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_writes_what_and_where_the_slots_say(codec: str, dtype: torch.dtype) -> None:
    arena = make_arena(codec)
    slots = torch.tensor([23, 0, 9, 10, 5])
    k, v = torch.randn(2, 5, 2, 8).to(dtype)
    arena.write(1, slots, k, v)
    expected = torch.zeros(6, 2, 2, 4, arena.codec.stored_dim(8), dtype=arena.codec.dtype)
    for row, slot in enumerate(slots.tolist()):
        expected[slot // 4, 0, :, slot % 4] = arena.codec.encode(k[row])
        expected[slot // 4, 1, :, slot % 4] = arena.codec.encode(v[row])
    assert torch.equal(arena.layer(1), expected)
    assert not arena.layer(0).any()
    assert not arena.layer(2).any()


def test_slots_of_minus_one_are_skipped() -> None:
    arena, sparse = make_arena(), make_arena()
    k, v = torch.randn(2, 4, 2, 8)
    arena.write(0, torch.tensor([-1, 7, -1, 20]), k, v)
    sparse.write(0, torch.tensor([7, 20]), k[[1, 3]], v[[1, 3]])
    assert torch.equal(arena.layer(0), sparse.layer(0))
    arena.write(0, torch.tensor([-1, -1, -1, -1]), k + 1, v)
    assert torch.equal(arena.layer(0), sparse.layer(0))


def test_strided_keys_are_accepted() -> None:
    """K and V are slices of the fused projection."""
    arena, dense = make_arena(), make_arena()
    fused = torch.randn(3, 6, 8)
    slots = torch.tensor([1, 2, 3])
    arena.write(0, slots, fused[:, 2:4], fused[:, 4:])
    dense.write(0, slots, fused[:, 2:4].contiguous(), fused[:, 4:].contiguous())
    assert torch.equal(arena.layer(0), dense.layer(0))


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_copies_the_head_of_a_block_in_all_layers(num_tokens: int) -> None:
    arena = make_arena()
    for layer in range(3):
        arena.write(layer, torch.arange(24), torch.randn(24, 2, 8), torch.randn(24, 2, 8))
    before = [arena.layer(layer).clone() for layer in range(3)]
    arena.copy(1, 4, num_tokens)
    for layer in range(3):
        expected = before[layer]
        expected[4, :, :, :num_tokens] = expected[1, :, :, :num_tokens]
        assert torch.equal(arena.layer(layer), expected)


def test_a_block_is_one_contiguous_range_in_the_documented_order() -> None:
    """Layer, then K or V, head, position, dimension: docs/formats/kv_block.md."""
    arena = make_arena(block_size=4)
    k = torch.arange(16, dtype=torch.float32).view(1, 2, 8)
    arena.write(2, torch.tensor([3 * 4 + 1]), k, k + 100)
    values = arena.block_bytes(3).view(torch.float32)
    for is_value in (0, 1):
        for head in (0, 1):
            offset = (((2 * 2 + is_value) * 2 + head) * 4 + 1) * 8
            expected = k[0, head] + 100 * is_value
            assert torch.equal(values[offset : offset + 8], expected)
    assert arena.block_bytes(3).is_contiguous()


def test_memory_that_cannot_be_had_names_the_option() -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8)
    with pytest.raises(ConfigError, match=r"cannot allocate .* GiB for .* lower --memory-gib"):
        BlockArena(spec, 2**45)


def test_memory_is_of_a_kind_that_can_have_large_pages() -> None:
    maps = Path("/proc/self/smaps")
    if not maps.exists():
        pytest.skip("only Linux says what its mappings are")
    memory = allocate(8 << 20, "a test", torch.device("cpu"))
    address = memory.data_ptr()
    flags: list[str] = []
    permissions, is_ours = "", False
    for line in maps.read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            begin, end = (int(number, 16) for number in head.split("-"))
            is_ours = begin <= address < end
            permissions = rest[0] if is_ours else permissions
        elif is_ours and head == "VmFlags:":
            flags = rest
    assert permissions == "rw-p"
    assert "hg" in flags  # advised


def test_an_arena_without_blocks_names_the_option() -> None:
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=8)
    with pytest.raises(
        ConfigError, match=r"at least 1 KV block, received num_blocks=0; raise --memory-gib"
    ):
        BlockArena(spec, 0)
