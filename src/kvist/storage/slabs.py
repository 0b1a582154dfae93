"""Where K and V live when blocks have several codecs: slabs of cells, one block in a cell.

Responsible for the memory of all blocks, for where each of them is, and for changing the codec of one in place of its
id. Does not know which blocks are shared or whose they are, nor when a block should change its codec: the cache manager
decides that, and counts bytes so that everything it asks for fits (``slab_layout``).

A block id is logical. Where the block's bytes are is in two tables, and everybody else keeps the id:

    id       0      1      2      3      4    ...
    codecs   raw16  int8   none   int8   raw16            offsets[id]: bytes from the start of the memory

    memory   | raw raw raw raw . | 8 8 8 8 8 8 8 8 8 | raw . . . . |           |  . : a cell without a block
              slab 0, of raw16    slab 1, of int8     slab 2        slab 3, empty: of no codec yet

Invariants:
    1. A block has a cell of its codec, and its bytes are ``[offsets[id], offsets[id] + block_bytes(codec))``, laid out
       as ``KVSpec`` says.
    2. An allocated cell has one block. Cells of a slab have one codec; a slab without blocks is empty.
    3. The cells of all blocks, each with its share of a slab, are at most the budget. Then a cell can always be found,
       by moving blocks if need be.
    4. Bytes that were never written are arbitrary; kernels must not read them.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from kvist.codecs import registry
from kvist.errors import ConfigError, InvariantViolation
from kvist.kernels import native
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS
from kvist.storage.arena import allocate
from kvist.storage.slab_layout import SlabLayout, slab_layout
from kvist.types import BlockCopy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kvist.codecs.base import KVCodec
    from kvist.codecs.transforms import KVTransforms
    from kvist.spec import KVSpec
    from kvist.types import MemoryOp

NOT_ALLOCATED = 255
"""In the place of a codec's number, for an id without a block."""

_NOBODY = -1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabStats:
    """What the memory of an arena is used for. ``slab_bytes`` is blocks, unused cells and remainders."""

    num_blocks: Mapping[str, int]
    """Blocks by codec."""
    block_bytes: Mapping[str, int]
    """Their bytes, by codec."""
    cell_bytes: Mapping[str, int]
    """What they take of the budget, by codec: those and their share of what no block could have in their slabs."""
    budget_bytes: int
    slab_bytes: int
    """Of the slabs that hold blocks."""
    unused_cell_bytes: int
    """Cells without a block in those slabs. Blocks of the same codec can have them at once, others after compaction."""
    remainder_bytes: int
    """What those slabs have beyond their cells."""
    fragmentation_fraction: float
    """What no block could have even after compaction, of the budget: remainders, and the last slab of each codec."""
    num_moved_bytes: int
    """Moved by compaction since the start."""
    num_held_rows: int
    """Rows of K or V, since the start, with values beyond a codec's range that were held within it."""


class _Place(NamedTuple):
    slab: int
    cell: int


@dataclass(slots=True)
class _Slab:
    codec: int
    owners: list[int]
    """Block id by cell."""
    free: list[int]
    """Cells without a block, a stack."""

    @property
    def num_blocks(self) -> int:
        return len(self.owners) - len(self.free)


class _Class:
    """The slabs of one codec."""

    __slots__ = ("block_bytes", "by_num_blocks", "cells", "name", "num_blocks", "num_slabs", "spec")

    def __init__(self, name: str, spec: KVSpec, cells: int) -> None:
        self.name = name
        self.spec = spec
        self.block_bytes = spec.block_bytes
        self.cells = cells
        self.num_slabs = 0
        self.num_blocks = 0
        # By the number of blocks in them; the dicts are ordered sets.
        self.by_num_blocks: list[dict[int, None]] = [{} for _ in range(cells + 1)]

    def fullest_with_room(self) -> int | None:
        for slabs in reversed(self.by_num_blocks[:-1]):
            if slabs:
                return next(iter(slabs))
        return None

    def emptiest(self) -> int:
        return next(next(iter(slabs)) for slabs in self.by_num_blocks if slabs)

    @property
    def num_free_cells(self) -> int:
        return self.num_slabs * self.cells - self.num_blocks


class SlabArena:
    """Blocks of several codecs in one piece of memory. Written by the engine's thread only, between steps.

    Args:
        kv_spec: Shape of a block, and the codec in which its tokens are written: ``raw16``.
        codecs: Names of all codecs that blocks may have, that one among them.
        num_bytes: Memory to use.
        pool: ``native.Pool`` that encodes.
        transforms: What the codecs that encode spans know of the model; None where there are none of them.

    Raises:
        ConfigError: The memory cannot be had or is too little, or a codec has no native kernels or no transforms.
        KernelUnavailable: There are no native kernels here.
    """

    def __init__(
        self,
        kv_spec: KVSpec,
        codecs: Sequence[str],
        num_bytes: int,
        pool: Any,  # noqa: ANN401  # native.Pool
        transforms: KVTransforms | None = None,
    ) -> None:
        known = native.extension().kv_codecs()
        unknown = [codec for codec in (kv_spec.codec, *codecs) if codec not in known]
        if unknown or kv_spec.codec not in codecs:
            raise ConfigError(
                f"[storage] expected codecs out of {', '.join(known)}, {kv_spec.codec} among them, received "
                f"{', '.join(codecs)}; set --kv-cache-dtype"
            )
        spans = [codec for codec in codecs if codec in SPAN_CODEC_BITS]
        if spans and transforms is None:
            raise ConfigError(
                f"[storage] {', '.join(spans)} cannot be without transforms; set --kv-transforms"
            )
        self._kv_spec = kv_spec
        self._pool = pool
        self.transforms: Any = None  # native.KvTransforms
        """What native kernels need to read blocks of whole spans; None where there can be none."""
        if spans and transforms is not None:
            self.transforms = transforms.to_native()
        specs = {codec: replace(kv_spec, codec=codec) for codec in codecs}
        sizes = {codec: spec.block_bytes for codec, spec in specs.items()}
        self._layout = slab_layout(sizes, num_bytes)
        num_slabs, slab_bytes = self._layout.num_slabs, self._layout.slab_bytes
        self._memory = allocate(
            num_slabs * slab_bytes,
            f"{num_slabs} slabs of {slab_bytes:,} bytes for KV blocks",
            torch.device("cpu"),
        )
        self._bytes: NDArray[np.uint8] = self._memory.numpy()
        self._slab_view = self._memory.view(num_slabs, slab_bytes)
        self._numbers = {codec: known.index(codec) for codec in codecs}
        self._classes = {
            self._numbers[codec]: _Class(codec, spec, self._layout.cells[codec])
            for codec, spec in specs.items()
        }
        self.num_ids = self.budget_bytes // min(self._layout.cell_bytes.values())
        """Block ids are ``[0, num_ids)``: as many blocks of the smallest codec as the budget has room for."""
        self.offsets: NDArray[np.int64] = np.zeros(self.num_ids, np.int64)
        """(num_ids,) bytes from the start of the memory by block id; only those of allocated blocks mean anything."""
        self.codecs: NDArray[np.uint8] = np.full(self.num_ids, NOT_ALLOCATED, np.uint8)
        """(num_ids,) ``_native``'s number of the codec by block id, or NOT_ALLOCATED."""
        self._slabs: list[_Slab | None] = [None] * num_slabs
        self._empty = list(reversed(range(num_slabs)))
        # A block is encoded here first: its new cell may be found only once the old one is free.
        self._encoded = np.empty(max(sizes.values()), np.uint8)
        # Operations that memory ran out in, and those after them.
        self._left: deque[MemoryOp | BlockCopy] = deque()
        self._num_bytes_used = 0
        self._num_cell_bytes = 0
        self._num_moved_bytes = 0
        self._num_held_rows = 0

    @property
    def kv_spec(self) -> KVSpec:
        """Shape of a block, and the codec in which its tokens are written."""
        return self._kv_spec

    @property
    def layout(self) -> SlabLayout:
        """How the memory is cut."""
        return self._layout

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs."""
        return self._layout.num_bytes

    @property
    def budget_bytes(self) -> int:
        """What the cells of blocks that are allocated may come to: the memory less what compaction needs."""
        return self._layout.budget_bytes

    @property
    def slab(self) -> torch.Tensor:
        """The (slabs, slab bytes) uint8 memory, for kernels that find blocks by ``offsets`` and ``codecs``."""
        return self._slab_view

    def block_bytes(self, codec: str) -> int:
        """Return the bytes of a block in a codec."""
        return self._classes[self._numbers[codec]].block_bytes

    def cell_bytes(self, codec: str) -> int:
        """Return what a block in a codec takes of the budget: its bytes, and its share of the end of a slab."""
        return self._layout.cell_bytes[codec]

    def codec_of(self, block_id: int) -> str:
        """Return the codec of an allocated block."""
        return self._class_of(block_id).name

    def block(self, block_id: int) -> NDArray[np.uint8]:
        """Return the (block_bytes,) view of an allocated block; it holds until the next ``apply``."""
        offset = int(self.offsets[block_id])
        return self._bytes[offset : offset + self._class_of(block_id).block_bytes]

    def codec_at(self, block_id: int) -> KVCodec:
        """Return the format of an allocated block of rows."""
        return registry.get(self.codec_of(block_id))

    def head(self, block_id: int, num_tokens: int) -> torch.Tensor:
        """Return the (L, 2, K, num_tokens, N) view of a block's first positions, in the dtype of its codec.

        It holds until the next ``apply``.

        Raises:
            InvariantViolation: The block is records of whole spans (``records``), in which no position is by itself.
        """
        spec = self._class_of(block_id).spec
        if spec.has_spans:
            raise InvariantViolation(
                f"[storage] expected a block of rows, received {block_id=}, which is {spec.codec}"
            )
        codec = self.codec_at(block_id)
        shape = (spec.num_layers, 2, spec.num_kv_heads, spec.block_size, -1)
        stored = torch.from_numpy(self.block(block_id)).view(codec.dtype).view(shape)
        return stored[..., :num_tokens, :]

    def records(self, block_id: int) -> NDArray[np.uint8] | None:
        """Return the (L, P / SPAN_TOKENS, K, record bytes) view of a block of spans; None: it is one of rows.

        It holds until the next ``apply``.
        """
        spec = self._class_of(block_id).spec
        if not spec.has_spans:
            return None
        num_spans = spec.block_size // SPAN_TOKENS
        return self.block(block_id).reshape(spec.num_layers, num_spans, spec.num_kv_heads, -1)

    def apply(self, ops: Iterable[MemoryOp | BlockCopy]) -> None:
        """Carry out what happens to memory between two steps, in order.

        Args:
            ops: ``allocate`` gives an id a block of that codec, its bytes arbitrary; ``free`` takes it away; ``demote``
                encodes an allocated block in a smaller codec, or its first positions, of which it holds no more. Copies
                are as in ``copy``.

        Raises:
            InvariantViolation: An operation cannot be, as its id or its codec is, or is beyond the budget; those
                before it are done, those after it never will be.
            MemoryError: What an operation needs beside the blocks could not be had. Nothing is lost: the next call
                begins with that operation.

        Mutates: ``offsets`` and ``codecs`` of the ids named, and ``offsets`` of blocks that compaction moves: at most
            the blocks of one slab for each block that changes its size.
        """
        left = self._left
        left.extend(ops)
        while left:
            try:
                self._carry_out(left[0])
            except MemoryError:
                raise
            except Exception:
                left.clear()
                raise
            left.popleft()

    def copy(self, source: int, target: int, num_tokens: int) -> None:
        """Write the first ``num_tokens`` positions of one block into another one, K and V of all layers.

        Args:
            source: An allocated block of any codec; what it has in another codec is decoded.
            target: An allocated block of the codec in which tokens are written.
            num_tokens: [1, block_size].

        Raises:
            InvariantViolation: A block is not as stated.

        Mutates: The first ``num_tokens`` positions of ``target``; the rest of it keeps its bytes.
        """
        if self._class_of(target).name != self._kv_spec.codec or source == target:
            raise InvariantViolation(
                f"[storage] expected to copy into another block of {self._kv_spec.codec}, received {source=}, "
                f"{target=} of {self.codec_of(target)}"
            )
        self._recode(source, self._kv_spec.codec, self.block(target), num_tokens)

    def stats(self) -> SlabStats:
        """Return what the memory is used for. O(codecs)."""
        classes = self._classes.values()
        slab_bytes = self._layout.slab_bytes
        num_slabs = sum(each.num_slabs for each in classes)
        unused = sum(each.num_free_cells * each.block_bytes for each in classes)
        needed = sum(-(-each.num_blocks // each.cells) for each in classes)
        return SlabStats(
            num_blocks={each.name: each.num_blocks for each in classes},
            block_bytes={each.name: each.num_blocks * each.block_bytes for each in classes},
            cell_bytes={
                each.name: each.num_blocks * self.cell_bytes(each.name) for each in classes
            },
            budget_bytes=self.budget_bytes,
            slab_bytes=num_slabs * slab_bytes,
            unused_cell_bytes=unused,
            remainder_bytes=num_slabs * slab_bytes - unused - self._num_bytes_used,
            fragmentation_fraction=(needed * slab_bytes - self._num_bytes_used) / self.budget_bytes,
            num_moved_bytes=self._num_moved_bytes,
            num_held_rows=self._num_held_rows,
        )

    def _carry_out(self, op: MemoryOp | BlockCopy) -> None:
        if isinstance(op, BlockCopy):
            self.copy(op.source, op.target, op.num_tokens)
        elif op.kind == "allocate":
            self._allocate(op.block_id, op.codec)
        elif op.kind == "free":
            self._class_of(op.block_id)
            self._release(op.block_id)
        elif op.kind == "demote":
            self._demote(op)
        else:
            raise InvariantViolation(f"[storage] memory operation {op.kind!r} is none")

    def _class_of(self, block_id: int) -> _Class:
        number = int(self.codecs[block_id]) if 0 <= block_id < self.num_ids else NOT_ALLOCATED
        if number == NOT_ALLOCATED:
            raise InvariantViolation(
                f"[storage] expected an allocated block, received {block_id=} of {self.num_ids}"
            )
        return self._classes[number]

    def _allocate(self, block_id: int, codec: str) -> None:
        if codec not in self._numbers:
            raise InvariantViolation(
                f"[storage] expected a codec out of {', '.join(self._numbers)}, received {codec!r}"
            )
        if not 0 <= block_id < self.num_ids or self.codecs[block_id] != NOT_ALLOCATED:
            raise InvariantViolation(
                f"[storage] expected a block id without a block, received {block_id=} of {self.num_ids}"
            )
        size = self.cell_bytes(codec)
        if self._num_cell_bytes + size > self.budget_bytes:
            raise InvariantViolation(
                f"[storage] a block of {size:,} bytes does not fit: {self._num_cell_bytes:,} of "
                f"{self.budget_bytes:,} are allocated"
            )
        self._put(block_id, self._numbers[codec], self._find_cell(self._numbers[codec]))

    def _demote(self, op: MemoryOp) -> None:
        block_id, codec, block_size = op.block_id, op.codec, self._kv_spec.block_size
        source = self._class_of(block_id)
        if codec not in self._numbers or self.block_bytes(codec) >= source.block_bytes:
            raise InvariantViolation(
                f"[storage] expected a codec smaller than {source.name} to demote block {block_id} to, "
                f"received {codec!r}"
            )
        encoded = self._encoded[: self.block_bytes(codec)]
        start = op.block_index * block_size
        self._recode(block_id, codec, encoded, op.num_tokens or block_size, start)
        number = self._numbers[codec]
        # Before the block has lost its cell: it must not be without one when memory runs out.
        spare = self._new_slab(number)
        self._release(block_id)
        self._put(block_id, number, self._find_cell(number, spare))
        self.block(block_id)[:] = encoded

    def _recode(
        self,
        block_id: int,
        codec: str,
        target: NDArray[np.uint8],
        num_tokens: int,
        start: int = 0,
    ) -> None:
        spec = self._kv_spec
        num_held = native.extension().recode_block(
            self._pool,
            self.block(block_id),
            target,
            source_codec=self.codec_of(block_id),
            target_codec=codec,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            block_size=spec.block_size,
            head_dim=spec.head_dim,
            num_tokens=num_tokens,
            transforms=self.transforms,
            start=start,
        )
        if num_held and not self._num_held_rows:
            logger.warning(
                "values of K or V are beyond what %s can hold, and were held within it; "
                "--kv-cache-dtype raw16 keeps them",
                codec,
            )
        self._num_held_rows += num_held

    def _put(self, block_id: int, number: int, place: _Place) -> None:
        each = self._classes[number]
        slab = self._slabs[place.slab]
        assert slab is not None
        del each.by_num_blocks[slab.num_blocks][place.slab]
        slab.free.pop()
        slab.owners[place.cell] = block_id
        each.by_num_blocks[slab.num_blocks][place.slab] = None
        each.num_blocks += 1
        self._num_bytes_used += each.block_bytes
        self._num_cell_bytes += self.cell_bytes(each.name)
        self.codecs[block_id] = number
        self.offsets[block_id] = (
            place.slab * self._layout.slab_bytes + place.cell * each.block_bytes
        )

    def _release(self, block_id: int) -> None:
        each = self._class_of(block_id)
        index, within = divmod(int(self.offsets[block_id]), self._layout.slab_bytes)
        slab = self._slabs[index]
        assert slab is not None
        cell = within // each.block_bytes
        del each.by_num_blocks[slab.num_blocks][index]
        slab.owners[cell] = _NOBODY
        slab.free.append(cell)
        each.num_blocks -= 1
        self._num_bytes_used -= each.block_bytes
        self._num_cell_bytes -= self.cell_bytes(each.name)
        self.codecs[block_id] = NOT_ALLOCATED
        if slab.num_blocks:
            each.by_num_blocks[slab.num_blocks][index] = None
        else:
            each.num_slabs -= 1
            self._slabs[index] = None
            self._empty.append(index)

    def _new_slab(self, number: int) -> _Slab:
        cells = self._classes[number].cells
        return _Slab(number, [_NOBODY] * cells, list(reversed(range(cells))))

    def _find_cell(self, number: int, spare: _Slab | None = None) -> _Place:
        """Return a free cell of a codec, where the other cells are in use: emptier slabs get a chance to run empty.

        Mutates: Takes an empty slab for the codec if it must, with ``spare`` as its record, and makes one if there is
            none.
        """
        each = self._classes[number]
        index = each.fullest_with_room()
        if index is None:
            made = spare or self._new_slab(number)
            if not self._empty:
                self._compact()
            index = self._empty.pop()
            self._slabs[index] = made
            each.num_slabs += 1
            each.by_num_blocks[0][index] = None
        slab = self._slabs[index]
        assert slab is not None
        return _Place(index, slab.free[-1])

    def _compact(self) -> None:
        """Empty the slab with the fewest bytes out of those whose blocks fit into others of their codec.

        There is one whenever a cell is missing within the budget (``slab_layout``).
        """
        candidates = [
            (each.block_bytes * self._num_blocks_in(each.emptiest()), number)
            for number, each in self._classes.items()
            if each.num_free_cells >= each.cells
        ]
        if not candidates:
            raise InvariantViolation(
                f"[storage] no slab can be emptied with {self._num_bytes_used:,} of {self.budget_bytes:,} bytes "
                f"allocated: {self.stats()}"
            )
        num_bytes, number = min(candidates)
        each = self._classes[number]
        index = each.emptiest()
        slab = self._slabs[index]
        assert slab is not None
        for block_id in [owner for owner in slab.owners if owner != _NOBODY]:
            start = int(self.offsets[block_id])
            # Its own slab is never the fullest with room: the others have room for all its blocks.
            self._release(block_id)
            place = self._find_cell(number)
            self._put(block_id, number, place)
            stop = int(self.offsets[block_id])
            self._bytes[stop : stop + each.block_bytes] = self._bytes[
                start : start + each.block_bytes
            ]
        self._num_moved_bytes += num_bytes

    def _num_blocks_in(self, index: int) -> int:
        slab = self._slabs[index]
        return 0 if slab is None else slab.num_blocks
