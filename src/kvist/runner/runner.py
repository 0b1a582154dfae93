"""From a plan to its result: one step on the data plane.

Responsible for carrying out a plan: block copies, the flattened inputs, the forward pass, the logits of the rows that
are sampled, the sampler. Keeps nothing between steps: whatever a request needs is in the plan. Knows no policy, no
text and no prefix.
"""

from __future__ import annotations

import time
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch

from kvist.errors import InvariantViolation
from kvist.kernels.batch import AttentionBatch
from kvist.kernels.exhaustion import torch_memory_errors
from kvist.runner.damage import damage_messages
from kvist.runner.sampler import SampleFailure, sample
from kvist.sched.output import StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.sched.output import SampledToken, StepPlan
    from kvist.storage.arena import BlockArena
    from kvist.types import BlockCopy, MemoryOp, RequestId


class Decoder(Protocol):
    """The model, as the runner sees it."""

    def forward(
        self, token_ids: torch.Tensor, batch: AttentionBatch, arena: BlockArena
    ) -> torch.Tensor:
        """Return the hidden states (T, hidden) after the last norm; writes K and V of every token to the arena."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (S, V) float32 of hidden states (S, hidden)."""
        ...


class ModelRunner:
    """Runs plans, one at a time, on the engine's thread.

    Args:
        decoder: The model.
        arena: Its KV blocks.
    """

    def __init__(self, decoder: Decoder, arena: BlockArena) -> None:
        self._decoder = decoder
        self._arena = arena

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Carry out one step and return the tokens it chose.

        Args:
            plan: What to compute.
            meanwhile: Called first: the tensor library computes in this thread. None: there is nothing to do.

        Raises:
            InvariantViolation: The plan changes the memory of blocks; only the native plane's blocks can.
            MemoryError: There was none for computing the step. It may be run again, or another one with its copies.

        Mutates: The arena: targets of copies and slots of the scheduled tokens.
        """
        if meanwhile is not None:
            meanwhile()
        self.change_memory(plan.memory_ops)
        with torch.inference_mode(), torch_memory_errors():
            # In plan order: a later copy may overwrite the source of an earlier one.
            for copy in plan.copies:
                self._arena.copy(copy.source, copy.target, copy.num_tokens)
            batch = AttentionBatch.from_sequences(
                starts=[sequence.start for sequence in plan.sequences],
                num_tokens=[len(sequence.token_ids) for sequence in plan.sequences],
                block_tables=[sequence.block_table for sequence in plan.sequences],
                block_size=self._arena.kv_spec.block_size,
                device=self._arena.device,
            )
            token_ids = torch.tensor(
                list(chain.from_iterable(sequence.token_ids for sequence in plan.sequences)),
                device=self._arena.device,
            )
            hidden = self._decoder.forward(token_ids, batch, self._arena)
            damaged = damage_messages(plan.sequences, self._arena.damaged_rows(batch.slots))
            return self._sample(plan, batch, hidden, damaged)

    def change_memory(self, ops: Sequence[MemoryOp | BlockCopy]) -> None:
        """Refuse what happens to the memory of blocks: only those of the native plane can have several codecs.

        Raises:
            InvariantViolation: There is something.
        """
        if ops:
            raise InvariantViolation(
                "[runner] expected no memory operations where blocks have one codec, received "
                f"{len(ops)}, the first of them {ops[0]}"
            )

    def _sample(
        self,
        plan: StepPlan,
        batch: AttentionBatch,
        hidden: torch.Tensor,
        failed: dict[RequestId, str],
    ) -> StepResult:
        # The row of a sequence's last token is the one before the next sequence's first.
        sampled = [
            (stop - 1, sequence.request_id, sequence.sample)
            for sequence, stop in zip(plan.sequences, batch.query_starts[1:], strict=True)
            if sequence.sample is not None
        ]
        samples: dict[RequestId, SampledToken] = {}
        damaged = set(failed)
        sample_ns = 0
        if sampled:
            rows = torch.tensor([row for row, _, _ in sampled], device=hidden.device)
            logits = self._decoder.logits(hidden.index_select(0, rows))
            started_ns = time.perf_counter_ns()
            outcomes = sample(logits, [spec for _, _, spec in sampled])
            sample_ns = time.perf_counter_ns() - started_ns
            for (_, request_id, _), outcome in zip(sampled, outcomes, strict=True):
                if request_id in failed:
                    continue
                if isinstance(outcome, SampleFailure):
                    failed[request_id] = f"{outcome.message} (request {request_id})"
                    if outcome.is_damage:
                        damaged.add(request_id)
                else:
                    samples[request_id] = outcome
        return StepResult(
            step_index=plan.step_index,
            samples=samples,
            failed=failed,
            damaged=frozenset(damaged),
            sample_ns=sample_ns,
        )
