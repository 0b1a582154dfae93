"""Native draws against those in Python: the same tokens, but for rounding at the border of two."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.kernels import native
from kvist.runner.sampler import Draw, draw_tokens, uniform

pytestmark = pytest.mark.skipif(not native.available(), reason=native.why_not())

ISAS = native.extension().isas() if native.available() else ["none"]
BORDER = 1e-5
"""Share of all weight by which a draw may miss the border between two tokens."""


@pytest.fixture(scope="module")
def pool() -> object:
    return native.extension().Pool(2)


def draw(index: int = 0, row: int = 0, **values: object) -> Draw:
    defaults = {"largest": 0.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Draw(row=row, seed=7, output_index=index, **{**defaults, **values})


def is_at_border(logits: np.ndarray, each: Draw, token: int, expected: int) -> bool:
    """Whether the draw is so near the border of the expected token's share that rounding decides."""
    weights = np.exp((logits.astype(np.float64) - each.largest) / each.temperature)
    kept = weights >= min(weights[token], weights[expected]) * (1 - BORDER)
    # Which tokens the limits keep may be a matter of rounding too: with equals or nearly so at the limit.
    cumulative = np.cumsum(np.where(kept, weights, 0.0))
    target = uniform(each.seed, each.output_index) * cumulative[-1]
    between = cumulative[min(token, expected) : max(token, expected)]
    return bool((np.abs(between - target) <= BORDER * cumulative[-1]).all())


@given(seed=st.integers(0, 2**64 - 1), index=st.integers(0, 2**40))
def test_the_uniform_draw_is_that_of_numpy_to_the_bit(seed: int, index: int) -> None:
    assert native.extension().uniform_draw(seed, index) == uniform(seed, index)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_logits=st.integers(1, 3000),
    spread=st.sampled_from([0.0, 0.1, 1.0, 4.0, 30.0]),
    temperature=st.sampled_from([1e-30, 0.01, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 40, 2**31 - 1]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
    has_ties=st.booleans(),
)
def test_tokens_are_those_of_python(
    pool: object,
    isa: str,
    seed: int,
    num_logits: int,
    spread: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    has_ties: bool,
) -> None:
    random = np.random.default_rng(seed)
    logits = (spread * random.standard_normal((3, num_logits))).astype(np.float32)
    if has_ties:
        logits = np.round(logits)
    logits[:, random.random(num_logits) < 0.1] = -np.inf
    logits[:, random.integers(num_logits)] = 1.0
    draws = [
        draw(
            index,
            row=index % 3,
            largest=float(logits[index % 3].max()),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
        )
        for index in range(12)
    ]

    with native.forced_isa(isa):
        tokens = native.extension().draw_tokens(pool, logits, draws)

    expected = draw_tokens(logits, draws)
    for each, token, other in zip(draws, tokens, expected, strict=True):
        assert token == other or is_at_border(logits[each.row], each, token, other)


@pytest.mark.parametrize("isa", ISAS)
def test_nearly_all_tokens_of_a_large_vocabulary_agree(pool: object, isa: str) -> None:
    random = np.random.default_rng(3)
    logits = (3 * random.standard_normal((4, 50_000))).astype(np.float32)
    draws = [
        draw(index, row=index % 4, largest=float(logits[index % 4].max()), top_p=0.95)
        for index in range(200)
    ]

    with native.forced_isa(isa):
        tokens = native.extension().draw_tokens(pool, logits, draws)

    agreed = sum(map(int.__eq__, tokens, draw_tokens(logits, draws)))
    assert agreed >= 198


@pytest.mark.parametrize("isa", ISAS)
def test_a_row_does_not_depend_on_the_others(pool: object, isa: str) -> None:
    logits = np.random.default_rng(5).standard_normal((8, 1000)).astype(np.float32)
    draws = [draw(3, row=row, largest=float(logits[row].max()), top_k=50) for row in range(8)]

    with native.forced_isa(isa):
        together = native.extension().draw_tokens(pool, logits, draws)
        alone = [native.extension().draw_tokens(pool, logits, [each])[0] for each in draws]

    assert together == alone


@pytest.mark.parametrize(
    "values",
    [
        {"row": 1},
        {"row": -1},
        {"largest": float("nan")},
        {"largest": float("inf")},
        {"temperature": 0.0},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"min_p": float("nan")},
    ],
)
def test_draws_that_mean_nothing_are_refused(pool: object, values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="expected"):
        native.extension().draw_tokens(pool, np.zeros((1, 4), np.float32), [draw(**values)])


def test_no_draws_give_no_tokens(pool: object) -> None:
    assert native.extension().draw_tokens(pool, np.zeros((1, 4), np.float32), []) == []
