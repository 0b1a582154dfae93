"""Names of settings, and when their blocks change."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.precision import PRESETS, KVPrecision
from kvist.tune.settings import Setting, of_layers, single_layer, sink_of

RULE = "sink=raw16,recent:256=raw16,recent:512=int8,rest=int4"


def test_a_name_stands_for_a_codec_a_rule_or_layers() -> None:
    plain = Setting.parse("int8")
    assert (plain.rule, plain.layers, plain.codecs) == (None, (), ("int8",))
    assert not plain.needs_transforms
    for name, text in PRESETS.items():
        assert Setting.parse(name).rule == KVPrecision.parse(text)
        assert Setting.parse(name).name == name
    assert Setting.parse(RULE).codecs == ("raw16", "int8", "int4")
    assert Setting.parse(RULE).needs_transforms
    layers = Setting.parse(of_layers(["int8", "int8", "int3"]))
    assert layers.name == "layers:int8*2,int3*1"
    assert layers.layers == ("int8", "int8", "int3")
    assert layers.codecs == ("int8", "int3")
    assert layers.needs_transforms
    with pytest.raises(ConfigError, match="--kv-precision"):
        Setting.parse("recent:64=raw16")


@pytest.mark.parametrize(
    ("layer", "name"), [(0, "layers:int4*1,raw16*2"), (2, "layers:raw16*2,int4*1")]
)
def test_a_layer_alone_leaves_the_others(layer: int, name: str) -> None:
    assert single_layer(layer, "int4", 3) == name


def history(name: str, num_blocks: int) -> list[list[tuple[int, str]]]:
    setting = Setting.parse(name)
    return [list(setting.changes(index)) for index in range(num_blocks)]


def test_without_a_rule_a_block_changes_when_it_is_complete() -> None:
    assert history("int8", 2) == [[(0, "int8")], [(1, "int8")]]
    assert history("layers:int4*2", 2) == [[(0, "layers:int4*2")], [(1, "layers:int4*2")]]


def test_the_window_of_one_token_is_the_block_being_written() -> None:
    assert history("int4", 3) == [[(0, "int8")], [(1, "int4")], [(2, "int4")]]


def test_blocks_pass_through_the_windows() -> None:
    """256 tokens before a token of block 5 begin within block 1, 512 before one of block 9 likewise."""
    changes = history(RULE, 10)
    assert changes[:5] == [[], [], [], [], []]
    assert changes[5] == [(1, "int8")]
    assert changes[8] == [(4, "int8")]
    assert changes[9] == [(1, "int4"), (5, "int8")]


def test_first_blocks_go_where_a_codec_of_spans_cannot() -> None:
    assert [sink_of(codec) for codec in ("raw16", "int8", "int4", "int3")] == [
        "raw16", "int8", "int8", "int8"
    ]  # fmt: skip
