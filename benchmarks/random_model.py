"""Write a GGUF file with random weights: a model of any size of the llama family, to measure how fast it is.

The tokenizer and the rest of the metadata are those of a file that exists, so that peers load it as they load that one.
Weights are Q8_0 and scaled so that activations stay of one size through the layers; what the model says means nothing.
The default shape is Llama 3.2 1B's (16 layers, hidden 2048) with the vocabulary of the file it borrows from.

    python -m benchmarks.random_model OUT.gguf [--like smollm2-135m] [--layers 16] [--hidden 2048] ...
    kvist bench peers --model OUT.gguf --min-agreement 0 ...
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

import gguf
import numpy as np

from kvist.model import catalog

BLOCK = 32
"""Values of a block of Q8_0."""
BLOCK_BYTES = 2 + BLOCK
MAX_CODE = 127
CHUNK_BLOCKS = 1 << 18
"""Made at a time, so that a large matrix takes no memory."""
SHAPE_KEYS = {
    "block_count": "layers",
    "embedding_length": "hidden",
    "feed_forward_length": "intermediate",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "rope.dimension_count": "head_dim",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
"""Metadata that says the shape, after ``llama.``, and the option that it comes from."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--like", default="smollm2-135m", help="model whose GGUF file has the tokenizer"
    )
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    sizes = [arguments.hidden, arguments.intermediate, arguments.heads * arguments.head_dim]
    if min(sizes) < BLOCK or any(size % BLOCK for size in sizes):
        parser.error(
            f"--hidden, --intermediate and --heads times --head-dim must be multiples of {BLOCK}"
        )
    if arguments.kv_heads < 1 or arguments.heads % arguments.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")
    source = gguf.GGUFReader(catalog.resolve(arguments.like).path)
    if source.fields["general.architecture"].contents() != "llama":
        parser.error(f"--like must name a model of the llama family, {arguments.like} is none")
    write(arguments, source)
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1e9:.2f} GB")
    return 0


def write(arguments: argparse.Namespace, source: gguf.GGUFReader) -> None:
    """Write the file; what is there is replaced."""
    writer = gguf.GGUFWriter(arguments.out, "llama")
    for name, field in source.fields.items():
        key = name.removeprefix("llama.")
        if (
            key not in SHAPE_KEYS
            and not name.startswith("GGUF.")
            and name != "general.architecture"
        ):
            kinds = [*field.types, None]
            writer.add_key_value(name, field.contents(), kinds[0], kinds[1])
    for key, option in SHAPE_KEYS.items():
        writer.add_uint32(f"llama.{key}", getattr(arguments, option))
    random = np.random.default_rng(arguments.seed)
    matrices = shapes(arguments, vocabulary=len(source.fields["tokenizer.ggml.tokens"].data))
    for name, shape in matrices.items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, random_q8_0(random, *shape), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file(progress=sys.stderr.isatty())
    writer.close()


def shapes(arguments: argparse.Namespace, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a llama with tied embeddings: (outputs, inputs), or (values,)."""
    hidden, intermediate = arguments.hidden, arguments.intermediate
    query = arguments.heads * arguments.head_dim
    key = arguments.kv_heads * arguments.head_dim
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, hidden)}
    for layer in range(arguments.layers):
        layer_tensors: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q": (query, hidden),
            "attn_k": (key, hidden),
            "attn_v": (key, hidden),
            "attn_output": (hidden, query),
            "ffn_norm": (hidden,),
            "ffn_gate": (intermediate, hidden),
            "ffn_up": (intermediate, hidden),
            "ffn_down": (hidden, intermediate),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in layer_tensors.items()}
    tensors["output_norm.weight"] = (hidden,)
    return tensors


def random_q8_0(random: np.random.Generator, num_outputs: int, num_inputs: int) -> np.ndarray:
    """Return (outputs, bytes of a row) uint8: random codes, scaled so that outputs deviate by 1."""
    deviation = math.sqrt(((2 * MAX_CODE + 1) ** 2 - 1) / 12)
    scale = np.array([1 / (deviation * math.sqrt(num_inputs))], "<f2").view(np.uint8)
    blocks = np.empty((num_outputs * num_inputs // BLOCK, BLOCK_BYTES), np.uint8)
    blocks[:, :2] = scale
    for first in range(0, len(blocks), CHUNK_BLOCKS):
        chunk = blocks[first : first + CHUNK_BLOCKS, 2:]
        chunk[:] = random.integers(-MAX_CODE, MAX_CODE + 1, chunk.shape, np.int8).view(np.uint8)
    return blocks.reshape(num_outputs, -1)


if __name__ == "__main__":
    sys.exit(main())
