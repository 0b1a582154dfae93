from __future__ import annotations

import struct

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cache import KEY, NAMESPACE

from kvist.cache.hash import BlockHasher, TokenChain
from kvist.cache.namespaces import Namespace
from kvist.errors import ConfigError, RequestError

HASHER = BlockHasher(KEY)
FIELDS = ("model", "adapter", "tenant", "layout")
# Byte strings full of what lengths and tags look like.
TEXT = st.text(alphabet="\x00\x01\x02RBab", max_size=4)


def pack(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def test_golden_identities() -> None:
    """Identities name stored blocks: a change here needs a new SCHEMA_VERSION."""
    namespace = Namespace(model="smollm2", adapter="lora", tenant="alice", layout="rope/raw16")
    root = HASHER.root(namespace)
    first = HASHER.child(root, pack(1, 2, 3, 4))
    second = HASHER.child(first, pack(1, 2, 3, 4))
    assert [root.hex(), first.hex(), second.hex()] == [
        "cc6a41c7039942536506a7e72b77cee36173abce64434071fc234da2670786b9",
        "f6ce5c1b43ac6fae45436d9cc868aab6e388d4dc68056d5547b01a127b0b1820",
        "d05aa4703c857d47e50933ec79f190e1a50f74cd5ce927fab668ddb34c7bd396",
    ]


def test_identity_is_the_documented_message() -> None:
    def field(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    root = HASHER.root(Namespace(model="m", tenant="é"))
    message = b"\x01R" + field(b"m") + field(b"") + field("é".encode()) + field(b"")
    assert root == blake3(message, key=KEY).digest()
    message = b"\x01B" + field(root) + field(pack(7, 2**32 - 1))
    assert HASHER.child(root, pack(7, 2**32 - 1)) == blake3(message, key=KEY).digest()


@settings(max_examples=60, deadline=None)
@given(st.lists(TEXT, min_size=4, max_size=4), st.lists(TEXT, min_size=4, max_size=4))
def test_roots_are_equal_only_for_equal_namespaces(left: list[str], right: list[str]) -> None:
    one = Namespace(**dict(zip(FIELDS, left, strict=True)))
    other = Namespace(**dict(zip(FIELDS, right, strict=True)))
    assert (HASHER.root(one) == HASHER.root(other)) == (left == right)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("ab", "c", "", ""), ("a", "bc", "", "")),
        (("a", "", "", ""), ("", "a", "", "")),
        (("a", "", "b", ""), ("a", "b", "", "")),
        (("", "", "", "a"), ("", "", "a", "")),
    ],
)
def test_bytes_cannot_move_between_namespace_fields(
    one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    roots = {
        HASHER.root(Namespace(**dict(zip(FIELDS, names, strict=True)))) for names in (one, other)
    }
    assert len(roots) == 2


def test_bytes_cannot_move_between_parent_and_tokens() -> None:
    parent = HASHER.root(NAMESPACE)
    whole = parent + pack(1, 2)
    identities = {HASHER.child(whole[:cut], whole[cut:]) for cut in range(len(whole) + 1)}
    assert len(identities) == len(whole) + 1


def test_block_is_never_a_root() -> None:
    """The same bytes as fields of a root and of a block differ by their tag."""
    root = HASHER.root(Namespace(model="a", adapter="b"))
    assert root != HASHER.child(b"a", b"b")


def test_key_separates_stores() -> None:
    assert HASHER.root(NAMESPACE) != BlockHasher(bytes(32)).root(NAMESPACE)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_refuses_a_key_of_another_length(key: bytes) -> None:
    with pytest.raises(ConfigError, match=rf"must be 32 bytes, received {len(key)}"):
        BlockHasher(key)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 4, 5, 7, 8, 9])
def test_chain_cuts_tokens_into_blocks(num_tokens: int) -> None:
    token_ids = list(range(100, 100 + num_tokens))
    chain = TokenChain(HASHER, NAMESPACE, 4, token_ids)
    assert chain.num_tokens == num_tokens
    assert chain.num_full_blocks == num_tokens // 4
    blocks = [chain.block_tokens(index) for index in range(num_tokens // 4 + 1)]
    assert b"".join(blocks) == pack(*token_ids)
    assert all(len(block) == 16 for block in blocks[:-1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=20), st.integers(0, 20), st.integers(1, 5))
def test_appending_equals_building_at_once(
    token_ids: list[int], num_first: int, block_size: int
) -> None:
    whole = TokenChain(HASHER, NAMESPACE, block_size, token_ids)
    grown = TokenChain(HASHER, NAMESPACE, block_size, token_ids[:num_first])
    for token_id in token_ids[num_first:]:
        grown.append(token_id)
    assert grown.num_tokens == whole.num_tokens == len(token_ids)
    for index in range(len(token_ids) // block_size):
        assert grown.block_hash(index) == whole.block_hash(index)
        assert grown.parent_hash(index + 1) == whole.block_hash(index)
    assert grown.block_tokens(whole.num_full_blocks) == whole.block_tokens(whole.num_full_blocks)


def test_block_identity_depends_on_the_whole_prefix() -> None:
    one = TokenChain(HASHER, NAMESPACE, 2, [1, 2, 3, 4])
    other = TokenChain(HASHER, NAMESPACE, 2, [9, 2, 3, 4])
    assert one.block_tokens(1) == other.block_tokens(1)
    assert one.block_hash(1) != other.block_hash(1)
    assert one.parent_hash(0) == other.parent_hash(0) == HASHER.root(NAMESPACE)


def test_identities_are_computed_once() -> None:
    calls = []

    class CountingHasher(BlockHasher):
        def child(self, parent: bytes, tokens: bytes) -> bytes:
            calls.append(tokens)
            return super().child(parent, tokens)

    chain = TokenChain(CountingHasher(KEY), NAMESPACE, 1, [1, 2, 3])
    assert calls == []
    chain.block_hash(1)
    chain.block_hash(2)
    chain.block_hash(0)
    assert calls == [pack(1), pack(2), pack(3)]


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_refuses_token_ids_out_of_range(token_id: int) -> None:
    with pytest.raises(RequestError, match=r"token ids must be in \[0, 2\*\*32\)"):
        TokenChain(HASHER, NAMESPACE, 4, [1, token_id])
    with pytest.raises(RequestError):
        TokenChain(HASHER, NAMESPACE, 4, [1]).append(token_id)


def test_extending_a_chain_is_appending_each_token():
    for size in (1, 3, 4):
        for first, more in (((), (1,)), ((1, 2), (3, 4, 5, 6, 7)), ((1, 2, 3), ())):
            one, many = (
                TokenChain(BlockHasher(bytes(32)), Namespace(model="m"), size, first)
                for _ in range(2)
            )
            for token_id in more:
                one.append(token_id)
            many.extend(more)
            assert one.num_tokens == many.num_tokens
            assert one.num_full_blocks == many.num_full_blocks
            for index in range(one.num_full_blocks):
                assert one.block_hash(index) == many.block_hash(index)
            assert one.block_tokens(one.num_full_blocks) == many.block_tokens(many.num_full_blocks)
