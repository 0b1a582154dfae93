"""The ceiling against every possible choice, and above every strategy."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import pytest
from benchmarks import eviction

from kvist.errors import TraceError
from kvist.replay.belady import belady
from kvist.replay.traces import TraceRequest


def trace(*prompts: list[int], block_size: int = 1) -> list[TraceRequest]:
    return [
        TraceRequest(
            arrival_s=float(index),
            num_input_tokens=len(ids) * block_size,
            num_output_tokens=1,
            session="",
            block_size=block_size,
            block_runs=tuple(range(block_id, block_id + 1) for block_id in ids),
        )
        for index, ids in enumerate(prompts)
    ]


def random_prompts(seed: int, num_prompts: int) -> list[list[int]]:
    """Return prompts over random paths of a small tree; ids are numbers of its nodes."""
    draw = random.Random(seed)
    ids: dict[tuple[int, ...], int] = {}
    prompts = []
    for _ in range(num_prompts):
        path = [draw.choice([0, 0, 1]) for _ in range(draw.randint(1, 4))]
        prefixes = [tuple(path[: end + 1]) for end in range(len(path))]
        prompts.append([ids.setdefault(prefix, len(ids)) for prefix in prefixes])
    return prompts


def best_of_all(prompts: list[list[int]], num_blocks: int) -> int:
    """Return the most leading blocks that any choice of what to keep can hit, by trying all of them."""

    @cache
    def best(index: int, cached: frozenset[int]) -> int:
        if index == len(prompts):
            return 0
        prompt = prompts[index]
        num_hit = 0
        while num_hit < len(prompt) and prompt[num_hit] in cached:
            num_hit += 1
        others = sorted(cached - set(prompt))
        room = num_blocks - len(prompt)
        kept = combinations(others, min(room, len(others)))
        return num_hit + max(best(index + 1, frozenset((*prompt, *keep))) for keep in kept)

    return best(0, frozenset())


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_hits_more(seed: int) -> None:
    prompts = random_prompts(seed, 12)
    for num_blocks in (4, 5, 7):
        ceiling = belady(trace(*prompts), num_blocks)
        assert ceiling.num_hit_blocks == best_of_all(prompts, num_blocks)


@pytest.mark.parametrize("strategy", eviction.COMPARED)
@pytest.mark.parametrize("seed", range(5))
def test_no_strategy_hits_more(strategy: str, seed: int) -> None:
    requests = trace(*random_prompts(seed, 300), block_size=64)
    ceiling = belady(requests, 9)
    result = eviction.run_trace(requests, 9, strategy)
    assert 0 < result["hit_share"] <= ceiling.hit_share


def test_a_memory_for_everything_hits_whatever_comes_again() -> None:
    requests = trace([0, 1, 2], [0, 1, 3], [0, 1, 2])
    ceiling = belady(requests, 10)
    assert (ceiling.num_hit_blocks, ceiling.num_blocks, ceiling.num_requests) == (5, 9, 3)
    assert ceiling.hit_share == 5 / 9


def test_tokens_of_a_short_last_block_count_as_they_are() -> None:
    requests = [
        TraceRequest(
            arrival_s=0.0,
            num_input_tokens=700,
            num_output_tokens=1,
            session="",
            block_size=512,
            block_runs=(range(2),),
        )
    ] * 2
    ceiling = belady(requests, 4)
    assert (ceiling.num_hit_tokens, ceiling.num_input_tokens) == (700, 1400)


def test_requests_larger_than_the_memory_are_left_out() -> None:
    ceiling = belady(trace([0], [1, 2, 3], [0]), 2)
    assert (ceiling.num_requests, ceiling.num_refused, ceiling.num_hit_blocks) == (2, 1, 1)


def test_an_empty_trace_hits_nothing() -> None:
    assert belady([], 1).hit_share == 0.0
    assert belady(trace([]), 1).num_requests == 1


def test_refuses_ids_that_do_not_stand_for_prefixes() -> None:
    with pytest.raises(TraceError, match="a block id of request 0 follows different prefixes"):
        belady(trace([0, 1], [2, 1]), 4)
