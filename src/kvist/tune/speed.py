"""How fast the model decodes with K and V in each setting, and what it takes to encode a block, on this machine now.

Responsible for sequences with a full context of K and V in blocks of a setting's codecs, and for the clock. K and V are
random numbers: no kernel's time depends on them. Settings take turns, step by step, so that all see the same noise.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvist.model.native_decoder import StepSequence
from kvist.precision import LADDER
from kvist.spec import SPAN_TOKENS
from kvist.storage.arena import BlockArena
from kvist.storage.slabs import SlabArena
from kvist.tune.quality import block_spec
from kvist.tune.settings import Setting
from kvist.types import BlockId, MemoryOp

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvist.codecs.transforms import KVTransforms
    from kvist.model.native_decoder import NativeDecoder

REFERENCE = LADDER[0]
"""What every setting is compared with."""
MAX_SEQUENCES = 8
MAX_BYTES = 1 << 30
"""Of K and V of all sequences in 16 bits: fewer of them decode at once where they are long."""
_ENCODINGS = 5
_SPARE_BLOCKS = 64


class Speed(NamedTuple):
    """Medians over rounds."""

    tokens_per_s: float
    """Decoded, of all sequences together."""
    ratio: float
    """Tokens per second against REFERENCE in the same round."""
    attention_ms: float
    """Of a step, in all layers."""
    encode_ms: float | None
    """To encode a block of 64 tokens in all layers, with every codec that it passes through; None: as it is written."""


class _Contexts(NamedTuple):
    """Full contexts in one arena, ready to decode."""

    arena: BlockArena | SlabArena
    sequences: list[StepSequence]


def num_sequences(decoder: NativeDecoder, context: int) -> int:
    """Return how many sequences of a length decode at once."""
    one = block_spec(decoder.spec, REFERENCE).token_bytes * context
    return max(1, min(MAX_SEQUENCES, MAX_BYTES // one))


def measure_speed(
    decoder: NativeDecoder,
    transforms: KVTransforms,
    names: Sequence[str],
    context: int,
    num_rounds: int,
    on_round: Callable[[int], None],
) -> dict[str, Speed]:
    """Return the speed of each setting, and of REFERENCE.

    Args:
        decoder: The model.
        transforms: Of the model.
        names: Of settings whose codecs the kernels read.
        context: Tokens of each sequence, a multiple of SPAN_TOKENS.
        num_rounds: Steps of each setting.
        on_round: Is told how many rounds are done.
    """
    names = tuple(dict.fromkeys((REFERENCE, *names)))
    blocks = _Blocks(decoder, transforms)
    contexts = {name: blocks.contexts(Setting.parse(name), context) for name in names}
    step_s: dict[str, list[float]] = {name: [] for name in names}
    attention_s: dict[str, list[float]] = {name: [] for name in names}
    for index in range(num_rounds + 1):
        for name, each in contexts.items():
            before = decoder.phase_seconds()["attention"]
            started = time.perf_counter()
            decoder.step(each.sequences, each.arena)
            seconds = time.perf_counter() - started
            if index:  # the first one touches everything for the first time
                step_s[name].append(seconds)
                attention_s[name].append(decoder.phase_seconds()["attention"] - before)
        on_round(index)
    return {
        name: Speed(
            tokens_per_s=len(each.sequences) / statistics.median(step_s[name]),
            ratio=statistics.median(
                raw / own for raw, own in zip(step_s[REFERENCE], step_s[name], strict=True)
            ),
            attention_ms=1e3 * statistics.median(attention_s[name]),
            encode_ms=blocks.encode_ms(Setting.parse(name)),
        )
        for name, each in contexts.items()
    }


class _Blocks:
    """One block in every codec, to be copied."""

    def __init__(self, decoder: NativeDecoder, transforms: KVTransforms) -> None:
        self._decoder, self._transforms = decoder, transforms
        raw = block_spec(decoder.spec, REFERENCE)
        values = np.random.default_rng(0).standard_normal(raw.block_bytes // 2, np.float32)
        # The upper half of a float32 is a bfloat16.
        self._bytes: dict[str, NDArray[np.uint8]] = {
            REFERENCE: (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        }

    def contexts(self, setting: Setting, context: int) -> _Contexts:
        """Return sequences whose last token is to be computed."""
        num_blocks = context // SPAN_TOKENS
        count = num_sequences(self._decoder, context)
        tables = [
            tuple(BlockId(block) for block in range(i * num_blocks, (i + 1) * num_blocks))
            for i in range(count)
        ]
        arena: BlockArena | SlabArena
        if setting.rule is None:
            arena = BlockArena(block_spec(self._decoder.spec, setting.name), count * num_blocks)
            arena.slab.numpy()[:] = self._encoded(setting.name)
        else:
            codecs = [
                setting.rule.codec_at(block, context - 1, SPAN_TOKENS)
                for block in range(num_blocks)
            ]
            sizes = [len(self._encoded(codec)) for codec in codecs]
            arena = self._arena(setting.codecs, count * sum(sizes))
            for table in tables:
                for block_id, codec in zip(table, codecs, strict=True):
                    arena.apply([MemoryOp("allocate", block_id, codec)])
                    arena.block(block_id)[:] = self._encoded(codec)
        sequences = [
            StepSequence(context - 1, (1 + index,), table, 1) for index, table in enumerate(tables)
        ]
        return _Contexts(arena, sequences)

    def encode_ms(self, setting: Setting) -> float | None:
        """Return what it takes to encode a block that passes through all codecs of a rule."""
        if setting.rule is None:
            return None
        path = [codec for _, codec in setting.rule.windows] + [setting.rule.rest]
        steps = [(a, b) for a, b in pairwise(dict.fromkeys(path))]
        return sum(self._encode_ms(source, target) for source, target in steps)

    def _encode_ms(self, source: str, target: str) -> float:
        arena = self._arena((REFERENCE, *{source, target} - {REFERENCE}), 0)
        seconds = []
        for index in range(_ENCODINGS + 1):
            block_id = BlockId(index)
            arena.apply([MemoryOp("allocate", block_id, source)])
            arena.block(block_id)[:] = self._encoded(source)
            started = time.perf_counter()
            arena.apply([MemoryOp("demote", block_id, target)])
            seconds.append(time.perf_counter() - started)
        return 1e3 * statistics.median(seconds[1:])

    def _encoded(self, codec: str) -> NDArray[np.uint8]:
        if codec not in self._bytes:
            arena = self._arena((REFERENCE, codec), 0)
            arena.apply([MemoryOp("allocate", BlockId(0), REFERENCE)])
            arena.block(0)[:] = self._bytes[REFERENCE]
            arena.apply([MemoryOp("demote", BlockId(0), codec)])
            self._bytes[codec] = arena.block(0).copy()
        return self._bytes[codec]

    def _arena(self, codecs: Sequence[str], num_bytes: int) -> SlabArena:
        """Return an arena with room for so many bytes of blocks and some more."""
        kv_spec = block_spec(self._decoder.spec, REFERENCE)
        # Slabs are never quite full.
        room = num_bytes * 5 // 4 + _SPARE_BLOCKS * kv_spec.block_bytes
        return SlabArena(kv_spec, codecs, room, self._decoder.pool, self._transforms)
