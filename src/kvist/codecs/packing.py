"""Codes of 4 and 3 bits in the order in which attention multiplies them.

Responsible for that order and nothing else. A product of bytes sums four neighbouring ones into a lane of 32 bits, so
four codes that are summed over (*members*: channels of K, positions of V) lie in neighbouring bytes, and what must stay
apart (*lanes*: positions of K, channels of V) lies in different ones. A byte holds the codes of one member for several
lanes that are far apart, so that one load gives several registers of the same order after a shift and a mask, whatever
their width. docs/formats/kv_block.md draws it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MEMBERS = 4
"""Neighbouring bytes that a dot product sums."""

_PLANES: dict[int, tuple[tuple[int, int], ...]] = {4: ((0, 4),), 3: ((0, 2), (2, 1))}
"""Per width of a code: (lowest bit, bits) of each plane that a group is cut into."""


def packed_bytes(num_lanes: int, num_members: int, bits: int) -> int:
    """Return the bytes of ``num_lanes * num_members`` codes."""
    return num_lanes * num_members * bits // 8


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the bytes of codes.

    Args:
        codes: (..., lanes, members) below ``2 ** bits``; lanes a multiple of 8, members of 4.
        bits: 4 or 3.

    Returns:
        (..., lanes * members * bits / 8) uint8: group after group of four members, and within a group plane after
        plane. In a plane of w bits, byte ``4 * i + j`` holds member j of the lanes ``i + r * lanes * w / 8`` in its
        bits ``[r * w, r * w + w)``.
    """
    *outer, num_lanes, num_members = codes.shape
    groups = codes.reshape(*outer, num_lanes, num_members // MEMBERS, MEMBERS)
    groups = np.moveaxis(groups, -3, -2)  # (..., groups, lanes, MEMBERS)
    planes = []
    for lowest, width in _PLANES[bits]:
        part = (groups >> lowest) & ((1 << width) - 1)
        part = part.reshape(*outer, -1, 8 // width, num_lanes * width // 8, MEMBERS)
        shifts = (np.arange(8 // width, dtype=np.uint8) * width)[:, None, None]
        plane = np.bitwise_or.reduce(part << shifts, axis=-3)
        planes.append(plane.reshape(*plane.shape[:-2], -1))
    return np.concatenate(planes, axis=-1).reshape(*outer, -1)


def unpack(
    packed: NDArray[np.uint8], num_lanes: int, num_members: int, bits: int
) -> NDArray[np.uint8]:
    """Return the (..., lanes, members) codes of ``packed`` (..., lanes * members * bits / 8) uint8."""
    outer = packed.shape[:-1]
    groups = packed.reshape(*outer, num_members // MEMBERS, -1)
    codes = np.zeros((*outer, num_members // MEMBERS, num_lanes, MEMBERS), np.uint8)
    start = 0
    for lowest, width in _PLANES[bits]:
        length = num_lanes * MEMBERS * width // 8
        plane = groups[..., start : start + length].reshape(*groups.shape[:-1], 1, -1, MEMBERS)
        shifts = (np.arange(8 // width, dtype=np.uint8) * width)[:, None, None]
        part = (plane >> shifts) & ((1 << width) - 1)
        codes |= part.reshape(codes.shape) << lowest
        start += length
    return np.moveaxis(codes, -3, -2).reshape(*outer, num_lanes, num_members)
