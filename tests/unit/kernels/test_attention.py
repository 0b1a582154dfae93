"""Attention: the reference against float64 numpy, and every other implementation against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.batches import Case, Heads, make_case

from kvist.codecs.int8 import INT8
from kvist.errors import KernelUnavailable
from kvist.kernels import dispatch, torch_sdpa
from kvist.kernels.parts import Part, PartKind, cut

# Largest |difference| allowed for inputs of unit variance: sums of a few hundred products in float32.
TOLERANCE = 2e-6
SCALE = 0.25
LENGTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97)
SMALL = Heads(num_heads=4, num_kv_heads=2, head_dim=16)
FAST = [name for name in dispatch.available() if name != "reference"]


def independent(case: Case, window: int | None, softcap: float | None) -> np.ndarray:
    """Return the attention of every row, one row and head at a time, in float64."""
    batch = case.batch
    kv = case.kv.to(torch.float64).numpy()
    q = case.q.to(torch.float64).numpy()
    group = q.shape[1] // kv.shape[2]
    output = np.zeros(q.shape)
    for sequence, context_len in enumerate(batch.context_lens):
        first, stop = batch.query_starts[sequence : sequence + 2]
        table = batch.block_tables[sequence].tolist()
        for row in range(first, stop):
            position = context_len - stop + row
            oldest = 0 if window is None else max(0, position - window + 1)
            seen = range(oldest, position + 1)
            for head in range(q.shape[1]):
                pairs = [
                    kv[table[p // batch.block_size], :, head // group, p % batch.block_size]
                    for p in seen
                ]
                scores = np.array([q[row, head] @ key for key, _ in pairs]) * SCALE
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                weights = np.exp(scores - scores.max())
                weights /= weights.sum()
                output[row, head] = sum(
                    weight * value for weight, (_, value) in zip(weights, pairs, strict=True)
                )
    return output


def num_blocks(part: Part) -> int:
    return sum(piece.table.numel() for piece in part.pieces)


def run(
    name: str, case: Case, window: int | None = None, softcap: float | None = None
) -> torch.Tensor:
    before = dispatch.num_calls("attention", name)
    with dispatch.forced(name):
        output = dispatch.attention(
            case.q, case.kv, case.batch, scale=SCALE, window=window, softcap=softcap
        )
    assert dispatch.num_calls("attention", name) == before + 1
    return output


def assert_agrees(
    name: str, case: Case, window: int | None = None, softcap: float | None = None
) -> None:
    expected = run("reference", case, window, softcap)
    assert torch.isfinite(expected).all()
    difference = (run(name, case, window, softcap) - expected).abs().max().item()
    assert difference <= TOLERANCE


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [SMALL, Heads(num_heads=8, num_kv_heads=1, head_dim=8)])
def test_reference_equals_float64_numpy(
    window: int | None, softcap: float | None, heads: Heads
) -> None:
    case = make_case([(0, 19), (8, 1), (13, 6), (31, 2)], heads, block_size=8)
    difference = np.abs(
        run("reference", case, window, softcap).numpy() - independent(case, window, softcap)
    )
    assert difference.max() <= TOLERANCE


@pytest.mark.parametrize("name", dispatch.available())
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("head_dim", [8, 64, 96])
def test_blocks_of_int8_rows_are_attended_as_the_values_they_stand_for(
    name: str, window: int | None, softcap: float | None, head_dim: int
) -> None:
    lengths = [(0, 19), (700, 1), (650, 1), (641, 30), (8, 1), (31, 2)]
    heads = Heads(num_heads=4, num_kv_heads=2, head_dim=head_dim)
    case = make_case(lengths, heads, block_size=16, shared=[(1, 2, 3, 38)])
    stored = INT8.encode(case.kv)
    decoded = dataclasses.replace(case, kv=INT8.decode(stored))
    expected = run("reference", decoded, window, softcap)
    received = run(name, dataclasses.replace(case, kv=stored), window, softcap)
    assert torch.isfinite(received).all()
    assert (received - expected).abs().max() <= TOLERANCE * (head_dim / 16) ** 0.5 * 2
    assert (expected - run("reference", case, window, softcap)).abs().max() > 1e-4


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("length", LENGTHS)
def test_boundary_lengths(name: str, length: int) -> None:
    for start in (0, 1, 15, 16, 17, 48):
        assert_agrees(name, make_case([(start, length)], SMALL, block_size=16, seed=length))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("block_size", [1, 5, 64])
def test_lengths_around_whole_blocks(name: str, block_size: int) -> None:
    for num_blocks in (1, 2, 3):
        for extra in (-1, 0, 1):
            length = num_blocks * block_size + extra
            if length < 1:
                continue
            cases = [[(0, length)], [(length, 1)], [(length, 3)], [(length, 1), (0, length)]]
            for lengths in cases:
                assert_agrees(name, make_case(lengths, SMALL, block_size=block_size))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_query_heads_per_kv_head(name: str, ratio: int, num_kv_heads: int) -> None:
    heads = Heads(num_heads=ratio * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=8)
    assert_agrees(name, make_case([(0, 9), (30, 1), (17, 5), (3, 1)], heads, block_size=8))


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("window", [1, 2, 5, 8, 9, 33, 64, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_windows_and_softcaps(name: str, window: int, softcap: float | None) -> None:
    lengths = [(0, 70), (64, 1), (33, 17), (3, 1), (200, 1), (7, 1)]
    assert_agrees(name, make_case(lengths, SMALL, block_size=8), window, softcap)


@pytest.mark.parametrize("name", FAST)
def test_softcap_without_window(name: str) -> None:
    assert_agrees(
        name, make_case([(0, 20), (40, 1), (9, 1), (23, 6)], SMALL, block_size=8), None, 1.5
    )


@pytest.mark.parametrize("name", FAST)
def test_shared_prefixes_of_decoding_and_computing_sequences(name: str) -> None:
    lengths = [(700, 1), (650, 1), (641, 30), (640, 2), (0, 5), (900, 1), (12, 1)]
    case = make_case(
        lengths, SMALL, block_size=16, shared=[(0, 1, 2, 3, 5, 38), (0, 5, 43)], seed=3
    )
    for window, softcap in ((None, None), (300, None), (None, 5.0)):
        assert_agrees(name, case, window, softcap)
    shared = [part for part in cut(case.batch, None, 1024) if not isinstance(part.rows, slice)]
    assert [num_blocks(part) for part in shared if part.kind is PartKind.FULL] == [38]


@pytest.mark.parametrize("name", FAST)
def test_shared_prefixes_form_a_tree(name: str) -> None:
    """A system prompt shared by all and a document shared by two are gathered once each."""
    lengths = [(1300, 1), (1290, 1), (1000, 1), (999, 1), (640, 1)]
    shared = [(0, 1, 2, 3, 4, 40), (0, 1, 80), (2, 3, 60)]
    case = make_case(lengths, SMALL, block_size=16, shared=[shared[0], *shared[1:]], seed=4)
    # make_case shares from block 0 on: give the second pair the trunk of the first again.
    assert_agrees(name, case)
    full = [num_blocks(part) for part in cut(case.batch, None, 1024) if part.kind is PartKind.FULL]
    assert full[0] == 40
    assert 40 in full[1:]


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_long_contexts_are_gathered_in_pieces(
    monkeypatch: pytest.MonkeyPatch, softcap: float | None
) -> None:
    monkeypatch.setattr(torch_sdpa, "GATHERED_BYTES", 8 * 2 * 16 * 40)
    lengths = [(700, 1), (47, 1), (48, 1), (49, 1), (650, 3), (300, 30), (640, 1), (5, 1)]
    case = make_case(lengths, SMALL, block_size=16, shared=[(0, 4, 6, 37)])
    for window in (None, 200):
        assert_agrees("torch", case, window, softcap)
    assert max(len(part.pieces) for part in cut(case.batch, None, 40)) == 8


@pytest.mark.parametrize("name", FAST)
def test_two_sequences_with_the_very_same_blocks(name: str) -> None:
    case = make_case([(640, 1), (640, 1)], SMALL, block_size=16, shared=[(0, 1, 41)])
    assert_agrees(name, case)


@pytest.mark.parametrize("name", FAST)
def test_bfloat16_blocks_are_widened_before_use(name: str) -> None:
    case = make_case([(50, 7), (60, 1), (3, 1)], SMALL, block_size=16, dtype=torch.bfloat16)
    assert_agrees(name, case)


@pytest.mark.parametrize("name", FAST)
def test_strided_queries_are_accepted(name: str) -> None:
    """Queries are a slice of the fused projection, not a tensor of their own."""
    case = make_case([(50, 7), (60, 1), (61, 1)], SMALL, block_size=16)
    fused = torch.zeros(9, 4 + 2 + 2, 16)
    fused[:, :4] = case.q
    strided = Case(q=fused[:, :4], kv=case.kv, batch=case.batch)
    assert torch.equal(run(name, strided), run(name, case))


@pytest.mark.parametrize("name", FAST)
def test_a_view_of_one_layer_is_accepted(name: str) -> None:
    case = make_case([(50, 7), (60, 1), (61, 1)], SMALL, block_size=16)
    arena = torch.full((case.kv.shape[0], 3, *case.kv.shape[1:]), float("nan"))
    arena[:, 1] = case.kv
    layered = Case(q=case.q, kv=arena[:, 1], batch=case.batch)
    assert torch.equal(run(name, layered), run(name, case))


@pytest.mark.parametrize("name", dispatch.available())
def test_output_has_the_dtype_of_the_queries(name: str) -> None:
    case = make_case([(5, 3), (7, 1)], SMALL, block_size=4)
    narrow = Case(q=case.q.to(torch.bfloat16), kv=case.kv, batch=case.batch)
    assert run(name, narrow).dtype == torch.bfloat16


@pytest.mark.parametrize("name", FAST)
def test_rows_do_not_depend_on_their_company_beyond_rounding(name: str) -> None:
    lengths = [(300, 1), (7, 20), (44, 1), (0, 3)]
    together = make_case(lengths, SMALL, block_size=8)
    output = run(name, together)
    for index, (start, count) in enumerate(lengths):
        first, stop = together.batch.query_starts[index : index + 2]
        alone = Case(
            q=together.q[first:stop],
            kv=together.kv,
            batch=type(together.batch).from_sequences(
                starts=[start],
                num_tokens=[count],
                block_tables=[together.batch.block_tables[index].tolist()],
                block_size=8,
            ),
        )
        assert (run(name, alone) - output[first:stop]).abs().max().item() <= TOLERANCE


@pytest.mark.parametrize("name", FAST)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_batch_agrees(name: str, data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 3, 8, 32]))
    lengths = data.draw(
        st.lists(
            st.tuples(st.integers(0, 700), st.integers(1, 40) | st.just(1)), min_size=1, max_size=6
        )
    )
    depth = min(start // block_size for start, _ in lengths)
    shared = [(*range(len(lengths)), data.draw(st.integers(0, depth)))]
    window = data.draw(st.none() | st.integers(1, 800))
    case = make_case(lengths, SMALL, block_size=block_size, shared=shared)
    assert_agrees(name, case, window)


def test_padding_and_sharing_stay_within_their_bounds() -> None:
    """Sixteen sequences of one length need one part; one long sequence does not make short ones gather padding."""
    even = make_case([(100 + i, 1) for i in range(16)], SMALL, block_size=16)
    assert len(cut(even.batch, None, 8192)) == 1
    uneven = make_case([(5000, 1), *[(40, 1)] * 8], SMALL, block_size=16)
    assert [part.num_sequences for part in cut(uneven.batch, None, 8192)] == [1, 8]


def test_parts_are_cut_once_per_step_and_window() -> None:
    case = make_case([(100, 1), (0, 8)], SMALL, block_size=16)
    assert cut(case.batch, None, 1024) is cut(case.batch, None, 1024)
    assert cut(case.batch, 5000, 1024) is cut(case.batch, None, 1024)
    assert cut(case.batch, 5, 1024) is not cut(case.batch, None, 1024)


def test_unknown_implementations_are_refused_by_name() -> None:
    with (
        pytest.raises(KernelUnavailable, match="expected one of torch, reference, received 'avx'"),
        dispatch.forced("avx"),
    ):
        pass
    assert dispatch.selected() == "torch"


def test_torch_refuses_blocks_on_another_device() -> None:
    case = make_case([(0, 1)], SMALL, block_size=4)
    with pytest.raises(KernelUnavailable, match="expected K and V on the cpu, received meta"):
        torch_sdpa.attention(case.q, case.kv.to("meta"), case.batch, scale=1.0)
