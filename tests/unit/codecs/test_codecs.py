"""Codecs: exact where they can be, within their stated bound where they cannot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from kvist.codecs import registry
from kvist.codecs.raw import FLOAT32, RAW16
from kvist.errors import ConfigError
from kvist.spec import CODEC_BITS, KVSpec

CODECS = [registry.get(name) for name in registry.names()]
IDS = registry.names()
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
SMALLEST_BFLOAT16 = 2.0**-133


def roundtrip(codec: object, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values))  # type: ignore[attr-defined]


def test_names_and_bits_are_those_the_control_plane_reads() -> None:
    assert set(registry.names()) == set(CODEC_BITS)
    for codec in CODECS:
        assert codec.bits_per_value(64) == CODEC_BITS[codec.name]
        spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, block_size=1, codec=codec.name)
        assert spec.token_bytes == 2 * codec.stored_dim(64) * codec.dtype.itemsize


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@settings(max_examples=200, deadline=None)
@given(
    values=st_numpy.arrays(
        np.float32,
        (2, 8),
        elements=st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=True),
    )
)
def test_error_stays_within_the_bound(codec: object, values: np.ndarray) -> None:
    x = torch.from_numpy(values)
    error = (x.double() - roundtrip(codec, x).double()).abs()
    assert (error <= codec.error_bound(x).double()).all()  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_all_bfloat16_numbers_are_exact(codec: object) -> None:
    """All 65,536 bit patterns: zeros of both signs, denormals, infinities, NaN."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    wide = values.to(torch.float32)
    stored = roundtrip(codec, wide)
    assert stored.dtype == torch.float32
    is_nan = torch.isnan(wide)
    assert torch.isnan(stored[is_nan]).all()
    assert torch.equal(stored[~is_nan].view(torch.int32), wide[~is_nan].view(torch.int32))


def test_float32_keeps_every_bit() -> None:
    values = torch.randn(4, 64) * torch.logspace(-40, 38, 64)
    assert torch.equal(roundtrip(FLOAT32, values).view(torch.int32), values.view(torch.int32))
    assert not FLOAT32.error_bound(values).any()


def test_raw16_rounds_to_nearest_and_ties_to_even() -> None:
    values = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)])
    assert roundtrip(RAW16, values).tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, -1.0]


def test_raw16_keeps_denormals_down_to_its_smallest() -> None:
    values = torch.tensor([SMALLEST_BFLOAT16, SMALLEST_BFLOAT16 * 0.75, SMALLEST_BFLOAT16 * 0.25])
    assert roundtrip(RAW16, values).tolist() == [SMALLEST_BFLOAT16, SMALLEST_BFLOAT16, 0.0]


def test_raw16_overflows_to_infinity_and_not_to_a_wrong_number() -> None:
    values = torch.tensor([BFLOAT16_MAX, torch.finfo(torch.float32).max])
    assert roundtrip(RAW16, values).tolist() == [BFLOAT16_MAX, float("inf")]


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_a_span_in_parts_equals_the_span_at_once(codec: object) -> None:
    values = torch.randn(3, 11, 16)
    parts = [codec.encode(part) for part in values.split([1, 4, 6], dim=1)]  # type: ignore[attr-defined]
    assert torch.equal(torch.cat(parts, dim=1), codec.encode(values))  # type: ignore[attr-defined]


def test_byte_layout_is_pinned() -> None:
    """The worked examples of docs/formats/kv_block.md."""
    values = torch.tensor([1.0, -2.5])
    assert bytes(RAW16.encode(values).view(torch.uint8).tolist()).hex() == "803f20c0"
    assert bytes(FLOAT32.encode(values).view(torch.uint8).tolist()).hex() == "0000803f000020c0"


def test_unknown_codecs_are_refused_with_the_option() -> None:
    with pytest.raises(
        ConfigError, match="must be one of raw16, float32, received 'int3'; set --kv-cache-dtype"
    ):
        registry.get("int3")
