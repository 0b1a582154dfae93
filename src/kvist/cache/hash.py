"""Keyed identities of blocks, and the identities of one sequence's tokens.

Responsible for the bytes that are hashed and for computing each identity once. Knows no block pool and no tree; whether
two equal identities really mean equal tokens is checked where they are used.

An identity is BLAKE3, keyed with 32 secret bytes, of ``version tag field*`` where each field is a length followed by
that many bytes, so no byte can move from one field to its neighbour without changing the message. Integers are
little-endian.

    root   version u8 = 1, tag "R", then model, adapter, tenant, layout: each length u64, UTF-8 bytes
    block  version u8 = 1, tag "B", then parent identity, token ids (u32 each): each length u64, bytes

The number of tokens is part of the message, so blocks of different sizes never have equal identities by construction.

Source: BLAKE3 (O'Connor, Aumasson, Neves, Wilcox-O'Hearn, 2020), keyed_hash mode. Untagged fields and unkeyed or
unverified hashes have leaked other tenants' context elsewhere (vllm-project/vllm GHSA-rm76-4mrf-v9r8).
"""

from __future__ import annotations

import sys
from array import array
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from blake3 import blake3

from kvist.errors import ConfigError, RequestError
from kvist.types import BlockHash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.cache.namespaces import Namespace
    from kvist.types import TokenId

SCHEMA_VERSION = 1
"""Changes whenever the hashed message changes; identities of different versions never meet."""
KEY_BYTES = 32
"""Length of the secret key."""
TOKEN_BYTES = 4
"""Bytes of one token id in a block's identity and in its kept tokens."""

_VERSION = SCHEMA_VERSION.to_bytes(1, "little")
_ROOT_TAG = _VERSION + b"R"
_BLOCK_TAG = _VERSION + b"B"


_DIGEST_BYTES = 32
# What stands before the parent's digest in every block's message.
_BLOCK_HEAD = _BLOCK_TAG + _DIGEST_BYTES.to_bytes(8, "little")


def _field(value: bytes) -> bytes:
    return len(value).to_bytes(8, "little") + value


@lru_cache(maxsize=1024)
def _root(key: bytes, namespace: Namespace) -> BlockHash:
    # Every request asks for it, and few namespaces are in use at a time.
    fields = (namespace.model, namespace.adapter, namespace.tenant, namespace.layout)
    message = _ROOT_TAG + b"".join(_field(value.encode()) for value in fields)
    return BlockHash(blake3(message, key=key).digest())


class BlockHasher:
    """Computes identities under one secret key. Immutable; any thread.

    Args:
        key: 32 secret bytes; identities under different keys are unrelated.

    Raises:
        ConfigError: The key has another length.
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise ConfigError(
                f"[cache] the hash key must be {KEY_BYTES} bytes, received {len(key)}"
            )
        self._key = key

    def root(self, namespace: Namespace) -> BlockHash:
        """Return the identity of the empty prefix of a namespace."""
        return _root(self._key, namespace)

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        """Return the identity of the block that follows a prefix.

        Args:
            parent: Identity of the block before it, or of the root.
            tokens: Token ids of the block, u32 little-endian.

        Complexity: O(tokens).
        """
        # _field written out: this runs once per block of every prompt.
        message = b"".join((_BLOCK_HEAD, parent, len(tokens).to_bytes(8, "little"), tokens))
        return BlockHash(blake3(message, key=self._key).digest())


class TokenChain:
    """The tokens of one sequence, cut into blocks, and the identities of the full ones.

    Append-only, owned by one request on the engine thread. Identities are computed when first asked for, once.

    Args:
        hasher: Computes the identities.
        namespace: Where the sequence's blocks may be shared.
        block_size: Tokens per block, >= 1.
        token_ids: The tokens so far, each in [0, 2**32).

    Raises:
        RequestError: A token id is out of range.

    Complexity: O(tokens) to build; O(block_size) amortised per new identity.
    """

    __slots__ = (
        "_block_bytes",
        "_blocks",
        "_hasher",
        "_hashes",
        "_tail",
        "block_size",
        "namespace",
        "num_tokens",
    )

    def __init__(
        self,
        hasher: BlockHasher,
        namespace: Namespace,
        block_size: int,
        token_ids: Sequence[int],
    ) -> None:
        self.namespace = namespace
        self.block_size = block_size
        """Tokens per block."""
        self._hasher = hasher
        self._block_bytes = width = block_size * TOKEN_BYTES
        packed = _pack(token_ids)
        self.num_tokens = len(packed) // TOKEN_BYTES
        """Tokens in the sequence."""
        num_full_bytes = len(packed) // width * width
        self._blocks = [packed[i : i + width] for i in range(0, num_full_bytes, width)]
        self._tail = packed[num_full_bytes:]
        # Entry i is the parent of block i: the root first.
        self._hashes = [hasher.root(namespace)]

    @property
    def num_full_blocks(self) -> int:
        """Blocks whose tokens are all known."""
        return len(self._blocks)

    def append(self, token_id: int) -> None:
        """Add one token to the end."""
        try:
            self._tail += token_id.to_bytes(TOKEN_BYTES, "little")
        except OverflowError:
            raise _out_of_range() from None
        self.num_tokens += 1
        if len(self._tail) == self._block_bytes:
            self._blocks.append(self._tail)
            self._tail = b""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the end; the same as ``append`` for each of them. O(tokens)."""
        packed = self._tail + _pack(token_ids)
        self.num_tokens += (len(packed) - len(self._tail)) // TOKEN_BYTES
        width = self._block_bytes
        num_full_bytes = len(packed) // width * width
        self._blocks += [packed[i : i + width] for i in range(0, num_full_bytes, width)]
        self._tail = packed[num_full_bytes:]

    def block_hash(self, index: int) -> BlockHash:
        """Return the identity of full block ``index``, in [0, num_full_blocks).

        Complexity: O(1) when asked for before, else O(tokens not hashed yet before the block's end).
        """
        hashes = self._hashes
        return hashes[index + 1] if index + 1 < len(hashes) else self.parent_hash(index + 1)

    def parent_hash(self, index: int) -> BlockHash:
        """Return the identity of what precedes block ``index``: block ``index - 1``, or the root."""
        hashes = self._hashes
        if len(hashes) <= index:
            child = self._hasher.child
            parent = hashes[-1]
            for tokens in self._blocks[len(hashes) - 1 : index]:
                parent = child(parent, tokens)
                hashes.append(parent)
        return hashes[index]

    def block_hashes(self, start: int, stop: int) -> Sequence[BlockHash]:
        """Return the identities of full blocks ``[start, stop)``. Complexity: as ``block_hash``."""
        self.parent_hash(stop)
        return self._hashes[start + 1 : stop + 1]

    def block_tokens(self, index: int) -> bytes:
        """Return the known token ids of block ``index``, u32 little-endian; the last block may be partial or empty."""
        return self._blocks[index] if index < len(self._blocks) else self._tail

    def tokens_from(self, index: int) -> Sequence[bytes]:
        """Return the known token ids of block ``index`` and all that follow, those of a partial block last."""
        return [*self._blocks[index:], self._tail] if self._tail else self._blocks[index:]


def _pack(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode == "I" and sys.byteorder == "little":
        return token_ids.tobytes()
    try:
        packed = array("I", token_ids)
    except OverflowError:
        raise _out_of_range() from None
    if sys.byteorder == "big":  # pragma: no cover - no big-endian machine runs the tests
        packed.byteswap()
    return packed.tobytes()


def _out_of_range() -> RequestError:
    return RequestError("[cache] token ids must be in [0, 2**32), received one outside")


def unpack(tokens: bytes) -> tuple[TokenId, ...]:
    """Return the token ids of a block, u32 little-endian."""
    ids = array("I", tokens)
    if sys.byteorder == "big":  # pragma: no cover - as above
        ids.byteswap()
    return cast("tuple[TokenId, ...]", tuple(ids))
