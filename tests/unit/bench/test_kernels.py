"""Bounds, refusals and cases of ``kvist bench kernels``, with kernels that are not real."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvist.bench import kernels
from kvist.bench.kernels import (
    AttentionSizes,
    Case,
    Ceilings,
    KernelOptions,
    StepKind,
    Weights,
    check_attention,
    check_linear,
    decode_kv,
    linear_cases,
    make_step,
    run_case,
)
from kvist.cli.main import app
from kvist.errors import BenchError
from kvist.model.shapes import named_shape

SIZES = AttentionSizes(num_heads=4, num_kv_heads=2, head_dim=32)


class FakeNative:
    """The extension in numpy; ``error`` is added to every result."""

    def __init__(self, error=0.0):
        self.error = error
        self.asked = []

    # An extension's names.
    class Pool:
        def __init__(self, num_threads):
            self.num_threads = num_threads

    class PackedLinear:
        def __init__(self, weights, kind, group, gate, pool):
            self.weights, self.kind = weights, kind
            self.num_outputs, self.num_inputs = weights.shape
            self.nbytes = weights.size
            self.activation_limit = 0 if kind == "bf16" else 127

        @classmethod
        def from_data(cls, num_outputs, num_inputs, kind, group, gate, data):
            return cls(data, kind, group, gate, None)

        def data(self):
            return self.weights

        def unpack(self):
            return self.weights

    def isa(self):
        return "fake"

    def measure_ceiling(self, pool, what, num_bytes, seconds):
        self.asked.append((what, num_bytes))
        return {"read": 1e9, "int8_madd": 4e9}.get(what, 8e9)

    def linear(self, pool, weights, x):
        return x @ weights.weights.T + self.error

    def time_linear(self, pool, matrices, rows, repeats):
        return 1e-3

    def encode_kv(self, codec, x):
        flat = x.reshape(-1, x.shape[-1])
        if codec == "raw16":
            rows = (flat.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        else:
            scale = (np.abs(flat).max(axis=1, keepdims=True) / 127).astype(np.float16)
            codes = np.clip(np.rint(flat / scale.astype(np.float32)), -127, 127).astype(np.int8)
            rows = np.concatenate([codes.view(np.uint8), scale.view(np.uint8)], axis=1)
        return rows.reshape(*x.shape[:2], -1)

    def attention(self, pool, queries, arena, *, layer, codec, num_layers, num_kv_heads, block_size, query_starts,
                  context_lens, table_starts, block_ids, scale):  # fmt: skip
        """Attend key by key, straight from the arena."""
        head_dim = queries.shape[2]
        blocks = arena.reshape(len(arena), num_layers, 2, num_kv_heads, block_size, -1)[:, layer]
        out = np.zeros_like(queries)
        for sequence, context_len in enumerate(context_lens):
            first, last = query_starts[sequence : sequence + 2]
            table = block_ids[table_starts[sequence] : table_starts[sequence + 1]]
            for row in range(first, last):
                num_keys = context_len - (last - 1 - row)
                for head in range(queries.shape[1]):
                    group = head // (queries.shape[1] // num_kv_heads)
                    held = blocks[table][:, :, group]
                    keys, values = (
                        decode_kv(codec, held[:, i].reshape(-1, held.shape[-1]), head_dim)[
                            :num_keys
                        ]
                        for i in (0, 1)
                    )
                    weights = np.exp(keys @ queries[row, head] * scale)
                    out[row, head] = weights @ values / weights.sum()
        return out + self.error

    def time_attention(self, pool, queries, arena, *, repetitions, **_):
        return [1e-3] * repetitions


def make_case(**changes):
    values = {
        "name": "a case",
        "kernel": "linear",
        "num_bytes": 1000,
        "num_operations": 1000,
        "ceiling": "int8_madd",
        "footprint_bytes": 2**20 + 5,
        "check": lambda: None,
        "time_s": lambda seconds: 2e-6,
    }
    return Case(**{**values, **changes})


def test_the_slower_resource_is_the_bound():
    native = FakeNative()
    ceilings = Ceilings(native, None, 0.1)
    by_memory = run_case(make_case(), ceilings, 0.1)
    assert (by_memory.bound_by, by_memory.ceiling) == ("read 1 MiB", 1e9)
    assert by_memory.fraction == pytest.approx(0.5)  # 1 us of 2
    by_operations = run_case(
        make_case(num_operations=8000, time_s=lambda seconds: 4e-6), ceilings, 0.1
    )
    assert (by_operations.bound_by, by_operations.ceiling) == ("int8_madd", 4e9)
    assert by_operations.fraction == pytest.approx(0.5)
    assert native.asked == [("read", 2**20), ("int8_madd", 0)]  # each once


def test_a_wrong_kernel_is_not_timed():
    def fails():
        raise BenchError("wrong")

    with pytest.raises(BenchError, match="wrong"):
        run_case(make_case(check=fails, time_s=lambda seconds: pytest.fail("timed")), None, 0.1)


@pytest.mark.parametrize("kind", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("num_rows", [1, 20])
def test_linear_layers_are_checked_against_their_own_weights(kind, num_rows):
    check_linear(Weights(FakeNative(), None, (48, 64), kind), num_rows)
    # A tenth of an output's spread is more than rounding to 127 codes explains; for bf16 a thousandth is.
    error = 0.01 if kind == "bf16" else 1.0
    with pytest.raises(BenchError, match=f"the {kind} linear kernel is wrong at {num_rows} rows"):
        check_linear(Weights(FakeNative(error), None, (48, 64), kind), num_rows)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize(
    ("num_queries", "tables"),
    [([1], [[0, 1]]), ([70], [[1, 0]]), ([1, 1, 1], [[0, 1], [0, 2], [0, 3]])],
)
def test_attention_is_checked_row_by_row(codec, num_queries, tables):
    step = make_step(FakeNative(), SIZES, StepKind(codec, num_queries, tables), 2)
    check_attention(FakeNative(), None, step)
    with pytest.raises(BenchError, match=f"the attention kernel is wrong over {codec} blocks"):
        check_attention(FakeNative(0.5), None, step)


def test_a_key_that_is_missing_is_noticed():
    step = make_step(FakeNative(), SIZES, StepKind("raw16", [64], [[0, 1]]), 1)

    class Forgetful(FakeNative):
        def attention(self, *arguments, context_lens, **more):
            return super().attention(*arguments, context_lens=context_lens - 1, **more)

    with pytest.raises(BenchError, match="the attention kernel is wrong"):
        check_attention(Forgetful(), None, step)


def test_layers_of_the_arena_hold_the_same_values_at_their_own_addresses():
    step = make_step(FakeNative(), SIZES, StepKind("int8", [1], [[0]]), 3)
    layers = step.arena.reshape(1, 3, -1)
    assert (layers[0, 0] == layers[0, 2]).all()
    assert step.arena.shape[1] == 3 * 2 * 2 * 64 * (32 + 2)


def test_planning_cases_allocates_nothing_and_copies_fill_the_footprint():
    native = FakeNative()
    native.PackedLinear = None
    planned = list(linear_cases(native, None, {"large": (8192, 2048)}, 2**30))
    assert len(planned) == 3 * 5
    weights = Weights(FakeNative(), None, (32, 64), "int8")
    assert len(weights.copies(5 * 32 * 64 + 7)) == 5
    assert len(weights.copies(0)) == 1


def test_the_cases_of_a_model_by_name(monkeypatch):
    monkeypatch.setattr(kernels, "extension", FakeNative)
    done = []
    document = kernels.measure_kernels(
        named_shape("smollm2-135m"),
        2,
        KernelOptions("int8 o ", 0.001, 2**20),
        lambda *counts: done.append(counts),
    )
    assert [case["case"] for case in document["cases"]] == [
        f"int8 o 576->576, {rows} rows" for rows in (1, 4, 16, 64, 512)
    ]
    assert done[-1] == (5, 5)
    assert document["isa"] == "fake"
    json.dumps(document, allow_nan=False)


def test_no_such_case_is_an_error(monkeypatch):
    monkeypatch.setattr(kernels, "extension", FakeNative)
    result = CliRunner().invoke(app, ["bench", "kernels", "--only", "int7"])
    assert result.exit_code == 1
    assert "no case has 'int7' in its name" in result.stderr


def test_the_last_line_of_stdout_is_json(monkeypatch):
    monkeypatch.setattr(kernels, "extension", FakeNative)
    arguments = [
        "bench",
        "kernels",
        "--only",
        "int8 o ",
        "--seconds",
        "0.001",
        "--footprint-mib",
        "1",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    table, _, line = result.stdout.strip().rpartition("\n")
    assert json.loads(line)["cases"][0]["bound_by"] == "read 0.5 MiB"
    assert "int8 o 576->576, 512 rows" in table
    only_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(only_json.stdout)["bench"] == "kernels"
    assert "int8 o 576->576, 512 rows" in only_json.stderr
