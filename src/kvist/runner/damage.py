"""Which sequences of a step wrote K or V that nobody may use.

Responsible for turning rows of a step into messages about its sequences, the same on both planes. Knows no numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.sched.output import ScheduledSequence
    from kvist.types import RequestId


def damage_messages(
    sequences: tuple[ScheduledSequence, ...], rows: list[int]
) -> dict[RequestId, str]:
    """Return a message for each sequence that wrote K or V values that are no finite numbers.

    Args:
        sequences: Those of the step, in order.
        rows: The rows of the step, of all T, that did; ascending.
    """
    messages: dict[RequestId, str] = {}
    first_row = 0
    for sequence in sequences:
        own = [row - first_row for row in rows if 0 <= row - first_row < len(sequence.token_ids)]
        if own:
            messages[sequence.request_id] = (
                f"[runner] expected finite K and V, received others at position {sequence.start + own[0]} "
                f"(request {sequence.request_id}); the weights or the KV blocks are damaged"
            )
        first_row += len(sequence.token_ids)
    return messages
