"""The slab arena: bytes conserved by codec, contents intact through demotion and compaction, and always a place."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codecs import registry
from kvist.codecs.rotated import INT4, Rows
from kvist.codecs.transforms import KeyMetric, KVTransforms, uncalibrated
from kvist.errors import ConfigError, InvariantViolation
from kvist.kernels import native
from kvist.kernels.rotation import rotation
from kvist.spec import KVSpec
from kvist.storage.slab_layout import MAX_SLAB_BLOCKS, MAX_SLAB_BYTES, slab_layout
from kvist.types import BlockCopy, MemoryOp

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")

if native.available():
    from kvist.storage.slabs import NOT_ALLOCATED, SlabArena

CODECS = ("raw16", "int8")
LADDER = ("raw16", "int8", "int4", "int3")
TINY = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4)
NARROW = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=4)
SMALL = KVSpec(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16)
SPANS = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=64)
SMOLLM2 = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=64)


def sizes_of(spec: KVSpec, codecs: tuple[str, ...] = CODECS) -> dict[str, int]:
    return {codec: replace(spec, codec=codec).block_bytes for codec in codecs}


def transforms_of(spec: KVSpec) -> KVTransforms:
    """Return transforms that are not those of uncalibrated codecs."""
    plain = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    balance = np.linspace(0.5, 2.0, plain.mean.size, dtype=np.float32).reshape(plain.mean.shape)
    rows = replace(plain.keys, balance=balance)
    return replace(plain, mean=balance[..., ::-1].copy() - 1, keys=rows, values=rows)


def codecs_of(spec: KVSpec) -> tuple[str, ...]:
    return LADDER if spec.block_size % 64 == 0 else CODECS


def make_arena(spec: KVSpec = TINY, num_blocks: int = 256) -> SlabArena:
    pool = native.extension().Pool(1)
    num_bytes = num_blocks * spec.block_bytes
    return SlabArena(spec, codecs_of(spec), num_bytes, pool, transforms_of(spec))


class Contents:
    """Values of blocks, and what is made of them on each way through the codecs.

    ``stored`` is by way, as in ``raw16>int4>int3``: a block that was demoted twice has lost twice. int8 is what the
    reference codec makes of it, int4 and int3 what the native ones do, which have tests of their own.
    """

    def __init__(self, spec: KVSpec, count: int) -> None:
        shape = (count, spec.num_layers, 2, spec.num_kv_heads, spec.block_size, spec.head_dim)
        generator = torch.Generator().manual_seed(0)
        raw = registry.get("raw16")
        self._shape = shape[1:]
        encoded = raw.encode(torch.randn(shape, generator=generator))
        lossy = registry.get("int8").encode(raw.decode(encoded))
        self.stored = {
            "raw16": encoded.view(torch.uint8).reshape(count, -1).numpy(),
            "int8": lossy.reshape(count, -1).numpy(),
        }
        self.stored["raw16>int8"] = self.stored["int8"]
        if codecs_of(spec) == LADDER:
            self._recode(spec, "raw16", ("raw16>int4", "raw16>int3"))
            self._recode(spec, "raw16>int8", ("raw16>int8>int4", "raw16>int8>int3"))
            self._recode(spec, "raw16>int4", ("raw16>int4>int3",))
            self._recode(spec, "raw16>int8>int4", ("raw16>int8>int4>int3",))
            self.stored["int4"] = self.stored["raw16>int4"]
            self.stored["int3"] = self.stored["raw16>int3"]

    def _recode(self, spec: KVSpec, way: str, ways: tuple[str, ...]) -> None:
        module = native.extension()
        transforms = transforms_of(spec).to_native()
        for target_way in ways:
            codec = target_way.rpartition(">")[2]
            target = np.zeros((len(self.stored[way]), sizes_of(spec, (codec,))[codec]), np.uint8)
            for source, row in zip(self.stored[way], target, strict=True):
                module.recode_block(
                    module.Pool(1), source, row, source_codec=way.rpartition(">")[2], target_codec=codec,
                    num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, block_size=spec.block_size,
                    head_dim=spec.head_dim, num_tokens=spec.block_size, transforms=transforms,
                )  # fmt: skip
            self.stored[target_way] = target

    def head(self, block: np.ndarray, codec: str, num_tokens: int) -> torch.Tensor:
        """Return the decoded values of the first positions of a block's bytes."""
        stored = torch.from_numpy(block.copy()).view(registry.get(codec).dtype)
        values = registry.get(codec).decode(stored.view(*self._shape[:-1], -1))
        return values[..., :num_tokens, :]


def is_same(block: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether two blocks have the same bytes; numpy's own assertion takes a hundred times as long."""
    return block.tobytes() == expected.tobytes()


def audit(arena: SlabArena, blocks: dict[int, tuple[str, int]], contents: Contents) -> None:
    """Check everything that must hold between operations, block by block."""
    codecs = codecs_of(arena.kv_spec)
    stats, sizes = arena.stats(), sizes_of(arena.kv_spec, codecs)
    for codec in codecs:
        count = sum(1 for own, _ in blocks.values() if own.rpartition(">")[2] == codec)
        assert stats.num_blocks[codec] == count
        assert stats.block_bytes[codec] == count * sizes[codec]
        assert stats.cell_bytes[codec] == count * arena.cell_bytes(codec)
    used = sum(stats.block_bytes.values())
    assert used <= sum(stats.cell_bytes.values()) <= arena.budget_bytes
    assert used + stats.unused_cell_bytes + stats.remainder_bytes == stats.slab_bytes
    assert stats.remainder_bytes >= 0
    assert 0 <= stats.fragmentation_fraction < 0.05
    allocated = np.flatnonzero(arena.codecs != NOT_ALLOCATED).tolist()
    assert allocated == sorted(blocks)
    ranges = sorted(
        (int(arena.offsets[i]), sizes[own.rpartition(">")[2]]) for i, (own, _) in blocks.items()
    )
    end = 0
    for start, size in ranges:
        assert end <= start
        end = start + size
    assert end <= arena.num_bytes
    for block_id, (codec, index) in blocks.items():
        assert arena.codec_of(block_id) == codec.rpartition(">")[2]
        assert is_same(arena.block(block_id), contents.stored[codec][index])


class Driver:
    """Random operations within the budget, as the control plane counts it, on an arena and on a model of it."""

    def __init__(self, arena: SlabArena, contents: Contents, seed: int) -> None:
        self.arena = arena
        self.contents = contents
        self.random = random.Random(seed)
        self.sizes = {codec: arena.cell_bytes(codec) for codec in codecs_of(arena.kv_spec)}
        self.blocks: dict[int, tuple[str, int]] = {}
        self.order: list[int] = []
        self.free_ids = list(range(arena.num_ids))
        self.used = 0
        self.most_moved = 0

    def fits(self, codec: str) -> bool:
        return self.used + self.sizes[codec] <= self.arena.budget_bytes

    def allocate(self, codec: str) -> None:
        block_id = self.free_ids.pop(self.random.randrange(len(self.free_ids)))
        self.apply(MemoryOp("allocate", block_id, codec))
        index = self.random.randrange(len(self.contents.stored[codec]))
        self.arena.block(block_id)[:] = self.contents.stored[codec][index]
        self.blocks[block_id] = (codec, index)
        self.order.append(block_id)
        self.used += self.sizes[codec]

    def free(self, block_id: int) -> None:
        codec, index = self.blocks.pop(block_id)
        assert is_same(self.arena.block(block_id), self.contents.stored[codec][index])
        self.apply(MemoryOp("free", block_id, ""))
        self.free_ids.append(block_id)
        self.used -= self.sizes[codec.rpartition(">")[2]]

    def demote(self, block_id: int, codec: str = "int8") -> None:
        way, index = self.blocks[block_id]
        self.apply(MemoryOp("demote", block_id, codec))
        self.used -= self.sizes[way.rpartition(">")[2]] - self.sizes[codec]
        way = f"{way}>{codec}"
        self.blocks[block_id] = (way, index)
        assert is_same(self.arena.block(block_id), self.contents.stored[way][index])

    def apply(self, op: MemoryOp) -> None:
        before = self.arena._num_moved_bytes
        self.arena.apply([op])
        self.most_moved = max(self.most_moved, self.arena._num_moved_bytes - before)

    def any_of(self, codec: str) -> int | None:
        """Return a block of the codec; None: a few tries found none."""
        for _ in range(20 if self.blocks else 0):
            # Freed ids stay in the list until they are met.
            index = self.random.randrange(len(self.order))
            self.order[index], self.order[-1] = self.order[-1], self.order[index]
            block_id = self.order[-1]
            if block_id not in self.blocks:
                self.order.pop()
            elif self.blocks[block_id][0].rpartition(">")[2] == codec:
                return block_id
        return None

    def ids(self) -> list[int]:
        return list(self.blocks)

    def step(self, wish: float) -> None:
        """Do something, likely an allocation when ``wish`` is near 1."""
        draw = self.random.random()
        if draw < wish:
            is_small = len(self.sizes) == 2 and self.random.random() < 0.1
            codec = "int8" if is_small else "raw16"
            if self.fits(codec):
                self.allocate(codec)
                return
        codec = self.random.choice(list(self.sizes)[:-1])
        raw = self.any_of(codec)
        if raw is not None and draw < (1 + wish) / 2:
            smaller = list(self.sizes)[list(self.sizes).index(codec) + 1 :]
            self.demote(raw, self.random.choice(smaller))
        elif self.blocks:
            self.free(raw if raw is not None and draw < 0.9 else next(iter(self.blocks)))


@pytest.mark.parametrize(
    ("spec", "num_blocks", "num_ops", "seed"),
    [
        (TINY, 256, 100_000, 0),
        (SMALL, 64, 10_000, 1),
        (NARROW, 1500, 30_000, 2),
        (SPANS, 1024, 100_000, 3),
    ],
    ids=["many operations", "small slabs", "large slabs", "four codecs"],
)
def test_random_operations_within_the_budget_always_succeed(spec, num_blocks, num_ops, seed):
    arena = make_arena(spec, num_blocks)
    contents = Contents(spec, 97)
    driver = Driver(arena, contents, seed)
    wish = 0.9
    for index in range(num_ops):
        if index % (4 * num_blocks) == 0:
            # Full, empty, and in between; full is where compaction is needed.
            wish = driver.random.choice([0.2, 0.5, 0.7, 0.95, 0.98, 1.0])
            audit(arena, driver.blocks, contents)
        driver.step(wish)
    audit(arena, driver.blocks, contents)
    assert arena.stats().num_moved_bytes > 0
    assert driver.most_moved <= arena.layout.slab_bytes
    for block_id in driver.ids():
        driver.free(block_id)
    stats = arena.stats()
    assert stats.slab_bytes == stats.unused_cell_bytes == stats.remainder_bytes == 0
    assert stats.fragmentation_fraction == 0


@pytest.mark.parametrize("keep", [1, 2, 3, 7])
def test_a_full_arena_of_holes_changes_its_codec(keep):
    """Every slab of raw blocks keeps a few: without moving them no slab could become one of int8."""
    arena = make_arena(NARROW, 1500)
    contents = Contents(NARROW, 5)
    driver = Driver(arena, contents, 0)
    while driver.fits("raw16"):
        driver.allocate("raw16")
    for place, block_id in enumerate(driver.ids()):
        if place % (keep + 1):
            driver.free(block_id)
    while driver.fits("int8"):
        driver.allocate("int8")
    audit(arena, driver.blocks, contents)
    for block_id in [i for i, (way, _) in driver.blocks.items() if way.endswith("int8")]:
        driver.free(block_id)
    while driver.fits("raw16"):
        driver.allocate("raw16")
    audit(arena, driver.blocks, contents)


def test_all_blocks_can_be_demoted_when_the_budget_is_full():
    arena = make_arena(SMALL, 50)
    contents = Contents(SMALL, 5)
    driver = Driver(arena, contents, 0)
    while driver.fits("raw16"):
        driver.allocate("raw16")
    count = len(driver.blocks)
    for block_id in driver.ids():
        driver.demote(block_id)
    while driver.fits("int8"):
        driver.allocate("int8")
    audit(arena, driver.blocks, contents)
    assert len(driver.blocks) >= 1.9 * count


def test_a_demoted_block_keeps_its_id_and_the_reference_codec_reads_it():
    arena = make_arena(SMALL, 20)
    contents = Contents(SMALL, 3)
    driver = Driver(arena, contents, 0)
    for _ in range(3):
        driver.allocate("raw16")
    block_id = driver.ids()[1]
    before = contents.head(arena.block(block_id), "raw16", 16)
    driver.demote(block_id)
    after = contents.head(arena.block(block_id), "int8", 16)
    bound = registry.get("int8").error_bound(before)
    assert ((before - after).abs() <= bound).all()
    assert not torch.equal(before, after)
    audit(arena, driver.blocks, contents)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_tokens", [1, 7, 16])
def test_heads_of_blocks_are_copied_from_any_codec(codec, num_tokens):
    arena = make_arena(SMALL, 20)
    contents = Contents(SMALL, 3)
    arena.apply([MemoryOp("allocate", 5, codec), MemoryOp("allocate", 6, "raw16")])
    arena.block(5)[:] = contents.stored[codec][1]
    arena.block(6)[:] = contents.stored["raw16"][2]
    arena.apply([BlockCopy(source=5, target=6, num_tokens=num_tokens)])
    decoded = contents.head(contents.stored[codec][1], codec, num_tokens)
    expected = registry.get("raw16").decode(registry.get("raw16").encode(decoded))
    assert torch.equal(contents.head(arena.block(6), "raw16", num_tokens), expected)
    rest = contents.head(arena.block(6), "raw16", 16)[..., num_tokens:, :]
    before = contents.head(contents.stored["raw16"][2], "raw16", 16)[..., num_tokens:, :]
    assert torch.equal(rest, before)


def test_operations_run_in_order():
    """A block is demoted, copied from, freed, and its id allocated anew in one go."""
    arena = make_arena(SMALL, 20)
    contents = Contents(SMALL, 3)
    arena.apply([MemoryOp("allocate", 0, "raw16")])
    arena.block(0)[:] = contents.stored["raw16"][0]
    arena.apply(
        [
            MemoryOp("demote", 0, "int8"),
            MemoryOp("allocate", 1, "raw16"),
            BlockCopy(source=0, target=1, num_tokens=16),
            MemoryOp("free", 0, ""),
            MemoryOp("allocate", 0, "raw16"),
            BlockCopy(source=1, target=0, num_tokens=4),
            MemoryOp("free", 1, ""),
        ]
    )
    expected = contents.head(contents.stored["int8"][0], "int8", 4)
    assert torch.equal(
        contents.head(arena.block(0), "raw16", 4),
        registry.get("raw16").decode(registry.get("raw16").encode(expected)),
    )
    assert arena.stats().num_blocks == {"raw16": 1, "int8": 0}


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (MemoryOp("allocate", 0, "raw16"), "without a block, received block_id=0"),
        (MemoryOp("allocate", -1, "raw16"), "without a block, received block_id=-1"),
        (MemoryOp("allocate", 10**6, "raw16"), "received block_id=1000000"),
        (MemoryOp("allocate", 9, "int4"), "a codec out of raw16, int8, received 'int4'"),
        (MemoryOp("free", 9, ""), "an allocated block, received block_id=9"),
        (MemoryOp("free", -1, ""), "an allocated block, received block_id=-1"),
        (MemoryOp("demote", 9, "int8"), "an allocated block, received block_id=9"),
        (MemoryOp("demote", 1, "int8"), "smaller than int8 to demote block 1"),
        (MemoryOp("demote", 1, "raw16"), "smaller than int8"),
        (MemoryOp("demote", 0, "raw16"), "smaller than raw16"),
        (MemoryOp("demote", 0, ""), "smaller than raw16"),
        (MemoryOp("promote", 0, "raw16"), "'promote' is none"),
        (BlockCopy(source=0, target=1, num_tokens=1), "into another block of raw16"),
        (BlockCopy(source=0, target=0, num_tokens=1), "into another block of raw16"),
        (BlockCopy(source=9, target=0, num_tokens=1), "an allocated block, received block_id=9"),
        (BlockCopy(source=0, target=9, num_tokens=1), "an allocated block, received block_id=9"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(op, message):
    arena = make_arena(SMALL, 20)
    contents = Contents(SMALL, 3)
    arena.apply([MemoryOp("allocate", 0, "raw16"), MemoryOp("allocate", 1, "int8")])
    arena.block(0)[:] = contents.stored["raw16"][0]
    arena.block(1)[:] = contents.stored["int8"][1]
    with pytest.raises(InvariantViolation, match=message):
        arena.apply([op])
    audit_free_of_fraction(arena, contents)


def audit_free_of_fraction(arena: SlabArena, contents: Contents) -> None:
    assert arena.stats().num_blocks == {"raw16": 1, "int8": 1}
    np.testing.assert_array_equal(arena.block(0), contents.stored["raw16"][0])
    np.testing.assert_array_equal(arena.block(1), contents.stored["int8"][1])


@pytest.mark.parametrize("site", ["_recode", "_new_slab"])
def test_operations_that_memory_ran_out_in_are_done_first_by_the_next_call(site, monkeypatch):
    arena, contents = make_arena(), Contents(TINY, 2)
    arena.apply([MemoryOp("allocate", 0, "raw16"), MemoryOp("allocate", 1, "raw16")])
    for block_id in range(2):
        arena.block(block_id)[:] = contents.stored["raw16"][block_id]
    original = getattr(SlabArena, site)

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(SlabArena, site, fail)
    ops = [
        MemoryOp("demote", 0, "int8"),
        MemoryOp("allocate", 2, "raw16"),
        BlockCopy(source=1, target=2, num_tokens=3),
    ]
    for attempt in (ops, []):
        with pytest.raises(MemoryError):
            arena.apply(attempt)
        audit(arena, {0: ("raw16", 0), 1: ("raw16", 1)}, contents)
    monkeypatch.setattr(SlabArena, site, original)
    arena.apply([MemoryOp("free", 1, "")])
    assert [arena.codec_of(0), arena.codec_of(2)] == ["int8", "raw16"]
    assert is_same(arena.block(0), contents.stored["raw16>int8"][0])
    torch.testing.assert_close(
        contents.head(arena.block(2), "raw16", 3),
        contents.head(contents.stored["raw16"][1], "raw16", 3),
    )
    assert arena.stats().num_blocks == {"raw16": 1, "int8": 1}


def test_more_than_the_budget_is_refused_with_the_numbers():
    arena = make_arena(SMALL, 20)
    ids = iter(range(arena.num_ids))
    while arena.stats().block_bytes["raw16"] + SMALL.block_bytes <= arena.budget_bytes:
        arena.apply([MemoryOp("allocate", next(ids), "raw16")])
    with pytest.raises(InvariantViolation, match=r"does not fit: [\d,]+ of [\d,]+ are allocated"):
        arena.apply([MemoryOp("allocate", next(ids), "raw16")])


def test_values_beyond_a_codec_are_told_once(caplog):
    arena = make_arena(SMALL, 20)
    arena.apply([MemoryOp("allocate", i, "raw16") for i in range(2)])
    for block_id in range(2):
        arena.block(block_id)[:] = 0
        arena.block(block_id).view(np.uint16)[3] = 0x7F00  # 1.7e38
    with caplog.at_level(logging.WARNING):
        arena.apply([MemoryOp("demote", i, "int8") for i in range(2)])
    assert arena.stats().num_held_rows == 2
    assert len(caplog.records) == 1
    assert "beyond what int8 can hold" in caplog.text


def test_a_demoted_block_is_encoded_for_its_place_in_the_sequence():
    plain = transforms_of(SPANS)
    dims = SPANS.head_dim
    ramp = np.arange(dims * dims, dtype=np.float32).reshape(dims, dims)
    metric = np.broadcast_to(np.cos(ramp) @ np.cos(ramp).T, (*plain.mean.shape, dims))
    frequencies = np.broadcast_to(np.linspace(1, 0.01, dims // 2), (SPANS.num_layers, dims // 2))
    transforms = replace(plain, key_metric=KeyMetric(metric=metric, frequencies=frequencies))
    arena = SlabArena(
        SPANS, ("raw16", "int4"), 64 * SPANS.block_bytes, native.extension().Pool(1), transforms
    )
    raw = Contents(SPANS, 1).stored["raw16"][0]
    encoded = {}
    for block_id, block_index in enumerate((1, 5, 5)):
        arena.apply([MemoryOp("allocate", block_id, "raw16")])
        arena.block(block_id)[:] = raw
        arena.apply([MemoryOp("demote", block_id, "int4", block_index=block_index)])
        encoded[block_id] = arena.block(block_id).copy()
    assert np.array_equal(encoded[1], encoded[2])
    keys = torch.from_numpy(raw).view(torch.bfloat16).float().numpy()
    keys = keys.reshape(SPANS.num_layers, 2, SPANS.num_kv_heads, SPANS.block_size, dims)
    rows = Rows(keys[:, 0] @ rotation(dims).T, keys[:, 1])
    for block_id, block_index in enumerate((1, 5)):
        expected = INT4.encode(rows, transforms, block_index * SPANS.block_size).records
        agreed = encoded[block_id].reshape(expected.shape) == expected
        assert agreed.mean() > 0.99
    assert (encoded[0] != encoded[1]).mean() > 0.02


def test_memory_that_is_too_little_names_the_option():
    pool = native.extension().Pool(1)
    for num_bytes in (0, 1, SMALL.block_bytes - 1):
        with pytest.raises(ConfigError, match=r"a slab of blocks of raw16 or int8.*--memory-gib"):
            SlabArena(SMALL, CODECS, num_bytes, pool)
    with pytest.raises(ConfigError, match=r"cannot allocate .* GiB for .* lower --memory-gib"):
        SlabArena(SMOLLM2, CODECS, 2**60, pool)


@pytest.mark.parametrize("codecs", [("int8",), ("raw16", "float32"), ("raw16", "int7")])
def test_codecs_without_kernels_name_the_option(codecs):
    pool = native.extension().Pool(1)
    with pytest.raises(ConfigError, match=r"raw16 among them, received .*--kv-cache-dtype"):
        SlabArena(SMALL, codecs, 2**20, pool)


@pytest.mark.parametrize("num_blocks", [2, 3, 4, 5, 9, 17])
def test_small_memories_keep_their_promise(num_blocks):
    arena = make_arena(SMALL, num_blocks)
    contents = Contents(SMALL, 7)
    driver = Driver(arena, contents, num_blocks)
    assert driver.fits("raw16")
    for index in range(3000):
        driver.step([0.3, 0.9, 1.0][index // 100 % 3])
    for block_id, (codec, index) in driver.blocks.items():
        np.testing.assert_array_equal(arena.block(block_id), contents.stored[codec][index])


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=3, unique=True),
    num_bytes=st.integers(1, 6000),
)
def test_whatever_is_within_the_budget_fits_into_the_slabs(sizes, num_bytes):
    """By exhaustion: every number of blocks of each codec that the budget allows."""
    blocks = {f"codec {size}": size * 8 for size in sizes}
    try:
        layout = slab_layout(blocks, num_bytes)
    except ConfigError:
        assert num_bytes < 3 * 64 * len(blocks) * max(blocks.values())
        return
    assert layout.num_bytes <= num_bytes
    assert layout.budget_bytes <= layout.num_bytes
    for name, size in blocks.items():
        assert size * layout.cells[name] <= layout.slab_bytes
        assert size <= layout.cell_bytes[name]
    blocks = dict(layout.cell_bytes)
    *most, (last, last_size) = blocks.items()
    counts = [range(layout.budget_bytes // size + 1) for _, size in most]
    for chosen in product(*counts):
        used = sum(count * size for count, (_, size) in zip(chosen, most, strict=True))
        if used > layout.budget_bytes:
            continue
        # As many as possible of the last: fewer need no more slabs.
        counts_of_all = (*chosen, (layout.budget_bytes - used) // last_size)
        slabs = sum(
            -(-count // layout.cells[name])
            for count, name in zip(counts_of_all, [*(name for name, _ in most), last], strict=True)
        )
        assert slabs <= layout.num_slabs


@pytest.mark.parametrize(
    ("spec", "num_blocks", "least"),
    [
        (SMOLLM2, 100, 0.93),
        (SMOLLM2, 1000, 0.97),
        (SMOLLM2, 5000, 0.99),
        (KVSpec(num_layers=32, num_kv_heads=8, head_dim=128), 1000, 0.95),
        (KVSpec(num_layers=18, num_kv_heads=1, head_dim=256), 2000, 0.98),
    ],
)
def test_little_memory_is_kept_back(spec, num_blocks, least):
    sizes = sizes_of(spec)
    layout = slab_layout(sizes, num_blocks * spec.block_bytes)
    assert layout.budget_bytes >= least * num_blocks * spec.block_bytes
    assert layout.slab_bytes <= max(MAX_SLAB_BYTES, spec.block_bytes) + 64
    assert layout.slab_bytes <= MAX_SLAB_BLOCKS * spec.block_bytes + 64
    for codec, size in sizes.items():
        assert layout.cells[codec] * size > 0.95 * layout.slab_bytes
