"""What can be told of the records of whole spans without decoding them.

Responsible for where the metadata of a record is (``kvist.codecs.rotated`` has the layout). Knows no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS

if TYPE_CHECKING:
    from numpy.typing import NDArray

NOT_A_NUMBER = 255
"""The step or scale of what was infinite or no number."""


def is_finite(records: NDArray[np.uint8], codec: str, head_dim: int) -> bool:
    """Return whether records stand for finite K and V only.

    Args:
        records: (..., record_bytes).
        codec: A key of SPAN_CODEC_BITS.
        head_dim: D.
    """
    scales = 2 * head_dim + SPAN_TOKENS * head_dim * SPAN_CODEC_BITS[codec] // 8
    steps_of_keys = records[..., :head_dim]
    scales_of_values = records[..., scales : scales + SPAN_TOKENS]
    return not bool(
        np.any(steps_of_keys == NOT_A_NUMBER) or np.any(scales_of_values == NOT_A_NUMBER)
    )
