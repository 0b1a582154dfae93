"""Blocks that change their codec under a native decoder: near raw ones, and equal whenever and wherever it happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.codecs.transforms import uncalibrated
from kvist.errors import InvariantViolation
from kvist.kernels import native
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, StepSequence, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.storage.inspection import BlockInspector
from kvist.storage.slabs import SlabArena
from kvist.types import BlockCopy, MemoryOp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")

BLOCK_SIZE = 16
PROMPT = random_prompt(73)
"""Four full blocks and nine tokens more."""


@pytest.fixture(params=native.isas())
def isa(request) -> Iterator[str]:
    with native.forced_isa(request.param):
        yield request.param


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda model: model.name)
def checkpoint(request, tmp_path_factory):
    folder = save(build_reference(request.param), tmp_path_factory.mktemp(request.param.name))
    spec = read_spec(folder)
    return spec, {name: tensor.clone() for name, tensor in iterate_tensors(folder, spec)}


class Mixed:
    """A native decoder over slabs, stepped by hand. Whatever was not written reads as NaN."""

    block_size = BLOCK_SIZE
    codecs = ("raw16", "int8")

    def __init__(self, checkpoint, num_blocks: int = 48) -> None:
        spec, tensors = checkpoint
        self.pool = native.extension().Pool(2)
        packed = pack_weights(spec, ((n, t.clone()) for n, t in tensors.items()), "int8", self.pool)
        self.decoder = NativeDecoder(spec, packed, self.pool)
        self.kv_spec = KVSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=self.block_size,
        )
        num_bytes = num_blocks * self.kv_spec.block_bytes
        transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self.arena = SlabArena(self.kv_spec, self.codecs, num_bytes, self.pool, transforms)
        self.arena.slab.fill_(0xFF)

    def allocate(self, *ids: int) -> None:
        for block_id in ids:
            self.arena.apply([MemoryOp("allocate", block_id, "raw16")])
            self.arena.block(block_id)[:] = 0xFF

    def demote(self, *ids: int) -> None:
        self.arena.apply([MemoryOp("demote", block_id, "int8") for block_id in ids])

    def run(
        self, *sequences: tuple[int, Sequence[int], Sequence[int]], arena: BlockArena | None = None
    ) -> torch.Tensor:
        """Return the logits of the last token of each sequence of (start, token ids, block table)."""
        scores = self.decoder.step(
            [StepSequence(start, tuple(ids), tuple(table), 1) for start, ids, table in sequences],
            arena or self.arena,
        )
        assert not scores.damaged_rows
        return torch.from_numpy(scores.logits[: len(sequences)].copy())


def test_slabs_without_demotion_are_as_near_as_rounding_turned_keys_allows(checkpoint, isa):
    """Blocks of a cache with several codecs hold turned keys, which are rounded to bfloat16 elsewhere."""
    mixed = Mixed(checkpoint)
    uniform = BlockArena(mixed.kv_spec, 9)
    table = [8, 3, 5, 1, 0]
    mixed.allocate(*table)
    for start, stop in [(0, 40), (40, 41), (41, 73)]:
        step = (start, PROMPT[start:stop], table)
        difference = (mixed.run(step) - mixed.run(step, arena=uniform)).abs()
        assert float(difference.max()) < 0.15
        assert float(difference.mean()) < 0.02


def test_demoted_blocks_stay_near_raw_ones(checkpoint, isa):
    """The bounds are those of a sequence all of whose blocks are int8 (test_native_decoder)."""
    mixed = Mixed(checkpoint)
    table = [8, 3, 5, 1, 0]
    mixed.allocate(*table)
    mixed.run((0, PROMPT[:64], table))
    # The last of the demoted blocks is within everybody's window.
    raw = mixed.run((64, PROMPT[64:65], table))
    mixed.demote(*table[:4])
    assert mixed.arena.stats().num_blocks == {"raw16": 1, "int8": 4}
    coded = mixed.run((64, PROMPT[64:65], table))
    assert not torch.equal(raw, coded)
    assert float((raw - coded).abs().max()) < 0.25
    assert float((raw - coded).abs().mean()) < 0.03


def others(mixed: Mixed, first_id: int, count: int) -> list[tuple[int, list[int], list[int]]]:
    """Return one more token for each of some other sequences that run meanwhile, each with two blocks computed."""
    steps = []
    for index in range(count):
        prompt = random_prompt(20, seed=100 + index)
        table = [first_id + 2 * index, first_id + 2 * index + 1]
        mixed.allocate(*table)
        mixed.run((0, prompt[:19], table))
        steps.append((19, prompt[19:], table))
    return steps


@pytest.mark.parametrize("num_users", [1, 3, 16])
def test_it_does_not_matter_when_and_where_blocks_were_demoted(checkpoint, isa, num_users):
    """Demoted under running sequences, or before anybody used them, at other addresses: the same logits to the bit."""

    def run(*, is_early: bool) -> list[torch.Tensor]:
        mixed = Mixed(checkpoint)
        shared = [7, 2, 9, 4]
        if is_early:
            mixed.allocate(60, 61, 62)  # somewhere else
        mixed.allocate(*shared)
        mixed.run((0, PROMPT[:64], shared))
        if is_early:
            mixed.demote(*shared[:3])
        beside = [] if is_early else others(mixed, 30, 2)
        if not is_early:
            mixed.run(*beside)  # two other sequences between
            mixed.demote(shared[2])
            mixed.run(*beside)
            mixed.demote(shared[0], shared[1])
        tails = list(range(10, 10 + num_users))
        mixed.allocate(*tails)
        tables = [[*shared, tail] for tail in tails]
        logits = []
        for position in range(64, 70):
            step = [
                (position, [(PROMPT[position] + user) % 150], table)
                for user, table in enumerate(tables)
            ]
            logits.append(mixed.run(*step))
        return logits

    early, late = run(is_early=True), run(is_early=False)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


def test_sequences_under_way_read_demoted_blocks_as_new_ones_do(checkpoint, isa):
    """Their own tokens were computed from raw blocks; the next ones equal those of a copy of their tail elsewhere."""
    mixed = Mixed(checkpoint)
    shared, tables = [7, 2, 9, 4], [[7, 2, 9, 4, 10], [7, 2, 9, 4, 11]]
    mixed.allocate(*shared, 10, 11)
    mixed.run((0, PROMPT[:64], shared))
    mixed.run((64, PROMPT[64:68], tables[0]), (64, PROMPT[65:69], tables[1]))
    mixed.demote(*shared)
    step = [(68, PROMPT[68:69], tables[0]), (68, PROMPT[69:70], tables[1])]
    under_way = mixed.run(*step)
    mixed.allocate(20, 21)
    copies = [BlockCopy(source=tail, target=tail + 10, num_tokens=4) for tail in (10, 11)]
    mixed.arena.apply(copies)
    fresh = mixed.run(
        (68, PROMPT[68:69], [*shared, 20]),
        (68, PROMPT[69:70], [*shared, 21]),
    )
    assert torch.equal(under_way, fresh)


def test_a_partial_hit_on_a_demoted_block_is_decoded_into_a_raw_one(checkpoint, isa):
    mixed = Mixed(checkpoint)
    table = [0, 1, 2, 3, 4]
    mixed.allocate(*table)
    mixed.run((0, PROMPT[:64], table))
    mixed.demote(1)
    mixed.allocate(20)
    mixed.arena.apply([BlockCopy(source=1, target=20, num_tokens=9)])
    copied = mixed.run((25, PROMPT[25:30], [0, 20]))
    raw = Mixed(checkpoint)
    raw.allocate(0, 1)
    raw.run((0, PROMPT[:25], [0, 1]))
    difference = (copied - raw.run((25, PROMPT[25:30], [0, 1]))).abs()
    assert 0 < float(difference.max()) < 0.25


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([(16, (5,), (0, 1), 1)], "block id 1 is to be written in raw16 and is in int8"),
        ([(0, (5,) * 20, (0, 1), 1)], "block id 1 is to be written in raw16 and is in int8"),
        ([(16, (5,), (0, 2), 1)], "block id 2 is not allocated"),
        ([(16, (5,), (2, 0), 1)], "block id 2 is not allocated"),
        ([(0, (5,), (10**6,), 1)], "block id 1000000 is not in"),
        ([(0, (5,), (0,), 1), (16, (5,), (0, 1), 1)], "block id 1 is to be written"),
    ],
)
def test_tables_that_do_not_fit_are_refused_before_anything_is_computed(
    checkpoint, sequences, message
):
    mixed = Mixed(checkpoint)
    mixed.allocate(0, 1)
    mixed.run((0, PROMPT[:32], [0, 1]))
    mixed.demote(1)
    before = mixed.arena.slab.clone()
    with pytest.raises(ValueError, match=message):
        mixed.decoder.step([StepSequence(*sequence) for sequence in sequences], mixed.arena)
    np.testing.assert_array_equal(mixed.arena.slab.numpy(), before.numpy())


SPAN_BLOCK = 64
LONG_PROMPT = random_prompt(4 * SPAN_BLOCK + 9)


class Spans(Mixed):
    """Blocks of 64 tokens, which may become int4 and int3."""

    block_size = SPAN_BLOCK
    codecs = ("raw16", "int8", "int4", "int3")

    def demote(self, *ids: int, codec: str = "int4") -> None:
        self.arena.apply([MemoryOp("demote", block_id, codec) for block_id in ids])


@pytest.mark.parametrize("codec", ["int4", "int3"])
def test_blocks_of_spans_read_as_their_copies_in_16_bits(checkpoint, isa, codec):
    mixed = Spans(checkpoint)
    table, copies = [8, 3, 5, 1, 0], [8, 23, 25, 21, 20]
    mixed.allocate(*table, *copies[1:])
    mixed.run((0, LONG_PROMPT[:256], table))
    raw = mixed.run((256, LONG_PROMPT[256:257], table))
    mixed.demote(8, codec="int8")
    mixed.demote(*table[1:4], codec=codec)
    assert mixed.arena.stats().num_blocks[codec] == 3
    for source, target in zip(table[1:4], copies[1:4], strict=True):
        mixed.arena.apply([BlockCopy(source=source, target=target, num_tokens=SPAN_BLOCK)])
    coded = mixed.run((256, LONG_PROMPT[256:257], table))
    decoded = mixed.run((256, LONG_PROMPT[256:257], copies))
    lost = float((raw - decoded).std() / raw.std())
    # Kernels round queries and weights to bytes; that is little beside what the codec loses.
    assert float((coded - decoded).std() / raw.std()) < 0.3 * lost + 0.02
    # Three bits of a model of random numbers lose most of it, but what is left is not noise: that would be 1.4.
    assert 0.02 < lost < 1.1


@pytest.mark.parametrize("num_users", [1, 16])
def test_it_does_not_matter_when_blocks_became_spans(checkpoint, isa, num_users):
    """Demoted under running sequences, or before anybody used them, at other addresses: the same logits to the bit."""

    def run(*, is_early: bool) -> list[torch.Tensor]:
        mixed = Spans(checkpoint)
        shared = [7, 2, 9, 4]

        def demote() -> None:
            mixed.demote(7, codec="int8")
            mixed.demote(2, 9, codec="int4")
            mixed.demote(4, codec="int3")

        if is_early:
            mixed.allocate(60, 61, 62)  # somewhere else
        mixed.allocate(*shared)
        mixed.run((0, LONG_PROMPT[:256], shared))
        tails = list(range(10, 10 + num_users))
        mixed.allocate(*tails)
        tables = [[*shared, tail] for tail in tails]
        if is_early:
            demote()
        logits = []
        for position in range(256, 262):
            if position == 259 and not is_early:
                demote()
                # Their own tokens so far were computed from raw blocks: as those of the others.
                for tail in tails:
                    mixed.arena.apply(
                        [MemoryOp("free", tail, ""), MemoryOp("allocate", tail, "raw16")]
                    )
                for before in range(256, 259):
                    mixed.run(*step(before, tables))
            logits.append(mixed.run(*step(position, tables)))
        return logits[3:]

    def step(position: int, tables: list[list[int]]):
        return [
            (position, [(LONG_PROMPT[position] + user) % 150], table)
            for user, table in enumerate(tables)
        ]

    early, late = run(is_early=True), run(is_early=False)
    assert all(torch.equal(a, b) for a, b in zip(early, late, strict=True))


def test_a_partial_hit_on_a_block_of_spans_is_decoded_into_a_raw_one(checkpoint, isa):
    mixed = Spans(checkpoint)
    table = [0, 1, 2, 3]
    mixed.allocate(*table)
    mixed.run((0, LONG_PROMPT[:256], table))
    mixed.demote(1)
    mixed.allocate(20)
    mixed.arena.apply([BlockCopy(source=1, target=20, num_tokens=30)])
    copied = mixed.run((94, LONG_PROMPT[94:100], [0, 20]))
    raw = Spans(checkpoint)
    raw.allocate(0, 1)
    raw.run((0, LONG_PROMPT[:94], [0, 1]))
    expected = raw.run((94, LONG_PROMPT[94:100], [0, 1]))
    assert 0 < float((copied - expected).std() / expected.std()) < 0.5


def test_a_block_of_spans_that_is_not_finite_is_seen(checkpoint):
    mixed = Spans(checkpoint)
    mixed.allocate(0, 1)
    mixed.run((0, LONG_PROMPT[:128], [0, 1]))
    inspector = BlockInspector(mixed.arena)
    mixed.demote(1)
    sum_before = inspector.checksum(1, SPAN_BLOCK)
    assert inspector.is_finite(1, SPAN_BLOCK)
    with pytest.raises(InvariantViolation, match="expected a block of rows, received block_id=1"):
        mixed.arena.head(1, 5)
    mixed.arena.block(1)[5] = 255  # a step
    assert not inspector.is_finite(1, SPAN_BLOCK)
    assert inspector.checksum(1, SPAN_BLOCK) != sum_before
    # Codes are any bytes.
    mixed.arena.block(1)[5] = 100
    mixed.arena.block(1)[2 * mixed.kv_spec.head_dim] = 255
    assert inspector.is_finite(1, SPAN_BLOCK)
