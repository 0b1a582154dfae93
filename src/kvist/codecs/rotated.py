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
``y = v diag(balance) R``: position t is ``scale[t] * LEVELS[b][code]``.

A block is encoded when it is complete and never changes; positions of one that is not complete stay in another codec.
So does the block that begins a sequence: the key of the first position is far from all others and looked at by all
queries. docs/formats/kv_block.md says how a kernel reads a record, and has a worked example.

Numerics: float32. An encoder may choose any step, zero point and scale; codes are one of the two grid points around a
value, or the nearest one beyond the grid's ends, so no component is off by more than ``error_bounds`` says. This one
takes the step nearest to what a channel's range needs, and tries neighbouring scales for the least squared error.
Values are rounded to the nearest level; keys channel by channel, each error moving the channels that follow, where the
transforms say how (``KVTransforms.feedback``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvist.codecs import e5m3
from kvist.codecs.packing import pack, packed_bytes, unpack
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS, span_record_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvist.codecs.transforms import KVTransforms

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

_FAR_CANDIDATES = tuple((step, shift) for step in range(9) for shift in (0, 1))
"""Tried for the least error where a channel varies less than the zero point can say: steps up to an octave above the
nearest one, shifts of the zero point. Some step may be just right."""
_SCALE_CANDIDATES = (-1, 0, 1, 2)
_HALF = np.float32(0.5)


class Encoded(NamedTuple):
    """The bytes of a block."""

    records: Bytes
    """(L, P / 64, K, record_bytes)."""
    num_held: int
    """Turned components that were beyond ``reach_of_keys`` or ``reach_of_values``."""


class Rows(NamedTuple):
    """K and V of a block, in all layers and KV heads; P positions, a multiple of 64."""

    keys: Floats
    """(L, K, P, D)."""
    values: Floats
    """(L, K, P, D)."""


class _KeyGrid(NamedTuple):
    """Steps and zero points; shapes (N, D)."""

    step: Floats
    zero: Floats


class _Held(NamedTuple):
    """(N, positions, D) turned rows as they can be said."""

    rows: Floats
    """0 where a component is no number."""
    num_held: int
    """Finite components that were beyond reach."""


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
        """Return the bits stored per K or V value, metadata included."""
        return 8.0 * self.record_bytes(head_dim) / (2 * SPAN * head_dim)

    @property
    def reach_of_keys(self) -> float:
        """What a turned component of K is held within: the largest step, half of the codes on either side of 0."""
        return float(e5m3.LARGEST * ((1 << self.bits) - 1) / 2)

    @property
    def reach_of_values(self) -> float:
        """What a turned component of V is held within: the largest scale times the last level."""
        return e5m3.LARGEST * float(LEVELS[self.bits][-1])

    def encode(self, rows: Rows, transforms: KVTransforms, start: int = 0) -> Encoded:
        """Return the bytes of a block.

        A channel of K over a span, or a position of V, with a component that is not finite reads as NaN. As rows are
        turned first, a key that is not finite makes NaN of all keys of its span.

        Args:
            rows: K after RoPE, and V.
            transforms: Of the model, for the same layers, heads and dimensions.
            start: Position of the first row in its sequence. Makes a difference where transforms have a key metric, and
                none to what may be read.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            keys = _spans(transforms.keys.turn(rows.keys - transforms.mean[:, :, None]))
            values = _spans(transforms.values.turn(rows.values))
        records, num_held = [], 0
        for span in range(keys.shape[2]):
            feedback = transforms.feedback(start + span * SPAN)
            key_bytes, keys_held = self._encode_keys(keys[:, :, span], feedback)
            value_bytes, values_held = self._encode_values(values[:, :, span])
            record = np.concatenate((key_bytes, value_bytes), axis=-1)
            records.append(record.reshape(*keys.shape[:2], -1))
            num_held += keys_held + values_held
        return Encoded(np.stack(records, axis=1), num_held)

    def decode(self, records: Bytes, transforms: KVTransforms) -> Rows:
        """Return what the (L, P / 64, K, record_bytes) records of a block stand for."""
        turned = self.decode_turned(records, transforms.mean.shape[-1])
        keys = transforms.keys.turn_back(turned.keys) + transforms.mean[:, :, None]
        return Rows(keys, transforms.values.turn_back(turned.values))

    def decode_turned(self, records: Bytes, head_dim: int) -> Rows:
        """Return the numbers that the records hold: K and V in the turned basis, K without its mean."""
        steps, zeros, key_codes, scales, value_codes = self._split(records, head_dim)
        codes = unpack(key_codes, SPAN, head_dim, self.bits).astype(np.float32)
        zero = zeros.view(np.int8).astype(np.float32)[..., None, :]
        keys = e5m3.VALUES[steps][..., None, :] * (codes + zero * _HALF)
        codes = np.swapaxes(unpack(value_codes, head_dim, SPAN, self.bits), -1, -2)
        values = e5m3.VALUES[scales][..., None] * LEVELS[self.bits][codes]
        return Rows(_positions(keys), _positions(values))

    def error_bounds(self, rows: Rows, records: Bytes, transforms: KVTransforms) -> Rows:
        """Return bounds, component by component in the turned basis, of what ``decode_turned`` is off by.

        A step of K, or the distance of the two levels of V around the value; beyond the ends of the grid, the distance
        to its end. Beyond reach, by as much more. NaN where the records say so.
        """
        head_dim = transforms.mean.shape[-1]
        steps, zeros, _, scales, _ = self._split(records, head_dim)
        step = e5m3.VALUES[steps][..., None, :]
        zero = zeros.view(np.int8).astype(np.float32)[..., None, :]
        turned = _by_record(transforms.keys.turn(rows.keys - transforms.mean[:, :, None]))
        keys = turned.clip(-self.reach_of_keys, self.reach_of_keys)
        lowest, highest = step * (zero / 2), step * (2**self.bits - 1 + zero / 2)
        key_bounds = np.maximum(step, np.maximum(lowest - keys, keys - highest))
        key_bounds += np.abs(turned - keys)
        scale = e5m3.VALUES[scales][..., None]
        values = _by_record(transforms.values.turn(rows.values))
        levels = LEVELS[self.bits] * scale[..., None]
        above = np.clip((values[..., None] > levels).sum(axis=-1), 1, 2**self.bits - 1)[..., None]
        upper = np.take_along_axis(levels, above, axis=-1)[..., 0]
        lower = np.take_along_axis(levels, above - 1, axis=-1)[..., 0]
        value_bounds = np.maximum(upper - lower, np.maximum(lower - values, values - upper))
        return Rows(_positions(key_bounds), _positions(value_bounds))

    def _split(self, records: Bytes, head_dim: int) -> list[Bytes]:
        """Return steps, zero points and codes of K, scales and codes of V: the last axis of records, in parts."""
        codes = packed_bytes(SPAN, head_dim, self.bits)
        ends = np.cumsum([head_dim, head_dim, codes, SPAN])
        return np.split(records, ends, axis=-1)

    def _encode_keys(self, turned: Floats, feedback: Floats | None) -> tuple[Bytes, int]:
        """Return the K part of (L, K, 64, D) turned rows as (L * K, bytes), and how many components it holds."""
        rows = turned.reshape(-1, SPAN, turned.shape[-1])
        is_sound = np.asarray(np.isfinite(rows).all(axis=1))
        rows, num_held = _held(rows, is_sound[:, None], self.reach_of_keys)
        grid = self._choose_grid(rows)
        codes = self._round_keys(rows, grid, feedback)
        steps_stored = np.where(is_sound, e5m3.nearest(grid.step), e5m3.NAN).astype(np.uint8)
        zeros_stored = grid.zero.astype(np.int8).view(np.uint8)
        packed = np.concatenate((steps_stored, zeros_stored, pack(codes, self.bits)), axis=-1)
        return packed, num_held

    def _round_keys(self, rows: Floats, grid: _KeyGrid, feedback: Floats | None) -> Bytes:
        """Return the codes of (N, positions, D) rows."""
        limit = 2**self.bits - 1
        step, half = grid.step[:, None], grid.zero[:, None] * _HALF
        exact = rows * _inverse(step) - half
        if feedback is None:
            return np.rint(exact).clip(0, limit).astype(np.uint8)
        lowest, highest = np.floor(exact).clip(0, limit), np.ceil(exact).clip(0, limit)
        feedback = feedback.reshape(-1, *feedback.shape[-2:])
        # Channels first: what one of them moves lies together.
        rows, exact, lowest, highest = (
            np.ascontiguousarray(np.moveaxis(x, -1, 0)) for x in (rows, exact, lowest, highest)
        )
        step, half, inverse = (np.moveaxis(x, -1, 0) for x in (step, half, _inverse(step)))
        shares = np.ascontiguousarray(np.moveaxis(feedback, 0, -1))[..., None]  # (D, D, N, 1)
        moved, codes = rows.copy(), np.empty_like(rows)
        for channel in range(len(rows)):
            nearest = np.rint(moved[channel] * inverse[channel] - half[channel])
            codes[channel] = nearest.clip(lowest[channel], highest[channel])
            error = step[channel] * (codes[channel] + half[channel]) - rows[channel]
            moved[channel + 1 :] -= shares[channel, channel + 1 :] * error
        return np.moveaxis(codes, 0, -1).astype(np.uint8)

    def _choose_grid(self, rows: Floats) -> _KeyGrid:
        """Return the steps and zero points for (N, positions, D) rows."""
        limit = 2**self.bits - 1
        lowest, highest = rows.min(axis=1), rows.max(axis=1)
        middle = lowest / 2 + highest / 2
        # Far from 0 the step grows until the zero point reaches the middle.
        for_range = (highest / 2 - lowest / 2) / (limit / 2)
        for_middle = 2 * np.abs(middle) / (127 - limit)
        needed = np.maximum(for_range, for_middle)
        nearest = e5m3.nearest(needed)
        best = _KeyGrid(np.zeros_like(middle), np.zeros_like(middle))
        least = np.full_like(middle, np.inf)
        # A smaller step for the sake of most keys would clip those at the ends, which get much of the attention.
        is_far = for_middle > for_range
        for candidate, shift in _FAR_CANDIDATES if is_far.any() else _FAR_CANDIDATES[:1]:
            step = e5m3.VALUES[np.clip(nearest + candidate, 0, e5m3.NAN - 1)]
            inverse = _inverse(step)
            zero = np.rint(2 * middle * inverse - limit) + shift
            zero = np.where(step > 0, zero, 0).clip(-128, 127)
            codes = np.rint(rows * inverse[:, None] - zero[:, None] / 2).clip(0, limit)
            errors = step[:, None] * (codes + zero[:, None] / 2) - rows
            error = np.square(errors).sum(axis=1)
            is_better = (error < least) & (is_far | (least == np.inf))
            least = np.where(is_better, error, least)
            best = _KeyGrid(
                np.where(is_better, step, best.step), np.where(is_better, zero, best.zero)
            )
        return best

    def _encode_values(self, turned: Floats) -> tuple[Bytes, int]:
        """Return the V part of (L, K, 64, D) turned rows as (L * K, bytes), and how many components it holds."""
        rows = turned.reshape(-1, SPAN, turned.shape[-1])
        is_sound = np.asarray(np.isfinite(rows).all(axis=-1))
        rows, num_held = _held(rows, is_sound[..., None], self.reach_of_values)
        scales, levels = self._choose_scales(rows), LEVELS[self.bits]
        midpoints = (levels[1:] + levels[:-1]) / 2
        codes = np.searchsorted(midpoints, rows * _inverse(scales)[..., None])
        codes = np.where(is_sound[..., None], codes, 0).astype(np.uint8)
        packed = pack(np.swapaxes(codes, -1, -2), self.bits)
        stored = np.where(is_sound, e5m3.nearest(scales), e5m3.NAN).astype(np.uint8)
        return np.concatenate((stored, packed), axis=-1), num_held

    def _choose_scales(self, rows: Floats) -> Floats:
        """Return the (N, positions) scales for (N, positions, D) rows."""
        levels = LEVELS[self.bits]
        midpoints = (levels[1:] + levels[:-1]) / 2
        largest = np.abs(rows).max(axis=-1)
        deviation = np.sqrt(np.square(rows).mean(axis=-1))
        nearest = e5m3.nearest(deviation / _DEVIATION[self.bits])
        # Where one component stands out from all others: scales at which the last level reaches it, or half of it.
        reaching = e5m3.nearest(largest / levels[-1])
        candidates = [nearest + step for step in _SCALE_CANDIDATES] + [reaching, reaching - 8]
        best: Floats = np.zeros_like(deviation)
        least = np.full_like(deviation, np.inf)
        for candidate in candidates:
            scale = e5m3.VALUES[np.clip(candidate, 0, e5m3.NAN - 1)]
            codes = np.searchsorted(midpoints, rows * _inverse(scale)[..., None])
            error = np.square(scale[..., None] * levels[codes] - rows).sum(axis=-1)
            best = np.where(error < least, scale, best)
            least = np.minimum(error, least)
        return best


def _held(rows: Floats, is_sound: NDArray[np.bool_], reach: float) -> _Held:
    rows = np.where(is_sound, rows, np.float32(0))
    return _Held(rows.clip(-reach, reach), int((np.abs(rows) > reach).sum()))


def _spans(rows: Floats) -> Floats:
    """Return (L, K, P, D) as (L, K, P / 64, 64, D)."""
    return rows.reshape(*rows.shape[:2], -1, SPAN, rows.shape[-1])


def _by_record(rows: Floats) -> Floats:
    """Return (L, K, P, D) as (L, P / 64, K, 64, D), the order of records."""
    return np.swapaxes(_spans(rows), 1, 2)


def _positions(spans: Floats) -> Floats:
    """Return (L, P / 64, K, 64, D) as (L, K, P, D)."""
    rows = np.swapaxes(spans, 1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _inverse(x: Floats) -> Floats:
    """Return 1 / x, and 0 for 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)


INT4, INT3 = (RotatedCodec(name, SPAN_CODEC_BITS[name]) for name in ("int4", "int3"))
