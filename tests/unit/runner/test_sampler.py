"""The sampler: distributions, repeatability, independence of the batch, and the effect of each parameter."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.runner import sampler
from kvist.runner.sampler import SampleFailure, sample, uniform
from kvist.sched.output import SampledToken, SampleSpec
from kvist.types import SamplingParams

# Upper 0.001 quantiles of the chi-square distribution; the seeds are fixed, so a pass stays a pass.
CHI_SQUARE_LIMIT = {3: 16.27, 7: 24.32, 15: 37.70}
PROBABILITIES = np.array([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005])


def spec(
    *,
    seed: int = 0,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    **params: object,
) -> SampleSpec:
    return SampleSpec(
        params=SamplingParams(**params),
        seed=seed,
        output_index=index,
        prompt_token_ids=prompt,
        output_token_ids=output,
    )


def row(probabilities: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.log(probabilities)).to(torch.float32)[None]


def tokens(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    outcomes = sample(logits, specs)
    assert all(isinstance(outcome, SampledToken) for outcome in outcomes)
    return [outcome.token_id for outcome in outcomes]


def counts(logits: torch.Tensor, num_draws: int, **params: object) -> np.ndarray:
    specs = [spec(seed=11, index=index, **params) for index in range(num_draws)]
    drawn = tokens(logits.expand(num_draws, -1), specs)
    return np.bincount(drawn, minlength=logits.shape[1])


def assert_distributed(observed: np.ndarray, probabilities: np.ndarray) -> None:
    possible = probabilities > 0
    assert observed[~possible].sum() == 0
    expected = probabilities[possible] * observed.sum()
    statistic = ((observed[possible] - expected) ** 2 / expected).sum()
    assert statistic < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


def normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def test_draws_follow_the_distribution() -> None:
    assert_distributed(counts(row(PROBABILITIES), 4000), PROBABILITIES)


def test_temperature_sharpens_and_flattens() -> None:
    for temperature in (0.5, 2.0):
        expected = normalised(PROBABILITIES ** (1 / temperature))
        assert_distributed(counts(row(PROBABILITIES), 4000, temperature=temperature), expected)


def test_top_k_keeps_the_most_likely() -> None:
    expected = normalised(PROBABILITIES * (np.arange(8) < 4))
    assert_distributed(counts(row(PROBABILITIES), 3000, top_k=4), expected)


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    expected = normalised(PROBABILITIES * (np.arange(8) < 4))
    assert_distributed(counts(row(PROBABILITIES), 3000, top_p=0.85), expected)


def test_min_p_is_relative_to_the_most_likely() -> None:
    expected = normalised(PROBABILITIES * (np.arange(8) < 4))
    assert_distributed(counts(row(PROBABILITIES), 3000, min_p=0.2), expected)


def test_top_p_counts_probability_among_what_top_k_kept() -> None:
    """Of (0.4, 0.25, 0.15) / 0.8, the first two hold 0.81; of the whole distribution they hold 0.65 only."""
    observed = counts(row(PROBABILITIES), 500, top_k=3, top_p=0.8)
    assert set(np.flatnonzero(observed)) == {0, 1}


def test_equal_logits_at_the_threshold_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert set(np.flatnonzero(counts(logits, 300, top_k=2))) == {1, 2, 3}


def test_temperature_zero_takes_the_most_likely_and_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]])
    assert tokens(logits, [spec(temperature=0)]) == [1]
    assert tokens(logits, [spec(temperature=0, logit_bias={0: 3.0})]) == [0]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_tiny_temperatures_approach_greedy(temperature: float) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.9, -3e38, float("-inf")]])
    assert counts(logits, 50, temperature=temperature)[1] == 50


def test_logit_bias_is_added() -> None:
    logits = torch.zeros(1, 4)
    assert tokens(logits, [spec(temperature=0, logit_bias={2: 0.5})]) == [2]
    expected = normalised(np.exp([0.0, 1.0, 0.0, -2.0]))
    assert_distributed(counts(logits, 3000, logit_bias={1: 1.0, 3: -2.0}), expected)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([[2.0, 1.5, -1.0, -1.5]])
    penalised = spec(temperature=0, repetition_penalty=2.0, prompt=(0,), output=(2, 2), logprobs=0)
    assert tokens(logits, [penalised]) == [1]
    negative = torch.tensor([[-1.0, -1.5]])
    assert tokens(negative, [spec(temperature=0, repetition_penalty=2.0, prompt=(0,))]) == [1]
    assert tokens(negative, [spec(temperature=0, repetition_penalty=0.5, prompt=(0,))]) == [0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-38])
def test_a_tiny_repetition_penalty_makes_no_infinities(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[3.0, 2.0, 0.0, -1.0]])
    chosen = tokens(
        logits,
        [spec(repetition_penalty=penalty, temperature=temperature, prompt=(0, 1, 2, 3))],
    )
    assert chosen[0] in (0, 1)


def test_presence_counts_once_and_frequency_counts_each_output_token() -> None:
    logits = torch.tensor([[2.0, 1.5, 0.9]])
    history = (0, 0, 1)
    assert tokens(logits, [spec(temperature=0, presence_penalty=1.0, output=history)]) == [0]
    assert tokens(logits, [spec(temperature=0, frequency_penalty=0.8, output=history)]) == [2]
    assert tokens(logits, [spec(temperature=0, frequency_penalty=2.0, prompt=history)]) == [0]
    assert tokens(logits, [spec(temperature=0, presence_penalty=-1.0, output=(2,))]) == [0]
    assert tokens(logits, [spec(temperature=0, presence_penalty=-2.0, output=(2,))]) == [2]


def test_bias_comes_before_the_penalties() -> None:
    """A bias of 3 on a logit of 1 is halved with it: 2, not 3.5."""
    logits = torch.tensor([[1.0, 3.0]])
    both = spec(temperature=0, logit_bias={0: 3.0}, repetition_penalty=2.0, prompt=(0,))
    assert tokens(logits, [both]) == [1]


def test_penalties_come_before_the_temperature() -> None:
    """At temperature 0.5 a difference of 1 - 1 stays 0; penalising after the division would leave 2 - 1."""
    logits = torch.tensor([[1.0, 0.0]])
    observed = counts(logits, 2000, temperature=0.5, presence_penalty=1.0, logit_bias={})
    assert observed[0] > 1500  # no history: nothing is penalised
    specs = [
        spec(seed=3, index=index, temperature=0.5, presence_penalty=1.0, output=(0,))
        for index in range(2000)
    ]
    halves = np.bincount(tokens(logits.expand(2000, -1), specs), minlength=2)
    assert abs(halves[0] - 1000) < 150


def test_top_k_comes_before_min_p_and_after_the_penalties() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    specs = [
        spec(seed=5, index=index, top_k=1, frequency_penalty=2.0, output=(0,))
        for index in range(20)
    ]
    assert set(tokens(logits.expand(20, -1), specs)) == {1}


def test_logprobs_are_those_of_the_model_before_everything_else() -> None:
    asked = spec(
        temperature=0,
        logprobs=3,
        logit_bias={7: 100.0},
        frequency_penalty=1.0,
        output=(0, 1),
        top_k=1,
    )
    (outcome,) = sample(row(PROBABILITIES), [asked])
    assert isinstance(outcome, SampledToken)
    assert outcome.token_id == 7
    assert outcome.logprobs is not None
    assert outcome.logprobs.token_id == 7
    assert outcome.logprobs.logprob == pytest.approx(math.log(0.005), abs=1e-6)
    assert [token for token, _ in outcome.logprobs.top] == [0, 1, 2]
    assert [value for _, value in outcome.logprobs.top] == pytest.approx(
        np.log(PROBABILITIES[:3]), abs=1e-6
    )


def test_logprobs_of_zero_alternatives_and_of_more_than_there_are() -> None:
    none, all_of_them = sample(
        torch.zeros(2, 3), [spec(temperature=0, logprobs=0), spec(temperature=0, logprobs=20)]
    )
    assert isinstance(none, SampledToken)
    assert isinstance(all_of_them, SampledToken)
    assert none.logprobs is not None
    assert none.logprobs.top == ()
    assert all_of_them.logprobs is not None
    assert [token for token, _ in all_of_them.logprobs.top] == [0, 1, 2]


def test_draws_depend_on_seed_and_output_index_alone() -> None:
    assert uniform(1, 0) == uniform(1, 0)
    assert len({uniform(seed, index) for seed in range(20) for index in range(20)}) == 400
    draws = np.array([uniform(2**63 - 1, index) for index in range(4096)])
    assert ((draws >= 0) & (draws < 1)).all()
    assert_distributed(np.histogram(draws, 16, (0.0, 1.0))[0], np.full(16, 1 / 16))


def test_draws_are_pinned() -> None:
    """Seeded output must not change with a release of ours or of numpy."""
    assert [uniform(0, 0), uniform(42, 7)] == [0.011546754286331562, 0.4074136540795371]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_do_not_depend_on_the_batch(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(num_rows, 301, generator=generator) * 4
    specs = [
        spec(
            seed=data.draw(st.integers(0, 2**63 - 1)),
            index=data.draw(st.integers(0, 5)),
            prompt=(1, 2, 3),
            output=(3, 3),
            temperature=data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
            top_k=data.draw(st.sampled_from([0, 1, 5, 500])),
            top_p=data.draw(st.sampled_from([0.01, 0.5, 0.99, 1.0])),
            min_p=data.draw(st.sampled_from([0.0, 0.1, 1.0])),
            repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])),
            logprobs=data.draw(st.sampled_from([None, 0, 4])),
            logit_bias=data.draw(st.sampled_from([{}, {5: 2.0}])),
        )
        for _ in range(num_rows)
    ]
    together = sample(logits, specs)
    alone = [sample(logits[i : i + 1], specs[i : i + 1])[0] for i in range(num_rows)]
    backwards = sample(logits.flip(0), specs[::-1])[::-1]
    assert together == alone == backwards


def test_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample(logits, [spec(logit_bias={3: 5.0}, repetition_penalty=1.5, prompt=(1,))] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("damage", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"top_p": 0.9}, {"logprobs": 2}])
def test_a_damaged_row_fails_alone(damage: float, params: dict[str, object]) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = damage
    outcomes = sample(logits, [spec(**params)] * 3)
    assert [isinstance(outcome, SampleFailure) for outcome in outcomes] == [False, True, False]
    assert isinstance(outcomes[1], SampleFailure)
    assert "expected finite logits, received" in outcomes[1].message


def test_excluded_tokens_are_no_damage_but_a_row_of_them_is() -> None:
    logits = torch.full((2, 4), float("-inf"))
    logits[0, 2] = -5.0
    first, second = sample(logits, [spec(seed=9)] * 2)
    assert first == SampledToken(token_id=2)
    assert isinstance(second, SampleFailure)


@pytest.mark.parametrize(
    "bad", [{"logit_bias": {10: 1.0}}, {"logit_bias": {-1: 1.0}}, {"presence_penalty": 1.0}]
)
def test_token_ids_outside_the_vocabulary_fail_the_row(bad: dict[str, object]) -> None:
    (outcome,) = sample(torch.zeros(1, 10), [spec(output=(10,), **bad)])
    assert isinstance(outcome, SampleFailure)
    assert "expected token ids" in outcome.message
    assert "[0, 10)" in outcome.message


def test_a_draw_close_to_one_picks_a_possible_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product of the largest draw and the total can round up to the total, behind the last token."""
    monkeypatch.setattr(sampler, "uniform", lambda _seed, _index: 1.0 - 2.0**-53)
    logits = torch.tensor([[0.0, 0.3, float("-inf")]])
    assert tokens(logits, [spec()]) == [1]


def test_top_p_equals_a_full_sort_on_flat_and_peaked_rows() -> None:
    rng = np.random.default_rng(8)
    for spread in (0.0, 0.01, 1.0, 8.0):
        weights = np.exp(rng.standard_normal(5000) * spread).astype(np.float32)
        for top_p in (0.001, 0.5, 0.9, 0.999):
            descending = np.sort(weights)[::-1].astype(np.float64)
            reached = np.searchsorted(np.cumsum(descending), top_p * descending.sum())
            assert sampler._top_p_weight(weights, top_p) == descending[reached]


def test_every_sampling_field_that_chooses_tokens_is_tested() -> None:
    """A field added to SamplingParams must be thought about here."""
    chooses = {
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    }  # fmt: skip
    ends = {"max_tokens", "stop", "stop_token_ids", "ignore_eos", "n", "stop_degenerate"}
    assert set(SamplingParams.__dataclass_fields__) == chooses | ends
    assert replace(SamplingParams(), temperature=0).is_greedy
