"""The native decoder against the torch one, on tiny random models of every supported family and option.

The torch decoder gets the very weights that the packed ones stand for, in float32, and K and V in the same codec: what
is left is the rounding of activations (12 bits and more for int8 weights, 8 bits for int4) and of attention.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from tests.support.decoding import run_decoder
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.codecs.int8 import INT8
from kvist.kernels import native
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.kv_rows import turn
from kvist.model.decoder import Decoder
from kvist.model.layout import EMBEDDING
from kvist.model.loader import iterate_tensors
from kvist.model.native_decoder import NativeDecoder, PackedWeights, StepSequence, pack_weights
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


class SeenHeads:
    """What goes into the attention of layer 0."""

    queries: torch.Tensor
    keys: torch.Tensor

    def see(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        del values
        if layer_index == 0:
            self.queries, self.keys = queries, keys


class NativeSteps:
    """A native decoder with an arena, stepped by hand."""

    def __init__(self, decoder: NativeDecoder, num_blocks: int, codec: str = "raw16") -> None:
        spec = decoder.spec
        kv_spec = KVSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=decoder.kv_head_dim,
            block_size=BLOCK_SIZE,
            codec=codec,
        )
        self._decoder = decoder
        self.arena = BlockArena(kv_spec, num_blocks)
        # Whatever was not written must not be read: bytes of 0xff are NaN in every codec.
        self.arena.slab.fill_(0xFF)

    def run(self, sequences: Sequence[Rows], num_logits: int | None = None) -> torch.Tensor:
        """Return the logits of the last ``num_logits`` tokens of each sequence; None: of all."""
        counts = [len(rows.token_ids) if num_logits is None else num_logits for rows in sequences]
        scores = self._decoder.step(
            [
                StepSequence(rows.start, tuple(rows.token_ids), tuple(rows.table), count)
                for rows, count in zip(sequences, counts, strict=True)
            ],
            self.arena,
        )
        logits = torch.from_numpy(scores.logits[: sum(counts)].copy())
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
    second = steps.run([Rows(18, other[18:19], [1, 6]), Rows(7, PROMPT[7:33], [8, 3, 5])], 1)
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
    assert steps.run([Rows(0, PROMPT[:-1], [0, 1, 2])], 0).shape[0] == 0
    last = steps.run([Rows(len(PROMPT) - 1, PROMPT[-1:], [0, 1, 2])])
    whole = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [0, 1, 2])])
    torch.testing.assert_close(last[0], whole[-1], atol=0.02, rtol=0)


def test_keys_are_rounded_as_their_own_queries_have_it(checkpoint, isa):
    """The native plane gives the encoder the queries that the torch plane gives it."""
    decoder, oracle = build(checkpoint, "bf16")
    steps = NativeSteps(decoder, 3, "int8")
    steps.run([Rows(0, PROMPT, [2, 0, 1])])
    heads = SeenHeads()
    arena = BlockArena(steps.arena.kv_spec, 3)
    batch = AttentionBatch.from_sequences(
        starts=[0], num_tokens=[len(PROMPT)], block_tables=[[2, 0, 1]], block_size=BLOCK_SIZE
    )
    with torch.inference_mode():
        oracle.forward(torch.tensor(PROMPT), batch, arena, heads)
    queries, keys = turn(heads.queries), turn(heads.keys)
    stored = steps.arena.layer(0)[[2, 0, 1], 0].transpose(1, 2).flatten(0, 1)[: len(PROMPT)]
    head_dim = keys.shape[-1]

    def share_of_equal(rows: torch.Tensor) -> float:
        return (rows == stored)[..., :head_dim].float().mean().item()

    # Values differ a little between the planes, and few codes with them.
    with_queries = share_of_equal(INT8.encode_keys(keys, queries))
    assert with_queries > share_of_equal(INT8.encode(keys)) + 0.01
    assert with_queries > share_of_equal(INT8.encode_keys(keys, queries.flip(0))) + 0.01


def test_int8_blocks_stay_near_raw_ones(checkpoint, isa):
    decoder, _ = build(checkpoint, "int8")
    raw = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    coded = NativeSteps(decoder, 3, "int8").run([Rows(0, PROMPT, [2, 0, 1])])
    assert not torch.equal(raw, coded)
    assert float((raw - coded).abs().max()) < 0.25
    assert float((raw - coded).abs().mean()) < 0.03


@pytest.mark.parametrize("checkpoint", TINY_MODELS[:1], indirect=True, ids=["llama"])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("wait_s", [0.0, 0.02])
def test_a_thread_that_does_something_else_first_changes_no_bit(checkpoint, num_threads, wait_s):
    """With the longer wait the other threads, if there are any, have done all of the step before it joins them."""
    spec, tensors = checkpoint
    pool = native.extension().Pool(num_threads)
    packed = pack_weights(spec, ((name, t.clone()) for name, t in tensors.items()), "int8", pool)
    decoder = NativeDecoder(spec, packed, pool)
    expected = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])
    steps = NativeSteps(decoder, 3)
    calls = []

    def meanwhile() -> None:
        calls.append(threading.get_ident())
        threading.Event().wait(wait_s)

    sequence = StepSequence(0, tuple(PROMPT), (2, 0, 1), len(PROMPT))
    scores = decoder.step([sequence], steps.arena, meanwhile)
    assert torch.equal(torch.from_numpy(scores.logits[: len(PROMPT)].copy()), expected)
    assert calls == [threading.get_ident()]


@pytest.mark.parametrize("checkpoint", TINY_MODELS[:1], indirect=True, ids=["llama"])
def test_what_is_raised_meanwhile_comes_out_when_the_step_is_over(checkpoint):
    decoder, _ = build(checkpoint, "int8")
    steps = NativeSteps(decoder, 3)
    step = [StepSequence(0, tuple(PROMPT), (2, 0, 1), 1)]
    expected = NativeSteps(decoder, 3).run([Rows(0, PROMPT, [2, 0, 1])])[-1]

    def fail() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        decoder.step(step, steps.arena, fail)
    again = decoder.step([StepSequence(len(PROMPT) - 1, (PROMPT[-1],), (2, 0, 1), 1)], steps.arena)
    torch.testing.assert_close(
        torch.from_numpy(again.logits[0].copy()), expected, atol=0.02, rtol=0
    )


def test_rows_that_write_no_finite_values_are_named(checkpoint):
    spec, tensors = checkpoint
    pool = native.extension().Pool(1)
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    damaged[EMBEDDING][PROMPT[3]] = float("nan")
    packed = pack_weights(spec, damaged.items(), "int8", pool)
    decoder = NativeDecoder(spec, packed, pool)
    steps = NativeSteps(decoder, 3)
    with pytest.raises(AssertionError, match="damaged_rows"):
        steps.run([Rows(0, PROMPT[:8], [0])], 0)


@pytest.mark.parametrize(
    ("sequences", "message"),
    [
        ([(0, (160,), (0,), 1)], "token id 160"),
        ([(0, (5, -1), (0,), 1)], "token id -1"),
        ([(0, (5,), (3,), 1)], "block id 3"),
        ([(0, (5,), (-1,), 1)], "block id -1"),
        ([(0, (5,), (0,), 1), (15, (5, 5), (1,), 1)], "too short for its context of 17"),
        ([(2**30, (5,), (0,), 1)], "longer than"),
        ([(-1, (5,), (0,), 1)], "position 0 or later"),
        ([(0, (), (0,), 0)], "at least one token"),
        ([(0, (5,), (0,), 2)], "logits of its own tokens"),
        ([(0, (5,), (0,))], "number of logits"),
        ([], "at least one token"),
    ],
)
def test_sequences_that_do_not_fit_are_refused(sequences, message, tmp_path):
    folder = save(build_reference(TINY_MODELS[0]), tmp_path)
    spec = read_spec(folder)
    pool = native.extension().Pool(1)
    weights = pack_weights(spec, iterate_tensors(folder, spec), "int8", pool)
    steps = NativeSteps(NativeDecoder(spec, weights, pool), 3)
    logits = np.empty((4, 160), np.float32)

    def step(sequences):
        return steps._decoder._model.step(
            pool, steps.arena.slab.numpy(), "raw16", BLOCK_SIZE, sequences, logits
        )

    assert len(step([(0, (5,), (0,), 1)])[0]) == 1
    with pytest.raises(ValueError, match=message):
        step(sequences)
