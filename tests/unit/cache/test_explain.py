"""Every reason of the closed list, each by a scenario that a person can follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.cache import NAMESPACE, compute, make_manager, serve, start

from kvist.cache.explain import MAX_EXPECTED_TOKENS
from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.types import BlockHash, MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.types import MissReport

PROMPT = list(range(10, 22))  # three blocks of four


def report(
    manager: CacheManager, tokens: Sequence[int], *, namespace: Namespace = NAMESPACE
) -> MissReport | None:
    """Serve a prompt and return its report."""
    lease, chain = start(manager, tokens, namespace=namespace)
    compute(manager, lease, chain)
    manager.release(lease)
    manager.check_invariants()
    return lease.miss


def spans(given: MissReport | None) -> list[tuple[int, int, MissReason]]:
    assert given is not None
    return [(span.start, span.end, span.reason) for span in given.spans]


def test_all_hits_have_no_report():
    manager = make_manager(8)
    serve(manager, PROMPT)
    assert report(manager, PROMPT) is None


def test_the_first_prompt_of_all_is_new():
    assert spans(report(make_manager(8), PROMPT)) == [(0, 11, MissReason.NEW_PROMPT)]


def test_a_prompt_that_goes_on_where_another_ended_is_new_from_there():
    manager = make_manager(8)
    serve(manager, PROMPT[:6])
    given = report(manager, PROMPT)
    assert spans(given) == [(6, 11, MissReason.NEW_PROMPT)]
    assert given is not None
    assert given.expected_token_ids == ()


def test_an_unrelated_prompt_is_new():
    manager = make_manager(16)
    serve(manager, PROMPT)
    assert spans(report(manager, [1, 2, 3])) == [(0, 2, MissReason.NEW_PROMPT)]


@pytest.mark.parametrize("position", range(1, 11))
def test_a_changed_token_is_found_where_it_is(position):
    manager = make_manager(16)
    serve(manager, PROMPT)
    changed = [*PROMPT[:position], 99, *PROMPT[position + 1 :]]
    given = report(manager, changed)
    assert spans(given) == [(position, 11, MissReason.TOKENS_DIFFER)]
    assert given is not None
    assert given.num_common_tokens == position
    assert list(given.expected_token_ids) == PROMPT[position:]


def test_what_is_told_of_the_other_prompt_is_a_few_tokens():
    manager = make_manager(128)
    serve(manager, range(MAX_EXPECTED_TOKENS + 100))
    given = report(manager, [0, 99, 98])
    assert given is not None
    assert given.expected_token_ids == tuple(range(1, 1 + MAX_EXPECTED_TOKENS))


def test_evicted_blocks_are_told_from_a_prompt_that_was_never_seen():
    now_ns = 0
    manager = make_manager(4, clock_ns=lambda: now_ns)
    serve(manager, PROMPT)
    serve(manager, range(50, 62))  # sweeps the pool
    now_ns = 3_000_000_000
    given = report(manager, [*PROMPT, 99])
    assert spans(given) == [(4, 12, MissReason.EVICTED)]
    assert given is not None
    assert given.left_s_ago == 3.0


def test_an_evicted_prompt_that_differs_further_on_has_a_span_for_each():
    manager = make_manager(4)
    serve(manager, PROMPT)
    serve(manager, range(50, 66))
    given = report(manager, [*PROMPT[:9], 99, 98])
    assert spans(given) == [(0, 9, MissReason.EVICTED), (9, 10, MissReason.TOKENS_DIFFER)]
    assert given is not None
    assert given.expected_token_ids == tuple(PROMPT[9:])


def test_a_reset_counts_as_eviction():
    manager = make_manager(8)
    serve(manager, PROMPT)
    manager.reset()
    assert spans(report(manager, PROMPT)) == [(0, 11, MissReason.EVICTED)]


@pytest.mark.parametrize("kind", ["ttl", "pin"])
def test_blocks_evicted_after_their_time_have_expired(kind):
    now_ns = 0
    manager = make_manager(8, pin_fraction=0.5, clock_ns=lambda: now_ns)
    serve(manager, PROMPT)
    chain = manager.new_chain(NAMESPACE, PROMPT)
    if kind == "ttl":
        manager.retain(chain, 12, 1.0)
    else:
        assert manager.pin(chain, 12, 1.0) is not None
    now_ns = 2_000_000_000
    serve(manager, range(50, 82))
    assert spans(report(manager, PROMPT)) == [(0, 11, MissReason.EXPIRED)]
    assert manager.stats().num_expired_blocks == 3


def test_a_block_evicted_within_its_time_was_evicted():
    now_ns = 0
    manager = make_manager(4, clock_ns=lambda: now_ns)
    serve(manager, PROMPT)
    manager.retain(manager.new_chain(NAMESPACE, PROMPT), 12, 10.0)
    serve(manager, range(50, 66))
    assert spans(report(manager, PROMPT)) == [(0, 11, MissReason.EVICTED)]


def test_what_another_request_computes_right_now_is_not_there_yet():
    manager = make_manager(16)
    other, other_chain = start(manager, PROMPT)
    compute(manager, other, other_chain, 5)
    lease, _ = start(manager, [*PROMPT[:9], 99])
    assert spans(lease.miss) == [(5, 9, MissReason.NOT_YET_COMPUTED)]
    manager.release(lease)
    manager.release(other)


def test_what_was_never_computed_is_forgotten_with_its_request():
    manager = make_manager(16)
    other, other_chain = start(manager, PROMPT)
    compute(manager, other, other_chain, 5)
    manager.release(other)
    assert spans(report(manager, PROMPT)) == [(5, 11, MissReason.NEW_PROMPT)]


def test_a_head_that_there_is_no_room_to_copy_is_below_the_block_size():
    manager = make_manager(3)
    serve(manager, PROMPT)
    # All three blocks are needed for it, and the copy would hold one of them.
    assert spans(report(manager, [*PROMPT[:2], *range(90, 100)])) == [
        (0, 2, MissReason.BELOW_BLOCK_SIZE),
        (2, 11, MissReason.TOKENS_DIFFER),
    ]


def test_a_new_tenant_is_told_that_its_namespace_is_new_whatever_others_sent():
    for other in (PROMPT, [7, 7, 7]):
        manager = make_manager(16)
        serve(manager, other)
        given = report(manager, PROMPT, namespace=Namespace(model="m", tenant="t"))
        assert spans(given) == [(0, 11, MissReason.NAMESPACE_DIFFERS)]
        assert given is not None
        assert given.expected_token_ids == ()


def test_a_tenant_that_sent_something_is_told_of_nothing_else():
    manager = make_manager(16)
    tenant = Namespace(model="m", tenant="t")
    serve(manager, PROMPT)
    serve(manager, [7, 7, 7], namespace=tenant)
    given = report(manager, PROMPT, namespace=tenant)
    assert spans(given) == [(0, 11, MissReason.NEW_PROMPT)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "m2"}, MissReason.MODEL_CHANGED),
        ({"adapter": "lora"}, MissReason.MODEL_CHANGED),
        ({"layout": "int8"}, MissReason.NAMESPACE_DIFFERS),
    ],
)
def test_the_same_prompt_under_another_model_or_layout_of_the_owner(changes, reason):
    manager = make_manager(16)
    serve(manager, PROMPT)
    namespace = Namespace(**{"model": "m", **changes})
    given = report(manager, [*PROMPT[:6], 99], namespace=namespace)
    assert spans(given) == [(0, 6, reason)]
    assert given is not None
    assert given.expected_token_ids == ()


class CollidingHasher(BlockHasher):
    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        return BlockHash(bytes(32))


def test_an_identity_with_other_tokens_has_failed_verification():
    manager = CacheManager(num_blocks=8, block_size=4, hasher=CollidingHasher(bytes(32)))
    serve(manager, PROMPT[:4])
    assert spans(report(manager, range(50, 60))) == [(0, 9, MissReason.VERIFICATION_FAILED)]


def test_without_a_prefix_cache_everything_is_missed_for_that_reason():
    manager = make_manager(8, prefix_cache=False)
    serve(manager, PROMPT)
    assert spans(report(manager, PROMPT)) == [(0, 11, MissReason.CACHE_OFF)]


def test_missed_and_hit_tokens_make_up_what_was_looked_up():
    manager = make_manager(4)
    for prompt in (PROMPT, PROMPT[:6], [*PROMPT[:6], 1, 2], range(50, 66), PROMPT):
        serve(manager, prompt)
    stats = manager.stats()
    missed = sum(stats.missed_tokens.values())
    assert missed == stats.num_lookup_tokens - stats.num_hit_tokens - stats.num_admissions
    assert set(stats.missed_tokens) == {reason.value for reason in MissReason}


def test_a_memory_that_is_full_forgets_what_left_first():
    manager = make_manager(4, max_ghosts=3)
    serve(manager, PROMPT)
    serve(manager, range(50, 66))
    assert manager.stats().num_ghosts == 3
    serve(manager, range(70, 86))
    assert manager.stats().num_ghosts == 3
    assert spans(report(manager, PROMPT)) == [(0, 11, MissReason.NEW_PROMPT)]


def test_what_two_requests_compute_is_in_flight_until_both_have_it():
    manager = make_manager(16)
    first, first_chain = start(manager, PROMPT)
    second, second_chain = start(manager, PROMPT)
    assert spans(second.miss) == [(0, 11, MissReason.NOT_YET_COMPUTED)]
    compute(manager, first, first_chain)
    manager.release(first)
    manager.check_invariants()
    compute(manager, second, second_chain)
    manager.release(second)
    assert report(manager, PROMPT) is None


def test_a_block_that_leaves_while_another_request_computes_it_is_in_flight():
    manager = make_manager(6)
    first, first_chain = start(manager, PROMPT[:6])
    second, _ = start(manager, PROMPT[:6])
    compute(manager, first, first_chain)
    manager.release(first)
    assert manager.reset() == 2
    manager.check_invariants()
    third, _ = start(manager, PROMPT[:6])
    assert spans(third.miss) == [(0, 5, MissReason.NOT_YET_COMPUTED)]
    manager.release(second)
    manager.release(third)
    manager.check_invariants()
    assert spans(report(manager, PROMPT[:6])) == [(0, 5, MissReason.EVICTED)]


def test_a_partial_block_that_another_request_computes_too_stays_when_it_is_superseded():
    manager = make_manager(8)
    first, first_chain = start(manager, PROMPT[:2])
    second, _ = start(manager, PROMPT[:2])
    compute(manager, first, first_chain)
    manager.release(first)
    serve(manager, PROMPT[:4])  # begins with the partial block
    manager.check_invariants()
    manager.release(second)
    manager.check_invariants()


def test_a_namespace_of_which_nothing_is_known_takes_no_memory():
    manager = make_manager(8, max_ghosts=0)
    lease, _ = start(manager, PROMPT)
    manager.release(lease)
    assert manager._memory._tenants == {}


def test_an_owner_s_other_namespace_outlives_one_of_which_nothing_is_known():
    manager = make_manager(8, max_ghosts=0)
    serve(manager, PROMPT)
    lease, _ = start(manager, PROMPT, namespace=Namespace(model="m2"))
    manager.release(lease)
    assert [list(roots) for roots in manager._memory._tenants.values()] == [[NAMESPACE]]


def test_a_fully_cached_prompt_costs_the_memory_one_block():
    """The explanation is made of what was missed: nothing is looked up or noted for blocks that were hit."""
    manager = make_manager(600)
    prompt = list(range(2000))
    serve(manager, prompt)
    begun = []
    manager._memory = _Spy(manager._memory, begun)
    assert report(manager, prompt) is None
    assert len(begun) == 1


class _Spy:
    def __init__(self, memory, begun):
        self._of = memory
        self._begun = begun

    def begin(self, parent, blocks):
        self._begun += blocks
        return self._of.begin(parent, blocks)

    def __getattr__(self, name):
        return getattr(self._of, name)
