"""The decoder on the native plane: weights packed for the integer kernels, a whole step in one call.

Responsible for which tensor becomes which packed layer, and for handing a step's arrays to ``kvist._native``. Computes
what ``kvist.model.decoder`` computes, in the precision of ``WeightKind``; that one stays the oracle. Knows no family
names, no files and no requests.

Dimension letters: T tokens in the step, S rows asked for, V vocabulary, N outputs and M inputs of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvist.errors import ModelLoadError
from kvist.kernels import native
from kvist.model.decoder import check_reduction
from kvist.model.layout import EMBEDDING, FINAL_NORM, HEAD, parts_of, target_shapes
from kvist.model.rotary import frequencies_of
from kvist.spec import INT4_GROUP, head_kind, why_not_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    from kvist.model.decoder import HeadReduction
    from kvist.spec import ModelSpec
    from kvist.storage.arena import BlockArena
    from kvist.storage.slabs import SlabArena
    from kvist.types import TokenId

_PROJECTIONS = ("qkv", "output", "gate_up", "down")
_MATRICES = ("queries", "keys", "values", "outputs")
_VECTORS = (
    "attention_norm",
    "query_norm",
    "key_norm",
    "post_attention_norm",
    "mlp_norm",
    "post_mlp_norm",
)


class StepScores(NamedTuple):
    """What a step says about the rows that were asked for."""

    logits: NDArray[np.float32]
    """(at least S, V); overwritten by the next step."""
    best_logits: list[float]
    """(S,) the largest logit of each row; NaN when any of the row is."""
    best_ids: list[TokenId]
    """(S,) the first token that has it."""
    damaged_rows: list[int]
    """Rows of the step, of all T, that wrote a K or V value that is infinite or no number."""


class StepSequence(NamedTuple):
    """The tokens of one sequence in a step."""

    start: int
    """Position of the first of them; what is before is in the blocks already."""
    token_ids: tuple[int, ...]
    """At least one."""
    block_table: tuple[int, ...]
    """Blocks of the sequence in order; covers start + len(token_ids) positions."""
    num_logits: int
    """Of how many of the last tokens the logits are asked for."""


class NativeDecoder:
    """A decoder whose weights are packed for this CPU. One step at a time.

    Args:
        spec: What to compute.
        weights: As ``pack_weights`` returned them for the same spec.
        pool: The threads that compute.
        reduction: Of the model; the blocks it is given are then of heads of ``kv_head_dim``. None: there is none.

    Raises:
        ModelLoadError: The native kernels do not cover the spec.
        KernelUnavailable: There are no native kernels here.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: PackedWeights,
        pool: Any,  # noqa: ANN401  # native.Pool
        reduction: HeadReduction | None = None,
    ) -> None:
        reason = why_not_native(spec)
        if reason:
            raise ModelLoadError(f"[decoder] {reason}")
        if reduction is not None:
            check_reduction(spec, reduction)
        self.reduction = reduction
        """What keeps K and V in fewer dimensions; None: nothing does."""
        self.spec = spec
        self._weights = weights
        self.pool = pool
        """The threads that compute."""
        self._logits = np.empty((1, spec.vocab_size), np.float32)
        # The arena of the last step, and what the kernels are told of it: asking torch for its bytes takes a tenth of a
        # millisecond each time, right after the kernels have pushed everything else out of the processor's caches.
        self._arena: BlockArena | SlabArena | None = None
        self._blocks: tuple[Any, str, int] = (None, "", 0)
        self._block_tables: tuple[Any, Any, Any] = (None, None, None)
        self._model = native.extension().Model(
            shape={
                "hidden": spec.hidden_size,
                "num_heads": spec.num_heads,
                "num_kv_heads": spec.num_kv_heads,
                "head_dim": spec.head_dim,
                "kv_head_dim": spec.head_dim if reduction is None else reduction.kv_head_dim,
                "intermediate": spec.intermediate_size,
                "vocab": spec.vocab_size,
                "norm_eps": spec.norm_eps,
                # Rounded to the table's precision, as the models that scale it were trained.
                "embedding_scale": torch.tensor(spec.embedding_scale, dtype=torch.bfloat16).item(),
                "attention_scale": spec.attention_scale,
                "attention_softcap": spec.attention_softcap or 0.0,
                "logit_softcap": spec.logit_softcap or 0.0,
            },
            ropes=[(frequencies_of(rope).tolist(), rope.attention_factor) for rope in spec.ropes],
            layers=[self._layer(index) for index in range(spec.num_layers)],
            embedding=weights.embedding,
            final_norm=weights.vectors[FINAL_NORM],
            head=(weights.linears[HEAD], None),
        )

    def reduced(self, reduction: HeadReduction) -> NativeDecoder:
        """Return a decoder of the same weights whose heads are kept in fewer dimensions."""
        return NativeDecoder(self.spec, self._weights, self.pool, reduction)

    @property
    def kv_head_dim(self) -> int:
        """Dimensions of a head that K and V are kept in."""
        return self.spec.head_dim if self.reduction is None else self.reduction.kv_head_dim

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        return self._weights.num_bytes

    def phase_seconds(self) -> dict[str, float]:
        """Return the time spent in each phase of the steps so far, waiting for other threads included.

        Together that is the time in which kernels ran: of a step, from the begin of the first to the end of the last.
        """
        return {name: ns / 1e9 for name, ns in self._model.phase_ns().items()}

    def wake(self) -> None:
        """Wake the pool's threads, since a step is near: that takes them about as long as its arrays take to make."""
        self.pool.wake()

    def step(
        self,
        sequences: list[StepSequence],
        arena: BlockArena | SlabArena,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepScores:
        """Compute the step's tokens, store their K and V, and score the rows asked for.

        Args:
            sequences: At least one; their rows follow each other in this order.
            arena: The blocks that the tables name; those that the step writes are in the codec of its ``kv_spec``.
            meanwhile: Called once by this thread while the pool's other threads compute; this one joins them after it.
                It must not use the pool. What it raises is raised when the step is over. None: there is nothing to do.

        Raises:
            ValueError: A token, a block or a count is outside its range, or a block is not allocated or is to be
                written and in another codec; nothing was computed.

        Mutates: The slots of the step's tokens in every layer of the arena.
        """
        num_logits = 0
        for sequence in sequences:
            num_logits += sequence.num_logits
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self.spec.vocab_size), np.float32)
        if arena is not self._arena:
            self._arena = arena
            kv_spec = arena.kv_spec
            self._blocks = (arena.slab.numpy(), kv_spec.codec, kv_spec.block_size)
            self._block_tables = (arena.offsets, arena.codecs, arena.transforms)
        # Without names: binding ten arguments by name takes longer than what is done with them.
        slab, codec, block_size = self._blocks
        offsets, codecs, transforms = self._block_tables
        best_logits, best_ids, damaged_rows = self._model.step(
            self.pool,
            slab,
            codec,
            block_size,
            sequences,
            self._logits,
            offsets,
            codecs,
            transforms,
            meanwhile,
        )
        return StepScores(self._logits, best_logits, best_ids, damaged_rows)

    def _layer(self, index: int) -> dict[str, Any]:
        spec, prefix = self.spec.layers[index], f"layers.{index}."
        layer: dict[str, Any] = {
            "rope": -1 if spec.rope_index is None else spec.rope_index,
            "window": spec.window or 0,
            "reduction": None,
        }
        if self.reduction is not None:
            arrays = self.reduction.arrays()
            layer["reduction"] = tuple(
                np.ascontiguousarray(arrays[name][index]) for name in _MATRICES
            )
        for name in _PROJECTIONS:
            bias = self._weights.vectors.get(f"{prefix}{name}.bias")
            layer[name] = (self._weights.linears[f"{prefix}{name}.weight"], bias)
        for name in _VECTORS:
            layer[name] = self._weights.vectors.get(prefix + name)
        return layer


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """The weights of a decoder, ready for the kernels."""

    embedding: NDArray[np.uint16]
    """(V, hidden) bfloat16 bits."""
    vectors: Mapping[str, NDArray[np.float32]]
    """Norms and biases by their names in ``layout``."""
    linears: Mapping[str, Any]
    """``_native.PackedLinear`` by the name of the weight in ``layout``; the head always under ``head``."""

    def arrays(self) -> dict[str, NDArray[np.uint8]]:
        """Return all of it as bytes, by name, without copying."""
        small: dict[str, NDArray[Any]] = {EMBEDDING: self.embedding, **self.vectors}
        return {
            **{name: array.reshape(-1).view(np.uint8) for name, array in small.items()},
            **{name: linear.data() for name, linear in self.linears.items()},
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        linears = sum(int(linear.nbytes) for linear in self.linears.values())
        return self.embedding.nbytes + sum(v.nbytes for v in self.vectors.values()) + linears


def pack_weights(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor]],
    kind: str,
    pool: Any,  # noqa: ANN401  # native.Pool
) -> PackedWeights:
    """Convert a decoder's tensors, one at a time.

    Args:
        spec: What they belong to.
        tensors: Name and float32 tensor, as ``loader.iterate_tensors`` yields them; each may be overwritten.
        kind: ``int8``, ``int4`` or ``bf16``.
        pool: The threads that pack.
    """
    vectors: dict[str, NDArray[np.float32]] = {}
    linears: dict[str, Any] = {}
    embedding: NDArray[np.uint16] | None = None
    for name, tensor in tensors:
        if name == EMBEDDING:
            embedding = tensor.to(torch.bfloat16).view(torch.uint16).numpy()
        if tensor.dim() == 1:
            vectors[name] = tensor.numpy().copy()
        elif name != EMBEDDING or spec.has_tied_embeddings:
            linear = HEAD if name == EMBEDDING else name
            linears[linear] = native.extension().PackedLinear(
                tensor.numpy(), *_format(spec, linear, kind), pool
            )
    assert embedding is not None
    return PackedWeights(embedding=embedding, vectors=vectors, linears=linears)


def load_packed(
    spec: ModelSpec, arrays: Mapping[str, NDArray[np.uint8]], kind: str
) -> PackedWeights:
    """Return weights from the bytes that ``PackedWeights.arrays`` gave for the same spec and kind.

    The arrays are kept, not copied: they may be a file mapped into memory.

    Raises:
        ValueError: An array is missing or has the wrong size.
    """
    vectors: dict[str, NDArray[np.float32]] = {}
    linears: dict[str, Any] = {}
    for name, shape in target_shapes(parts_of(spec)).items():
        if len(shape) == 1:
            vectors[name] = _reinterpreted(arrays, name, np.float32, shape)
        elif name != EMBEDDING or spec.has_tied_embeddings:
            linear = HEAD if name == EMBEDDING else name
            linears[linear] = native.extension().PackedLinear.from_data(
                *shape, *_format(spec, linear, kind), _array(arrays, linear)
            )
    table = (spec.vocab_size, spec.hidden_size)
    return PackedWeights(
        embedding=_reinterpreted(arrays, EMBEDDING, np.uint16, table),
        vectors=vectors,
        linears=linears,
    )


def _format(spec: ModelSpec, name: str, kind: str) -> tuple[str, int, str]:
    """Return how a matrix is packed: its kind, its group, and what is applied to the halves of its outputs."""
    stored = head_kind(kind) if name == HEAD else kind
    gate = spec.activation.value if name.endswith("gate_up.weight") else "none"
    return stored, INT4_GROUP if stored == "int4" else 0, gate


def _array(arrays: Mapping[str, NDArray[np.uint8]], name: str) -> NDArray[np.uint8]:
    if name not in arrays:
        raise ValueError(f"[decoder] packed weights lack {name}")
    return arrays[name]


def _reinterpreted(
    arrays: Mapping[str, NDArray[np.uint8]], name: str, dtype: type, shape: tuple[int, ...]
) -> NDArray[Any]:
    return _array(arrays, name).view(dtype).reshape(shape)
