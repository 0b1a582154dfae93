"""From a plan to its result on the native plane: the same contract as ``runner.ModelRunner``, one call a step.

Responsible for flattening a plan into arrays and for sampling from what comes back. Keeps nothing between steps.
"""

from __future__ import annotations

import time
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvist.model.native_decoder import StepArrays
from kvist.runner.sampler import SampleFailure, sample_rows
from kvist.sched.output import StepResult

if TYPE_CHECKING:
    from kvist.model.native_decoder import StepScores
    from kvist.sched.output import SampledToken, ScheduledSequence, StepPlan
    from kvist.storage.arena import BlockArena
    from kvist.types import RequestId


class Decoder(Protocol):
    """The model, as this runner sees it."""

    def step(self, arrays: StepArrays, arena: BlockArena) -> StepScores:
        """Compute the step's tokens, store their K and V, and score the rows asked for."""
        ...


class NativeRunner:
    """Runs plans, one at a time, on the engine's thread.

    Args:
        decoder: The model.
        arena: Its KV blocks, in the machine's memory.
    """

    def __init__(self, decoder: Decoder, arena: BlockArena) -> None:
        self._decoder = decoder
        self._arena = arena

    def run(self, plan: StepPlan) -> StepResult:
        """Carry out one step and return the tokens it chose.

        Mutates: The arena: targets of copies and slots of the scheduled tokens.
        """
        # In plan order: a later copy may overwrite the source of an earlier one.
        for copy in plan.copies:
            self._arena.copy(copy.source, copy.target, copy.num_tokens)
        sequences = plan.sequences
        arrays = _flatten(sequences, self._arena.kv_spec.block_size)
        scores = self._decoder.step(arrays, self._arena)
        sampled = [sequence for sequence in sequences if sequence.sample is not None]
        started_ns = time.perf_counter_ns()
        outcomes = sample_rows(
            scores.logits,
            scores.best_logits,
            scores.best_ids,
            [sequence.sample for sequence in sampled if sequence.sample is not None],
        )
        sample_ns = time.perf_counter_ns() - started_ns
        samples: dict[RequestId, SampledToken] = {}
        failed = _damaged(sequences, arrays, scores.damaged_rows)
        for sequence, outcome in zip(sampled, outcomes, strict=True):
            if sequence.request_id in failed:
                continue
            if isinstance(outcome, SampleFailure):
                failed[sequence.request_id] = f"{outcome.message} (request {sequence.request_id})"
            else:
                samples[sequence.request_id] = outcome
        return StepResult(
            step_index=plan.step_index, samples=samples, failed=failed, sample_ns=sample_ns
        )


def _flatten(sequences: tuple[ScheduledSequence, ...], block_size: int) -> StepArrays:
    num_tokens = [len(sequence.token_ids) for sequence in sequences]
    query_starts = [0, *accumulate(num_tokens)]
    context_lens = [
        sequence.start + count for sequence, count in zip(sequences, num_tokens, strict=True)
    ]
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    blocks = chain.from_iterable(
        sequence.block_table[:count] for sequence, count in zip(sequences, num_blocks, strict=True)
    )
    # The row of a sequence's last token is the one before the next sequence's first.
    logit_rows = [
        stop - 1
        for sequence, stop in zip(sequences, query_starts[1:], strict=True)
        if sequence.sample is not None
    ]
    return StepArrays(
        token_ids=np.fromiter(
            chain.from_iterable(sequence.token_ids for sequence in sequences),
            np.int64,
            query_starts[-1],
        ),
        query_starts=np.array(query_starts, np.int32),
        context_lens=np.array(context_lens, np.int32),
        table_starts=np.array([0, *accumulate(num_blocks)], np.int32),
        block_ids=np.fromiter(blocks, np.int32, sum(num_blocks)),
        logit_rows=np.array(logit_rows, np.int32),
    )


def _damaged(
    sequences: tuple[ScheduledSequence, ...], arrays: StepArrays, rows: list[int]
) -> dict[RequestId, str]:
    """Return a message for each sequence that wrote K or V values that are no finite numbers."""
    owners = np.searchsorted(arrays.query_starts, rows, side="right") - 1
    return {
        sequences[
            owner
        ].request_id: "[runner] expected finite K and V, received others at position "
        f"{sequences[owner].start + row - int(arrays.query_starts[owner])} (request {sequences[owner].request_id}); "
        "the weights or the KV blocks are damaged"
        for owner, row in zip(reversed(owners.tolist()), reversed(rows), strict=True)
    }
