"""Calibration: the statistics it takes from a model, and what it refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.support.tiny_engine import load_tiny_decoder
from tests.support.tiny_models import random_prompt

from kvist.codecs.rotated import SPAN
from kvist.codecs.transforms import from_statistics
from kvist.errors import ConfigError
from kvist.kernels import dispatch
from kvist.kernels.batch import AttentionBatch
from kvist.model.rotary import RotaryEmbedding, frequencies_of
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.tune import calibration
from kvist.tune.calibration import calibrate, text_digest

if TYPE_CHECKING:
    from kvist.model.decoder import Decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny_decoder(tmp_path_factory.mktemp("tiny"))


class Recorder:
    """An observer that keeps what it sees."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[np.ndarray, ...]] = {}

    def see(self, layer_index: int, *rows: torch.Tensor) -> None:
        self.layers[layer_index] = tuple(x.double().numpy().copy() for x in rows)


def seen(decoder: Decoder, token_ids: list[int]) -> Recorder:
    spec = decoder.spec
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=SPAN,
        codec="float32",
    )
    arena, recorder = BlockArena(kv_spec, 8), Recorder()
    batch = AttentionBatch.from_sequences(
        starts=[0], num_tokens=[len(token_ids)], block_tables=[range(8)], block_size=SPAN
    )
    with torch.inference_mode():
        watched = decoder.forward(torch.tensor(token_ids), batch, arena, recorder)
        unwatched = decoder.forward(torch.tensor(token_ids), batch, arena)
    assert torch.equal(watched, unwatched)
    # What the observer is shown is what was stored.
    stored = arena.layer(0)[0].double().numpy()
    assert np.array_equal(stored[0], recorder.layers[0][1][:SPAN].transpose(1, 0, 2))
    assert np.array_equal(stored[1], recorder.layers[0][2][:SPAN].transpose(1, 0, 2))
    return recorder


def test_transforms_are_those_of_the_statistics(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more in float64, from what each layer was shown, head by head."""
    monkeypatch.setattr(calibration, "WINDOW", 256)
    monkeypatch.setattr(calibration, "MIN_TOKENS", 256)
    prefix, text = [7], random_prompt(2 * 255 + 20)
    transforms = calibrate(decoder, (prefix, text), "a model")
    windows = [seen(decoder, prefix + text[:255]), seen(decoder, prefix + text[255:510])]
    spec = decoder.spec
    group = spec.num_heads // spec.num_kv_heads
    output = decoder.weights["layers.1.output.weight"].double().numpy()
    for head in range(spec.num_kv_heads):
        queries, keys, values, spans = [], [], [], []
        for window in windows:
            q, k, v = window.layers[1]
            queries += [q[:, head * group + i] for i in range(group)]
            values.append(v[:, head])
            keys.append(k[1:, head])
            parts = [k[max(1, at) : at + SPAN, head] for at in range(0, 256, SPAN)]
            spans += [part - part.mean(axis=0) for part in parts]
        q, k, v, d = (np.concatenate(x) for x in (queries, keys, values, spans))
        columns = [
            output[:, (head * group + i) * spec.head_dim : (head * group + i + 1) * spec.head_dim]
            for i in range(group)
        ]
        weight = np.concatenate(columns)

        def both(x: np.ndarray, y: np.ndarray) -> Any:
            return from_statistics(x[None, None], y[None, None])

        expected_keys = both(q.T @ q / len(q), d.T @ d / len(d))
        expected_values = both(weight.T @ weight, v.T @ v / len(v))
        assert np.allclose(transforms.mean[1, head], k.mean(axis=0), atol=1e-5)
        for mine, expected in (
            (transforms.keys, expected_keys),
            (transforms.values, expected_values),
        ):
            assert np.allclose(mine.balance[1, head], expected.balance[0, 0], rtol=1e-3)
    assert (transforms.fingerprint, transforms.text) == ("a model", text_digest(prefix, text))


def test_the_metric_of_keys_weighs_queries_by_what_they_give_to_a_span(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once more query by query, from what each layer was shown."""
    monkeypatch.setattr(calibration, "WINDOW", 256)
    monkeypatch.setattr(calibration, "MIN_TOKENS", 256)
    tokens, spec = random_prompt(256), decoder.spec
    metric = calibrate(decoder, ([], tokens), "a model").key_metric
    assert metric is not None
    rope = RotaryEmbedding(spec.ropes[0])
    group, layer, head = spec.num_heads // spec.num_kv_heads, 1, 1
    queries, keys, _ = seen(decoder, tokens).layers[layer]
    expected = np.zeros((spec.head_dim, spec.head_dim))
    for start in (64, 128):
        for position in range(start + SPAN, 256):
            for q in queries[position, head * group : (head + 1) * group]:
                scores = keys[: position + 1, head] @ q * spec.attention_scale
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                back = rope.at(torch.tensor([start]), torch.float64)
                row = dispatch.rope(torch.from_numpy(q)[None, None], back.cos, -back.sin)[0, 0]
                expected += np.square(weights[start : start + SPAN]).sum() * np.outer(row, row)
    assert np.allclose(metric.metric[layer, head] * 255, expected, rtol=1e-3, atol=1e-5)
    assert np.allclose(metric.frequencies[0], frequencies_of(spec.ropes[0]).numpy())


def test_progress_reaches_the_end(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 192)
    told: list[tuple[int, int]] = []
    calibrate(decoder, ([], random_prompt(600)), "x", lambda *x: told.append(x))
    assert told == [(192, 600), (384, 600), (576, 600)] or told[-1][0] == 600
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_too_little_text_is_refused_with_the_option(decoder: Decoder) -> None:
    with pytest.raises(
        ConfigError, match=r"at least 512 tokens of text, received 511.*--calibration-text"
    ):
        calibrate(decoder, ([], random_prompt(511)), "x")


def test_a_model_that_computes_no_numbers_is_refused(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "WINDOW", 256)
    weight = decoder.weights["layers.0.qkv.weight"]
    before = weight[0, 0].item()
    weight[0, 0] = float("nan")
    try:
        with pytest.raises(ConfigError, match="numbers that are not finite"):
            calibrate(decoder, ([], random_prompt(512)), "x")
    finally:
        weight[0, 0] = before


def test_digests_tell_prefix_and_text_apart() -> None:
    assert text_digest([1], [2, 3]) != text_digest([1, 2], [3])
    assert text_digest([], [1]) != text_digest([], [2])
