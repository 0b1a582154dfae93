"""Scores: what they count, and that codecs differ in K and V and in nothing else."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.tiny_engine import load_tiny_decoder
from tests.support.tiny_models import random_prompt

from kvist.codecs.rotated import INT3, INT4, SPAN, Rows
from kvist.codecs.transforms import uncalibrated
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.native_decoder import NativeDecoder, pack_weights
from kvist.storage.slabs import SlabArena
from kvist.tune import quality
from kvist.tune.quality import (
    Emulated,
    NativeComputer,
    Score,
    TorchComputer,
    bits_per_value,
    compare,
    emulation,
    range_start,
    range_starts,
    score_window,
)
from kvist.tune.settings import of_layers, single_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.codecs.transforms import KVTransforms
    from kvist.model.decoder import Decoder
    from kvist.tune.quality import Computer

TOKENS = random_prompt(4 * SPAN)
RULE = "sink=raw16,recent:64=raw16,recent:128=int8,rest=int4"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny_decoder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def transforms(decoder: Decoder) -> KVTransforms:
    spec = decoder.spec
    return uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)


@pytest.fixture(scope="module", params=["torch", "native"])
def computer(request: pytest.FixtureRequest, decoder: Decoder) -> Computer:
    if request.param == "torch":
        return TorchComputer(decoder)
    if not native.available():
        pytest.skip(native.why_not())
    return native_computer(decoder)


def native_computer(decoder: Decoder) -> NativeComputer:
    pool = native.extension().Pool(1)
    tensors = ((name, tensor.clone()) for name, tensor in decoder.weights.items())
    return NativeComputer(
        NativeDecoder(decoder.spec, pack_weights(decoder.spec, tensors, "int8", pool), pool)
    )


def scored(
    computer: Computer, transforms: KVTransforms, codecs: Sequence[str], tokens: list[int] = TOKENS
) -> dict[str, Score]:
    parts = score_window(computer, transforms, tokens, codecs, lambda _: None)
    return {name: sum(scores.values(), start=Score()) for name, scores in parts.items()}


def test_the_same_codec_scores_as_the_same(computer: Computer, transforms: KVTransforms) -> None:
    score = scored(computer, transforms, [computer.reference])[computer.reference]
    assert score.positions == len(TOKENS) - 1
    assert score.agreed == score.positions
    assert score.kl == score.squared_kl == score.squared_difference == 0.0
    assert score.nll == score.reference_nll > 0.0


def test_fewer_bits_cost_more(computer: Computer, transforms: KVTransforms) -> None:
    scores = scored(computer, transforms, ["int8", "int4", "int3"])
    assert 0.0 < scores["int8"].kl < 0.3 * scores["int4"].kl
    assert scores["int4"].kl < 0.7 * scores["int3"].kl
    assert len({score.reference_nll for score in scores.values()}) == 1
    assert all(score.num_held == 0 for score in scores.values())


def test_codecs_do_not_see_each_other(computer: Computer, transforms: KVTransforms) -> None:
    together = scored(computer, transforms, ["int3", "int8", "int4"])
    for name, score in together.items():
        alone = scored(computer, transforms, [name])[name]
        assert math.isclose(alone.kl, score.kl, rel_tol=1e-3)


def test_an_emulated_codec_leaves_the_block_being_written_alone(
    decoder: Decoder, transforms: KVTransforms
) -> None:
    computer = TorchComputer(decoder)
    first = scored(computer, transforms, ["int3"], TOKENS[:SPAN])["int3"]
    assert first.kl == 0.0
    both = scored(computer, transforms, ["int3"], TOKENS[: 2 * SPAN])["int3"]
    assert both.kl > 0.0


def test_native_kernels_hold_int8_from_the_first_token(
    computer: Computer, transforms: KVTransforms
) -> None:
    score = scored(computer, transforms, ["int8"], TOKENS[:SPAN])["int8"]
    assert (score.kl > 0.0) == ("int8" in computer.readable)


def test_native_kernels_read_blocks_as_the_engine_has_them(
    decoder: Decoder, transforms: KVTransforms
) -> None:
    """In raw16 while tokens are written; then int8 where a sequence begins, and the codec after that."""
    if not native.available():
        pytest.skip(native.why_not())
    computer = native_computer(decoder)
    cache = computer.cache("int4", 3, transforms)
    arena = cache.arena
    assert isinstance(arena, SlabArena)
    for index in range(3):
        cache.open(index)
        assert arena.codec_of(index) == "raw16"
        arena.head(index, SPAN).zero_()
        assert cache.seal(index) == 0
    assert [arena.codec_of(index) for index in range(3)] == ["int8", "int4", "int4"]


def test_blocks_of_a_rule_change_as_they_grow_older(
    decoder: Decoder, transforms: KVTransforms
) -> None:
    if not native.available():
        pytest.skip(native.why_not())
    cache = native_computer(decoder).cache(RULE, 4, transforms)
    arena = cache.arena
    assert isinstance(arena, SlabArena)
    codecs = []
    for index in range(4):
        cache.open(index)
        arena.head(index, SPAN).zero_()
        cache.seal(index)
        codecs.append([arena.codec_of(block) for block in range(index + 1)])
    assert codecs == [
        ["raw16"],
        ["raw16", "raw16"],
        ["raw16", "int8", "raw16"],
        ["raw16", "int4", "int8", "raw16"],
    ]


def test_a_rule_loses_less_than_its_smallest_codec(
    computer: Computer, transforms: KVTransforms
) -> None:
    scores = scored(computer, transforms, [RULE, "int4"])
    assert 0.0 < scores[RULE].kl < 0.7 * scores["int4"].kl
    # While everything is within the first window nothing is lost, but that native kernels keep keys turned by a rule.
    recent = "recent:256=raw16,rest=int4"
    kept = scored(computer, transforms, [recent])[recent].kl
    assert kept < 0.5 * scores["int4"].kl if computer.readable else kept == 0.0


def test_a_layer_alone_costs_a_part_of_all(
    computer: Computer, transforms: KVTransforms, decoder: Decoder
) -> None:
    count = decoder.spec.num_layers
    single = [single_layer(layer, "int3", count) for layer in range(count)]
    every, none = of_layers(["int3"] * count), of_layers(["raw16"] * count)
    scores = scored(computer, transforms, [*single, every, none])
    assert scores[none].kl == 0.0
    assert all(0.0 < scores[name].kl < scores[every].kl for name in single)
    emulated = scored(TorchComputer(decoder), transforms, ["int3", every])
    assert math.isclose(emulated["int3"].kl, emulated[every].kl, rel_tol=1e-3)


def test_figures_are_told_by_where_positions_are(
    computer: Computer, transforms: KVTransforms, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [range_start(x) for x in (0, 2047, 2048, 4095, 4096, 8191, 8192)]
    assert starts == [0, 0, 2048, 2048, 4096, 4096, 8192]
    assert range_starts(8192) == [0, 2048, 4096]
    assert range_starts(2048) == [0]
    monkeypatch.setattr(quality, "FIRST_RANGE", SPAN)
    parts = score_window(computer, transforms, TOKENS, ["int4"], lambda _: None)["int4"]
    assert {start: part.positions for start, part in parts.items()} == {0: 64, 64: 64, 128: 127}
    assert parts[64].kl > 0.0
    assert parts[128].kl > 0.0
    assert computer.readable or parts[0].kl == 0.0


def test_native_kernels_agree_with_the_emulation(
    decoder: Decoder, transforms: KVTransforms, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native.available():
        pytest.skip(native.why_not())
    computer = native_computer(decoder)
    real = scored(computer, transforms, ["int4", "int3"])
    monkeypatch.setattr(NativeComputer, "readable", ())
    emulated = scored(computer, transforms, ["int4", "int3"])
    for name, score in real.items():
        assert 0.5 * emulated[name].kl < score.kl < 2.0 * emulated[name].kl


def test_values_that_a_codec_holds_are_counted(
    decoder: Decoder, transforms: KVTransforms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "emulation", lambda *_: lambda rows, _: Emulated(rows, 2))
    score = scored(TorchComputer(decoder), transforms, ["int4"])["int4"]
    assert score.num_held == 4 * 2
    assert score.kl == 0.0


def test_the_block_that_begins_a_sequence_is_in_int8(
    decoder: Decoder, transforms: KVTransforms, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def emulation(codec: str, _: KVTransforms) -> Any:
        return lambda rows, start: asked.append((codec, start)) or Emulated(rows)

    monkeypatch.setattr(quality, "emulation", emulation)
    scored(TorchComputer(decoder), transforms, ["int3", "raw16"], TOKENS[: 3 * SPAN])
    assert asked == [
        ("int8", 0), ("raw16", 0), ("int3", 64), ("raw16", 64), ("int3", 128), ("raw16", 128)
    ]  # fmt: skip


def test_emulation_is_the_codec(transforms: KVTransforms, decoder: Decoder) -> None:
    spec = decoder.spec
    size = (spec.num_layers, spec.num_kv_heads, SPAN, spec.head_dim)
    generator = np.random.default_rng(0)
    rows = Rows(*(generator.normal(size=size).astype(np.float32) for _ in range(2)))
    for codec in (INT4, INT3):
        expected = codec.decode(codec.encode(rows, transforms).records, transforms)
        received = emulation(codec.name, transforms)(rows, 0)
        assert np.array_equal(received.rows.keys, expected.keys)
        assert np.array_equal(received.rows.values, expected.values)
        assert received.num_held == 0
    with pytest.raises(ConfigError, match="'int5'"):
        emulation("int5", transforms)


def test_scores_are_sums_over_positions() -> None:
    """Against the definitions, row by row."""
    torch.manual_seed(0)
    reference, other = torch.randn(2, 5, 11).double().log_softmax(-1)
    targets = torch.tensor([1, 0, 10, 4, 4])
    score = compare(reference, other, targets)
    before = [-reference[i, t].item() for i, t in enumerate(targets)]
    after = [-other[i, t].item() for i, t in enumerate(targets)]
    kl = [
        sum(math.exp(a) * (a - b) for a, b in zip(x.tolist(), y.tolist(), strict=True))
        for x, y in zip(reference, other, strict=True)
    ]
    assert math.isclose(score.reference_nll, sum(before))
    assert math.isclose(score.nll, sum(after))
    assert math.isclose(
        score.squared_difference, sum((a - b) ** 2 for a, b in zip(after, before, strict=True))
    )
    assert math.isclose(score.kl, sum(kl))
    assert math.isclose(score.squared_kl, sum(x * x for x in kl))
    assert score.agreed == sum(
        int(x.argmax() == y.argmax()) for x, y in zip(reference, other, strict=True)
    )
    summary = (score + score).summary()
    differences = np.array(after) - np.array(before)
    assert math.isclose(summary["perplexity_delta"], math.exp(differences.mean()) - 1)
    assert math.isclose(summary["perplexity_delta_se"], differences.std() / math.sqrt(10))
    assert math.isclose(summary["kl_se"], np.std(kl) / math.sqrt(10))
    assert summary["positions"] == 10


def test_scores_add_up_field_by_field() -> None:
    score = Score(positions=2, agreed=1, reference_nll=1.0, nll=2.0, kl=0.5, num_held=3)
    total = score + score
    assert asdict(total) == {name: 2 * value for name, value in asdict(score).items()}


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"positions": 1},
        {**asdict(Score()), "kl": "1"},
        {**asdict(Score()), "kl": math.nan},
        {**asdict(Score()), "more": 1},
    ],
)
def test_what_is_no_score_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no score"):
        Score.from_document(document)
    assert Score.from_document(asdict(Score(positions=3))) == Score(positions=3)


def test_bits_count_everything() -> None:
    assert bits_per_value("raw16", 64) == 16
    assert bits_per_value("int8", 64) == 8.25
    # A record of 4,288 bytes for 8,192 values.
    assert math.isclose(bits_per_value("int4", 64), 8 * 4288 / 8192)
    assert bits_per_value("int3", 256) < 3.25
