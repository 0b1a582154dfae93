"""Order of the codes: what the format says, and there and back."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.codecs import e5m3
from kvist.codecs.packing import pack, packed_bytes, unpack

SIZES = [(64, 64), (64, 8), (8, 64), (80, 64), (256, 64), (64, 256)]


def codes_of(num_lanes: int, num_members: int, bits: int) -> np.ndarray:
    generator = np.random.default_rng(num_lanes + num_members)
    return generator.integers(0, 2**bits, (2, num_lanes, num_members), dtype=np.uint8)


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("num_lanes", "num_members"), SIZES)
def test_there_and_back(num_lanes: int, num_members: int, bits: int) -> None:
    codes = codes_of(num_lanes, num_members, bits)
    packed = pack(codes, bits)
    assert packed.shape == (2, packed_bytes(num_lanes, num_members, bits))
    assert np.array_equal(unpack(packed, num_lanes, num_members, bits), codes)


@pytest.mark.parametrize(("num_lanes", "num_members"), SIZES)
def test_codes_of_4_bits_are_where_the_format_says(num_lanes: int, num_members: int) -> None:
    codes = codes_of(num_lanes, num_members, 4)[0]
    packed = pack(codes, 4)
    half = num_lanes // 2
    for lane in range(num_lanes):
        for member in range(num_members):
            byte = packed[member // 4 * 2 * num_lanes + 4 * (lane % half) + member % 4]
            assert (byte >> (4 * (lane // half))) & 15 == codes[lane, member]


@pytest.mark.parametrize(("num_lanes", "num_members"), SIZES)
def test_codes_of_3_bits_are_where_the_format_says(num_lanes: int, num_members: int) -> None:
    codes = codes_of(num_lanes, num_members, 3)[0]
    packed = pack(codes, 3)
    quarter, eighth = num_lanes // 4, num_lanes // 8
    for lane in range(num_lanes):
        for member in range(num_members):
            group = packed[member // 4 * 3 * num_lanes // 2 :]
            low = group[4 * (lane % quarter) + member % 4] >> (2 * (lane // quarter))
            high = group[num_lanes + 4 * (lane % eighth) + member % 4] >> (lane // eighth)
            assert (low & 3) + 4 * (high & 1) == codes[lane, member]


def test_the_numbers_of_8_bits_are_those_of_the_format() -> None:
    for byte in range(255):
        exponent, mantissa = divmod(byte, 8)
        value = mantissa * 2.0**-22 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 23)
        assert e5m3.VALUES[byte] == value
    assert (np.diff(e5m3.VALUES[:255]) > 0).all()
    assert np.isnan(e5m3.VALUES[e5m3.NAN])


def test_the_nearest_number_of_8_bits_is_nearest() -> None:
    x = np.concatenate(([0.0], np.logspace(-8, 4, 5000))).astype(np.float32)
    nearest = e5m3.nearest(x)
    distances = np.abs(x[:, None].astype(np.float64) - e5m3.VALUES)
    assert (distances[np.arange(len(x)), nearest] == np.nanmin(distances, axis=1)).all()
    assert np.array_equal(e5m3.nearest(e5m3.VALUES[:255]), np.arange(255))
    assert e5m3.nearest(np.float32(1e30)) == 254
