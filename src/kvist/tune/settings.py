"""What is measured, by the name it goes by: a codec, a rule by age, or a codec for each layer.

Responsible for what a name stands for. Knows neither K and V nor what is measured of them.

    int8                                            all blocks, from their first token on
    int4, int3, mixed                               the rule that --kv-cache-dtype stands for
    sink=int8,recent:512=raw16,rest=int4            a rule, as --kv-precision
    layers:int8*2,int4*28                           complete blocks, in layers 0 and 1 and in the others
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from kvist.precision import LADDER, PRESETS, SINK, KVPrecision
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_LAYERS = "layers:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a name stands for."""

    name: str
    rule: KVPrecision | None = None
    """None: all blocks are in the same codecs."""
    layers: tuple[str, ...] = ()
    """Codec of each layer; empty: one for all."""

    @classmethod
    def parse(cls, name: str) -> Setting:
        """Return what a name stands for; a codec where it is none of the other forms.

        Raises:
            ConfigError: A rule is none.
        """
        if name.startswith(_LAYERS):
            runs = [part.split("*") for part in name.removeprefix(_LAYERS).split(",")]
            layers = [codec for codec, count in runs for _ in range(int(count))]
            return cls(name=name, layers=tuple(layers))
        text = PRESETS.get(name, name)
        return cls(name=name, rule=KVPrecision.parse(text) if "=" in text else None)

    @property
    def codecs(self) -> tuple[str, ...]:
        """Codecs that blocks, or layers of them, come to be in."""
        if self.rule is not None:
            return self.rule.codecs
        return tuple(dict.fromkeys(self.layers)) or (self.name,)

    @property
    def needs_transforms(self) -> bool:
        """Whether any of them knows something of the model."""
        return not SPAN_CODEC_BITS.keys().isdisjoint(self.codecs)

    def changes(self, index: int) -> Iterator[tuple[int, str]]:
        """Return which blocks change, and what to, when the block of that index is complete.

        By a rule they are as the last token of the next block will find them, so a window that is no multiple of a
        block is taken to be shorter by a part of one, except for that token. Without a rule a block goes to the setting
        itself at once, and stays so.
        """
        if self.rule is None:
            yield index, self.name
            return
        for block in range(index + 1):
            before, after = (
                self.rule.codec_at(block, (at + 1) * SPAN_TOKENS - 1, SPAN_TOKENS)
                for at in (index, index + 1)
            )
            if before != after:
                yield block, after


def of_layers(codecs: Sequence[str]) -> str:
    """Return the name of a setting with a codec for each layer."""
    runs = [f"{codec}*{len(list(run))}" for codec, run in groupby(codecs)]
    return _LAYERS + ",".join(runs)


def sink_of(codec: str) -> str:
    """Return what the block that begins a sequence is in where the others come to be in a codec."""
    return SINK if codec in SPAN_CODEC_BITS else codec


def single_layer(layer: int, codec: str, num_layers: int) -> str:
    """Return the name of the setting with one layer in a codec and all others as they are."""
    codecs = [LADDER[0]] * num_layers
    codecs[layer] = codec
    return of_layers(codecs)
