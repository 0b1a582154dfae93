"""Codecs: exact where they can be, within their stated bound where they cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from kvist.codecs import registry
from kvist.codecs.int8 import INT8
from kvist.codecs.raw import FLOAT32, RAW16
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.kernels.kv_rows import encode_int8_keys
from kvist.spec import CODEC_BITS, KVSpec

if TYPE_CHECKING:
    from collections.abc import Callable

CODECS = [registry.get(name) for name in registry.names()]
IDS = registry.names()
BFLOAT16_MAX = torch.finfo(torch.bfloat16).max
SMALLEST_BFLOAT16 = 2.0**-133


def roundtrip(codec: object, values: torch.Tensor) -> torch.Tensor:
    return codec.decode(codec.encode(values))  # type: ignore[attr-defined]


def test_names_and_bits_are_those_the_control_plane_reads() -> None:
    assert set(registry.names()) == set(CODEC_BITS)
    for codec in CODECS:
        for head_dim in (8, 16, 63, 64, 65, 80, 96, 128, 192, 256):
            spec = KVSpec(
                num_layers=1, num_kv_heads=1, head_dim=head_dim, block_size=1, codec=codec.name
            )
            row_bytes = codec.stored_dim(head_dim) * codec.dtype.itemsize
            assert codec.encode(torch.ones(3, head_dim)).nbytes == 3 * row_bytes
            assert spec.row_bytes == row_bytes
            assert spec.token_bytes == 2 * row_bytes
            assert codec.bits_per_value(head_dim) == 8 * row_bytes / head_dim


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
    bound = codec.error_bound(x).double()  # type: ignore[attr-defined]
    error = (x.double() - roundtrip(codec, x).double()).abs()
    # Beyond its range a codec promises nothing but that no wrong number comes back.
    assert ((error <= bound) | (bound.isinf() & error.isnan())).all()


@pytest.mark.parametrize("codec", [RAW16, FLOAT32], ids=["raw16", "float32"])
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


LARGEST_INT8 = 127.0 * 65519.0
"""Times 127 the largest number that rounds to a finite half."""


@settings(max_examples=300, deadline=None)
@given(
    values=st_numpy.arrays(
        np.float32, (3, 70), elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=True)
    ),
    exponent=st.integers(-60, 13),
)
def test_int8_is_off_by_half_a_step_at_most(values: np.ndarray, exponent: int) -> None:
    """The bound from the definition, not from the codec: half of the largest over 127, and the scale's rounding."""
    x = torch.from_numpy(values).double() * 2.0**exponent
    x = x.float()
    decoded = roundtrip(INT8, x).double()
    assert torch.isfinite(decoded).all()
    for first, last in ((0, 64), (64, 70)):
        group = x[:, first:last].double()
        largest = group.abs().amax(dim=1, keepdim=True)
        # The scale is rounded by 2^-11 of itself, or by the smallest half; the largest code carries it 127 times.
        scale = largest / 127
        rounding = torch.maximum(scale * 2.0**-11, torch.full_like(scale, 2.0**-24))
        bound = scale * (0.5 + 2.0**-11) + 127 * rounding
        assert ((group - decoded[:, first:last]).abs() <= bound).all()


def test_int8_codes_stay_within_127_where_the_scale_was_rounded_down() -> None:
    values = torch.logspace(-9, 6.9, 20_000, dtype=torch.float64).float()[:, None].expand(-1, 8)
    stored = INT8.encode(torch.cat((values, -values), dim=1))
    codes = stored[:, :16].view(torch.int8)
    assert int(codes.min()) >= -127
    assert int(codes.max()) <= 127
    scales = stored[:, 16:].contiguous().view(torch.float16)[:, 0].double()
    assert (scales < values[:, 0].double() / 127).any(), "no scale was rounded down: nothing tested"
    assert (scales > 0).all()


def test_int8_keeps_zeros_and_what_its_codes_can_say() -> None:
    zeros = torch.zeros(2, 96)
    assert not INT8.encode(zeros).any()
    assert torch.equal(roundtrip(INT8, zeros), zeros)
    whole = torch.arange(-127.0, 128.0).repeat(2)[:448].view(7, 64)
    whole[:, 0] = 127.0
    for exponent in (-20, -3, 0, 8):
        assert torch.equal(roundtrip(INT8, whole * 2.0**exponent), whole * 2.0**exponent)
    constant = torch.full((1, 64), 127 * 1.5)
    assert torch.equal(roundtrip(INT8, constant), constant)


def test_an_outlier_costs_its_own_group_and_no_other() -> None:
    values = torch.randn(5, 128, generator=torch.Generator().manual_seed(1))
    values[:, 3] = 1000.0
    error = (values - roundtrip(INT8, values)).abs()
    assert (error[:, :64] <= 1000.0 / 254 * 1.01).all()
    assert (error[:, 64:] <= values[:, 64:].abs().amax(dim=1, keepdim=True) / 254 * 1.07).all()
    assert (error[:, 3] <= 0.5).all()


def test_int8_keeps_a_group_of_denormals_apart_from_zeros() -> None:
    values = torch.tensor([[2.0**-149, 0.0], [2.0**-126, 2.0**-127], [2.0**-24, -(2.0**-24)]])
    stored = INT8.encode(values)
    assert stored[:, 2:].tolist() == [[1, 0]] * 3, "the smallest half"
    assert torch.equal(roundtrip(INT8, values)[2], values[2])
    assert (roundtrip(INT8, values)[:2] == 0).all()


@pytest.mark.parametrize("wrong", [float("inf"), float("-inf"), float("nan"), 1e7, -3e38])
def test_int8_reads_a_group_beyond_its_range_as_nan_and_leaves_the_others(wrong: float) -> None:
    values = torch.ones(2, 128)
    values[0, 70] = wrong
    decoded = roundtrip(INT8, values)
    assert decoded[0, 64:].isnan().all()
    assert torch.isfinite(decoded[0, :64]).all()
    assert torch.isfinite(decoded[1]).all()
    assert INT8.error_bound(values)[0, 64:].isinf().all()


def test_int8_reaches_up_to_the_largest_half() -> None:
    values = torch.tensor([[LARGEST_INT8, 1.0]])
    assert torch.isfinite(roundtrip(INT8, values)).all()
    assert roundtrip(INT8, values * 1.001).isnan().all()


def test_int8_rounds_codes_to_even() -> None:
    values = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert roundtrip(INT8, values).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -2.0]


@pytest.fixture(params=["readable", "native"])
def encode_keys(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """Both encoders of keys in int8."""
    if request.param == "readable":
        return encode_int8_keys
    if not native.available():
        pytest.skip("the native kernels were not built")
    return INT8.encode_keys


@st.composite
def keys_and_queries(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    head_dim = draw(st.sampled_from([8, 24, 72]))
    elements = st.floats(-1e3, 1e3, width=32, allow_subnormal=True)
    keys, queries = (
        torch.from_numpy(draw(st_numpy.arrays(np.float32, (2, rows, head_dim), elements=elements)))
        for rows in (2, 6)
    )
    return keys * 2.0 ** draw(st.integers(-40, 12)), queries * 2.0 ** draw(st.integers(-70, 60))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=keys_and_queries())
def test_keys_that_know_their_queries_are_off_by_a_step_at_most(
    rows: tuple[torch.Tensor, torch.Tensor], encode_keys: Callable[..., torch.Tensor]
) -> None:
    keys, queries = rows
    stored = encode_keys(keys, queries)
    head_dim = keys.shape[-1]
    plain = INT8.encode(keys)
    assert torch.equal(stored[..., head_dim:], plain[..., head_dim:]), "the scales are the same"
    moved = stored[..., :head_dim].view(torch.int8).int() - plain[..., :head_dim].view(torch.int8)
    assert int(moved.abs().max()) <= 1
    error = (keys.double() - INT8.decode(stored).double()).abs()
    assert (error <= 2 * INT8.error_bound(keys).double()).all()
    assert (error[keys == 0] == 0).all()


def test_keys_that_know_their_queries_keep_the_product_with_them(
    encode_keys: Callable[..., torch.Tensor],
) -> None:
    generator = torch.Generator().manual_seed(1)
    for head_dim, share in ((64, 0.5), (256, 0.3)):
        keys = torch.randn(200, 2, head_dim, generator=generator)
        queries = torch.randn(200, 6, head_dim, generator=generator)
        together = queries.unflatten(1, (2, 3)).sum(2)

        def errors(stored: torch.Tensor, x: torch.Tensor) -> tuple[float, float]:
            error = INT8.decode(stored) - x
            product = (error * together).sum(-1)  # noqa: B023  # called at once
            return product.square().mean().sqrt().item(), error.square().mean().sqrt().item()

        with_queries, without = (
            errors(encode_keys(keys, queries), keys),
            errors(INT8.encode(keys), keys),
        )
        assert with_queries[0] < share * without[0]
        assert with_queries[1] < 1.1 * without[1]


def test_whole_codes_are_exact_whatever_the_queries(
    encode_keys: Callable[..., torch.Tensor],
) -> None:
    keys = torch.arange(-127.0, 128.0).repeat(2)[:448].view(1, 7, 64)
    keys[..., 0] = 127.0
    queries = torch.randn(1, 14, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(INT8.decode(encode_keys(keys, queries)), keys)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30, float("inf"), float("nan")])
def test_queries_that_say_nothing_change_nothing(
    scale: float, encode_keys: Callable[..., torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(5, 2, 64, generator=generator)
    queries = torch.randn(5, 6, 64, generator=generator) * scale
    assert torch.equal(encode_keys(keys, queries), INT8.encode(keys))


@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), 1e7])
def test_a_group_that_reads_as_nan_leaves_the_others_of_its_key(
    wrong: float, encode_keys: Callable[..., torch.Tensor]
) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, queries = (torch.randn(1, rows, 128, generator=generator) for rows in (1, 3))
    keys[0, 0, 3] = wrong
    decoded = INT8.decode(encode_keys(keys, queries))
    assert decoded[..., :64].isnan().all()
    assert (decoded[..., 64:] - keys[..., 64:]).abs().max() < 2 * 4 / 127


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_keys_in_parts_equal_the_keys_at_once(codec: object) -> None:
    generator = torch.Generator().manual_seed(1)
    keys, queries = (torch.randn(11, rows, 40, generator=generator) for rows in (2, 4))
    parts = [
        codec.encode_keys(*part)  # type: ignore[attr-defined]
        for part in zip(keys.split([1, 4, 6]), queries.split([1, 4, 6]), strict=True)
    ]
    assert torch.equal(torch.cat(parts), codec.encode_keys(keys, queries))  # type: ignore[attr-defined]


def test_bytes_of_a_key_that_knows_its_queries_are_pinned(
    encode_keys: Callable[..., torch.Tensor],
) -> None:
    """The worked example of docs/formats/kv_block.md."""
    keys = torch.tensor([127.0, 0.5, *[0.0, 0.5] * 7])[None, None]
    queries = torch.stack((torch.full((16,), 0.25), torch.full((16,), 0.75)))[None]
    assert bytes(INT8.encode(keys)[0, 0].tolist()).hex() == "7f" + "00" * 15 + "003c"
    knowing = encode_keys(keys, queries)
    assert bytes(knowing[0, 0].tolist()).hex() == "7f" + "00" * 8 + "01000100010001" + "003c"
    assert INT8.decode(knowing).sum() == keys.sum()


def test_byte_layout_is_pinned() -> None:
    """The worked examples of docs/formats/kv_block.md."""
    values = torch.tensor([1.0, -2.5])
    assert bytes(RAW16.encode(values).view(torch.uint8).tolist()).hex() == "803f20c0"
    assert bytes(INT8.encode(values).tolist()).hex() == "33810a25"
    assert bytes(FLOAT32.encode(values).view(torch.uint8).tolist()).hex() == "0000803f000020c0"


def test_the_scales_of_int8_follow_the_codes_one_for_each_64_values() -> None:
    values = torch.zeros(130)
    values[0], values[64], values[129] = 127.0, -254.0, 508.0
    stored = INT8.encode(values)
    assert stored.shape == (136,)
    codes = stored[:130].view(torch.int8)
    assert {i: int(c) for i, c in enumerate(codes) if c} == {0: 127, 64: -127, 129: 127}
    # Halves of 1, 2 and 4.
    assert bytes(stored[130:].tolist()).hex() == "003c00400044"


def test_unknown_codecs_are_refused_with_the_option() -> None:
    with pytest.raises(
        ConfigError,
        match="must be one of raw16, int8, float32, received 'int3'; set --kv-cache-dtype",
    ):
        registry.get("int3")


@pytest.mark.parametrize("name", registry.names())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_that_are_not_finite_are_told_from_others(name, bad) -> None:
    codec = registry.get(name)
    values = torch.randn((5, 3, 70), generator=torch.Generator().manual_seed(1)) * 1e4
    values[1, 2, 69] = values[4, 0, 0] = bad
    expected = torch.isfinite(values).all(dim=-1)
    assert torch.equal(codec.is_finite(codec.encode(values)), expected)
    assert codec.is_finite(codec.encode(torch.zeros(2, 64))).tolist() == [True, True]
