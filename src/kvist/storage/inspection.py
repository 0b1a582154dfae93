"""What can be told of a block by looking at its bytes.

Responsible for three questions: are all values finite, are the bytes what they were, and do two blocks hold the same K
and V as far as computing them twice can tell. Knows no tokens, no owners and no reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from kvist.codecs import spans
from kvist.kernels.exhaustion import torch_memory_errors
from kvist.storage.slabs import SlabArena

if TYPE_CHECKING:
    from kvist.storage.arena import BlockArena

CHECKSUM_BYTES = 16
RECOMPUTE_NOISE = 0.2
"""How far a value may be off beyond the codec's bounds when the same block is computed again, as a fraction of the
largest value of its layer and head in the block.

SmolLM2-135M, blocks of 64 computed in steps of 512, then alone in steps of 64, 8 and 1 and beside others; the largest
found, of K and V of all layers: 0.009 with bfloat16 weights, 0.014 with int8 weights, 0.056 with int8 weights and int8
blocks. It does not build up along a sequence. Blocks computed with the wrong last token, or behind a wrong block, are
off by 1.4 and more.
"""


class BlockInspector:
    """Reads the blocks of one arena. The thread that writes them.

    Args:
        arena: Where they are.
    """

    def __init__(self, arena: BlockArena | SlabArena) -> None:
        self._arena = arena

    @torch_memory_errors()
    def is_finite(self, block_id: int, num_tokens: int) -> bool:
        """Return whether the first ``num_tokens`` positions hold finite K and V only. O(bytes).

        Of a block of whole spans, all positions: what is not finite in one of them may make its span so.
        """
        records = self._arena.records(block_id)
        if records is not None:
            assert isinstance(self._arena, SlabArena)
            codec = self._arena.codec_of(block_id)
            return spans.is_finite(records, codec, self._arena.kv_spec.head_dim)
        stored = self._arena.head(block_id, num_tokens)
        return bool(self._arena.codec_at(block_id).is_finite(stored).all())

    @torch_memory_errors()
    def checksum(self, block_id: int, num_tokens: int) -> bytes:
        """Return a digest of the first ``num_tokens`` positions: equal for equal bytes, and for no others.

        Of a block of whole spans, which is complete, it is that of all of it.

        Complexity: O(bytes), about 3 GB/s on one core.
        """
        data = self._arena.records(block_id)
        if data is None:
            # Of a whole block a view, not a copy.
            head = self._arena.head(block_id, num_tokens).contiguous().flatten()
            data = head.view(torch.uint8).cpu().numpy()
        return blake3(data.data, max_threads=1).digest(length=CHECKSUM_BYTES)

    @torch_memory_errors()
    def excess(self, block_id: int, other_id: int, num_tokens: int) -> float:
        """Return by how much two blocks differ, in units of what recomputing explains; above 1 they hold other content.

        Two values may each be off by the codec's error bound, and by ``RECOMPUTE_NOISE`` times the largest value of
        their layer and head. Infinite when either has a value that is not finite.

        Raises:
            InvariantViolation: One is a block of whole spans.
        """
        codec = self._arena.codec_at(block_id)
        one = codec.decode(self._arena.head(block_id, num_tokens))
        two = codec.decode(self._arena.head(other_id, num_tokens))
        # The smaller: a damaged value that is huge must not widen what it is compared by.
        largest = torch.minimum(
            one.abs().amax(dim=(-1, -2), keepdim=True), two.abs().amax(dim=(-1, -2), keepdim=True)
        )
        bounds = torch.minimum(codec.error_bound(one), codec.error_bound(two)) * 2
        # Far below any value that counts: a head of zeros must not divide by nothing.
        allowed = (largest * RECOMPUTE_NOISE).clamp_min(1e-9)
        excess = ((one - two).abs() - bounds) / allowed
        worst = float(excess.amax())
        return worst if torch.isfinite(excess).all() else float("inf")
