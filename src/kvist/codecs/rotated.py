"""K and V in 4 and 3 bits: ``int4`` and ``int3``, 64 positions at a time.

Responsible for the readable encoder and decoder, their byte layout and error bounds. Knows neither blocks nor where a
model's transforms come from (``kvist.codecs.transforms``).

A *span* is 64 consecutive positions of one layer and KV head. Its record, for b bits and D channels:

    bytes              what
    D                  K: the step of each channel, e5m3 (``kvist.codecs.e5m3``)
    D                  K: the zero point of each channel, two's complement
    8 D b              K: codes, positions as lanes, channels as members (``kvist.codecs.packing``)
    64                 V: the scale of each position, e5m3
    8 D b              V: codes, channels as lanes, positions as members

K holds ``y = (k - mean) diag(balance) R``: component c is ``step[c] * (code + zero[c] / 2)``. V holds
``y = v diag(balance) R``: position t is ``scale[t] * LEVELS[b][code]``. The key of a sequence's first position is far
from all others and looked at by all queries: it is kept in bfloat16 beside the records, as it is (neither turned nor
centred), and its codes are 0.

A span is encoded when it is complete and never changes; positions of a span that is not complete stay in another codec.
docs/formats/kv_block.md says how a kernel reads a record, and has a worked example.

Numerics: float32. An encoder may choose any step, zero point and scale; codes are one of the two grid points around a
value, or the nearest one beyond the grid's ends, so no component is off by more than ``error_bounds`` says. This one
tries neighbouring steps and scales for the least squared error, then rounds channel by channel, each error moving the
channels that follow (``transforms.error_feedback``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvist.codecs import e5m3
from kvist.codecs.packing import pack, packed_bytes, unpack
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS, span_record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvist.codecs.transforms import KVTransforms, RowTransform

    Floats = NDArray[np.float32]
    Bytes = NDArray[np.uint8]

SPAN = SPAN_TOKENS
"""Positions of a span."""

LEVELS: dict[int, Floats] = {
    4: np.array([6, 18, 30, 43, 58, 74, 95, 126], np.float32),
    3: np.array([14, 44, 78, 125], np.float32),
}
"""Per width, what the codes of V stand for: Max's quantiser of a normal distribution times 46 and 58, in whole numbers
that fit 8 bits. Ascending, the negative ones first."""
LEVELS = {bits: np.concatenate((-half[::-1], half)) for bits, half in LEVELS.items()}
_DEVIATION = {4: 46.0, 3: 58.0}
"""What the levels take as the standard deviation."""

_STEP_CANDIDATES = tuple((step, 0) for step in (-1, 0, 1))
"""Tried for the least error: neighbours of the e5m3 number nearest to a channel's range, shifts of its zero point."""
_FAR_CANDIDATES = tuple((step, shift) for step in range(9) for shift in (0, 1))
"""An octave up: where a channel varies less than the zero point can say, some step may be just right."""
_SCALE_CANDIDATES = (-1, 0, 1, 2)
_HALF = np.float32(0.5)


class Span(NamedTuple):
    """The bytes of a span, in all layers and KV heads."""

    records: Bytes
    """(L, K, record_bytes)."""
    first_keys: NDArray[np.uint16] | None
    """(L, K, D) bfloat16 bits: the keys of the sequence's first position. None: the span does not begin a sequence."""


class Rows(NamedTuple):
    """K and V of a span, in all layers and KV heads."""

    keys: Floats
    """(L, K, 64, D)."""
    values: Floats
    """(L, K, 64, D)."""


class _KeyGrid(NamedTuple):
    """Steps and zero points; shapes (N, D)."""

    step: Floats
    zero: Floats


@dataclass(frozen=True, slots=True)
class RotatedCodec:
    """Stores each value in ``bits`` bits beside 16 bits a channel (K) and 8 bits a position (V) for a span."""

    name: str
    """Name in options and on disk."""
    bits: int
    """4 or 3."""

    def record_bytes(self, head_dim: int) -> int:
        """Return the bytes of one layer and KV head; ``head_dim`` is a multiple of 8."""
        return span_record_bytes(self.name, head_dim)

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits stored per K or V value, metadata included, of a span that does not begin a sequence."""
        return 8.0 * self.record_bytes(head_dim) / (2 * SPAN * head_dim)

    def encode(self, rows: Rows, transforms: KVTransforms, *, begins_sequence: bool) -> Span | None:
        """Return the bytes of a span.

        Args:
            rows: K after RoPE, and V.
            transforms: Of the model, for the same layers, heads and dimensions.
            begins_sequence: Whether the first position is the first of its sequence.

        Returns:
            None when there are none: a value is not finite, or beyond what steps and scales reach (about 4e4 times the
            usual size of a calibrated model's values). Such a span stays as it is.
        """
        first_keys = None
        with np.errstate(over="ignore", invalid="ignore"):
            keys = transforms.keys.turn(rows.keys - transforms.mean[:, :, None])
            values = transforms.values.turn(rows.values)
            is_sound = bool(np.isfinite(keys).all() and np.isfinite(values).all())
            if begins_sequence:
                first_keys = to_bfloat16(rows.keys[:, :, 0])
                is_sound &= bool(np.isfinite(from_bfloat16(first_keys)).all())
        if not is_sound:
            return None
        key_bytes = self._encode_keys(keys, transforms.keys, int(begins_sequence))
        value_bytes = self._encode_values(values, transforms.values)
        if key_bytes is None or value_bytes is None:
            return None
        records = np.concatenate((key_bytes, value_bytes), axis=-1)
        return Span(records.reshape(*keys.shape[:2], -1), first_keys)

    def decode(self, span: Span, transforms: KVTransforms) -> Rows:
        """Return what a span stands for."""
        turned = self.decode_turned(span, transforms.mean.shape[-1])
        keys = transforms.keys.turn_back(turned.keys) + transforms.mean[:, :, None]
        if span.first_keys is not None:
            keys[:, :, 0] = from_bfloat16(span.first_keys)
        return Rows(keys, transforms.values.turn_back(turned.values))

    def decode_turned(self, span: Span, head_dim: int) -> Rows:
        """Return the numbers that the records hold: K and V in the turned basis, K without its mean."""
        steps, zeros, key_codes, scales, value_codes = self._split(span.records, head_dim)
        codes = unpack(key_codes, SPAN, head_dim, self.bits).astype(np.float32)
        zero = zeros.view(np.int8).astype(np.float32)[..., None, :]
        keys = e5m3.VALUES[steps][..., None, :] * (codes + zero * _HALF)
        codes = np.swapaxes(unpack(value_codes, head_dim, SPAN, self.bits), -1, -2)
        values = e5m3.VALUES[scales][..., None] * LEVELS[self.bits][codes]
        return Rows(keys, values)

    def error_bounds(self, rows: Rows, span: Span, transforms: KVTransforms) -> Rows:
        """Return bounds, component by component in the turned basis, of what ``decode_turned`` is off by.

        A step of K, or the distance of the two levels of V around the value; beyond the ends of the grid, the distance
        to its end. The first key of a sequence is not in the records: its bound is infinite.
        """
        head_dim = transforms.mean.shape[-1]
        steps, zeros, _, scales, _ = self._split(span.records, head_dim)
        step = e5m3.VALUES[steps][..., None, :]
        zero = zeros.view(np.int8).astype(np.float32)[..., None, :]
        keys = transforms.keys.turn(rows.keys - transforms.mean[:, :, None])
        lowest, highest = step * (zero / 2), step * (2**self.bits - 1 + zero / 2)
        key_bounds = np.maximum(step, np.maximum(lowest - keys, keys - highest))
        if span.first_keys is not None:
            key_bounds[:, :, 0] = np.inf
        scale = e5m3.VALUES[scales][..., None]
        values = transforms.values.turn(rows.values)
        levels = LEVELS[self.bits] * scale[..., None]
        above = np.clip((values[..., None] > levels).sum(axis=-1), 1, 2**self.bits - 1)[..., None]
        upper = np.take_along_axis(levels, above, axis=-1)[..., 0]
        lower = np.take_along_axis(levels, above - 1, axis=-1)[..., 0]
        value_bounds = np.maximum(upper - lower, np.maximum(lower - values, values - upper))
        return Rows(key_bounds, value_bounds)

    def _split(self, records: Bytes, head_dim: int) -> list[Bytes]:
        """Return steps, zero points and codes of K, scales and codes of V: the last axis of records, in parts."""
        codes = packed_bytes(SPAN, head_dim, self.bits)
        ends = np.cumsum([head_dim, head_dim, codes, SPAN])
        return np.split(records, ends, axis=-1)

    def _encode_keys(self, turned: Floats, how: RowTransform, first: int) -> Bytes | None:
        """Return the K part of (L, K, 64, D) turned rows as (L * K, bytes); None where a step is out of reach."""
        head_dim = turned.shape[-1]
        rows = turned.reshape(-1, SPAN, head_dim)
        grid = self._choose_grid(rows[:, first:])
        if grid is None:
            return None
        limit = 2**self.bits - 1
        steps, halves, inverses = (
            _in_order(x, how) for x in (grid.step, grid.zero * _HALF, _inverse(grid.step))
        )

        def choose(index: int, moved: Floats, plain: Floats) -> tuple[Floats, Floats]:
            step, half, inverse = steps[index], halves[index], inverses[index]
            exact = plain * inverse - half
            nearest = np.rint(moved * inverse - half)
            codes = np.clip(nearest, np.floor(exact), np.ceil(exact)).clip(0, limit)
            return codes, step * (codes + half)

        codes = _sweep(rows, how, choose)
        codes[:, :first] = 0
        steps_stored = e5m3.nearest(grid.step).astype(np.uint8)
        zeros_stored = grid.zero.astype(np.int8).view(np.uint8)
        return np.concatenate((steps_stored, zeros_stored, pack(codes, self.bits)), axis=-1)

    def _choose_grid(self, rows: Floats) -> _KeyGrid | None:
        """Return the steps and zero points for (N, positions, D) rows; None where a step is out of reach."""
        limit = 2**self.bits - 1
        lowest, highest = rows.min(axis=1), rows.max(axis=1)
        middle = lowest / 2 + highest / 2
        # Far from 0 the step grows until the zero point reaches the middle.
        for_range = (highest / 2 - lowest / 2) / (limit / 2)
        for_middle = 2 * np.abs(middle) / (127 - limit)
        needed = np.maximum(for_range, for_middle)
        if (needed > e5m3.LARGEST).any():
            return None
        nearest = e5m3.nearest(needed)
        best = _KeyGrid(np.zeros_like(middle), np.zeros_like(middle))
        least = np.full_like(middle, np.inf)
        is_far = (for_middle > for_range).any()
        candidates = _FAR_CANDIDATES if is_far else _STEP_CANDIDATES
        for candidate, shift in candidates:
            step = e5m3.VALUES[np.clip(nearest + candidate, 0, 255)]
            inverse = _inverse(step)
            zero = np.rint(2 * middle * inverse - limit) + shift
            zero = np.where(step > 0, zero, 0).clip(-128, 127)
            codes = np.rint(rows * inverse[:, None] - zero[:, None] / 2).clip(0, limit)
            errors = step[:, None] * (codes + zero[:, None] / 2) - rows
            error = np.square(errors).sum(axis=1)
            is_better = error < least
            least = np.where(is_better, error, least)
            best = _KeyGrid(
                np.where(is_better, step, best.step), np.where(is_better, zero, best.zero)
            )
        return best

    def _encode_values(self, turned: Floats, how: RowTransform) -> Bytes | None:
        """Return the V part of (L, K, 64, D) turned rows as (L * K, bytes); None where a scale is out of reach."""
        head_dim = turned.shape[-1]
        rows = turned.reshape(-1, SPAN, head_dim)
        scales = self._choose_scales(rows)
        if scales is None:
            return None
        inverses, levels = _inverse(scales), LEVELS[self.bits]
        midpoints = (levels[1:] + levels[:-1]) / 2

        def choose(index: int, moved: Floats, plain: Floats) -> tuple[NDArray[np.intp], Floats]:  # noqa: ARG001
            above = np.searchsorted(levels, plain * inverses)
            codes = np.searchsorted(midpoints, moved * inverses).clip(above - 1, above)
            codes = codes.clip(0, len(levels) - 1)
            return codes, scales * levels[codes]

        codes = _sweep(rows, how, choose)
        packed = pack(np.swapaxes(codes, -1, -2), self.bits)
        return np.concatenate((e5m3.nearest(scales).astype(np.uint8), packed), axis=-1)

    def _choose_scales(self, rows: Floats) -> Floats | None:
        """Return the (N, positions) scales for (N, positions, D) rows; None where one is out of reach."""
        levels = LEVELS[self.bits]
        midpoints = (levels[1:] + levels[:-1]) / 2
        largest = np.abs(rows).max(axis=-1)
        if (largest / levels[-1] > e5m3.LARGEST).any():
            return None
        deviation = np.sqrt(np.square(rows).mean(axis=-1))
        nearest = e5m3.nearest(deviation / _DEVIATION[self.bits])
        # Where one component stands out from all others: scales at which the last level reaches it, or half of it.
        reaching = e5m3.nearest(largest / levels[-1])
        candidates = [nearest + step for step in _SCALE_CANDIDATES] + [reaching, reaching - 8]
        best: Floats = np.zeros_like(deviation)
        least = np.full_like(deviation, np.inf)
        for candidate in candidates:
            scale = e5m3.VALUES[np.clip(candidate, 0, 255)]
            codes = np.searchsorted(midpoints, rows * _inverse(scale)[..., None])
            error = np.square(scale[..., None] * levels[codes] - rows).sum(axis=-1)
            best = np.where(error < least, scale, best)
            least = np.minimum(error, least)
        return best


def to_bfloat16(values: Floats) -> NDArray[np.uint16]:
    """Return the bits of values rounded to bfloat16, to nearest, ties to even; what is not finite gives infinity."""
    bits = np.where(np.isfinite(values), values, np.inf).astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype(np.uint16)


def from_bfloat16(bits: NDArray[np.uint16]) -> Floats:
    """Return the float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _sweep(
    rows: Floats,
    how: RowTransform,
    choose: Callable[[int, Floats, Floats], tuple[NDArray[Any], Floats]],
) -> Bytes:
    """Return the codes of (N, positions, D) rows, chosen channel by channel.

    Args:
        rows: What is to be coded.
        how: The order of the channels, and what the error of one does to the next.
        choose: From how many channels came before, the channel with their errors fed back and the channel as it is,
            both (N, positions): its codes and what they stand for.
    """
    plain = _in_order(rows, how)
    moved = plain.copy()
    codes = np.empty(plain.shape, np.uint8)
    feedback = None if how.feedback is None else _pairs(how.feedback)
    for index in range(len(plain)):
        codes[index], stored = choose(index, moved[index], plain[index])
        if feedback is not None:
            error = moved[index] - stored
            moved[index + 1 :] -= feedback[index, index + 1 :, :, None] * error
    result = np.empty(rows.shape, np.uint8)
    order = how.order.reshape(-1, 1, rows.shape[-1]).astype(np.intp)
    np.put_along_axis(result, np.broadcast_to(order, rows.shape), np.moveaxis(codes, 0, -1), -1)
    return result


def _in_order(channels: Floats, how: RowTransform) -> Floats:
    """Return (N, D) or (N, positions, D) as (D, N, 1 or positions): what a step touches lies together."""
    rows = channels if channels.ndim == 3 else channels[:, None]
    order = how.order.reshape(-1, 1, rows.shape[-1]).astype(np.intp)
    return np.ascontiguousarray(np.moveaxis(np.take_along_axis(rows, order, axis=-1), -1, 0))


def _pairs(feedback: Floats) -> Floats:
    """Return (L, K, D, D) as (D, D, N)."""
    head_dim = feedback.shape[-1]
    return np.ascontiguousarray(np.moveaxis(feedback.reshape(-1, head_dim, head_dim), 0, -1))


def _inverse(x: Floats) -> Floats:
    """Return 1 / x, and 0 for 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)


INT4, INT3 = (RotatedCodec(name, SPAN_CODEC_BITS[name]) for name in ("int4", "int3"))
