"""Why the rest of a prompt was not reused.

Responsible for cutting the part of a prompt that was missed into spans with one reason each. Reads the prefix tree and
the memory of prompts and changes neither. Knows no text and no requests.

    position  0 ............... hit ................. common ......................... limit, last token
              [ reused         )[ known, and not there )[ not known                  )[ always computed )
              reason             by the state of each     new_prompt, tokens_differ, namespace_differs
                                 block                    or model_changed

*Known* are the sequences of the namespace that were computed, as far as they were, and the prompts of live leases.
``common`` is the longest prefix that the prompt shares with one of them; that one is the nearest earlier prompt.

What a reason may tell. Everything is looked up below the root of the prompt's own namespace, and for ``model_changed``
and ``namespace_differs`` below those of the same tenant. Of other tenants only this is used: whether there are any. So
the first prompt of a new tenant is told that its namespace is new, whatever others have sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvist.cache.hash import TOKEN_BYTES, unpack
from kvist.cache.memory import Entry, nearest
from kvist.types import MissReason, MissReport, MissSpan

if TYPE_CHECKING:
    from kvist.cache.hash import TokenChain
    from kvist.cache.lease import PrefixMatch
    from kvist.cache.memory import HasTokens, PromptMemory
    from kvist.cache.tree import Node
    from kvist.types import TokenId

MAX_EXPECTED_TOKENS = 256
"""How much is told of what the nearest earlier prompt had instead: enough to see whether both go on alike later."""


class Shortfall(NamedTuple):
    """What of a prompt was not reused although it could have been."""

    match: PrefixMatch
    """What the lease was made of."""
    num_hit_tokens: int
    """What it got: less than the match when a copy had to be left out."""
    limit: int
    """Tokens that could have been hit."""


class _Known(NamedTuple):
    """How far the known sequences go along with a prompt."""

    spans: list[MissSpan]
    num_tokens: int
    """Length of the longest common prefix."""
    entries: list[Entry]
    """What is known of the blocks that were missed, in order."""
    rival: tuple[HasTokens, int] | None
    """What goes on differently, and from which of its tokens on."""


def explain_off(limit: int) -> MissReport:
    """Return the report of a prompt when nothing is ever reused."""
    span = MissSpan(start=0, end=limit, reason=MissReason.CACHE_OFF)
    return MissReport(spans=(span,), num_common_tokens=0)


def explain(
    memory: PromptMemory, tree_root: Node | None, chain: TokenChain, shortfall: Shortfall
) -> MissReport:
    """Return why a part of a prompt was missed. To be called before the prompt itself is in the memory.

    Args:
        memory: What is known of earlier prompts.
        tree_root: The namespace's root in the prefix tree; None: nothing of it is cached.
        chain: The prompt.
        shortfall: The part; not empty.

    Complexity: O(blocks missed), with a search among siblings for each (``memory``).
    """
    match, num_hit_tokens, limit = shortfall
    if match.num_verification_failures:
        span = MissSpan(start=num_hit_tokens, end=limit, reason=MissReason.VERIFICATION_FAILED)
        return MissReport(spans=(span,), num_common_tokens=num_hit_tokens)
    parent = match.nodes[-1] if match.nodes else tree_root
    entry = (
        parent.entry if match.nodes and parent is not None else memory.find_root(chain.namespace)
    )
    known = _follow(entry, parent, chain, shortfall)
    spans = known.spans
    expected: tuple[TokenId, ...] = ()
    if known.num_tokens < limit:
        reason = _reason_elsewhere(memory, chain, known.num_tokens)
        if reason is None and known.rival is not None and known.num_tokens:
            reason = MissReason.TOKENS_DIFFER
            expected = _tokens_from(*known.rival)
        _add(spans, known.num_tokens, limit, reason or MissReason.NEW_PROMPT)
    left = next((entry for entry in known.entries if _reason_of(entry) is entry.left_why), None)
    return MissReport(
        spans=tuple(spans),
        num_common_tokens=known.num_tokens,
        expected_token_ids=expected,
        left_s_ago=None if left is None else memory.seconds_since(left.left_ns),
    )


def _follow(
    entry: Entry | None, node: Node | None, chain: TokenChain, shortfall: Shortfall
) -> _Known:
    """Go along the known sequences as far as they have the tokens of a prompt.

    Args:
        entry: Where the whole blocks that were hit end; None: nothing is known of the namespace.
        node: The same place in the tree. Heads of blocks that live leases write are only there, and the tree has
            nothing below a block that it has not.
        chain: The prompt.
        shortfall: What was hit of it, and how far to go.
    """
    match, position, limit = shortfall
    spans: list[MissSpan] = []
    if position < match.num_hit_tokens:
        _add(spans, position, match.num_hit_tokens, MissReason.BELOW_BLOCK_SIZE)
        position = match.num_hit_tokens
    entries: list[Entry] = []
    index = len(match.nodes)
    while True:
        start = index * chain.block_size
        tokens = chain.block_tokens(index)[: (limit - start) * TOKEN_BYTES]
        found = [] if entry is None else list(nearest(entry.children, tokens))
        best, num_common = max(found, key=lambda pair: pair[1], default=(None, 0))
        if best is not None and start + num_common > position:
            entries.append(best)
            _add(spans, position, start + num_common, _reason_of(best))
            position = start + num_common
        if best is None or position - start < chain.block_size or position == limit:
            break
        entry, node, index = best, None, index + 1
    rivals: list[tuple[HasTokens, int]] = [*found]
    if node is not None:
        rivals += nearest(node.ordered, tokens)
    goes_on = [
        (other, length)
        for other, length in rivals
        if length == position - start and len(other.tokens) > length * TOKEN_BYTES
    ]
    return _Known(spans, position, entries, goes_on[0] if goes_on else None)


def _add(spans: list[MissSpan], start: int, end: int, reason: MissReason) -> None:
    """Append a span, or lengthen the last one when the reason is the same."""
    if spans and spans[-1].reason is reason:
        start = spans.pop().start
    spans.append(MissSpan(start=start, end=end, reason=reason))


def _reason_of(entry: Entry) -> MissReason:
    if entry.num_cached:
        # Of what is there a head was wanted, and its codec does not allow copies.
        return MissReason.BELOW_BLOCK_SIZE
    if entry.num_in_flight or entry.left_why is None:
        return MissReason.NOT_YET_COMPUTED
    return entry.left_why


def _reason_elsewhere(memory: PromptMemory, chain: TokenChain, num_known: int) -> MissReason | None:
    """Return why a prompt is new to its namespace, if that is no matter of its tokens."""
    own = chain.namespace
    # Of two that go equally far, other weights are the reason: with them the layout could not matter.
    elsewhere = max(
        (
            (_num_common(root, chain), (other.model, other.adapter) != (own.model, own.adapter))
            for other, root in memory.other_roots(own)
        ),
        default=(0, False),
    )
    if elsewhere[0] > num_known:
        return MissReason.MODEL_CHANGED if elsewhere[1] else MissReason.NAMESPACE_DIFFERS
    if memory.find_root(own) is None and memory.has_other_tenants(own.tenant):
        return MissReason.NAMESPACE_DIFFERS
    return None


def _num_common(entry: Entry, chain: TokenChain) -> int:
    """Return the longest prefix that a sequence shares with what is known below a root."""
    num_tokens = index = 0
    while True:
        found = nearest(entry.children, chain.block_tokens(index))
        best, num_common = max(found, key=lambda pair: pair[1], default=(None, 0))
        num_tokens += num_common
        # The last block is shorter, or empty.
        if best is None or num_common < chain.block_size:
            return num_tokens
        entry, index = best, index + 1


def _tokens_from(first: HasTokens, num_skipped: int) -> tuple[TokenId, ...]:
    """Return how a sequence goes on inside a block and, when it is in the memory, below it."""
    tokens = first.tokens[num_skipped * TOKEN_BYTES :]
    children = first.children if isinstance(first, Entry) else []
    while children and len(tokens) < MAX_EXPECTED_TOKENS * TOKEN_BYTES:
        tokens += children[0].tokens
        children = children[0].children
    return unpack(tokens[: MAX_EXPECTED_TOKENS * TOKEN_BYTES])
