"""Order, values, refusals and the document, with peers that are not real."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field

import pytest
from tests.support import fake_driver
from tests.support.fake_driver import continuation

from kvist.bench.check import Checker
from kvist.bench.measure import checked_prompts, measure, rows_of
from kvist.bench.peers import DriverPeer, DriverSettings
from kvist.bench.report import rows_document
from kvist.bench.work import (
    CHECKED_TOKENS,
    KV_CACHE,
    ROWS,
    SANITY_TEXTS,
    Batch,
    Output,
    Sizes,
    Workload,
    rows_named,
)
from kvist.errors import BenchError

SIZES = Sizes(prompt_tokens=64, decode_tokens=8, fanout=3, fanout_tokens=4)
TEXT = "".join(chr(97 + (7 * i + i // 50) % 26) for i in range(6000))


class Letters:
    """A tokeniser: one token a character."""

    def encode(self, text, *, add_special_tokens=True):
        assert not add_special_tokens
        return [ord(letter) for letter in text]

    def decode(self, token_ids):
        return "".join(chr(token_id) for token_id in token_ids)


@dataclass(eq=False)
class FakePeer:
    """Answers right, in a time of its own for each call."""

    name: str
    log: list
    times_s: list = field(default_factory=list)
    family: str = "fake"
    is_kvist: bool = False
    cached: int | None = None

    def run(self, row, batch):
        self.log.append((row, self.name))
        first_s = self.times_s.pop(0) if self.times_s else 1.0
        return [
            Output(
                num_tokens=batch.max_tokens,
                token_ids=tuple(continuation(prompt, batch.max_tokens)),
                text=None,
                first_s=first_s,
                last_s=first_s + (batch.max_tokens - 1) * 0.5,
                num_cached_tokens=self.cached,
            )
            for prompt in batch.prompts
        ]


def workload(num_runs=2):
    return Workload(Letters(), TEXT, SIZES, num_runs)


def checker(rows, num_runs=2, min_agreement=0.5):
    prompts = checked_prompts(workload(num_runs), rows, num_runs)
    # The fault of the fake driver adds one; ten others stand beside the likeliest.
    reference = {
        tuple(prompt): [
            [token_id, *range(1000, 1009)] for token_id in continuation(prompt, CHECKED_TOKENS)
        ]
        for prompt in prompts
    }
    return Checker(Letters(), reference, min_agreement)


def test_runs_are_interleaved_row_by_row_and_peer_by_peer():
    log = []
    rows = rows_named(["cold", "decode"])
    peers = {FakePeer(name, log): list(rows) for name in ("a", "b")}
    measure(peers, workload(), checker(rows), 2, lambda sample: None)
    timed = [entry for entry in log if entry[0] != "sanity"]
    one_run = [("cold", "a"), ("cold", "b"), ("decode", "a"), ("decode", "b")]
    assert timed == one_run * 2
    assert log[: len(SANITY_TEXTS)] == [("sanity", "a")] * len(SANITY_TEXTS)


def test_values_are_what_each_row_says():
    peer = FakePeer("a", [])
    rows = ROWS[:5]
    samples = measure({peer: list(rows)}, workload(1), checker(rows, 1), 1, lambda sample: None)
    values = {sample.row.name: sample.value for sample in samples}
    assert values == {
        "cold": 64.0,  # prompt tokens over a first token after 1 s
        "warm": 1.0,
        "decode": 2.0,  # a token each 0.5 s
        "fanout": 3 * 4 / 2.5,
        "chat": 1.0,
    }


def test_no_two_cold_prompts_begin_alike_and_none_as_a_cached_prefix():
    rows = {row.name: row for row in ROWS}
    work = workload(3)
    firsts = [tuple(work.task(rows["cold"], run).timed[0].prompts[0][:16]) for run in range(3)]
    firsts += [tuple(work.task(rows["warm"], 0).primes[0].prompts[0][:16])]
    firsts += [tuple(batch.prompts[0][:16]) for batch in work.task(rows["chat"], 0).primes]
    assert len(set(firsts)) == len(firsts)


def test_warm_prompts_share_all_but_the_question_with_what_came_before():
    (row,) = rows_named(["warm"])
    task = workload().task(row, 1)
    prime = task.primes[0].prompts[0]
    prompts = [batch.prompts[0] for batch in task.timed]
    assert all(prompt[:64] == prime[:64] for prompt in prompts)
    assert len({tuple(prompt) for prompt in [*prompts, prime]}) == len(prompts) + 1


def test_concurrent_prompts_have_one_length():
    (row,) = rows_named(["fanout"])
    (batch,) = workload().task(row, 1).timed
    assert len(batch.prompts) == 3
    assert len({len(prompt) for prompt in batch.prompts}) == 1
    assert len({tuple(prompt) for prompt in batch.prompts}) == 3


def test_chats_go_on_in_the_next_run():
    (row,) = rows_named(["chat"])
    work = workload()
    first, second = work.task(row, 0), work.task(row, 1)
    last_turn, next_turn = first.timed[-4].prompts[0], second.timed[0].prompts[0]
    assert next_turn[: len(last_turn)] == last_turn
    assert second.primes[0].prompts[0] == next_turn[: len(second.primes[0].prompts[0])]


def test_a_text_that_is_too_short_is_refused():
    with pytest.raises(BenchError, match=r"--text must have .* tokens at least, it has 100"):
        Workload(Letters(), "x" * 100, SIZES, 2)


def test_an_unknown_row_is_refused():
    with pytest.raises(BenchError, match=r"--rows must be of cold, .* received 'hot'"):
        rows_named(["hot"])


def test_only_kvist_is_measured_with_and_without_a_cache():
    own = FakePeer("kvist", [], is_kvist=True)
    without = FakePeer("kvist, no KV cache", [], is_kvist=True)
    other = FakePeer("other", [])
    names = [
        [row.name for row in rows_of(peer, ROWS, frozenset([without.name]))]
        for peer in (own, without, other)
    ]
    assert names[0] == [row.name for row in ROWS]
    assert names[1] == [KV_CACHE]
    assert names[2] == [row.name for row in ROWS if row.name != KV_CACHE]


# --- refusals


def start(fault):
    return DriverPeer(
        DriverSettings(
            name=f"fake {fault}",
            family="fake",
            driver=fake_driver.__file__,
            python=sys.executable,
            settings={"fault": fault},
        )
    )


def measured(fault, min_agreement=0.5):
    rows = rows_named(["warm", "fanout"])
    judge = checker(rows, 1, min_agreement)
    with start(fault) as peer:
        measure({peer: list(rows)}, workload(1), judge, 1, lambda sample: None)
    return judge


def test_right_outputs_pass():
    judge = measured(None, min_agreement=1.0)
    judge.require_agreement()
    assert judge.agreement() == {"fake None": {"single": 1.0, "concurrent": 1.0}}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong", r"fake wrong \(single requests: 0%\), fake wrong \(concurrent requests: 0%\)"),
        (
            "wrong together",
            r"received wrong outputs from fake wrong together \(concurrent requests: 0%\); ",
        ),
    ],
)
def test_wrong_outputs_are_refused_by_name(fault, message):
    judge = measured(fault)
    with pytest.raises(BenchError, match=message):
        judge.require_agreement()


def test_a_missing_token_is_refused():
    with pytest.raises(BenchError, match=r"fake short was asked for 8 tokens and produced 7"):
        measured("short")


def test_a_peer_that_dies_ends_the_measurement():
    with pytest.raises(BenchError, match=r"fake die died with exit code 3"):
        measured("die")


@pytest.mark.parametrize(
    ("text", "agrees"),
    [
        ("abcdefgh", True),
        ("abcd", True),
        ("abxy", True),  # the second likeliest; what follows it is not compared
        ("abzd", False),
    ],
)
@pytest.mark.parametrize("has_ids", [True, False])
def test_outputs_follow_the_likeliest_until_they_take_another_candidate(text, agrees, has_ids):
    prompt = [1, 2]
    candidates = [[ord(letter), ord("x")] for letter in "abcd"]
    judge = Checker(Letters(), {tuple(prompt): candidates}, 1.0)
    output = Output(
        num_tokens=4,
        token_ids=tuple(ord(letter) for letter in text) if has_ids else None,
        text=None if has_ids else text,
        first_s=0.0,
        last_s=1.0,
    )
    judge.add("theirs", Batch((prompt,), 4), [output], is_compared=True)
    assert judge.agreement() == {"theirs": {"single": float(agrees)}}


# --- the document


def document(own_s, other_s, row_name):
    """Return the document of a row in which the peers took these times to the first token."""
    rows = rows_named([row_name])
    num_runs = len(own_s)
    idle = [1.0] * len(SANITY_TEXTS)
    peers = {
        FakePeer("kvist", [], [*idle, *own_s], family="kvist", is_kvist=True, cached=3): list(rows)
    }
    for name, times_s in other_s.items():
        peers[FakePeer(name, [], [*idle, *times_s], family="theirs")] = list(rows)
    samples = measure(
        peers, workload(num_runs), checker(rows, num_runs), num_runs, lambda sample: None
    )
    (found,) = rows_document(samples)
    return found


def test_medians_spreads_and_ratios_against_the_best_setting():
    found = document([1.0, 0.5, 2.0], {"slow": [8.0, 8.0, 8.0], "fast": [4.0, 5.0, 3.0]}, "cold")
    assert found["peers"]["kvist"] == {
        "median": 64.0,
        "min": 32.0,
        "max": 128.0,
        "runs": [64.0, 128.0, 32.0],
        "prompt_tokens": [64, 64, 64],
        "cached_tokens": [3, 3, 3],
    }
    assert found["peers"]["fast"]["cached_tokens"] is None
    assert found["ratios"] == [
        {"kvist": "kvist", "family": "theirs", "peer": "fast", "ratio": 4.0, "is_clear": True}
    ]
    json.dumps(found, allow_nan=False)


def test_a_ratio_of_times_is_above_one_where_kvist_takes_less():
    # One untimed request, then the questions of the only run.
    rows = rows_named(["warm"])
    idle = [1.0] * (len(SANITY_TEXTS) + 1)
    peers = {
        FakePeer("kvist", [], [*idle, 0.5, 1.0, 2.0], is_kvist=True): list(rows),
        FakePeer("other", [], [*idle, 4.0, 4.0, 4.0]): list(rows),
    }
    samples = measure(peers, workload(1), checker(rows, 1), 1, lambda sample: None)
    (found,) = rows_document(samples)
    assert found["peers"]["kvist"]["median"] == 1.0
    assert found["ratios"][0]["ratio"] == 4.0


def test_overlapping_runs_are_not_clear():
    found = document([1.0, 3.0, 1.0], {"a": [2.0, 2.0, 2.0]}, "cold")
    assert found["ratios"][0]["ratio"] == 2.0
    assert not found["ratios"][0]["is_clear"]
