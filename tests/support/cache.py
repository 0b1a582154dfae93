"""Small caches and whole requests in one call, for tests of the control plane."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvist.cache.hash import BlockHasher, TokenChain
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.cache.lease import PrefixLease

NAMESPACE = Namespace(model="m")
KEY = bytes(range(32))


def make_manager(
    num_blocks: int, block_size: int = 4, *, prefix_cache: bool = True, **options: Any
) -> CacheManager:
    return CacheManager(
        num_blocks=num_blocks,
        block_size=block_size,
        hasher=BlockHasher(KEY),
        prefix_cache=prefix_cache,
        **options,
    )


def start(
    manager: CacheManager,
    tokens: Sequence[int],
    *,
    reserve: int | None = None,
    namespace: Namespace = NAMESPACE,
) -> tuple[PrefixLease, TokenChain]:
    """Admit a request; the footprint is its tokens unless given."""
    chain = manager.new_chain(namespace, tokens)
    match = manager.lookup(chain, len(tokens) - 1)
    lease = manager.admit(match, chain, len(tokens) if reserve is None else reserve)
    assert lease is not None
    return lease, chain


def compute(
    manager: CacheManager, lease: PrefixLease, chain: TokenChain, num_tokens: int | None = None
) -> None:
    """Extend and commit up to a position, all tokens unless given."""
    end = chain.num_tokens if num_tokens is None else num_tokens
    assert manager.extend(lease, end)
    manager.commit(lease, chain, end)
    manager.check_invariants()


def serve(
    manager: CacheManager, tokens: Sequence[int], *, namespace: Namespace = NAMESPACE
) -> list[int]:
    """Take a request from admission to release; return its block table."""
    lease, chain = start(manager, tokens, namespace=namespace)
    compute(manager, lease, chain)
    table = list(lease.block_table)
    manager.release(lease)
    manager.check_invariants()
    return table


def hit_len(
    manager: CacheManager, tokens: Sequence[int], *, namespace: Namespace = NAMESPACE
) -> int:
    """Return how many tokens are cached, without touching anything."""
    return manager.match(manager.new_chain(namespace, tokens), len(tokens)).num_hit_tokens
