"""``kvist plan``: exact numbers from shapes, configurations and headers."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvist.cli.main import app
from kvist.cli.plan import find_spec
from kvist.errors import ModelLoadError
from kvist.kernels import native
from kvist.model.shapes import NAMED_SHAPES

KEYS = {
    "model", "parameters", "plane", "isa", "weights", "dtype", "kv_cache_dtype", "context", "max_context",
    "concurrency", "block_size", "num_layers", "num_heads",
    "num_kv_heads", "head_dim", "weight_bytes", "kv_bytes_per_token", "kv_bytes_per_request",
    "kv_bytes_per_request_windowed", "kv_bytes_total", "total_bytes", "memory_bytes", "requests_that_fit", "fits",
    "pinnable_bytes", "cache_shares", "kv_precision", "kv_head_dim", "kv_bytes_per_step",
}  # fmt: skip


def plan_json(*arguments: str) -> dict[str, object]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_llama_2_7b_needs_one_gib_a_request():
    plan = plan_json("--model", "llama-2-7b", "--context", "2048", "--concurrency", "8")
    assert plan["kv_bytes_per_request"] == 1_073_741_824
    assert plan["kv_bytes_total"] == 8_589_934_592
    assert plan["kv_bytes_per_token"] == 524_288
    assert set(plan) == KEYS


def test_the_defaults_are_eight_requests_of_2048_tokens():
    plan = plan_json("--model", "llama-2-7b")
    assert (plan["context"], plan["concurrency"]) == (2048, 8)


def test_byte_counts_are_integers():
    plan = plan_json("--model", "llama-2-7b", "--memory-gib", "8.5")
    assert all(type(plan[key]) is int for key in KEYS if "bytes" in key)
    assert plan["requests_that_fit"] == 8
    assert plan["fits"] is True


def test_what_pins_may_hold_is_not_for_requests():
    options = ("--pin-fraction", "0.25", "--cache-share", "a=0.5")
    plan = plan_json("--model", "llama-2-7b", "--memory-gib", "8", *options)
    assert plan["pinnable_bytes"] == 2 * 1024**3
    assert plan["cache_shares"] == {"a": 4 * 1024**3}
    assert plan["requests_that_fit"] == 6
    assert plan["fits"] is False


def test_codec_and_dtype_change_the_bytes():
    small = plan_json("--model", "llama-2-7b", "--dtype", "bfloat16")
    large = plan_json("--model", "llama-2-7b", "--dtype", "float32", "--kv-cache-dtype", "float32")
    assert large["weight_bytes"] == 2 * small["weight_bytes"]
    assert large["kv_bytes_total"] == 2 * small["kv_bytes_total"]


@pytest.mark.skipif(not native.available(), reason=native.why_not())
def test_weights_are_those_of_the_native_kernels_where_there_are_any():
    plans = {
        weights: plan_json("--model", "llama-2-7b", "--memory-gib", "8", "--weights", weights)
        for weights in ("auto", "bf16", "int8", "int4")
    }
    assert plans["auto"] == plans["int8"]
    for weights in ("bf16", "int8", "int4"):
        plan = plans[weights]
        assert (plan["plane"], plan["isa"]) == ("native", native.isa())
        assert (plan["weights"], plan["dtype"]) == (weights, "float32")
    sizes = [plans[weights]["weight_bytes"] for weights in ("bf16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)


def test_a_precision_by_name_is_torch():
    plan = plan_json("--model", "llama-2-7b", "--dtype", "bfloat16")
    assert (plan["plane"], plan["isa"]) == ("torch", None)
    assert (plan["weights"], plan["dtype"]) == ("bfloat16", "bfloat16")


def test_weights_and_a_precision_exclude_each_other():
    arguments = ["plan", "--model", "llama-2-7b", "--weights", "int4", "--dtype", "float32"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "--weights int4" in result.output


@pytest.mark.parametrize(
    "rule", [("--kv-cache-dtype", "int4"), ("--kv-precision", "recent:9=raw16,rest=int8")]
)
def test_what_would_not_start_is_not_planned_either(rule):
    """A plan was made of what ``kvist serve`` refuses."""
    arguments = ["plan", "--model", "llama-2-7b", "--dtype", "float32", *rule]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert f"received {' '.join(rule)} where weights are on torch: --dtype float32" in said


def test_int8_kv_is_counted_with_its_scales():
    plan = plan_json("--model", "llama-2-7b", "--kv-cache-dtype", "int8")
    assert plan["kv_bytes_per_token"] == 32 * 2 * 32 * (128 + 4)


def test_grouped_query_attention_is_counted():
    plan = plan_json("--model", "llama-3-8b")
    assert plan["kv_bytes_per_token"] == 32 * 2 * 8 * 128 * 2


def test_a_context_is_rounded_up_to_blocks():
    one = plan_json("--model", "llama-2-7b", "--context", "1")
    assert one["kv_bytes_per_request"] == 64 * 524_288


def test_table_shows_the_numbers():
    result = CliRunner().invoke(app, ["plan", "--model", "llama-2-7b", "--memory-gib", "8"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "1,073,741,824" in text
    assert "8 such requests" in text


def test_sliding_windows_are_reported_truthfully():
    result = CliRunner().invoke(app, ["plan", "--model", "gemma3-1b", "--context", "8192"])
    assert "this version keeps all positions" in " ".join(result.output.split())


def test_a_model_too_large_for_the_machine_is_said_to_be_one(monkeypatch):
    from kvist.plan import Hardware

    monkeypatch.setattr(
        "kvist.cli.plan.detect_hardware", lambda: Hardware(cpus=1, available_bytes=1)
    )
    result = CliRunner().invoke(app, ["plan", "--model", "llama-2-7b"])
    assert result.exit_code == 0
    assert "weights alone need more memory" in result.output


@pytest.mark.parametrize("name", sorted(NAMED_SHAPES))
def test_every_shape_can_be_planned(name):
    assert plan_json("--model", name)["parameters"] > 0


def test_a_folder_with_a_configuration_alone_is_enough(tmp_path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5, "hidden_act": "silu",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in (tmp_path, tmp_path / "config.json"):
        assert plan_json("--model", str(name))["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2


def test_the_header_of_a_gguf_file_is_enough(smollm2_path):
    plan = plan_json("--model", str(smollm2_path))
    assert plan["kv_bytes_per_token"] == 30 * 2 * 3 * 64 * 2
    assert plan["parameters"] == plan_json("--model", "smollm2-135m")["parameters"]


def test_broken_configuration_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        find_spec(str(tmp_path))


def test_an_unknown_name_lists_the_shapes():
    with pytest.raises(ModelLoadError, match=r"shapes with a name: .*llama-2-7b"):
        find_spec("llama-9-9b")


def test_a_context_beyond_the_models_own_is_called_that():
    result = CliRunner().invoke(app, ["plan", "--model", "llama-2-7b", "--context", "5000"])
    assert "made for 4,096 tokens" in result.stdout
    assert plan_json("--model", "llama-2-7b", "--context", "5000")["max_context"] == 4096


def test_a_name_in_brackets_is_no_markup(tmp_path, monkeypatch):
    folder = tmp_path / "[" / "x]"
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 256}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["plan", "--model", "[/x]"])
    assert result.exit_code == 0
    assert "[/x]" in result.stdout


def test_several_codecs_are_promised_as_their_blocks_will_be(kvist):
    arguments = ("plan", "--model", "llama-2-7b", "--context", "2048", "--concurrency", "8")
    shown = kvist(*arguments, "--kv-cache-dtype", "int4")
    assert shown.exit_code == 0
    text = " ".join(shown.stdout.split())
    assert "in int4" in text
    assert "youngest are in raw16" in text
    document = json.loads(kvist(*arguments, "--kv-cache-dtype", "int4", "--json").stdout)
    assert document["kv_precision"] == "sink=int8,recent:1=raw16,rest=int4"
    assert document["kv_bytes_per_request"] < 1_073_741_824 / 3
    assert document["kv_bytes_per_step"] > 0
    rule = ("--kv-precision", document["kv_precision"])
    same = json.loads(kvist(*arguments, *rule, "--json").stdout)
    assert same["kv_bytes_per_request"] == document["kv_bytes_per_request"]
    assert same["kv_cache_dtype"] == "mixed"


def test_fewer_dimensions_of_a_head_take_less():
    whole = plan_json("--model", "llama-2-7b")
    reduced = plan_json("--model", "llama-2-7b", "--kv-head-dim", "96")
    assert (whole["kv_head_dim"], reduced["kv_head_dim"]) == (128, 96)
    assert reduced["kv_bytes_total"] * 4 == whole["kv_bytes_total"] * 3
    shown = CliRunner().invoke(app, ["plan", "--model", "llama-2-7b", "--kv-head-dim", "96"])
    assert "96 of 128" in " ".join(shown.stdout.split())
