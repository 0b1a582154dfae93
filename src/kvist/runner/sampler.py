"""From logits to tokens.

Responsible for the order of operations on a row of logits, for repeatable draws, and for refusing rows that no token
can be chosen from. Keeps no state. Knows neither requests nor the step.

Each row goes through, in this order (that of vLLM up to the temperature, that of transformers after it):

    1. log-probabilities, when asked for: of the model's own distribution
    2. logit bias               added
    3. repetition penalty       tokens seen in prompt or output: positive logits divided, negative ones multiplied
    4. frequency, presence      output tokens: subtracted once per occurrence, once in all
    5. greedy                   temperature 0 takes the most likely token here, the lowest id of equal ones
    6. temperature              divides
    7. top-k                    keeps the k most likely tokens
    8. top-p                    of those, keeps the smallest set whose probability, among those, reaches p
    9. min-p                    of those, drops tokens less likely than min_p times the most likely one
    10. draw                    inverse of the cumulative distribution, in order of token ids

Steps 7 to 9 each keep the tokens above some logit, so they are one threshold: the largest of the three. Tokens that
equal the threshold are all kept; which of equals a sort puts first means nothing.

Invariants:
    1. A row's token depends on its logits and its spec alone, bit by bit, whatever else is in the batch.
    2. The draw is a function of (seed, output_index): preemption, batching and the order of requests change nothing.
    3. Nothing here raises for what a model or a request contains: such a row becomes a ``SampleFailure``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from kvist.sched.output import SampledToken
from kvist.types import TokenId, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from kvist.sched.output import SampleSpec
    from kvist.types import SamplingParams

_MAX_LOGIT = np.float32(1e30)
"""Far above any model's, and small enough that sums and differences stay finite."""
_MIN_TEMPERATURE = 1e-30
"""Float32 divides by nothing smaller without a NaN; already at this one all but the most likely token have weight 0."""

_INFINITY = math.inf
_MAX_TOP_K = 2**31 - 1
"""More tokens than any vocabulary has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleFailure:
    """Why no token could be chosen from a row."""

    message: str
    """In the form of an error message."""
    is_damage: bool = False
    """Whether the row has no finite numbers, which computing it again may mend."""


_UNDRAWN = SampleFailure(message="[sampler] nothing was drawn from the row")
"""Stands for the token of a row until that is drawn."""


class Draw(NamedTuple):
    """Steps 6 to 10 for one row, whose temperature is not 0."""

    row: int
    largest: float
    """Of its logits; finite."""
    temperature: float
    """At least ``_MIN_TEMPERATURE``."""
    top_k: int
    """At most ``_MAX_TOP_K``; 0: all."""
    top_p: float
    min_p: float
    seed: int
    output_index: int


class DrawTokens(Protocol):
    """Who carries out draws; ``draw_tokens``, or something faster."""

    def __call__(self, rows: NDArray[np.float32], draws: list[Draw]) -> list[int]:
        """Return a token for each draw, from the (S, V) logits ``rows``."""
        ...


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | SampleFailure]:
    """Return one token, or the reason why there is none, for each row.

    Args:
        logits: (S, V) float32; not changed.
        specs: One per row.

    Numerics: Exponentials in float32, every sum of them in float64, log-probabilities in float64.
    """
    best_logits, best_ids = (column.tolist() for column in logits.max(dim=-1))
    return sample_rows(logits.cpu().numpy(), best_logits, best_ids, specs)


def sample_rows(
    rows: NDArray[np.float32],
    best_logits: Sequence[float],
    best_ids: Sequence[TokenId],
    specs: Sequence[SampleSpec],
    draw_all: DrawTokens | None = None,
) -> list[SampledToken | SampleFailure]:
    """Return what ``sample`` does, for whoever knows the best token of each row already.

    Args:
        rows: (S, V) logits, S at least the number of specs; not changed.
        best_logits: The largest logit of each row; NaN when any of the row is.
        best_ids: The first token that has it.
        specs: One per row.
        draw_all: Carries out the draws; default: ``draw_tokens``.
    """
    outcomes: list[SampledToken | SampleFailure] = []
    draws: list[Draw] = []  # those of rows as they are; adjusted rows are drawn from one at a time
    for spec in specs:
        outcome: SampledToken | SampleFailure = _UNDRAWN
        index = len(outcomes)
        best_logit = best_logits[index]
        # A NaN anywhere in a row is its maximum. -inf merely excludes a token, unless it is all there is.
        if not -_INFINITY < best_logit < _INFINITY:
            outcome = SampleFailure(
                message="[sampler] expected finite logits, received "
                f"{best_logit} as the largest of a row; the weights or the KV blocks are damaged",
                is_damage=True,
            )
        elif spec.takes_best:
            outcome = SampledToken(best_ids[index])
        elif spec.params.logit_bias or spec.params.needs_history:  # its logits are changed
            outcome = _sample_adjusted(rows[index], spec, draw_all or draw_tokens)
        elif spec.params.is_greedy:
            outcome = _sampled(best_ids[index], rows, index, spec)
        else:
            draws.append(_draw_of(index, best_logit, spec))
        outcomes.append(outcome)
    if draws:
        draw_all = draw_all or draw_tokens
        for draw, token_id in zip(draws, draw_all(rows, draws), strict=True):
            outcomes[draw.row] = _sampled(token_id, rows, draw.row, specs[draw.row])
    return outcomes


def draw_tokens(rows: NDArray[np.float32], draws: list[Draw]) -> list[int]:
    """Return a token for each draw, from the (S, V) logits ``rows``: the version to compare others with."""
    return [_draw(rows[draw.row], draw) for draw in draws]


def uniform(seed: int, output_index: int) -> float:
    """Return the draw in [0, 1) of one output position: 53 bits of Philox-4x64 keyed by the seed, at that counter.

    Source: Salmon et al. 2011, Parallel random numbers: as easy as 1, 2, 3.
    """
    bits = np.random.Philox(key=seed, counter=output_index).random_raw()
    return (bits >> 11) * 2.0**-53


def _sample_adjusted(
    logits: NDArray[np.float32], spec: SampleSpec, draw_all: DrawTokens
) -> SampledToken | SampleFailure:
    params = spec.params
    touched = (*params.logit_bias, *spec.prompt_token_ids, *spec.output_token_ids)
    if touched and not 0 <= min(touched) <= max(touched) < len(logits):
        return SampleFailure(
            message=f"[sampler] expected token ids of logit_bias and history in [0, {len(logits)}), received "
            f"{min(touched)} to {max(touched)}"
        )
    adjusted = logits.copy()
    _add_bias(adjusted, params)
    _penalise(adjusted, spec)
    best_id = int(adjusted.argmax())
    if params.is_greedy:
        return _sampled(best_id, logits[None], 0, spec)
    (token_id,) = draw_all(adjusted[None], [_draw_of(0, float(adjusted[best_id]), spec)])
    return _sampled(token_id, logits[None], 0, spec)


def _draw_of(row: int, largest: float, spec: SampleSpec) -> Draw:
    params = spec.params
    return Draw(
        row,
        largest,
        max(params.temperature, _MIN_TEMPERATURE),
        min(params.top_k, _MAX_TOP_K),
        params.top_p,
        params.min_p,
        spec.seed,
        spec.output_index,
    )


def _sampled(token_id: int, rows: NDArray[np.float32], row: int, spec: SampleSpec) -> SampledToken:
    num_top = spec.params.logprobs
    # The row is taken out only where it is looked at: even that takes as long as all the rest.
    logprobs = None if num_top is None else _logprobs(rows[row], token_id, num_top)
    return SampledToken(TokenId(token_id), logprobs)


def _add_bias(logits: NDArray[np.float32], params: SamplingParams) -> None:
    if params.logit_bias:
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)


def _penalise(logits: NDArray[np.float32], spec: SampleSpec) -> None:
    params = spec.params
    if params.repetition_penalty != 1.0:
        # The constructor and not asarray: both are tuples of ints, possibly empty.
        seen = np.unique(np.array((*spec.prompt_token_ids, *spec.output_token_ids), np.int64))
        penalty = np.float32(params.repetition_penalty)
        values = logits[seen]
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            penalised = np.where(values > 0, values / penalty, values * penalty)
        # A tiny penalty must not make infinities, whose differences are no numbers.
        logits[seen] = np.clip(penalised, -_MAX_LOGIT, _MAX_LOGIT)
    if params.frequency_penalty or params.presence_penalty:
        produced, counts = np.unique(np.array(spec.output_token_ids, np.int64), return_counts=True)
        penalties = params.frequency_penalty * counts + params.presence_penalty
        logits[produced] -= penalties.astype(np.float32)


def _draw(logits: NDArray[np.float32], draw: Draw) -> int:
    temperature = np.float32(draw.temperature)
    # The most likely token has weight 1: the largest logit is subtracted before anything can overflow.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - np.float32(draw.largest)) / temperature)
    least = np.float32(0.0)
    if 0 < draw.top_k < len(weights):
        rank = len(weights) - draw.top_k
        least = np.partition(weights, rank)[rank]
    if draw.top_p < 1.0:
        least = max(least, _top_p_weight(weights[weights >= least], draw.top_p))
    least = max(least, np.float32(draw.min_p))
    kept = np.flatnonzero(weights >= least)
    cumulative = np.cumsum(weights[kept], dtype=np.float64)
    total = cumulative[-1]
    # The product may round up to the total, behind which there is no token.
    target = min(uniform(draw.seed, draw.output_index) * total, np.nextafter(total, 0.0))
    return int(kept[np.searchsorted(cumulative, target, side="right")])


def _top_p_weight(weights: NDArray[np.float32], top_p: float) -> np.float32:
    """Return the weight of the last token of the smallest set that holds ``top_p`` of all weight."""
    total = weights.sum(dtype=np.float64)
    # All tokens below this together hold less than 1 - top_p: the set is complete before it reaches them.
    negligible = (1.0 - top_p) * total / len(weights)
    candidates = np.sort(weights[weights >= negligible])[::-1]
    reached = np.searchsorted(np.cumsum(candidates, dtype=np.float64), top_p * total)
    return np.float32(candidates[min(int(reached), len(candidates) - 1)])


def _logprobs(logits: NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    largest = logits.max()
    log_total = float(largest) + math.log(np.exp(logits - largest).sum(dtype=np.float64))
    top: NDArray[np.int64] = np.empty(0, np.int64)
    if num_top:
        rank = max(0, len(logits) - num_top)
        top = np.flatnonzero(logits >= np.partition(logits, rank)[rank])
        top = top[np.argsort(-logits[top], kind="stable")][:num_top]
    return TokenLogprobs(
        token_id=TokenId(token_id),
        logprob=float(logits[token_id]) - log_total,
        top=tuple((TokenId(int(i)), float(logits[i]) - log_total) for i in top),
    )
