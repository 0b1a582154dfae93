"""Definitions of the metrics, by numbers that can be checked by hand; and the cost model's file."""

from __future__ import annotations

import json

import pytest

from kvist.errors import ConfigError
from kvist.replay.compare import Timing, replay_trace
from kvist.replay.cost import CostModel, StepPrices
from kvist.replay.metrics import Slo, jain_index, percentiles
from kvist.replay.setting import Setting
from kvist.replay.simulator import Load
from kvist.replay.traces import TraceRequest

UNIT = CostModel(
    step_s=1.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_token_s=0.0, decode_attended_s=0.0
)
SETTING = Setting(num_blocks=16, block_size=4, max_batch_tokens=16, max_running=4)


def record(arrival_s, num_input, num_output, first, stop, session=""):
    return TraceRequest(
        arrival_s=arrival_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        session=session,
        block_size=4,
        block_runs=(range(first, stop),),
    )


def test_percentiles_are_samples_and_weights_repeat_them():
    assert percentiles([3.0, 1.0, 2.0, 4.0]) == {
        "p50": 2.0, "p90": 4.0, "p95": 4.0, "p99": 4.0, "mean": 2.5,
    }  # fmt: skip
    assert percentiles([5, 1], [1, 99]) == {
        "p50": 1.0, "p90": 1.0, "p95": 1.0, "p99": 1.0, "mean": 1.04,
    }  # fmt: skip
    assert percentiles([]) is None


def test_jain_index():
    assert jain_index([2.0, 2.0, 2.0]) == 1.0
    assert jain_index([1.0, 0.0, 0.0, 0.0]) == 0.25
    assert jain_index([]) is None


def test_the_document_of_two_requests():
    # A: 4 + 3 tokens, steps 1 to 3. B: 8 tokens, 4 of them hit, arrives at 10 and leaves at 11.
    records = [record(0.0, 4, 3, 0, 1, "a"), record(10.0, 8, 1, 0, 2, "b")]
    timing = Timing(load=Load(), cost=UNIT, slo=Slo(ttft_s=1.0, itl_s=0.5))
    run = replay_trace(records, SETTING, timing)
    assert run["hit_share"] == 4 / 12
    assert (run["requests"], run["refused"], run["output_tokens"]) == (2, {}, 4)
    assert run["ttft_s"]["p99"] == 1.0
    assert run["e2e_s"]["p99"] == 3.0
    assert run["itl_s"]["p50"] == run["tpot_s"]["p50"] == 1.0
    assert run["queue_s"]["p99"] == 0.0
    assert run["makespan_s"] == 11.0
    assert run["busy_fraction"] == 4 / 11
    # A keeps the time to the first token and not the gaps.
    assert (run["slo_share"], run["goodput_rps"]) == (0.5, 1 / 11)
    assert (run["jain_fairness"], run["jain_over"]) == (1.0, "sessions")
    assert run["computed_tokens"] == 4 + 2 + 4
    assert run["kv_held_blocks"]["peak"] == 2


def test_hits_alone():
    # 4 blocks of memory; 3 requests of 3 blocks: the third finds what the second left of the first.
    records = [record(0.0, 12, 9, 0, 3), record(0.0, 4, 9, 7, 8), record(0.0, 13, 9, 0, 3)]
    run = replay_trace(records, Setting(num_blocks=4, block_size=4), None)
    assert (run["mode"], run["schedule"]) == ("hits", None)
    assert (run["hit_tokens"], run["prompt_tokens"]) == (12, 29)
    assert run["evicted_blocks"] == 1  # the fourth block of the third takes that of the second


def test_hits_alone_count_what_cannot_run():
    records = [record(0.0, 0, 1, 0, 0), record(0.0, 40, 1, 0, 10), record(0.0, 4, 1, 0, 1)]
    run = replay_trace(records, Setting(num_blocks=4, block_size=4), None)
    assert run["refused"] == {"RequestError": 1, "PromptTooLong": 1}
    assert run["requests"] == 3
    assert run["prompt_tokens"] == 4


def test_prices():
    prices = StepPrices(
        CostModel(
            step_s=1.0, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_token_s=2e-3, decode_attended_s=1e-5
        )
    )  # fmt: skip
    assert prices.prefill(10, 2) == 2 * 10**9 + (11 + 12) * 10**6
    assert prices.decode(3, 100) == 6 * 10**9 + 100 * 10**7
    # Two chunks of a prompt of 5, of which 1 is cached, then a second token.
    second = 10**12
    expected = second + prices.prefill(1, 3) + second + prices.decode(1, 5)
    assert prices.alone(1, 5, 2, 3) == expected + second + prices.decode(1, 6)


def test_a_cost_model_comes_from_a_file(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"step_s": 0.5}')
    assert CostModel.load(path) == CostModel(step_s=0.5)
    path.write_text(json.dumps({"benchmark": "cost_model", "cost_model": {"step_s": 0.25}}))
    assert CostModel.load(path).step_s == 0.25


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot read the cost model"),
        ("[]", "JSON object"),
        ('{"step": 1}', "JSON object with keys among step_s"),
        ('{"step_s": -1}', "step_s must be >= 0"),
        ('{"step_s": 0}', "step_s must be > 0"),
        ('{"step_s": "1"}', "must be a number"),
        ('{"prefill_pair_s": NaN}', "must be >= 0"),
    ],
)
def test_a_bad_cost_model_is_refused(tmp_path, content, message):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        CostModel.load(path)


def test_slo_bounds():
    with pytest.raises(ConfigError, match="--slo-ttft-s"):
        Slo(ttft_s=0.0)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="num_blocks must be at least 1"):
        Setting(num_blocks=0, block_size=4)
    with pytest.raises(ConfigError, match="--eviction"):
        Setting(num_blocks=1, block_size=4, eviction="none")
