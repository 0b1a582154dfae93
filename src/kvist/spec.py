"""What a model looks like, and what its KV cache weighs: pure numbers.

Responsible for the decoder's description (``ModelSpec``), the byte sizes of KV blocks (``KVSpec``) and the weights'
parameter count. Knows no file format, no tensor library and no memory limit.

Dimension letters are those of docs/architecture.md: L layers, H query heads, K KV heads, D head dim, V vocabulary,
P positions per block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvist.errors import ConfigError

GIB = 1024**3
"""Bytes in one GiB."""


class Activation(Enum):
    """Gate activation of the feed-forward block."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"


class RopeScaling(Enum):
    """How rotary frequencies are stretched for long contexts."""

    NONE = "none"
    LINEAR = "linear"
    """All frequencies divided by ``factor``."""
    LLAMA3 = "llama3"
    """Low frequencies divided, high ones kept, a ramp between (Llama 3.1)."""
    YARN = "yarn"
    """NTK-by-parts ramp plus attention temperature (Peng et al. 2023)."""
    DYNAMIC = "dynamic"
    """Dynamic NTK; equals NONE up to the original context, which is the limit Kvist then enforces."""
    FACTORS = "factors"
    """One explicit divisor per frequency (longrope, GGUF ``rope_freqs``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """One rotary position embedding."""

    base: float
    """Theta."""
    dim: int
    """Rotated leading dimensions of each head, even, <= head_dim."""
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    original_max_context_len: int = 0
    """Context the model was trained at before stretching; 0 when scaling does not use it."""
    low_freq_factor: float = 1.0
    """LLAMA3 only."""
    high_freq_factor: float = 4.0
    """LLAMA3 only."""
    beta_fast: float = 32.0
    """YARN only."""
    beta_slow: float = 1.0
    """YARN only."""
    attention_factor: float = 1.0
    """Multiplies cos and sin (YARN, FACTORS)."""
    truncate: bool = True
    """YARN only: round the ramp's ends to whole dimensions."""
    factors: tuple[float, ...] = ()
    """FACTORS only: dim / 2 divisors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope_index: int | None = 0
    """Index into ModelSpec.ropes; None: no rotary embedding in this layer (NoPE)."""
    window: int | None = None
    """Sliding window: a query attends to itself and the window - 1 positions before it; None: to all."""


class MatrixShape(NamedTuple):
    """Shape of one projection, ``y = x W^T``."""

    num_outputs: int
    num_inputs: int

    @property
    def num_elements(self) -> int:
        """Weights of the matrix."""
        return self.num_outputs * self.num_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only transformer, whatever its family. The forward pass is driven by this alone."""

    architecture: str
    """Family, for messages and fingerprints only: ``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``gemma3``."""
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    """Rows of the embedding."""
    max_context_len: int
    """Positions the model was made for."""
    ropes: tuple[RopeSpec, ...]
    layers: tuple[LayerSpec, ...]
    """One per layer."""
    norm_eps: float = 1e-6
    activation: Activation = Activation.SILU
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    """Bias on the attention output projection."""
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    """RMSNorm over head_dim on q and k before RoPE."""
    has_post_norms: bool = False
    """RMSNorm on the output of attention and of the feed-forward block, before the residual addition (Gemma)."""
    has_tied_embeddings: bool = False
    embedding_scale: float = 1.0
    """Multiplies embedding rows (Gemma: sqrt(hidden_size))."""
    attention_scale: float = 0.0
    """Multiplies q.k; always filled in by the readers (usually head_dim ** -0.5)."""
    attention_softcap: float | None = None
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if len(self.layers) != self.num_layers:
            msg = f"[spec] expected one LayerSpec per layer, received {len(self.layers)} for {self.num_layers=}"
            raise ConfigError(msg)
        if self.num_heads % self.num_kv_heads:
            msg = (
                "[spec] num_heads must be a multiple of num_kv_heads, received "
                f"{self.num_heads=}, {self.num_kv_heads=}"
            )
            raise ConfigError(msg)

    @property
    def layer_matrices(self) -> tuple[MatrixShape, ...]:
        """The projections of one layer as they are applied: queries, keys and values in one; gate and up in one."""
        query_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return (
            MatrixShape(query_rows + 2 * kv_rows, self.hidden_size),
            MatrixShape(self.hidden_size, query_rows),
            MatrixShape(2 * self.intermediate_size, self.hidden_size),
            MatrixShape(self.hidden_size, self.intermediate_size),
        )

    @property
    def num_parameters(self) -> int:
        """Weights in all; tied embeddings are counted once."""
        matrices = sum(matrix.num_elements for matrix in self.layer_matrices)
        norms = self.hidden_size * (4 if self.has_post_norms else 2)
        norms += 2 * self.head_dim if self.has_qk_norm else 0
        bias = self.head_dim * (self.num_heads + 2 * self.num_kv_heads) if self.has_qkv_bias else 0
        bias += self.hidden_size if self.has_output_bias else 0
        bias += 2 * self.intermediate_size + self.hidden_size if self.has_mlp_bias else 0
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        return self.num_layers * (matrices + norms + bias) + embeddings + self.hidden_size


DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
"""Bytes of one number in each compute precision of torch."""

WEIGHT_BITS: dict[str, int] = {"bf16": 16, "int8": 8, "int4": 4}
"""Bits of one weight in each format of the native kernels, without its scales."""

INT4_GROUP = 32
"""Inputs of one output that share a scale and a minimum, of 16 bits each, in int4 weights. int8 weights have a scale of
32 bits for each output."""

CODEC_BITS: dict[str, int] = {"raw16": 16, "int8": 8, "float32": 32}
"""Bits of a stored K or V value in each codec that stores rows, without its scales. ``raw16`` is bfloat16."""

LOSSY_CODECS = frozenset(CODEC_BITS) - {"raw16", "float32"}
"""Codecs that keep less than the precision K and V are computed in."""

CODEC_SCALE_GROUP: dict[str, int] = {"int8": 64}
"""Values of one position and head that share a scale of 16 bits, for codecs that have scales."""


SPAN_TOKENS = 64
"""Positions that int4 and int3 encode at once."""

SPAN_CODEC_BITS: dict[str, int] = {"int4": 4, "int3": 3}
"""Bits of a code in the codecs that encode whole spans (``kvist.codecs.rotated``)."""

SPAN_DIM_MULTIPLE = 8
"""What head dimensions must be multiples of in those codecs."""


def span_record_bytes(codec: str, head_dim: int) -> int:
    """Return the bytes of K and V of SPAN_TOKENS positions in one layer and KV head.

    Args:
        codec: A key of SPAN_CODEC_BITS.
        head_dim: A multiple of 8.
    """
    codes = 2 * SPAN_TOKENS * head_dim * SPAN_CODEC_BITS[codec] // 8
    # A step and a zero point for each channel of K, a scale for each position of V.
    return codes + 2 * head_dim + SPAN_TOKENS


def native_weight_bytes(spec: ModelSpec, kind: str) -> int:
    """Return the bytes of a model's weights in the native kernels.

    Packed are the projections and the matrix of the logits, also where it is the embedding: rows are looked up in a
    bfloat16 copy. Norms and biases are float32. Padding to cache lines is not counted.

    Args:
        spec: The model.
        kind: A key of WEIGHT_BITS.
    """
    head = MatrixShape(spec.vocab_size, spec.hidden_size)
    projections = spec.layer_matrices * spec.num_layers
    num_embeddings = head.num_elements * (1 if spec.has_tied_embeddings else 2)
    num_small = (
        spec.num_parameters - num_embeddings - sum(matrix.num_elements for matrix in projections)
    )
    packed = sum(_packed_bytes(matrix, kind) for matrix in projections)
    return packed + _packed_bytes(head, head_kind(kind)) + 2 * head.num_elements + 4 * num_small


def head_kind(kind: str) -> str:
    """Return the format of the logits' matrix when the weights are of ``kind``.

    It stays at int8 under int4: its errors go straight into the probabilities of the next token.
    """
    return "int8" if kind == "int4" else kind


def is_native_head_dim(head_dim: int) -> bool:
    """Return whether the native kernels take heads of so many dimensions."""
    return head_dim % 8 == 0 and head_dim <= 256


def why_not_native(spec: ModelSpec) -> str:
    """Return why the native kernels cannot run a model, in words; empty when they can."""
    if not is_native_head_dim(spec.head_dim):
        return f"the native kernels take head dimensions that are multiples of 8 up to 256, not {spec.head_dim}"
    if any(rope.dim != spec.head_dim for rope in spec.ropes):
        return f"the native kernels rotate whole heads of {spec.head_dim} dimensions only"
    return ""


def _packed_bytes(matrix: MatrixShape, kind: str) -> int:
    scale_bytes = {
        "bf16": 0,
        "int8": 4,
        "int4": 4 * -(-matrix.num_inputs // INT4_GROUP),
    }
    row_bytes = -(-matrix.num_inputs * WEIGHT_BITS[kind] // 8) + scale_bytes[kind]
    return matrix.num_outputs * row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSpec:
    """Shape of one KV block: K and V of all layers for ``block_size`` positions, one contiguous byte range.

    Layout (docs/formats/kv_block.md): ``(L, 2, K, P, N)``, row-major, N elements of the codec for D values; index 0 of
    the second axis is K, 1 is V. In the codecs that encode spans ``(L, P / SPAN_TOKENS, K)`` records.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 64
    codec: str = field(default="raw16")

    def __post_init__(self) -> None:
        if self.codec not in (*CODEC_BITS, *SPAN_CODEC_BITS):
            msg = (
                f"[spec] codec must be one of {', '.join((*CODEC_BITS, *SPAN_CODEC_BITS))}, received {self.codec!r}; "
                "set --kv-cache-dtype"
            )
            raise ConfigError(msg)
        if self.has_spans and self.block_size % SPAN_TOKENS:
            msg = (
                f"[spec] {self.codec} encodes {SPAN_TOKENS} tokens at once, so a block must have a multiple of that, "
                f"received {self.block_size}; change --block-size, or set --kv-cache-dtype raw16 or int8"
            )
            raise ConfigError(msg)
        if self.has_spans and self.head_dim % SPAN_DIM_MULTIPLE:
            msg = (
                f"[spec] {self.codec} takes head dimensions that are multiples of {SPAN_DIM_MULTIPLE}, received "
                f"{self.head_dim}; set --kv-cache-dtype raw16 or int8"
            )
            raise ConfigError(msg)

    @property
    def has_spans(self) -> bool:
        """Whether a block is records of whole spans, and not rows of one position and head each."""
        return self.codec in SPAN_CODEC_BITS

    @property
    def row_bytes(self) -> int:
        """Bytes of K, or of V, of one position and head: the values and their scales. Not for spans."""
        group = CODEC_SCALE_GROUP.get(self.codec)
        num_scales = 0 if group is None else -(-self.head_dim // group)
        return self.head_dim * CODEC_BITS[self.codec] // 8 + 2 * num_scales

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one position over all layers; with spans its part of a block, rounded up."""
        return -(-self.block_bytes // self.block_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        if self.has_spans:
            num_records = self.num_layers * self.num_kv_heads * (self.block_size // SPAN_TOKENS)
            return num_records * span_record_bytes(self.codec, self.head_dim)
        return 2 * self.num_layers * self.num_kv_heads * self.row_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)
