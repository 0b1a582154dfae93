"""Drive a decoder through real blocks without a scheduler: prefill in chunks, decode greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvist.kernels.batch import AttentionBatch
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.model.decoder import Decoder


class Sequencer:
    """One sequence in an arena of its own; blocks are handed out back to front, so that order cannot help."""

    def __init__(
        self, decoder: Decoder, max_len: int, *, block_size: int = 16, codec: str = "float32"
    ) -> None:
        spec = decoder.spec
        kv_spec = KVSpec(
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=decoder.kv_head_dim,
            block_size=block_size,
            codec=codec,
        )
        num_blocks = kv_spec.num_blocks_for(max_len)
        self._decoder = decoder
        self._arena = BlockArena(kv_spec, num_blocks)
        self._table = list(reversed(range(num_blocks)))
        self.num_computed = 0

    @torch.inference_mode()
    def compute(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the (T, V) logits of the next T tokens of the sequence."""
        batch = AttentionBatch.from_sequences(
            starts=[self.num_computed],
            num_tokens=[len(token_ids)],
            block_tables=[self._table],
            block_size=self._arena.kv_spec.block_size,
        )
        hidden = self._decoder.forward(torch.tensor(token_ids), batch, self._arena)
        self.num_computed += len(token_ids)
        return self._decoder.logits(hidden)


def run_decoder(
    decoder: Decoder,
    token_ids: Sequence[int],
    *,
    block_size: int = 16,
    chunk: int | None = None,
    codec: str = "float32",
) -> torch.Tensor:
    """Return the logits at every position, (T, V), computed ``chunk`` tokens at a time (None: all at once)."""
    sequence = Sequencer(decoder, len(token_ids), block_size=block_size, codec=codec)
    step = chunk or len(token_ids)
    starts = range(0, len(token_ids), step)
    return torch.cat([sequence.compute(token_ids[start : start + step]) for start in starts])


def generate_greedily(
    decoder: Decoder, prompt: Sequence[int], num_tokens: int, *, block_size: int = 16
) -> list[int]:
    """Return ``num_tokens`` greedy tokens after the prompt, each computed from the blocks of the ones before."""
    sequence = Sequencer(decoder, len(prompt) + num_tokens, block_size=block_size)
    logits = sequence.compute(prompt)
    output = [int(logits[-1].argmax())]
    while len(output) < num_tokens:
        output.append(int(sequence.compute(output[-1:])[-1].argmax()))
    return output
