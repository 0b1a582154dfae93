"""The native decoder against the torch one, on tiny random models of every supported family and option.

The torch decoder gets the very weights that the packed ones stand for, in float32, and K and V in the same codec: what
is left is the rounding of activations (12 bits and more for int8 weights, 8 bits for int4) and of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.decoding import run_decoder
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.kernels import native
from kvist.model.decoder import Decoder
from kvist.model.layout import EMBEDDING
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, PackedWeights, StepArrays, pack_weights
from kvist.model.spec_readers import read_spec
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvist.spec import ModelSpec

pytestmark = pytest.mark.skipif(not native.available(), reason="the native kernels were not built")

PROMPT = random_prompt(41)
BLOCK_SIZE = 16
TOLERANCE = {"bf16": (0.05, 0.01), "int8": (0.05, 0.01), "int4": (0.6, 0.08)}
"""Largest difference of a logit, and root of the mean square of all; the standard deviation of these models' logits is
about 1.3. K and V rounded to bfloat16 alone move a logit by 0.01 to 0.03."""


@dataclass
class Rows:
    """Tokens of one sequence in a step."""

    start: int
    token_ids: Sequence[int]
    table: Sequence[int]


class NativeSteps:
    """A native decoder with an arena, stepped by hand."""

    def __init__(self, decoder: NativeDecoder, num_blocks: int, codec: str = "raw16") -> None:
        spec = decoder.spec
        kv_spec = KVSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=BLOCK_SIZE,
            codec=codec,
        )
        self._decoder = decoder
        self.arena = BlockArena(kv_spec, num_blocks)
        # Whatever was not written must not be read: bytes of 0xff are NaN in every codec.
        self.arena.slab.fill_(0xFF)

    def run(
        self, sequences: Sequence[Rows], logit_rows: Sequence[int] | None = None
    ) -> torch.Tensor:
        counts = [len(rows.token_ids) for rows in sequences]
        lens = [rows.start + len(rows.token_ids) for rows in sequences]
        tables = [
            list(rows.table)[: -(-length // BLOCK_SIZE)]
            for rows, length in zip(sequences, lens, strict=True)
        ]
        wanted = list(range(sum(counts))) if logit_rows is None else list(logit_rows)
        arrays = StepArrays(
            token_ids=np.array([token for rows in sequences for token in rows.token_ids], np.int64),
            query_starts=np.cumsum([0, *counts], dtype=np.int32),
            context_lens=np.array(lens, np.int32),
            table_starts=np.cumsum([0, *map(len, tables)], dtype=np.int32),
            block_ids=np.array([block for table in tables for block in table], np.int32),
            logit_rows=np.array(wanted, np.int32),
        )
        scores = self._decoder.step(arrays, self.arena)
        logits = torch.from_numpy(scores.logits[: len(wanted)].copy())
        assert not scores.damaged_rows
        assert scores.best_ids == logits.argmax(-1).tolist()
        assert scores.best_logits == logits.max(-1).values.tolist()
        return logits


def oracle_of(spec: ModelSpec, tensors: dict[str, torch.Tensor], packed: PackedWeights) -> Decoder:
    """Return the torch decoder of the float32 weights that the packed ones stand for."""
    weights = dict(tensors)
    for name, linear in packed.linears.items():
        weights[name] = torch.from_numpy(linear.unpack())
    # Looked up in bfloat16 on the native plane; a head that was tied to it is packed on its own.
    weights[EMBEDDING] = tensors[EMBEDDING].bfloat16().float()
    return Decoder(replace(spec, has_tied_embeddings=False), weights)


@pytest.fixture(params=native.isas())
def isa(request) -> Iterator[str]:
    with native.forced_isa(request.param):
        yield request.param


@pytest.fixture(scope="module", params=TINY_MODELS, ids=lambda model: model.name)
def checkpoint(request, tmp_path_factory):
    folder = save(build_reference(request.param), tmp_path_factory.mktemp(request.param.name))
    spec = read_spec(folder)
    return spec, {name: tensor.clone() for name, tensor in iterate_tensors(folder, spec)}


def build(checkpoint, kind: str) -> tuple[NativeDecoder, Decoder]:
    spec, tensors = checkpoint
    pool = native.extension().Pool(2)
    packed = pack_weights(spec, ((name, t.clone()) for name, t in tensors.items()), kind, pool)
    return NativeDecoder(spec, packed, pool), oracle_of(spec, tensors, packed)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_logits_agree_at_every_position(checkpoint, kind, isa, record_property):
    decoder, oracle = build(checkpoint, kind)
    logits = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    expected = run_decoder(oracle, PROMPT, codec="raw16")
    difference = logits - expected
    largest, root_mean_square = (
        float(difference.abs().max()),
        float(difference.square().mean().sqrt()),
    )
    record_property("max_logit_difference", largest)
    record_property("rms_logit_difference", root_mean_square)
    assert largest < TOLERANCE[kind][0]
    assert root_mean_square < TOLERANCE[kind][1]


def test_chunks_batches_and_chosen_rows_give_the_same_logits(checkpoint, isa):
    decoder, _ = build(checkpoint, "int8")
    whole = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    steps = NativeSteps(decoder, 9)
    other = random_prompt(20, seed=5)
    # A prefill in three chunks, while another sequence is prefilled and then decodes beside it.
    first = steps.run([Rows(0, PROMPT[:7], [8, 3, 5]), Rows(0, other[:18], [1, 6])])
    second = steps.run([Rows(18, other[18:19], [1, 6]), Rows(7, PROMPT[7:33], [8, 3, 5])], [0, 26])
    third = steps.run([Rows(33, PROMPT[33:], [8, 3, 5]), Rows(19, other[19:], [1, 6])])
    alone = NativeSteps(decoder, 2).run([Rows(0, other, [1, 0])])
    close = {"atol": 0.02, "rtol": 0}
    torch.testing.assert_close(first[:7], whole[:7], **close)
    torch.testing.assert_close(second[1], whole[32], **close)
    torch.testing.assert_close(third[:8], whole[33:], **close)
    torch.testing.assert_close(torch.stack((first[24], second[0], third[8])), alone[17:20], **close)


def test_a_step_without_wanted_rows_stores_k_and_v(checkpoint):
    decoder, _ = build(checkpoint, "int8")
    steps = NativeSteps(decoder, 3)
    assert steps.run([Rows(0, PROMPT[:-1], [0, 1, 2])], []).shape[0] == 0
    last = steps.run([Rows(len(PROMPT) - 1, PROMPT[-1:], [0, 1, 2])])
    whole = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [0, 1, 2])])
    torch.testing.assert_close(last[0], whole[-1], atol=0.02, rtol=0)


def test_int8_blocks_stay_near_raw_ones(checkpoint, isa):
    decoder, _ = build(checkpoint, "int8")
    raw = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    coded = NativeSteps(decoder, 3, "int8").run([Rows(0, PROMPT, [2, 0, 1])])
    assert not torch.equal(raw, coded)
    assert float((raw - coded).abs().max()) < 0.25
    assert float((raw - coded).abs().mean()) < 0.03


def test_rows_that_write_no_finite_values_are_named(checkpoint):
    spec, tensors = checkpoint
    pool = native.extension().Pool(1)
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    damaged[EMBEDDING][PROMPT[3]] = float("nan")
    packed = pack_weights(spec, damaged.items(), "int8", pool)
    decoder = NativeDecoder(spec, packed, pool)
    steps = NativeSteps(decoder, 3)
    with pytest.raises(AssertionError, match="damaged_rows"):
        steps.run([Rows(0, PROMPT[:8], [0])], [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": np.array([160], np.int64)}, "token id 160"),
        ({"token_ids": np.array([-1], np.int64)}, "token id -1"),
        ({"block_ids": np.array([3], np.int32)}, "block id 3"),
        ({"context_lens": np.array([17], np.int32)}, "too short"),
        ({"context_lens": np.array([0], np.int32)}, "its own rows"),
        ({"query_starts": np.array([0, 2], np.int32)}, "query_starts"),
        ({"logit_rows": np.array([1], np.int32)}, "logit_rows"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message, tmp_path):
    folder = save(build_reference(TINY_MODELS[0]), tmp_path)
    spec = read_spec(folder)
    pool = native.extension().Pool(1)
    steps = NativeSteps(
        NativeDecoder(spec, pack_weights(spec, iterate_tensors(folder, spec), "int8", pool), pool),
        3,
    )
    arrays = {
        "token_ids": np.array([5], np.int64),
        "query_starts": np.array([0, 1], np.int32),
        "context_lens": np.array([1], np.int32),
        "table_starts": np.array([0, 1], np.int32),
        "block_ids": np.array([0], np.int32),
        "logit_rows": np.array([0], np.int32),
    }
    steps._decoder.step(StepArrays(**arrays), steps.arena)
    with pytest.raises(ValueError, match=message):
        steps._decoder.step(StepArrays(**{**arrays, **changes}), steps.arena)
