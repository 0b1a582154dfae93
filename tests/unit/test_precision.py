"""The rule that says in which codec a block is kept."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.precision import PRESETS, KVPrecision


def test_rule_is_read_and_written_the_same() -> None:
    text = "sink=raw16,recent:256=raw16,recent:4096=int8,rest=int4"
    rule = KVPrecision.parse(text)
    windows = ((256, "raw16"), (4096, "int8"))
    assert rule == KVPrecision(sink="raw16", windows=windows, rest="int4")
    assert str(rule) == text
    assert rule.codecs == ("raw16", "int8", "int4")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_rules(name: str) -> None:
    rule = KVPrecision.parse(PRESETS[name])
    assert str(rule) == PRESETS[name]
    assert rule.rest == {"mixed": "int4"}.get(name, name)


def test_sink_is_as_all_others_when_left_out() -> None:
    assert KVPrecision.parse("recent:64=raw16, rest=int8").sink == "int8"


@pytest.mark.parametrize("rest", ["int4", "int3"])
def test_sink_is_never_in_a_codec_that_its_first_key_would_spoil(rest: str) -> None:
    rule = f"recent:64=raw16,rest={rest}"
    assert KVPrecision.parse(rule).sink == "int8"
    assert KVPrecision.parse(f"sink=raw16,{rule}").sink == "raw16"
    for text in (f"sink={rest},{rule}", f"sink={rest},recent:64=raw16,rest=int8"):
        with pytest.raises(ConfigError, match=r"the sink.*raw16 or int8 in --kv-precision"):
            KVPrecision.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rest=int8",
        "recent:256=raw16",
        "recent:256=int8,rest=int8",
        "recent:256=raw16,recent:128=raw16,rest=int8",
        "recent:0=raw16,rest=int8",
        "recent:-4=raw16,rest=int8",
        "recent:1e3=raw16,rest=int8",
        "recent:٢٥=raw16,rest=int8",
        "recent:256=raw16,rest=int7",
        "recent:256=raw16,rest=",
        "recent:256=raw16,rest=int8,rest=raw16",
        "sink=raw16,sink=raw16,recent:256=raw16,rest=int8",
        "recent:256=raw16,rest=int8,old=int8",
        "recent:64=raw16,recent:128=int8,rest=raw16",
        "recent:64=raw16,recent:128=int3,rest=int4",
        "recent:64=int4,rest=int4",
        "recent:99999999999=raw16,rest=int8",
        "sink=float32,recent:256=raw16,rest=int8",
    ],
)
def test_what_is_no_rule_names_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-precision"):
        KVPrecision.parse(text)


def test_layers_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"one codec in all layers, received 'layers:0-1=int8'"):
        KVPrecision.parse("recent:64=raw16,layers:0-1=int8,rest=int4")


@pytest.mark.parametrize(
    ("index", "num_tokens", "codec"),
    [
        (0, 0, "raw16"),
        (0, 4, "raw16"),
        (0, 10, "int8"),
        (0, 100, "int8"),
        (1, 13, "raw16"),
        (1, 14, "int8"),
        (1, 21, "int8"),
        (1, 22, "int4"),
        (5, 22, "raw16"),
    ],
)
def test_a_block_is_in_a_window_with_its_last_token(
    index: int, num_tokens: int, codec: str
) -> None:
    rule = KVPrecision.parse("sink=int8,recent:6=raw16,recent:14=int8,rest=int4")
    assert rule.codec_at(index, num_tokens, 4) == codec
