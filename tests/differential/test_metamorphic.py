"""Relations that need no oracle: whatever the cache, the batch and the scheduler do, the tokens stay the same.

All on a tiny random model in float32 with float32 KV, through the whole engine below the thread.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from tests.support.tiny_engine import (
    Session,
    load_tiny_decoder,
    make_core,
    request,
    unshared,
    unshared_batches,
)
from tests.support.tiny_models import random_prompt

from kvist.types import FinishReason

NUM_OUTPUT = 12
SHARED = random_prompt(45, seed=1)
"""A prefix that does not end at a block border of any size tested."""
PROMPTS = [
    SHARED + random_prompt(20, seed=2),
    SHARED + random_prompt(3, seed=3),
    SHARED,
    random_prompt(64, seed=4),
    random_prompt(1, seed=5),
    SHARED[:23] + random_prompt(9, seed=6),
]
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.3, "top_p": 0.95, "seed": 7},
    "penalised": {
        "temperature": 0.8,
        "seed": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
    },
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    torch.set_num_threads(1)
    return load_tiny_decoder(tmp_path_factory.mktemp("tiny"))


def groups(kind: str, *, tag: str = "", n: int = 1, prompts=PROMPTS):
    params = {**SAMPLING[kind], "max_tokens": NUM_OUTPUT, "ignore_eos": True, "n": n}
    return [request(f"{tag}{i}", prompt, **params) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(decoder):
    """Return the answers of each way of sampling, every request alone and nothing shared."""
    return {kind: unshared(decoder, groups(kind, n=3)) for kind in SAMPLING}


def tokens(answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer.token_ids for key, answer in answers.items()}


def firsts(expected: dict[tuple[str, int], list[int]]) -> dict[tuple[str, int], list[int]]:
    return {key: value for key, value in expected.items() if key[1] == 0}


KINDS = pytest.mark.parametrize("kind", list(SAMPLING))


@KINDS
def test_all_at_once(decoder, expected, kind):
    answers = Session(make_core(decoder)).run(groups(kind))
    assert tokens(answers) == firsts(expected[kind])


@KINDS
def test_cold_then_warm(decoder, expected, kind):
    core = make_core(decoder)
    cold = Session(core).run(groups(kind))
    warm = Session(core).run(groups(kind))
    assert tokens(cold) == tokens(warm) == firsts(expected[kind])
    assert sum(answer.num_cached_tokens for answer in warm.values()) == sum(
        len(prompt) - 1 for prompt in PROMPTS
    )


@KINDS
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("max_batch_tokens", [1, 7, 64])
def test_chunk_sizes(decoder, expected, kind, max_batch_tokens, prefix_cache):
    core = make_core(decoder, max_batch_tokens=max_batch_tokens, prefix_cache=prefix_cache)
    assert tokens(Session(core).run(groups(kind))) == firsts(expected[kind])


@KINDS
@pytest.mark.parametrize("block_size", [1, 3, 16, 64, 100])
def test_block_sizes(decoder, expected, kind, block_size):
    core = make_core(decoder, block_size=block_size, num_blocks=2048 // block_size)
    for _ in range(2):
        assert tokens(Session(core).run(groups(kind))) == firsts(expected[kind])


@KINDS
@pytest.mark.parametrize("max_running", [1, 2, 3])
def test_batch_mixes(decoder, expected, kind, max_running):
    core = make_core(decoder, max_running=max_running)
    assert tokens(Session(core).run(groups(kind))) == firsts(expected[kind])


@KINDS
@pytest.mark.parametrize("seed", range(4))
def test_orders_and_arrivals(decoder, expected, kind, seed):
    rng = random.Random(seed)
    order = groups(kind)
    rng.shuffle(order)
    session = Session(make_core(decoder, max_batch_tokens=48))
    for group in order:
        session.add([group])
        for _ in range(rng.randrange(4)):
            if session.core.has_work:
                session.step()
    assert tokens(session.run()) == firsts(expected[kind])


@KINDS
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("every", [1, 4])
def test_forced_preemption(decoder, expected, kind, every, prefix_cache):
    session = Session(make_core(decoder, max_batch_tokens=24, prefix_cache=prefix_cache))
    session.add(groups(kind))
    rng = random.Random(every)
    names = [str(i) for i in range(len(PROMPTS))]
    num_steps = 0
    while session.core.has_work:
        session.step()
        num_steps += 1
        if num_steps % every == 0 and num_steps < 40:
            session.core._scheduler.preempt(rng.choice(names))
    assert tokens(session.answers) == firsts(expected[kind])
    scheduler = session.core.stats().scheduler
    assert scheduler.num_preemptions >= 2
    assert bool(scheduler.num_recomputed_tokens) != prefix_cache


@KINDS
@pytest.mark.parametrize("max_batch_tokens", [8, 128])
def test_several_sequences_of_one_prompt(decoder, expected, kind, max_batch_tokens):
    core = make_core(decoder, max_batch_tokens=max_batch_tokens)
    assert tokens(Session(core).run(groups(kind, n=3))) == expected[kind]


@KINDS
@pytest.mark.parametrize("max_batch_tokens", [16, 256])
def test_without_any_kv_cache(decoder, expected, kind, max_batch_tokens):
    core = make_core(decoder, keep_kv=False, prefix_cache=False, max_batch_tokens=max_batch_tokens)
    assert tokens(Session(core).run(groups(kind))) == firsts(expected[kind])


@KINDS
def test_evictions_between_two_runs(decoder, expected, kind):
    core = make_core(decoder, num_blocks=16)
    for _ in range(3):
        assert tokens(Session(core).run(groups(kind))) == firsts(expected[kind])
    assert core.stats().cache.num_evictions > 0


def test_another_tenant_gets_the_same_tokens_and_none_of_the_blocks(decoder, expected):
    core = make_core(decoder)
    Session(core).run(groups("greedy"))
    other = [
        type(group)(
            request_id=group.request_id,
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            tenant="other",
        )
        for group in groups("greedy", prompts=PROMPTS[3:4])
    ]
    answers = Session(core).run(other)
    assert answers["0", 0].token_ids == expected["greedy"]["3", 0]
    assert answers["0", 0].num_cached_tokens == 0


def random_request(rng: random.Random, index: int, prefixes: list[list[int]]):
    """Return a request as clients send them: mostly shared beginnings, mostly bounded, sometimes several at once."""
    prompt = rng.choice(prefixes)[: rng.randrange(1, 60)] + random_prompt(
        rng.randrange(8), seed=rng.randrange(40)
    )
    params = {
        "max_tokens": None if rng.random() < 0.08 else rng.randrange(16),
        "temperature": rng.choice([0.0, 0.7, 1.2]),
        "seed": rng.randrange(3),
        "n": rng.choice([1, 1, 1, 1, 2, 3]),
        "ignore_eos": rng.random() < 0.2,
    }
    if rng.random() < 0.3:
        params["stop_token_ids"] = tuple(rng.sample(range(160), 8))
    if rng.random() < 0.1:
        params["repetition_penalty"] = 1.2
    return request(str(index), prompt or [5], **params)


def test_a_thousand_requests_through_a_pool_of_64_blocks(decoder):
    """Every answer is that of an unshared run, and no block is lost, through eviction, preemption and aborts."""
    rng = random.Random(2026)
    prefixes = [random_prompt(60, seed=100 + i) for i in range(12)]
    requests = [random_request(rng, i, prefixes) for i in range(1000)]
    sizes = {"block_size": 4, "max_context_len": 96}
    expected = unshared_batches(decoder, requests, **sizes)

    core = make_core(decoder, num_blocks=64, max_batch_tokens=48, reserve_tokens=4, **sizes)
    session = Session(core)
    waiting, aborted = list(reversed(requests)), set()
    while waiting or core.has_work:
        while waiting and len(core._calls) < 20:
            session.add([waiting.pop()])
        session.step()
        if rng.random() < 0.05 and core._calls:
            name = rng.choice(list(core._calls))
            session.abort(name)
            aborted.add(name)
    core.check_invariants()

    assert session.answers.keys() == expected.keys()
    for key, answer in session.answers.items():
        if answer.finish_reason is FinishReason.ABORT:
            assert key[0] in aborted
            assert answer.token_ids == expected[key][: len(answer.token_ids)], key
        else:
            assert answer.token_ids == expected[key], key

    stats = core.stats()
    reasons = Counter(answer.finish_reason for answer in session.answers.values())
    assert stats.cache.num_evictions > 1000
    assert stats.cache.num_hit_tokens > 10_000
    assert stats.cache.num_partial_copies > 100
    assert stats.scheduler.num_preemptions > 20
    assert stats.num_aborted == len(aborted) > 20
    assert min(reasons[FinishReason.STOP], reasons[FinishReason.LENGTH]) > 50
    assert stats.cache.num_verification_failures == 0
