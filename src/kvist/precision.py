"""In which codec a block is kept, by its age: what ``--kv-precision`` says, and what a block of each codec takes.

Responsible for the rule and its written form. Knows neither blocks nor bytes of K and V: the cache manager applies the
rule, the arena encodes.

Invariants:
    1. A rule never makes a block larger as it grows older: its codecs are in the order of ``LADDER``.
    2. New tokens are written in the first codec of the ladder: the youngest window is kept in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvist.errors import ConfigError
from kvist.spec import SPAN_CODEC_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping

LADDER = ("raw16", "int8", "int4", "int3")
"""Codecs that a block can pass through, from the largest to the smallest."""
SINK = "int8"
"""Of the first block of a sequence where others come to be in a codec of whole spans, unless the rule says otherwise:
those codecs cannot take it, since its first key is unlike any other."""
PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "int4": f"sink={SINK},recent:1=raw16,rest=int4",
        "int3": f"sink={SINK},recent:1=raw16,rest=int3",
        "mixed": "sink=raw16,recent:256=raw16,recent:4096=int8,rest=int4",
    }
)
"""What ``--kv-cache-dtype`` stands for where it means more than one codec. ``recent:1`` is the block being written."""

_WINDOW = re.compile(r"recent:([0-9]{1,9})")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPrecision:
    """Codecs by age. The age of a block is how many tokens of a sequence come after its last one."""

    sink: str
    """Of the first block of a sequence, whatever its age: queries look at the first tokens more than at any others."""
    windows: tuple[tuple[int, str], ...]
    """(tokens, codec), ascending: a block that has a token among the last so many of a running sequence."""
    rest: str
    """Of older blocks."""

    def __post_init__(self) -> None:
        lengths = [num_tokens for num_tokens, _ in self.windows]
        codecs = [codec for _, codec in self.windows] + [self.rest]
        unknown = sorted({self.sink, *codecs} - set(LADDER))
        if unknown:
            raise ConfigError(
                f"[precision] codecs that blocks can change to are {', '.join(LADDER)}, received {unknown[0]!r}; "
                "change --kv-precision"
            )
        if not lengths or lengths != sorted(set(lengths)) or lengths[0] < 1:
            raise ConfigError(
                f"[precision] expected one window or more, each longer than the one before, received {self}; "
                "change --kv-precision"
            )
        if self.sink in SPAN_CODEC_BITS:
            raise ConfigError(
                f"[precision] the sink, a sequence's first block, cannot be {self.sink}, whose scales its first key "
                f"would spoil, received {self}; change it to raw16 or int8 in --kv-precision"
            )
        levels = [LADDER.index(codec) for codec in codecs]
        if levels[0] != 0 or levels != sorted(levels):
            raise ConfigError(
                f"[precision] the youngest window must be {LADDER[0]}, in which tokens are written, and no window may "
                f"be kept in a larger codec than a younger one, received {self}; change --kv-precision"
            )

    @classmethod
    def parse(cls, text: str) -> KVPrecision:
        """Read ``sink=CODEC,recent:TOKENS=CODEC,...,rest=CODEC``.

        ``sink`` may be left out: it is then as the rest, or ``SINK`` where that is a codec that cannot be a sink.

        Raises:
            ConfigError: It is not written like that, or the rule is not one.
        """
        sink: str | None = None
        rest: str | None = None
        windows: list[tuple[int, str]] = []
        for part in text.replace(" ", "").split(","):
            name, _, codec = part.partition("=")
            window = _WINDOW.fullmatch(name)
            if window is not None:
                windows.append((int(window[1]), codec))
            elif name == "sink" and sink is None:
                sink = codec
            elif name == "rest" and rest is None:
                rest = codec
            elif name.startswith("layers"):
                raise ConfigError(
                    f"[precision] a block has one codec in all layers, received {part!r} in {text!r}; leave it out of "
                    "--kv-precision (kvist tune --layers measures what it would gain)"
                )
            else:
                raise ConfigError(
                    f"[precision] expected 'sink=CODEC,recent:TOKENS=CODEC,...,rest=CODEC', received {part!r} in "
                    f"{text!r}; change --kv-precision"
                )
        if rest is None:
            raise ConfigError(
                f"[precision] expected a codec for the rest, as in {PRESETS['int4']!r}, received {text!r}; change "
                "--kv-precision"
            )
        if sink is None:
            sink = SINK if rest in SPAN_CODEC_BITS else rest
        return cls(sink=sink, windows=tuple(windows), rest=rest)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codecs that a block may come to be in, from the largest to the smallest."""
        used = {self.sink, self.rest, *(codec for _, codec in self.windows)}
        return tuple(codec for codec in LADDER if codec in used)

    @property
    def has_spans(self) -> bool:
        """Whether blocks may come to be in a codec that encodes whole spans."""
        return not SPAN_CODEC_BITS.keys().isdisjoint(self.codecs)

    def codec_at(self, index: int, num_tokens: int, block_size: int) -> str:
        """Return the codec of a block that one sequence alone holds, between two steps.

        Args:
            index: Of the block in the sequence.
            num_tokens: Tokens of the sequence that have been computed.
            block_size: Tokens per block.
        """
        firsts = [max(0, num_tokens - length) // block_size for length, _ in self.windows]
        if index == 0:
            return self.sink if firsts[0] else LADDER[0]
        for first, (_, codec) in zip(firsts, self.windows, strict=True):
            if index >= first:
                return codec
        return self.rest

    def __str__(self) -> str:
        windows = [f"recent:{num_tokens}={codec}" for num_tokens, codec in self.windows]
        return ",".join([f"sink={self.sink}", *windows, f"rest={self.rest}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class KVBudget:
    """Memory for blocks of several codecs, and the rule by which they change."""

    num_bytes: int
    """What all blocks together may take."""
    block_bytes: Mapping[str, int]
    """What one block takes of that, by codec; those of ``precision.codecs`` at least."""
    precision: KVPrecision
    demote_before_evict: bool = True
    """Whether cached blocks that nobody uses are made smaller before any is evicted."""
    max_chunk: int = 1 << 30
    """Positions of one sequence that are computed before its blocks are made smaller: those of a step at most. They
    are written in the first codec, so memory for them is promised in that one."""
    max_demotions: int | None = None
    """Blocks that a step makes smaller at most, unless its memory needs more, >= 1; None: all, at once."""
