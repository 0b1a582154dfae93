"""From a model and a few thousand tokens of text to the dimensions of its heads that K and V are kept in.

Responsible for the statistics and for what is kept of them on disk. What follows from them is arithmetic
(``kvist.codecs.reduction``).

Keys lose pairs of channels. RoPE turns the two of a pair together, by the position; what is learnt of whole pairs holds
at all positions, and of other directions it does not. What matters is how the scores of one query differ from each
other, each weighted by the attention that its key gets: that is what the softmax turns into weights.

Values lose directions. Attention gives means of values, and these are what has to survive, as the output projection
sees them; single values vary more, in directions that averaging takes away.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from blake3 import blake3

from kvist import envvars
from kvist.codecs.reduction import (
    KVReduction,
    best_pairs,
    best_product,
    load_reduction,
    save_reduction,
)
from kvist.errors import ConfigError
from kvist.tune.calibration import observe, text_digest, value_importance

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvist.model.decoder import Decoder
    from kvist.spec import ModelSpec

    Moments = NDArray[np.float64]

WINDOW = 2048
"""Tokens that are computed as one text, if the model takes so many. RoPE turns keys by their positions, so what is
learnt from short texts does not hold for long ones."""
_SAMPLED = 32
"""Every so many queries are looked at for the keys."""

logger = logging.getLogger(__name__)


def calibrate_reduction(
    decoder: Decoder,
    text: tuple[Sequence[int], Sequence[int]],
    fingerprint: str,
    kv_head_dim: int,
    on_computed: Callable[[int, int], None] | None = None,
) -> KVReduction:
    """Return how to keep a model's heads in fewer dimensions.

    Args:
        decoder: The model, in float32 or bfloat16, not reduced.
        text: As ``calibration.calibrate``.
        fingerprint: Of the model.
        kv_head_dim: r, at most D.
        on_computed: Is told how many tokens of how many are done.

    Raises:
        ConfigError: There is too little text, or the model computes numbers that are not finite from it.
    """
    moments = _Moments(decoder.spec)
    observe(decoder, text, moments, WINDOW, on_computed)
    return moments.reduction(
        value_importance(decoder), kv_head_dim, fingerprint, text_digest(*text)
    )


def kept_reduction(fingerprint: str, kv_head_dim: int) -> KVReduction | None:
    """Return the reduction that is kept of a model; None: there is none, or it is not sound."""
    file = reduction_file(fingerprint, kv_head_dim)
    if not file.exists():
        return None
    try:
        reduction = load_reduction(file, fingerprint)
    except ConfigError as error:
        logger.warning("[tune] %s; calibrating anew", error)
        return None
    return reduction if reduction.kv_head_dim == kv_head_dim else None


def keep_reduction(reduction: KVReduction) -> None:
    """Keep a reduction for later starts, in the place of what is kept of the model and of as many dimensions."""
    file = reduction_file(reduction.fingerprint, reduction.kv_head_dim)
    try:
        save_reduction(file, reduction)
    except OSError as error:
        logger.warning(
            "[tune] cannot keep the reduction in %s: %s; the next start makes it again",
            file,
            error.strerror,
        )


def reduction_file(fingerprint: str, kv_head_dim: int) -> Path:
    """Return where a reduction of a model is kept; the file need not exist."""
    return envvars.tune_folder() / f"{fingerprint[:32]}.{kv_head_dim}.reduction.safetensors"


def reduced_fingerprint(fingerprint: str, reduction: KVReduction) -> str:
    """Return the identity of a model whose heads are kept so: what is learnt of it is of no use to another."""
    return str(blake3(f"{fingerprint} {reduction.digest}".encode()).hexdigest())


class _Moments:
    """Sums over the texts of a calibration; an ``AttentionObserver``. Each text is one call for each layer."""

    def __init__(self, spec: ModelSpec) -> None:
        shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.head_dim)
        self._spec = spec
        self._group = spec.num_heads // spec.num_kv_heads
        self._pairs, self._attended = np.zeros(shape), np.zeros(shape)

    def see(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Add one text's rows of one layer: (T, H, D), (T, K, D), (T, K, D), from the first position."""
        spec, window = self._spec, self._spec.layers[layer_index].window
        at = torch.arange(len(keys))
        distance = at[:, None] - at
        is_seen = (distance >= 0) & (distance < (window or len(keys)))
        for head in range(spec.num_heads):
            kv_head = head // self._group
            q, k, v = (x.float() for x in (queries[:, head], keys[:, kv_head], values[:, kv_head]))
            scores = q @ k.T * spec.attention_scale
            if spec.attention_softcap is not None:
                scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
            weights = scores.masked_fill_(~is_seen, -torch.inf).softmax(-1)
            attended = weights @ v
            self._attended[layer_index, kv_head] += (attended.T @ attended).double().numpy()
            gram = torch.zeros(spec.head_dim, spec.head_dim)
            for row in range(_SAMPLED // 2, len(keys), _SAMPLED):
                first = 0 if window is None else max(0, row + 1 - window)
                seen = slice(first, row + 1)
                gram += _gram(q[row], k[seen], weights[row, seen])
            self._pairs[layer_index, kv_head] += gram.double().numpy()

    def reduction(self, importance: Moments, kept: int, fingerprint: str, text: str) -> KVReduction:
        """Return what follows from all texts.

        Args:
            importance: (L, K, D, D) of the output projections of each KV head.
            kept: r.
            fingerprint: Of the model.
            text: Digest of the texts.

        Raises:
            ConfigError: A sum is not finite.
        """
        if not all(np.isfinite(x).all() for x in (self._pairs, self._attended, importance)):
            raise ConfigError(
                "[calibration] the model computed numbers that are not finite from this text; check the model, "
                "or give another file as --calibration-text"
            )
        values = best_product(importance, self._attended, kept)
        shape = self._pairs.shape[:2]
        pairs = [best_pairs(gram, kept) for layer in self._pairs for gram in layer]
        queries, keys = (
            np.stack(factors).reshape(*shape, -1, kept) for factors in zip(*pairs, strict=True)
        )
        return KVReduction(
            fingerprint=fingerprint,
            text=text,
            queries=queries.astype(np.float32),
            keys=keys.astype(np.float32),
            values=values.right.astype(np.float32),
            outputs=np.swapaxes(values.left, -1, -2).astype(np.float32),
        )


def _gram(query: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return (D, D), how pairs of channels make scores differ; see ``best_pairs``.

    Args:
        query: (D,).
        keys: (keys, D) that it sees.
        weights: (keys,) the attention that it gives them, 1 in all.
    """
    half = len(query) // 2
    k_first, k_second = keys[:, :half], keys[:, half:]
    first, second = query[:half], query[half:]
    shares = torch.cat(
        (k_first * first + k_second * second, k_first * second - k_second * first), dim=-1
    )
    # What all keys have in common cancels in the softmax.
    shares = shares - weights @ shares
    return (shares * weights[:, None]).T @ shares
