"""Loops and collapses are seen, ordinary texts are not taken for either."""

from __future__ import annotations

import gzip
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from tests.support.engine_fakes import make_parts
from tests.support.tiny_engine import request

from kvist.engine.degeneration import (
    MIN_ENTROPY_BITS,
    MIN_LOOP_TOKENS,
    MIN_REPEATS,
    STRIDE,
    WINDOW,
    DegenerationWatch,
)
from kvist.types import FinishReason, OutputChunk

TEXTS = (
    "text/wikitext2_test.txt",
    "text/pride_and_prejudice.txt",
    "fewshot/gsm8k_test.jsonl",
    "chat/mt_bench.jsonl",
    "chat/mt_bench_101.jsonl.gz",
    "agents/tau_bench_airline.json.gz",
    "longctx/bamboo_paperqa_4k.jsonl",
    "longctx/kv_retrieval_75_keys.jsonl.gz",
    "sysprompts/gemini_cli_system_prompts.jsonl",
)
MAX_CHARACTERS = 300_000
ROOT = Path(__file__).resolve().parents[3]


def watch(tokens) -> DegenerationWatch:
    found = DegenerationWatch()
    for token in tokens:
        found.append([token])
    return found


def noise(chance: random.Random, num_tokens: int) -> list[int]:
    return [chance.randrange(40_000) for _ in range(num_tokens)]


@pytest.mark.parametrize("period", range(1, 65))
def test_loops_of_every_period_are_seen_soon_and_measured_exactly(period):
    chance = random.Random(period)
    lead, run = noise(chance, 30), noise(chance, period)
    needed = max(MIN_LOOP_TOKENS, MIN_REPEATS * period)
    found = watch(lead + run * (needed // period + STRIDE + 2))
    assert found.found is not None
    assert (found.found.kind, found.found.start, found.found.period) == ("loop", 30, period)
    assert len(found._token_ids) <= 30 + needed + STRIDE


@pytest.mark.parametrize("period", [2, 6, 11])
def test_loops_with_repetitions_inside_have_the_smallest_period(period):
    chance = random.Random(period)
    run = [7] * (period - 1) + [8]
    found = watch(noise(chance, 5) + run * 400).found
    assert found is not None
    assert found.period == period


def test_the_numbers_of_repetitions_that_are_not_a_loop_yet():
    chance = random.Random(0)
    for period in (20, 40, 64):
        run = noise(chance, period)
        tokens = noise(chance, 50) + run * (MIN_REPEATS - 1) + noise(chance, 300)
        assert watch(tokens).found is None


def test_a_loop_that_ends_is_told_of():
    chance = random.Random(0)
    assert watch([5, 6] * 200 + noise(chance, 500)).found is not None


def test_few_tokens_in_any_order_are_a_collapse():
    chance = random.Random(1)
    found = watch(noise(chance, 100) + [chance.choice([4, 9, 13]) for _ in range(600)]).found
    assert found is not None
    assert found.kind == "entropy"
    assert found.entropy_bits is not None
    assert found.entropy_bits < MIN_ENTROPY_BITS
    assert 60 <= found.start <= 110


def test_digits_are_no_collapse():
    chance = random.Random(2)
    assert watch([chance.randrange(11) for _ in range(4000)]).found is None


@pytest.mark.parametrize("seed", range(5))
def test_the_entropy_is_that_of_the_window(seed):
    chance = random.Random(seed)
    found = DegenerationWatch()
    tokens: list[int] = []
    while found.found is None:
        tokens.append(chance.randrange(40) if chance.random() < 0.3 else chance.randrange(3))
        found.append(tokens[-1:])
        if chance.random() < 0.002:  # fewer and fewer
            chance = random.Random(chance.random())
        if len(tokens) > 4000:
            return
    counts = Counter(tokens[-WINDOW:])
    expected = -sum(c / WINDOW * math.log2(c / WINDOW) for c in counts.values())
    assert found.found.kind == "entropy"
    assert math.isclose(found.found.entropy_bits, expected, abs_tol=1e-3)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    from kvist.model.tokenizer import load_tokenizer

    return load_tokenizer(smollm2_path)


def has_alarm(tokenizer, text: str) -> bool:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return watch(tokens).found is not None


@pytest.mark.model
@pytest.mark.shared_data
@pytest.mark.parametrize("name", TEXTS)
def test_no_alarm_on_real_texts(tokenizer, shared_data, name):
    path = shared_data / name
    data = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert not has_alarm(tokenizer, data.decode(errors="replace")[:MAX_CHARACTERS])


LISTS = {
    "numbers": ", ".join(map(str, range(1, 700))),
    "steps": "\n".join(
        f"{i}. Turn the screw by one notch and note the reading." for i in range(1, 80)
    ),
    "table": "| hour | degrees |\n| --- | --- |\n"
    + "\n".join(f"| {h % 24:02d}:00 | {12 + h % 7} |" for h in range(150)),
    "primes": "\n".join(str(p) for p in range(2, 2000) if all(p % d for d in range(2, p))),
    "json": ",\n".join(f'  {{"id": {i}, "name": "row", "ok": true}}' for i in range(120)),
    "rule": "=" * 400,
}


@pytest.mark.model
@pytest.mark.parametrize("name", LISTS)
def test_no_alarm_on_lists_and_tables(tokenizer, name):
    assert not has_alarm(tokenizer, LISTS[name])


@pytest.mark.model
def test_no_alarm_on_code(tokenizer):
    files = [
        *ROOT.glob("src/kvist/**/*.py"),
        *ROOT.glob("native/**/*.cpp"),
        *ROOT.glob("docs/**/*.md"),
    ]
    assert len(files) > 50
    texts = [path.read_text(encoding="utf-8") for path in files]
    alarms = [
        str(path) for path, text in zip(files, texts, strict=True) if has_alarm(tokenizer, text)
    ]
    assert alarms == []


class TestEngine:
    def run(self, **params) -> list[OutputChunk]:
        parts = make_parts(max_context_len=600, num_blocks=200)
        # Every output is the same letter.
        run = parts.runner.run

        def looping(plan, meanwhile):
            result = run(plan, meanwhile)
            samples = {name: type(s)(token_id=97) for name, s in result.samples.items()}
            return type(result)(step_index=result.step_index, samples=samples)

        parts.runner.run = looping
        parts.core.add(request("r", b"once", max_tokens=400, **params))
        chunks = []
        while parts.core.has_work:
            chunks += parts.core.step()
        parts.core.check_invariants()
        self.stats = parts.core.stats().requests
        return chunks

    def test_a_loop_is_told_of_at_the_end(self):
        chunks = self.run()
        assert len(chunks) == 400
        assert [chunk.finish_details for chunk in chunks[:-1]] == [None] * 399
        last = chunks[-1]
        assert last.finish_reason is FinishReason.LENGTH
        assert last.finish_details is not None
        assert not last.finish_details.is_stopped
        assert last.finish_details.degeneration.period == 1
        assert (self.stats.degenerate, self.stats.num_stopped_degenerate) == (
            {"loop": 1, "entropy": 0},
            0,
        )

    def test_a_loop_is_ended_when_that_is_asked_for(self):
        chunks = self.run(stop_degenerate=True)
        assert len(chunks) == MIN_LOOP_TOKENS
        last = chunks[-1]
        assert (last.finish_reason, last.stop_reason) == (FinishReason.STOP, None)
        assert last.finish_details is not None
        assert last.finish_details.is_stopped
        assert last.usage is not None
        assert last.usage.num_output_tokens == MIN_LOOP_TOKENS
        assert "".join(chunk.text for chunk in chunks) == "a" * MIN_LOOP_TOKENS
        assert self.stats.num_stopped_degenerate == 1

    def test_text_that_was_held_back_comes_with_the_end(self):
        chunks = self.run(stop_degenerate=True, stop=("a" * 8 + "!",))
        assert "".join(chunk.text for chunk in chunks) == "a" * MIN_LOOP_TOKENS


def test_looking_costs_no_more_with_a_longer_output():
    """The number of tokens compared, by counting what is sliced, does not grow with the length."""

    class Counted(list):
        num_read = 0

        def __getitem__(self, index):
            part = super().__getitem__(index)
            Counted.num_read += len(part) if isinstance(index, slice) else 1
            return part

    chance = random.Random(4)
    costs = []
    found = DegenerationWatch()
    found._token_ids = Counted()
    tokens = noise(chance, 8000)
    for start in range(0, 8000, 2000):
        before = Counted.num_read
        for token in tokens[start : start + 2000]:
            found.append([token])
        costs.append(Counted.num_read - before)
    assert max(costs[1:]) < 1.2 * min(costs[1:])
    assert max(costs) < 25 * 2000
