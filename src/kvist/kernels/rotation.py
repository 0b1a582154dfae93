"""The rotation that spreads what sticks out in one channel of a head over all of them.

Responsible for the matrix. Queries and keys that are both turned have the same products as before, and what is turned
can be stored in fewer bits: no channel needs a scale that is too coarse for the others.

Letters: D head dim.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@cache
def rotation(head_dim: int) -> NDArray[np.float32]:
    """Return R, (D, D) float32 orthonormal: ``diag(signs) (C kron H)``.

    H is the Hadamard matrix of the largest power of two that divides D (Sylvester's order), C the cosine transform
    (DCT-II) of what is left, both scaled to length 1. The sign of channel c is minus where ``scrambled(c + 1)`` is odd.
    Read-only, the same object for every call.
    """
    matrix = np.ones((1, 1))
    odd = head_dim
    while odd % 2 == 0:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
        odd //= 2
    steps = np.arange(odd)
    cosines = np.sqrt(2.0) * np.cos(np.pi * (steps + 0.5) * steps[:, None] / odd)
    cosines[0] = 1.0
    signs = np.array([1.0 - 2.0 * (scrambled(c + 1) & 1) for c in range(head_dim)])
    rotated = signs[:, None] * np.kron(cosines.T, matrix) / np.sqrt(head_dim)
    result: NDArray[np.float32] = rotated.astype(np.float32)
    result.flags.writeable = False
    return result


def scrambled(x: int) -> int:
    """Return a number of 32 bits that looks unlike x: x ^= x >> 16, x *= 0x7FEB352D, and so on with 15 and 16.

    Signs with a pattern would be much like a row of the Hadamard matrix, and gather equal channels in one.
    Source: C. Wellons' hash prospector, lowbias32.
    """
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
