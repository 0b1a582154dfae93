"""The decoder-only transformer, one for all families.

Responsible for the forward pass that a ``ModelSpec`` describes. Knows no family names, no files, no requests and no
codec: K and V go through the store it is given, attention through ``kvist.kernels.dispatch``.

Dimension letters: T tokens in the step, S rows asked for, H query heads, K KV heads, D head dim, I intermediate size,
V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional

from kvist.errors import ModelLoadError
from kvist.kernels import dispatch
from kvist.kernels.kv_rows import turn
from kvist.model.layout import EMBEDDING, FINAL_NORM, HEAD
from kvist.model.linear import Linear
from kvist.model.rotary import RotaryEmbedding, Rotation

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from kvist.kernels.batch import AttentionBatch
    from kvist.spec import LayerSpec, ModelSpec


class KVStore(Protocol):
    """Where K and V are kept; ``storage.arena.BlockArena`` is one."""

    @property
    def turns_keys(self) -> bool:
        """Whether keys are stored turned (``kv_rows.turn``)."""
        ...

    def layer(self, layer_index: int) -> torch.Tensor:
        """Return one layer's blocks, (B, 2, K, P, D)."""

    def write(  # one argument for each thing that is stored, and where
        self,
        layer_index: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None = None,
    ) -> None:
        """Store k and v, (T, K, D), of one layer in the given (T,) slots; (T, H, D) queries tell how to round keys."""


class AttentionObserver(Protocol):
    """Who looks on while a step computes."""

    def see(
        self, layer_index: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Take note of one layer's (T, H, D) queries and (T, K, D) keys and values, as attention gets them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights and constants of one layer."""

    index: int
    spec: LayerSpec
    attention_norm: torch.Tensor
    qkv: Linear
    """(H + 2 K) * D rows: queries, keys, values."""
    qk_norm: torch.Tensor | None
    """(H + K, D): the query norm's weight for each query head, then the key norm's for each KV head."""
    output: Linear
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Linear
    """2 * I rows: gate, up."""
    down: Linear
    post_mlp_norm: torch.Tensor | None


class HeadReduction(Protocol):
    """What brings heads to fewer dimensions; ``codecs.reduction.KVReduction`` is one, and says what the arrays are."""

    @property
    def kv_head_dim(self) -> int:
        """Dimensions in which K and V are kept."""
        ...

    @property
    def digest(self) -> str:
        """Of all numbers."""
        ...

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Return ``queries``, ``keys``, ``values`` and ``outputs``."""
        ...


class _Step(NamedTuple):
    """What attention needs in every layer."""

    batch: AttentionBatch
    arena: KVStore
    observer: AttentionObserver | None


class _LayerReduction(NamedTuple):
    """What brings one layer's heads to fewer dimensions and back; see ``codecs.reduction``."""

    queries: torch.Tensor
    """(H, D, r)."""
    keys: torch.Tensor
    """(K, D, r)."""
    values: torch.Tensor
    """(K, D, r)."""
    outputs: torch.Tensor
    """(H, r, D)."""

    def reduce(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (T, H, D) queries and (T, K, D) keys and values in r dimensions."""
        return (
            _through(queries, self.queries),
            _through(keys, self.keys),
            _through(values, self.values),
        )

    def restore(self, attended: torch.Tensor) -> torch.Tensor:
        """Return (T, H, D) of what attention gave, (T, H, r)."""
        return _through(attended, self.outputs)


class Decoder:
    """A decoder with its weights. Immutable; safe to call from one thread at a time.

    Args:
        spec: What to compute.
        weights: The tensors that ``layout.parts_of(spec)`` names as targets, all of one dtype and device. The decoder
            keeps them without copying.
        reduction: Of the model; the blocks it is given are then of heads of ``kv_head_dim``. None: there is none.

    Raises:
        ModelLoadError: The spec asks for a partial rotary embedding, which no supported family has.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Mapping[str, torch.Tensor],
        reduction: HeadReduction | None = None,
    ) -> None:
        if any(rope.dim != spec.head_dim for rope in spec.ropes):
            raise ModelLoadError(
                f"[decoder] rotary dimensions should equal {spec.head_dim=}, received "
                f"{[rope.dim for rope in spec.ropes]}"
            )
        self.spec = spec
        self.weights = weights
        """The tensors, by the names of ``layout``; not to be changed."""
        self._embedding = weights[EMBEDDING]
        self._norm = weights[FINAL_NORM]
        self._head = Linear(weights[EMBEDDING if spec.has_tied_embeddings else HEAD])
        self._layers = tuple(self._build_layer(index, weights) for index in range(spec.num_layers))
        self._ropes = tuple(RotaryEmbedding(rope) for rope in spec.ropes)
        # Rounded to the weights' dtype, as the model was trained (Gemma).
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        # QK-norm of all heads at once: normalise with unit weight, then multiply by each head's own.
        self._unit_weight = torch.ones(spec.head_dim, dtype=self.dtype)
        self.reduction = reduction
        """What keeps K and V in fewer dimensions; None: nothing does."""
        self._reductions = _reductions(spec, reduction, self.dtype)

    def reduced(self, reduction: HeadReduction) -> Decoder:
        """Return a decoder of the same weights whose heads are kept in fewer dimensions."""
        return Decoder(self.spec, self.weights, reduction)

    @property
    def kv_head_dim(self) -> int:
        """Dimensions of a head that K and V are kept in."""
        return self.spec.head_dim if self.reduction is None else self.reduction.kv_head_dim

    @property
    def dtype(self) -> torch.dtype:
        """Precision of weights and activations."""
        return self._embedding.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.weights.values())

    def forward(
        self,
        token_ids: torch.Tensor,
        batch: AttentionBatch,
        arena: KVStore,
        observer: AttentionObserver | None = None,
    ) -> torch.Tensor:
        """Compute the step's tokens and store their K and V.

        Args:
            token_ids: (T,) int64, the tokens of all sequences of the step, one after the other.
            batch: Where each of them stands and which blocks its sequence has. Positions before the step's own must
                have been stored by earlier steps.
            arena: Blocks of K and V.
            observer: Is shown what goes into attention, layer by layer; None: nobody looks.

        Returns:
            (T, hidden) after the final norm, in the decoder's dtype.

        Mutates: The batch's slots in every layer of the arena.
        """
        x = functional.embedding(token_ids, self._embedding)
        if self._embedding_scale != 1.0:
            x = x * self._embedding_scale
        rotations = [rope.at(batch.positions, self.dtype) for rope in self._ropes]
        for layer in self._layers:
            rope_index = layer.spec.rope_index
            rotation = None if rope_index is None else rotations[rope_index]
            x = self._attend(layer, x, rotation, _Step(batch, arena, observer))
            x = self._feed_forward(layer, x)
        return dispatch.rms_norm(x, self._norm, self.spec.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of every vocabulary entry.

        Args:
            hidden: (S, hidden) rows of what ``forward`` returned.

        Returns:
            (S, V) float32.
        """
        logits = self._head(hidden).to(torch.float32)
        if self.spec.logit_softcap is not None:
            cap = self.spec.logit_softcap
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _attend(
        self,
        layer: _Layer,
        x: torch.Tensor,
        rotation: Rotation | None,
        step: _Step,
    ) -> torch.Tensor:
        spec, batch, arena = self.spec, step.batch, step.arena
        normed = dispatch.rms_norm(x, layer.attention_norm, spec.norm_eps)
        heads = layer.qkv(normed).view(-1, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        # Queries and keys stay together through norm and rotation: half the calls.
        queries_keys, values = heads.split_with_sizes(
            (spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), 1
        )
        if layer.qk_norm is not None:
            queries_keys = dispatch.rms_norm(queries_keys, self._unit_weight, spec.norm_eps)
            queries_keys = queries_keys * layer.qk_norm
        if rotation is not None:
            queries_keys = dispatch.rope(queries_keys, rotation.cos, rotation.sin)
        queries, keys = queries_keys.split_with_sizes((spec.num_heads, spec.num_kv_heads), 1)
        reduction = self._reductions[layer.index]
        if reduction is not None:
            queries, keys, values = reduction.reduce(queries, keys, values)
        if step.observer is not None:
            step.observer.see(layer.index, queries, keys, values)
        if arena.turns_keys:
            queries, keys = turn(queries), turn(keys)
        rounding = queries if arena.turns_keys else None
        arena.write(layer.index, batch.slots, keys, values, rounding)
        attended = dispatch.attention(
            queries,
            arena.layer(layer.index),
            batch,
            scale=spec.attention_scale,
            window=layer.spec.window,
            softcap=spec.attention_softcap,
        )
        if reduction is not None:
            attended = reduction.restore(attended)
        update = layer.output(attended.flatten(1))
        if layer.post_attention_norm is not None:
            update = dispatch.rms_norm(update, layer.post_attention_norm, spec.norm_eps)
        return update.add_(x)

    def _feed_forward(self, layer: _Layer, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        normed = dispatch.rms_norm(x, layer.mlp_norm, spec.norm_eps)
        update = layer.down(dispatch.gate(layer.gate_up(normed), spec.activation))
        if layer.post_mlp_norm is not None:
            update = dispatch.rms_norm(update, layer.post_mlp_norm, spec.norm_eps)
        return update.add_(x)

    def _build_layer(self, index: int, weights: Mapping[str, torch.Tensor]) -> _Layer:
        prefix = f"layers.{index}."

        def linear(name: str) -> Linear:
            return Linear(weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

        spec, qk_norm = self.spec, None
        if spec.has_qk_norm:
            query, key = weights[f"{prefix}query_norm"], weights[f"{prefix}key_norm"]
            qk_norm = torch.cat(
                (query.expand(spec.num_heads, -1), key.expand(spec.num_kv_heads, -1))
            )
        return _Layer(
            index=index,
            spec=spec.layers[index],
            attention_norm=weights[f"{prefix}attention_norm"],
            qkv=linear("qkv"),
            qk_norm=qk_norm,
            output=linear("output"),
            post_attention_norm=weights.get(f"{prefix}post_attention_norm"),
            mlp_norm=weights[f"{prefix}mlp_norm"],
            gate_up=linear("gate_up"),
            down=linear("down"),
            post_mlp_norm=weights.get(f"{prefix}post_mlp_norm"),
        )


def _through(heads: torch.Tensor, matrices: torch.Tensor) -> torch.Tensor:
    """Return (T, heads, n) times (heads, n, m), contiguous."""
    return torch.bmm(heads.transpose(0, 1), matrices).transpose(0, 1).contiguous()


def _reductions(
    spec: ModelSpec, reduction: HeadReduction | None, dtype: torch.dtype
) -> tuple[_LayerReduction | None, ...]:
    """Return the matrices of each layer.

    Raises:
        ModelLoadError: They are those of another model.
    """
    if reduction is None:
        return (None,) * spec.num_layers
    check_reduction(spec, reduction)
    arrays = {name: torch.tensor(a, dtype=dtype) for name, a in reduction.arrays().items()}
    for name in ("queries", "outputs"):
        # One for each query head.
        arrays[name] = arrays[name].repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
    return tuple(
        _LayerReduction(**{name: matrices[index] for name, matrices in arrays.items()})
        for index in range(spec.num_layers)
    )


def check_reduction(spec: ModelSpec, reduction: HeadReduction) -> None:
    """Refuse a reduction of another model.

    Raises:
        ModelLoadError: Its sizes are not those of the spec.
    """
    kept = reduction.kv_head_dim
    narrow = (spec.num_layers, spec.num_kv_heads, spec.head_dim, kept)
    expected = {
        "queries": narrow,
        "keys": narrow,
        "values": narrow,
        "outputs": (spec.num_layers, spec.num_kv_heads, kept, spec.head_dim),
    }
    shapes = {name: array.shape for name, array in reduction.arrays().items()}
    if shapes != expected:
        raise ModelLoadError(f"[decoder] a reduction should have {expected}, received {shapes}")
