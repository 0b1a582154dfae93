"""From a model and a few thousand tokens of text to the dimensions of its heads that K and V are kept in.

Responsible for the statistics and for what is kept of them on disk. What follows from them is arithmetic
(``kvist.codecs.reduction``).

Keys: what a query sees of keys is how they differ, weighted by the attention that it gives them; what is common to all
of them cancels in the softmax. So their second moment is the mean, over queries, of the covariance of keys under the
query's own weights. Values: attention gives means of values, and these are what has to survive, as the output
projection sees them; single values vary more, in directions that averaging takes away.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from blake3 import blake3

from kvist import envvars
from kvist.codecs.reduction import KVReduction, best_product, load_reduction, save_reduction
from kvist.errors import ConfigError
from kvist.tune.calibration import observe, output_importance, text_digest

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
_RIDGE = 1e-4
"""Share of the mean variance of kept values that holds a head's way back near that of its group."""

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
        output_importance(decoder), kv_head_dim, fingerprint, text_digest(*text)
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
        num_layers, num_heads, head_dim = spec.num_layers, spec.num_heads, spec.head_dim
        shape = (num_layers, spec.num_kv_heads, head_dim, head_dim)
        self._spec = spec
        self._group = num_heads // spec.num_kv_heads
        self._queries, self._keys = np.zeros(shape), np.zeros(shape)
        self._attended = np.zeros((num_layers, num_heads, head_dim, head_dim))
        self._num_tokens = 0

    def see(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Add one text's rows of one layer: (T, H, D), (T, K, D), (T, K, D), from the first position."""
        spec, layer = self._spec, self._spec.layers[layer_index]
        num_tokens = len(keys)
        at = torch.arange(num_tokens)
        distance = at[:, None] - at
        is_seen = (distance >= 0) & (distance < (layer.window or num_tokens))
        for head in range(spec.num_heads):
            kv_head = head // self._group
            q, k, v = (x.float() for x in (queries[:, head], keys[:, kv_head], values[:, kv_head]))
            scores = q @ k.T * spec.attention_scale
            if spec.attention_softcap is not None:
                scores = torch.tanh(scores / spec.attention_softcap) * spec.attention_softcap
            weights = scores.masked_fill_(~is_seen, -torch.inf).softmax(-1)
            means, attended = weights @ k, weights @ v
            spread = (k * weights.sum(0)[:, None]).T @ k - means.T @ means
            self._queries[layer_index, kv_head] += (q.T @ q).double().numpy()
            self._keys[layer_index, kv_head] += spread.double().numpy()
            self._attended[layer_index, head] += (attended.T @ attended).double().numpy()
        if layer_index == 0:
            self._num_tokens += num_tokens

    def reduction(self, importance: Moments, kept: int, fingerprint: str, text: str) -> KVReduction:
        """Return what follows from all texts.

        Args:
            importance: (L, H, D, D) of the output projections.
            kept: r.
            fingerprint: Of the model.
            text: Digest of the texts.

        Raises:
            ConfigError: A sum is not finite.
        """
        sums = (self._queries, self._keys, self._attended, importance)
        if not all(np.isfinite(x).all() for x in sums):
            raise ConfigError(
                "[calibration] the model computed numbers that are not finite from this text; check the model, "
                "or give another file as --calibration-text"
            )
        keys = best_product(self._queries, self._keys, kept)
        attended = self._attended / self._num_tokens
        values = best_product(self._grouped(importance), self._grouped(attended), kept)
        outputs = self._ways_back(attended, values.right, values.left)
        return KVReduction(
            fingerprint=fingerprint,
            text=text,
            queries=keys.left.astype(np.float32),
            keys=keys.right.astype(np.float32),
            values=values.right.astype(np.float32),
            outputs=outputs.astype(np.float32),
        )

    def _grouped(self, moments: Moments) -> Moments:
        """Return the sums of (L, H, D, D) over the heads of each KV head."""
        spec = self._spec
        shape = (spec.num_layers, spec.num_kv_heads, self._group, spec.head_dim, spec.head_dim)
        grouped: Moments = moments.reshape(shape).sum(axis=2)
        return grouped

    def _ways_back(self, attended: Moments, values: Moments, common: Moments) -> Moments:
        """Return (L, H, r, D): what is most probable of a head's output, given its kept dimensions."""
        values, common = (np.repeat(x, self._group, axis=1) for x in (values, common))
        across = np.swapaxes(values, -1, -2) @ attended
        kept = across @ values
        size = kept.shape[-1]
        ridge = _RIDGE * np.trace(kept, axis1=-2, axis2=-1)[..., None, None] / size
        ridge += np.finfo(np.float32).tiny
        prior = np.swapaxes(common, -1, -2)
        found: Moments = np.linalg.solve(kept + ridge * np.eye(size), across + ridge * prior)
        return found
