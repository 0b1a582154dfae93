"""Positive numbers in 8 bits: 5 bits of exponent, 3 of mantissa, no sign, no infinity, one NaN.

Responsible for the table of the 256 values and for finding the nearest. Steps and scales of the rotated codecs
(``kvist.codecs.rotated``) are stored so.

    byte 8 e + m    value
    e = 0           m * 2^-22
    e >= 1          (8 + m) * 2^(e - 23)
    255             NaN

From 2^-22 (2.4e-7) to 3,584, neighbours 1/15 to 1/8 apart above 2^-19; byte 0 is zero; the order of the bytes is the
order of the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_EXPONENTS, _MANTISSAS = np.divmod(np.arange(256), 8)
VALUES: NDArray[np.float32] = np.ldexp(
    np.where(_EXPONENTS == 0, _MANTISSAS, _MANTISSAS + 8), np.maximum(_EXPONENTS, 1) - 23
).astype(np.float32)
"""(256,) the value of each byte, ascending; the last one is NaN."""
NAN = 255
"""The byte that stands for no number."""
VALUES[NAN] = np.nan
LARGEST: float = float(VALUES[NAN - 1])
_BOUNDARIES = (VALUES[1:NAN] + VALUES[: NAN - 1]) / 2  # exact: two more bits than a value


def nearest(x: NDArray[Any]) -> NDArray[np.int16]:
    """Return the byte whose value is nearest to each x, as int16 so that callers may step to neighbours.

    Args:
        x: Any shape, >= 0 and no NaN; above LARGEST gives 254.

    Returns:
        In [0, 254]; half-way cases go down.
    """
    return np.searchsorted(_BOUNDARIES, x).astype(np.int16)
