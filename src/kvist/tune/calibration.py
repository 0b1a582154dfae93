"""From a model and a few thousand tokens of text to the transforms of the rotated codecs.

Responsible for the statistics: what the queries look at, how keys and values vary, what the output projection makes of
values. What follows from them is arithmetic (``kvist.codecs.transforms``). Knows neither the cache nor requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from blake3 import blake3

from kvist.codecs.rotated import SPAN
from kvist.codecs.transforms import KeyMetric, KVTransforms, from_statistics, turned_metric
from kvist.errors import ConfigError
from kvist.kernels.batch import AttentionBatch
from kvist.model.rotary import frequencies_of
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.model.decoder import AttentionObserver, Decoder
    from kvist.spec import ModelSpec

TOKENS = 4096
"""Tokens that are read by default: with twice as many, or half, the divergence changes in the second digit only."""
MIN_TOKENS = 512
QUERIES = 128
"""Positions whose attention is computed at once: their scores stay in the processor's cache, and of the keys after them
there are few."""
WINDOW = 1024
"""Tokens that are computed as one text. Keys and queries depend on their positions; what is learnt from them does not,
as the mean of keys and the balance of channels vary little with them, and the metric of keys is relative to a span."""


def calibrate(
    decoder: Decoder,
    text: tuple[Sequence[int], Sequence[int]],
    fingerprint: str,
    on_computed: Callable[[int, int], None] | None = None,
) -> KVTransforms:
    """Return the transforms of a model.

    Args:
        decoder: The model, in float32 or bfloat16.
        text: What every sequence of the model begins with (a token for it, often, or nothing), and ordinary text of
            MIN_TOKENS at least.
        fingerprint: Of the model (``kvist.model.fingerprint``), not empty.
        on_computed: Is told how many tokens of how many are done.

    Raises:
        ConfigError: There is too little text, or the model computes numbers that are not finite from it.
    """
    statistics = _Statistics(decoder)
    observe(decoder, text, statistics, WINDOW, on_computed)
    return statistics.transforms(value_importance(decoder), fingerprint, text_digest(*text))


def observe(
    decoder: Decoder,
    text: tuple[Sequence[int], Sequence[int]],
    observer: AttentionObserver,
    window: int,
    on_computed: Callable[[int, int], None] | None,
) -> None:
    """Compute a text, some tokens at a time, and show an observer what goes into attention.

    Args:
        decoder: The model.
        text: As ``calibrate``.
        observer: Who looks on; each piece of the text is one call for each layer, of whole spans from position 0.
        window: Tokens that are computed as one text, if the model takes so many.
        on_computed: As ``calibrate``.

    Raises:
        ConfigError: There is too little text.
    """
    prefix, token_ids = text
    if len(token_ids) < MIN_TOKENS:
        raise ConfigError(
            f"[calibration] expected at least {MIN_TOKENS} tokens of text, received {len(token_ids)}; "
            "give a longer file as --calibration-text"
        )
    spec = decoder.spec
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=decoder.kv_head_dim,
        block_size=SPAN,
        codec="float32",
    )
    taken = max(SPAN, min(window, spec.max_context_len) // SPAN * SPAN) - len(prefix)
    # A last piece that fills no span is left out.
    starts = range(0, len(token_ids) - SPAN + 1, taken)
    for start in starts:
        tokens = [*prefix, *token_ids[start : start + taken]]
        tokens = tokens[: len(tokens) // SPAN * SPAN]
        arena = BlockArena(kv_spec, kv_spec.num_blocks_for(len(tokens)))
        batch = AttentionBatch.from_sequences(
            starts=[0],
            num_tokens=[len(tokens)],
            block_tables=[range(arena.num_blocks)],
            block_size=SPAN,
        )
        with torch.inference_mode():
            decoder.forward(torch.tensor(tokens), batch, arena, observer)
        if on_computed is not None:
            on_computed(min(start + taken, len(token_ids)), len(token_ids))


def text_digest(prefix: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the digest that the transforms of a calibration carry."""
    numbers = [len(prefix), *prefix, *token_ids]
    return str(blake3(np.asarray(numbers, dtype=np.int64).tobytes()).hexdigest())


class _Statistics:
    """Sums over the texts of a calibration; an ``AttentionObserver``. Each text is one call for each layer."""

    def __init__(self, decoder: Decoder) -> None:
        spec = decoder.spec
        shape = (spec.num_layers, spec.num_kv_heads, decoder.kv_head_dim)
        self._group = spec.num_heads // spec.num_kv_heads
        self._num_layers = spec.num_layers
        self._num_queries = self._num_keys = self._num_values = 0
        self._queries, self._key_spread, self._value_square, self._key_metric = (
            np.zeros((*shape, decoder.kv_head_dim)) for _ in range(4)
        )
        self._key_sum = np.zeros(shape)
        self._spec = spec
        self._frequencies = _frequencies(spec)
        # Each reduced head keeps pairs of its own, and a metric has the frequencies of a layer.
        self._has_metric = decoder.reduction is None

    def see(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Add one text's rows of one layer: (T, H, D), (T, K, D), (T, K, D), T whole spans from the first position."""
        num_tokens, num_kv_heads, head_dim = keys.shape
        # (K, rows, D): the queries of a group's heads are rows of their KV head.
        q = queries.reshape(num_tokens, num_kv_heads, self._group, head_dim).float()
        q = q.permute(1, 0, 2, 3).flatten(1, 2)
        k, v = keys.float().transpose(0, 1), values.float().transpose(0, 1)
        # The first position's key is not coded, and would be all that the sums are about.
        spans = k.reshape(num_kv_heads, -1, SPAN, head_dim)
        centred = spans - spans.mean(2, keepdim=True)
        centred[:, 0, 1:] = spans[:, 0, 1:] - spans[:, 0, 1:].mean(1, keepdim=True)
        centred[:, 0, 0] = 0.0
        self._queries[layer_index] += _square(q)
        self._value_square[layer_index] += _square(v)
        if self._has_metric:
            self._key_metric[layer_index] += self._seen_from_spans(layer_index, queries, k)
        self._key_sum[layer_index] += k[:, 1:].double().sum(1).numpy()
        self._key_spread[layer_index] += _square(centred.flatten(1, 2))
        if layer_index == 0:
            self._num_queries += num_tokens * self._group
            self._num_keys += num_tokens - 1
            self._num_values += num_tokens

    def _seen_from_spans(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor
    ) -> np.ndarray:
        """Return the (K, D, D) sum of ``w q^T q`` over spans and the queries after them, seen from the span's start.

        w is the sum of squares of the attention that q gives to the positions of the span: an error of a score moves
        the output by its share. Left out are the first span, which is not coded so, and the queries within the span,
        for which it is the block being written.

        Args:
            layer_index: The layer.
            queries: (T, H, D).
            keys: (K, T, D) float32.
        """
        num_kv_heads, num_tokens, head_dim = keys.shape
        rows = queries.float().view(num_tokens, num_kv_heads, self._group, head_dim)
        rows = rows.permute(1, 2, 0, 3)
        weights = torch.stack(
            [self._given_to_spans(layer_index, *head) for head in zip(rows, keys, strict=True)]
        )
        result = np.zeros((num_kv_heads, head_dim, head_dim))
        for start in range(SPAN, num_tokens - SPAN, SPAN):
            seen = rows[:, :, start + SPAN :].flatten(1, 2)
            share = weights[:, :, start + SPAN :, start // SPAN].flatten(1, 2)
            product = torch.bmm((seen * share[..., None]).transpose(1, 2), seen)
            result += turned_metric(
                product.double().numpy(), -start * self._frequencies[layer_index]
            )
        return result

    def _given_to_spans(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Return (G, T, T / SPAN) sums of squares of the attention that queries give to the positions of each span.

        Args:
            layer_index: The layer.
            queries: (G, T, D) float32 of the heads of one KV head's group.
            keys: (T, D) float32.
        """
        spec, num_tokens = self._spec, keys.shape[0]
        window = spec.layers[layer_index].window or num_tokens
        at = torch.arange(num_tokens)
        # A product adds up the positions of a span faster than a sum over the last dimension.
        is_of_span = torch.repeat_interleave(torch.eye(num_tokens // SPAN), SPAN, dim=0)
        result = torch.empty(*queries.shape[:2], num_tokens // SPAN)
        for first in range(0, num_tokens, QUERIES):
            some = slice(first, min(first + QUERIES, num_tokens))
            scores = queries[:, some] @ keys[: some.stop].T
            scores *= spec.attention_scale
            if spec.attention_softcap is not None:
                scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
            distance = at[some, None] - at[: some.stop]
            scores.masked_fill_((distance < 0) | (distance >= window), -torch.inf)
            result[:, some] = scores.softmax(-1).square_() @ is_of_span[: some.stop]
        return result

    def transforms(self, value_importance: np.ndarray, fingerprint: str, text: str) -> KVTransforms:
        """Return what follows from all texts.

        Raises:
            ConfigError: A sum is not finite.
        """
        mean = self._key_sum / self._num_keys
        sums = (
            self._queries,
            self._key_spread,
            self._value_square,
            self._key_metric,
            value_importance,
        )
        if not all(np.isfinite(x).all() for x in sums):
            raise ConfigError(
                "[calibration] the model computed numbers that are not finite from this text; check the model, "
                "or give another file as --calibration-text"
            )
        # Symmetric to the last bit: a file has one half of it.
        metric = (self._key_metric + np.swapaxes(self._key_metric, -1, -2)) / 2
        return KVTransforms(
            fingerprint=fingerprint,
            text=text,
            mean=mean.astype(np.float32),
            keys=from_statistics(
                self._queries / self._num_queries, self._key_spread / self._num_keys
            ),
            values=from_statistics(value_importance, self._value_square / self._num_values),
            key_metric=KeyMetric(
                metric=(metric / self._num_keys).astype(np.float32),
                frequencies=self._frequencies,
            )
            if self._has_metric
            else None,
        )


def _frequencies(spec: ModelSpec) -> np.ndarray:
    """Return (L, D / 2): by how much a position turns each pair of channels, in radians."""
    ropes = [frequencies_of(rope).double().numpy() for rope in spec.ropes]
    still = np.zeros(spec.head_dim // 2)
    layers = (layer.rope_index for layer in spec.layers)
    return np.stack([still if index is None else ropes[index] for index in layers])


def _square(rows: torch.Tensor) -> np.ndarray:
    """Return x^T x of (K, rows, D), float64, the products in float32."""
    product: np.ndarray = torch.bmm(rows.transpose(1, 2), rows).double().numpy()
    return product


def value_importance(decoder: Decoder) -> np.ndarray:
    """Return (L, K, D, D): the sum of W^T W over the columns W of the output projection of each head of a group.

    Of a reduced decoder (L, K, r, r): what an error of a kept dimension costs.
    """
    spec = decoder.spec
    shape = (-1, spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, spec.head_dim)
    layers = []
    for index in range(spec.num_layers):
        weight = decoder.weights[f"layers.{index}.output.weight"].float().view(shape)
        # (hidden, K, heads, D) -> (K, hidden * heads, D)
        layers.append(_square(weight.permute(1, 0, 2, 3).flatten(1, 2)))
    importance: np.ndarray = np.stack(layers)
    if decoder.reduction is not None:
        outputs = decoder.reduction.arrays()["outputs"].astype(np.float64)
        importance = outputs @ importance @ np.swapaxes(outputs, -1, -2)
    return importance
