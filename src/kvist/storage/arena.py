"""Where K and V live: one slab of blocks, allocated once.

Responsible for the memory of all blocks of one codec, and for writing, copying and viewing it. Does not know which
blocks are free, shared or whose they are, nor what a prefix is: the cache manager decides that.

Invariants:
    1. Block ``b`` is bytes ``[b * block_bytes, (b + 1) * block_bytes)`` of the slab, laid out (L, 2, K, P, N)
       row-major: whole blocks are copied, checksummed, stored and sent as one range.
    2. The slab is allocated at construction and neither grows nor moves.
    3. Slots that were never written hold arbitrary bytes; kernels must not read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvist.codecs import registry
from kvist.errors import ConfigError
from kvist.spec import GIB
from kvist.storage.pages import LARGE_PAGE, anonymous_memory

if TYPE_CHECKING:
    from kvist.codecs.base import KVCodec
    from kvist.spec import KVSpec

_CHECKED_AT_ONCE = 32
"""Positions whose K and V are gathered to be looked at."""


class BlockArena:
    """The blocks of one codec. Written by the engine's thread only.

    Args:
        kv_spec: Shape and codec of a block.
        num_blocks: B, blocks in the slab, >= 1.
        device: Where the slab is allocated.

    Raises:
        ConfigError: The memory cannot be had, or the numbers make no slab.
    """

    def __init__(
        self, kv_spec: KVSpec, num_blocks: int, device: torch.device | str = "cpu"
    ) -> None:
        if num_blocks < 1:
            raise ConfigError(
                f"[storage] expected at least 1 KV block, received {num_blocks=}; raise --memory-gib "
                f"(a block takes {kv_spec.block_bytes:,} bytes)"
            )
        codec = registry.get(kv_spec.codec)
        shape = (
            num_blocks,
            kv_spec.num_layers,
            2,
            kv_spec.num_kv_heads,
            kv_spec.block_size,
            codec.stored_dim(kv_spec.head_dim),
        )
        slab = allocate(
            num_blocks * kv_spec.block_bytes,
            f"{num_blocks} KV blocks of {kv_spec.block_bytes:,} bytes",
            torch.device(device),
        ).view(num_blocks, kv_spec.block_bytes)
        self._kv_spec = kv_spec
        self._codec = codec
        self._slab = slab
        self._view = slab.view(codec.dtype).view(shape)
        # (B, 2, K, P, N) to read and (B, P, 2, K, N) to write, per layer, made once: a view costs microseconds.
        self._layers = self._view.unbind(1)
        self._writable = tuple(layer.permute(0, 3, 1, 2, 4) for layer in self._layers)

    @property
    def kv_spec(self) -> KVSpec:
        """Shape and codec of a block."""
        return self._kv_spec

    @property
    def codec(self) -> KVCodec:
        """Format of K and V."""
        return self._codec

    @property
    def turns_keys(self) -> bool:
        """Whether the keys to be written, and the queries that meet them, are to be turned (``kv_rows.turn``)."""
        return self._codec.turns_keys

    @property
    def num_blocks(self) -> int:
        """B, blocks in the slab."""
        return int(self._slab.shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of the slab."""
        return self._slab.nbytes

    @property
    def device(self) -> torch.device:
        """Where the slab is."""
        return self._slab.device

    @property
    def slab(self) -> torch.Tensor:
        """The (B, block_bytes) uint8 bytes of all blocks, for kernels that address them by themselves."""
        return self._slab

    @property
    def offsets(self) -> None:
        """Bytes from the slab's start by block id (``SlabArena``); None: ``block_bytes`` times the id."""
        return None

    @property
    def codecs(self) -> None:
        """Numbers of codecs by block id (``SlabArena``); None: all blocks have the codec of ``kv_spec``."""
        return None

    def block_bytes(self, block_id: int) -> torch.Tensor:
        """Return the (block_bytes,) uint8 view of one block."""
        return self._slab[block_id]

    def layer(self, layer_index: int) -> torch.Tensor:
        """Return the (B, 2, K, P, N) view of one layer in the codec's dtype; index 0 of axis 1 is K, 1 is V."""
        return self._layers[layer_index]

    def write(  # one argument for each thing that is stored, and where
        self,
        layer_index: int,
        slots: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        queries: torch.Tensor | None = None,
    ) -> None:
        """Encode and store the K and V of one layer.

        Args:
            layer_index: Layer, [0, L).
            slots: (T,) int64, ``block_id * P + offset`` each, no slot twice; a row whose slot is -1 is skipped.
            k: (T, K, D) keys, any float dtype, any strides; turned already where ``turns_keys``.
            v: (T, K, D) values.
            queries: (T, H, D) of the same positions, turned as the keys are, for an encoder that rounds keys by them;
                None: it rounds without.

        Mutates: The slots' bytes in this layer, and nothing else.
        """
        if bool((slots < 0).any()):
            rows = (slots >= 0).nonzero().squeeze(1)
            slots, k, v = slots[rows], k[rows], v[rows]
            queries = None if queries is None else queries[rows]
        block_ids = torch.div(slots, self._kv_spec.block_size, rounding_mode="floor")
        offsets = slots - block_ids * self._kv_spec.block_size
        if queries is None:
            stored = self._codec.encode(torch.stack((k, v), dim=1))
        else:
            keys = self._codec.encode_keys(k, queries)
            stored = torch.stack((keys, self._codec.encode(v)), dim=1)
        self._writable[layer_index].index_put_((block_ids, offsets), stored)

    def damaged_rows(self, slots: torch.Tensor) -> list[int]:
        """Return which of some slots, (T,) int64 of written positions, hold a K or V that is no finite number.

        Complexity: reads the slots' bytes once, as much as a step's writing of them.
        """
        size = self._kv_spec.block_size
        is_whole = []
        # A few at a time: a copy of a long prompt's K and V would be new memory, faulted in page by page.
        for some in torch.split(slots, _CHECKED_AT_ONCE):
            block_ids = torch.div(some, size, rounding_mode="floor")
            stored = self._view[block_ids, :, :, :, some - block_ids * size]
            is_whole.append(self._codec.is_finite(stored).flatten(1).all(dim=1))
        return torch.nonzero(~torch.cat(is_whole)).flatten().tolist()

    def codec_at(self, block_id: int) -> KVCodec:  # noqa: ARG002  # here all blocks have one
        """Return the format of a block."""
        return self._codec

    def records(self, block_id: int) -> None:  # noqa: ARG002  # as above
        """Return None: no block is records of whole spans."""
        return

    @property
    def transforms(self) -> None:
        """What kernels need to read blocks of whole spans: nothing."""
        return None

    def head(self, block_id: int, num_tokens: int) -> torch.Tensor:
        """Return the (L, 2, K, num_tokens, N) view of a block's first positions, in the codec's dtype."""
        return self._view[block_id, ..., :num_tokens, :]

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Copy the first ``num_tokens`` positions of one block into another, K and V of all layers.

        Mutates: The first ``num_tokens`` positions of ``target``; the rest of it keeps its bytes.
        """
        self._view[target, ..., :num_tokens, :] = self._view[source, ..., :num_tokens, :]


def allocate(num_bytes: int, what: str, device: torch.device) -> torch.Tensor:
    """Return (num_bytes,) uint8 for KV blocks, not initialised, on large pages where the system has them.

    A decode step reads every block of a context once, a few KiB at a time: on pages of 4 KiB it waits for translations.

    Raises:
        ConfigError: The memory cannot be had; the message says for ``what``.
    """
    try:
        return _allocate(num_bytes, device)
    except (RuntimeError, MemoryError, OSError) as error:
        raise ConfigError(
            f"[storage] cannot allocate {num_bytes / GIB:.2f} GiB for {what}; lower --memory-gib"
        ) from error


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    whole = torch.frombuffer(anonymous_memory(num_bytes + LARGE_PAGE), dtype=torch.uint8)
    start = -whole.data_ptr() % LARGE_PAGE
    return whole[start : start + num_bytes]
