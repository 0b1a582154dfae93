"""The runner of the native plane: a plan becomes arrays, and scores become a result."""

from __future__ import annotations

import numpy as np
import torch

from kvist.model.native_decoder import StepArrays, StepScores
from kvist.runner.native_runner import NativeRunner
from kvist.sched.output import BlockCopy, SampleSpec, ScheduledSequence, StepPlan
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena
from kvist.types import SamplingParams

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, codec="raw16")
VOCAB_SIZE = 17
GREEDY = SampleSpec(params=SamplingParams(temperature=0), seed=0, output_index=0)
DRAWN = SampleSpec(
    params=SamplingParams(temperature=1.0, logit_bias={5: 90.0}), seed=0, output_index=0
)


class ScoreDecoder:
    """Scores token ``(3 * token) % VOCAB_SIZE`` best after each token; reports the rows it is told to."""

    def __init__(self) -> None:
        self.arrays: list[StepArrays] = []
        self.blocks: list[torch.Tensor] = []
        self.damaged_rows: list[int] = []

    def step(self, arrays: StepArrays, arena: BlockArena) -> StepScores:
        self.arrays.append(arrays)
        self.blocks.append(arena.slab.clone())
        best = 3 * arrays.token_ids[arrays.logit_rows] % VOCAB_SIZE
        # More rows than were asked for: the buffer is kept from larger steps.
        logits = np.zeros((len(best) + 2, VOCAB_SIZE), np.float32)
        logits[np.arange(len(best)), best] = 2.0
        return StepScores(
            logits=logits,
            best_logits=[2.0] * len(best),
            best_ids=best.tolist(),
            damaged_rows=self.damaged_rows,
        )


def sequence(
    name: str, start: int, tokens: list[int], table: list[int], sample: SampleSpec | None = GREEDY
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=name,
        start=start,
        token_ids=tuple(tokens),
        block_table=tuple(table),
        sample=sample,
    )


def plan(*sequences: ScheduledSequence, copies: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step_index=3, copies=copies, sequences=sequences)


def make_runner() -> tuple[NativeRunner, ScoreDecoder, BlockArena]:
    decoder, arena = ScoreDecoder(), BlockArena(SPEC, 12)
    return NativeRunner(decoder, arena), decoder, arena


def test_inputs_are_flattened_in_plan_order() -> None:
    runner, decoder, _ = make_runner()
    result = runner.run(
        plan(
            sequence("a", 9, [3, 5], [7, 2, 9, 11]),
            sequence("b", 0, [4, 4, 4, 4, 4], [0, 5], None),
            sequence("c", 3, [6], [8]),
        )
    )
    arrays = decoder.arrays[-1]
    assert arrays.token_ids.tolist() == [3, 5, 4, 4, 4, 4, 4, 6]
    assert arrays.query_starts.tolist() == [0, 2, 7, 8]
    assert arrays.context_lens.tolist() == [11, 5, 4]
    # Block 11 lies behind the last position of its sequence.
    assert arrays.block_ids.tolist() == [7, 2, 9, 0, 5, 8]
    assert arrays.table_starts.tolist() == [0, 3, 5, 6]
    assert arrays.logit_rows.tolist() == [1, 7]
    assert result.step_index == 3
    assert {name: token.token_id for name, token in result.samples.items()} == {"a": 15, "c": 1}
    assert result.failed == {}


def test_a_step_without_samples_asks_for_no_logits() -> None:
    runner, decoder, _ = make_runner()
    result = runner.run(plan(sequence("a", 0, [1, 2, 3], [7], None)))
    assert result.samples == {}
    assert decoder.arrays[-1].logit_rows.tolist() == []


def test_rows_that_are_not_plain_are_sampled_from_their_logits() -> None:
    runner, _, _ = make_runner()
    result = runner.run(plan(sequence("a", 0, [2], [0]), sequence("b", 0, [2], [1], DRAWN)))
    assert {name: token.token_id for name, token in result.samples.items()} == {"a": 6, "b": 5}


def test_copies_run_first_and_in_plan_order() -> None:
    runner, decoder, arena = make_runner()
    arena.slab.copy_(torch.arange(12, dtype=torch.uint8)[:, None].expand_as(arena.slab))
    copies = (
        BlockCopy(source=2, target=5, num_tokens=4),
        BlockCopy(source=0, target=2, num_tokens=4),
    )
    runner.run(plan(sequence("a", 0, [1], [9]), copies=copies))
    assert decoder.blocks[-1][5].unique().tolist() == [2]
    assert decoder.blocks[-1][2].unique().tolist() == [0]


def test_a_sequence_that_wrote_damaged_values_fails_alone_and_is_named() -> None:
    runner, decoder, _ = make_runner()
    decoder.damaged_rows = [3, 4]
    result = runner.run(
        plan(
            sequence("good", 0, [1, 2], [0]),
            sequence("bad", 6, [8, 9, 10], [1, 2, 3], None),
            sequence("also good", 0, [3], [4]),
        )
    )
    assert set(result.samples) == {"good", "also good"}
    assert set(result.failed) == {"bad"}
    # The first damaged row: the second of its three, at position 7.
    assert "at position 7 (request bad)" in result.failed["bad"]
