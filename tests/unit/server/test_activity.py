from __future__ import annotations

import json

from kvist.server.activity import (
    MAX_CALLS,
    MAX_SAMPLES,
    MAX_SPANS,
    SPAN_S,
    Activity,
    FinishedCall,
)

SECOND_NS = 10**9
MISS = {
    "reason": "tokens_differ",
    "part": "system",
    "position": 3,
    "tokens_lost": 6,
    "before": "secret",
    "expected": "secret",
    "received": "secret",
    "left_s_ago": None,
}


def call(name="c", tenant="", at_s=1000.0, *, reused=10, computed=6, ttft_s=0.5, miss=None):
    spans = [] if miss is None else [miss]
    told = {"reused_tokens": reused, "computed_tokens": computed, "recomputed_tokens": 0}
    return FinishedCall(
        request_id=name,
        tenant=tenant,
        finished_ns=round(at_s * SECOND_NS),
        elapsed_s=1.0,
        ttft_s=ttft_s,
        num_output_tokens=4,
        explanation={**told, "miss": miss, "spans": spans},
    )


def spans(activity, at_s=1000.0):
    return activity.spans(round(at_s * SECOND_NS))


def test_calls_of_one_span_are_summed_up():
    activity = Activity()
    activity.note(call(at_s=1000, miss=MISS))
    activity.note(call(at_s=1004.9, reused=1, computed=9, ttft_s=2.0, miss=MISS))
    activity.note(call(at_s=1005, ttft_s=None))
    got = spans(activity, 1006)
    assert list(got) == ["1000", "1005"]
    assert got["1000"] == {
        "calls": 2,
        "reused": 11,
        "computed": 15,
        "output": 8,
        "missed": {"tokens_differ": 12},
        "cold": {"n": 1, "p50": 2.0, "p90": 2.0},
        "warm": {"n": 1, "p50": 0.5, "p90": 0.5},
    }
    assert got["1005"]["warm"] is None


def test_a_call_of_several_prompts_counts_the_misses_of_each():
    several = call()
    several.explanation["prompts"] = [{"spans": [MISS]}, {"spans": []}, {"spans": [MISS]}]
    activity = Activity()
    activity.note(several)
    assert spans(activity)["1000"]["missed"] == {"tokens_differ": 12}


def test_spans_are_not_made_again_until_they_change():
    activity = Activity()
    activity.note(call())
    first = spans(activity)["1000"]
    assert spans(activity)["1000"] is first
    activity.note(call())
    assert spans(activity)["1000"]["calls"] == 2


def test_old_spans_go_whether_or_not_anything_comes():
    activity = Activity()
    for index in range(MAX_SPANS + 20):
        activity.note(call(at_s=1000 + index * SPAN_S))
    last_s = 1000 + (MAX_SPANS + 19) * SPAN_S
    assert len(spans(activity, last_s)) == MAX_SPANS
    assert len(spans(activity, last_s + 10 * SPAN_S)) == MAX_SPANS - 10
    assert not spans(activity, last_s + 1e6)


def test_memory_is_bounded():
    activity = Activity()
    for index in range(3 * MAX_SAMPLES):
        activity.note(call(f"c{index}", ttft_s=index))
    (span,) = activity._spans.values()
    assert len(span.warm) == MAX_SAMPLES
    assert spans(activity)["1000"]["warm"]["n"] == 3 * MAX_SAMPLES
    assert len(activity.calls("")) == MAX_CALLS
    assert list(activity.calls(""))[-1] == f"c{3 * MAX_SAMPLES - 1}"


def test_calls_are_their_own_tenants_and_hold_no_text():
    activity = Activity()
    activity.note(call("a", "one", miss=MISS))
    activity.note(call("b", "two"))
    assert list(activity.calls("one")) == ["a"]
    assert not activity.calls("three")
    row = activity.calls("one")["a"]
    assert row["miss"] == {
        "reason": "tokens_differ",
        "part": "system",
        "position": 3,
        "tokens_lost": 6,
    }
    assert "secret" not in json.dumps([activity.calls("one"), spans(activity)])
