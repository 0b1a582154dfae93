"""Which tensors a decoder consists of, and what each checkpoint format calls them.

Responsible for the one table of names: the decoder's own tensors, the parts they are fused from, the part's name in
Hugging Face checkpoints and in GGUF files, and its shape. Knows no tensor library and no file.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.spec import ModelSpec

EMBEDDING = "embedding"
FINAL_NORM = "norm"
HEAD = "head"


class PartKind(Enum):
    """What a format may store in its own way."""

    PLAIN = "plain"
    NORM = "norm"
    """A norm's weight: Gemma's Hugging Face checkpoints store it minus one."""
    QUERY = "query"
    """Projects to query heads: GGUF files of the llama family interleave the rows of each head."""
    KEY = "key"
    """Projects to key heads: as QUERY."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One tensor of a checkpoint and the rows of the decoder's tensor that it fills."""

    target: str
    """Name of the decoder's tensor, for example ``layers.3.qkv.weight``."""
    first_row: int
    """Row of the target where this part starts."""
    shape: tuple[int, ...]
    kind: PartKind
    hf_name: str
    """Name in a Hugging Face checkpoint, without the prefix of the model around it."""
    gguf_name: str


def parts_of(spec: ModelSpec) -> list[Part]:
    """Return every tensor that a checkpoint of this decoder must hold, in the order of the forward pass."""
    hidden, plain = spec.hidden_size, PartKind.PLAIN
    vocabulary = (spec.vocab_size, hidden)
    parts = [_single(EMBEDDING, vocabulary, plain, ("embed_tokens.weight", "token_embd.weight"))]
    for index in range(spec.num_layers):
        parts.extend(_layer_parts(spec, index))
    names = ("norm.weight", "output_norm.weight")
    parts.append(_single(FINAL_NORM, (hidden,), PartKind.NORM, names))
    if not spec.has_tied_embeddings:
        parts.append(_single(HEAD, vocabulary, plain, ("lm_head.weight", "output.weight")))
    return parts


def target_shapes(parts: list[Part]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each of the decoder's tensors: the parts of one target are stacked along the first axis."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        shapes[part.target] = (part.first_row + part.shape[0], *part.shape[1:])
    return shapes


def _single(target: str, shape: tuple[int, ...], kind: PartKind, names: tuple[str, str]) -> Part:
    return Part(
        target=target, first_row=0, shape=shape, kind=kind, hf_name=names[0], gguf_name=names[1]
    )


def _layer_parts(spec: ModelSpec, index: int) -> Iterator[Part]:
    hidden, middle = spec.hidden_size, spec.intermediate_size
    query_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    plain = PartKind.PLAIN

    def norm(target: str, length: int, hf_name: str, gguf_name: str) -> Part:
        return _single(
            f"layers.{index}.{target}",
            (length,),
            PartKind.NORM,
            (f"layers.{index}.{hf_name}.weight", f"blk.{index}.{gguf_name}.weight"),
        )

    def projection(
        target: str,
        rows: tuple[tuple[int, PartKind, str, str], ...],
        columns: int,
        *,
        has_bias: bool,
    ) -> Iterator[Part]:
        shapes: dict[str, tuple[int, ...]] = {"weight": (columns,), "bias": ()}
        for suffix in ("weight", "bias") if has_bias else ("weight",):
            first_row = 0
            for num_rows, kind, hf_name, gguf_name in rows:
                yield Part(
                    target=f"layers.{index}.{target}.{suffix}",
                    first_row=first_row,
                    shape=(num_rows, *shapes[suffix]),
                    kind=kind,
                    hf_name=f"layers.{index}.{hf_name}.{suffix}",
                    gguf_name=f"blk.{index}.{gguf_name}.{suffix}",
                )
                first_row += num_rows

    yield norm("attention_norm", hidden, "input_layernorm", "attn_norm")
    qkv = (
        (query_rows, PartKind.QUERY, "self_attn.q_proj", "attn_q"),
        (kv_rows, PartKind.KEY, "self_attn.k_proj", "attn_k"),
        (kv_rows, plain, "self_attn.v_proj", "attn_v"),
    )
    yield from projection("qkv", qkv, hidden, has_bias=spec.has_qkv_bias)
    if spec.has_qk_norm:
        yield norm("query_norm", spec.head_dim, "self_attn.q_norm", "attn_q_norm")
        yield norm("key_norm", spec.head_dim, "self_attn.k_norm", "attn_k_norm")
    output = ((hidden, plain, "self_attn.o_proj", "attn_output"),)
    yield from projection("output", output, query_rows, has_bias=spec.has_output_bias)
    # One name, two meanings: with post norms, "post_attention" is one; without, it precedes the feed-forward block.
    if spec.has_post_norms:
        post = "post_attention_layernorm"
        yield norm("post_attention_norm", hidden, post, "post_attention_norm")
        yield norm("mlp_norm", hidden, "pre_feedforward_layernorm", "ffn_norm")
        yield norm("post_mlp_norm", hidden, "post_feedforward_layernorm", "post_ffw_norm")
    else:
        yield norm("mlp_norm", hidden, "post_attention_layernorm", "ffn_norm")
    gate_up = (
        (middle, plain, "mlp.gate_proj", "ffn_gate"),
        (middle, plain, "mlp.up_proj", "ffn_up"),
    )
    yield from projection("gate_up", gate_up, hidden, has_bias=spec.has_mlp_bias)
    down = ((hidden, plain, "mlp.down_proj", "ffn_down"),)
    yield from projection("down", down, middle, has_bias=spec.has_mlp_bias)
