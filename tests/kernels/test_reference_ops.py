"""The torch operations against plain formulas, and their independence of neighbours, bit for bit."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import merge_block_attention, prefix_attention
from kernels.gate import residual_gate, resolve_sources
from kernels.head import RowSampling, head_rows, keep_top
from kernels.linear import linear_rows, swiglu_rows
from kernels.noise import gumbel_noise, gumbel_noise_of, philox_4x32
from kernels.norm import rms_norm
from kernels.rope import apply_rope

SHAPES = [(64, 192), (176, 64), (72, 216), (160, 72), (1536, 256)]


@pytest.mark.parametrize(("inner", "outer"), SHAPES)
def test_a_rows_bits_depend_neither_on_count_nor_on_place(inner: int, outer: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(300, inner)
    weight, bias = torch.randn(outer, inner), torch.randn(outer)
    gate_up, down = torch.randn(2 * outer, inner), torch.randn(inner, outer)
    norm = torch.rand(inner)
    operations = (
        lambda rows: linear_rows(rows, weight, bias),
        lambda rows: swiglu_rows(rows, gate_up, down),
        lambda rows: rms_norm(rows, norm, 1e-6),
    )
    for operation in operations:
        whole = operation(x)
        for count in (1, 2, 3, 7, 15, 31, 33, 64, 100, 257):
            place = torch.randperm(300)[:count]
            assert torch.equal(operation(x[place]), whole[place])


def test_no_rows_give_no_rows() -> None:
    assert linear_rows(torch.empty(0, 8), torch.randn(4, 8)).shape == (0, 4)
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


def test_gate_is_the_relative_residual() -> None:
    parent = torch.tensor([[[3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0]]])
    child = torch.tensor([[[3.0, 4.5], [3.0, 4.501], [0.0, 0.0], [0.0, 1e-6]]])
    h = torch.cat((parent, child))
    fold = residual_gate(h, torch.tensor([0, 0]), torch.tensor([False, True]), 0.1)
    assert fold.tolist() == [[False] * 4, [True, False, True, False]]
    assert residual_gate(h, torch.tensor([0, 0]), torch.tensor([False, False]), 9.0).sum() == 0
    exact = residual_gate(torch.cat((parent, parent)), torch.tensor([0, 0]), torch.tensor([False, True]), 0.0)
    assert exact[1].all()


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.tuples(*(st.integers(0, max(i - 1, 0)) for i in range(n))),
            st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=n, max_size=n),
        )
    )
)
@settings(max_examples=100)
def test_sources_follow_the_chain(tree: tuple[tuple[int, ...], list[list[bool]]]) -> None:
    parents, fold_rows = tree
    fold = torch.tensor(fold_rows)
    fold[0] = False
    depth = [0] * len(parents)
    for i in range(1, len(parents)):
        depth[i] = depth[parents[i]] + 1
    levels = [torch.tensor([i for i in range(len(parents)) if depth[i] == d], dtype=torch.long) for d in range(1, 6)]
    rows, source = resolve_sources(fold, torch.tensor(parents), levels)
    assert rows.tolist() == (~fold).flatten().nonzero().squeeze(1).tolist()
    for i in range(len(parents)):
        for n in range(5):
            at = i
            while fold[at, n]:
                at = parents[at]
            assert rows[source[i, n]] == at * 5 + n


@pytest.mark.parametrize("head_dim", [16, 24, 64, 128])
@pytest.mark.parametrize("length", [0, 1, 31, 77])
def test_attention_over_pages_and_block_is_softmax_attention(head_dim: int, length: int) -> None:
    """Branches of two slots, some queries and keys inherited, against one softmax over all keys in float64."""
    torch.manual_seed(1)
    heads, kv, block, branches = 6, 2, 8, 4
    rows = 20
    q, k, v = (torch.randn(rows, n, head_dim) for n in (heads, kv, kv))
    k_pages, v_pages = torch.randn(8, 32, kv, head_dim), torch.randn(8, 32, kv, head_dim)
    lengths = torch.tensor([5, length])
    table = torch.tensor([[6, 0, 0], [3, 1, 7]])
    slot_of_branch = torch.tensor([0, 1, 1, 1])
    # Rows 0..7 serve slot 0, rows 8..19 slot 1.
    source = torch.stack([torch.arange(8), torch.arange(8, 16), *torch.randint(8, 20, (2, 8))])
    slot_of_row = (torch.arange(rows) >= 8).long()
    mask = torch.rand(branches, block, block) < 0.7
    mask |= torch.eye(block, dtype=torch.bool)
    scale = head_dim**-0.5
    prefix = prefix_attention(q, slot_of_row, k_pages, v_pages, table, lengths, scale)
    got = merge_block_attention(q, k, v, prefix, source, mask, scale)
    for b in range(branches):
        slot = int(slot_of_branch[b])
        n = int(lengths[slot])
        keys = torch.cat((k_pages[table[slot]].flatten(0, 1)[:n], k[source[b]])).double().repeat_interleave(3, dim=1)
        values = torch.cat((v_pages[table[slot]].flatten(0, 1)[:n], v[source[b]])).double().repeat_interleave(3, dim=1)
        scores = torch.einsum("thd,khd->htk", q[source[b]].double(), keys) * scale
        allowed = torch.cat((torch.ones(block, n, dtype=torch.bool), mask[b]), dim=1)
        want = torch.einsum("htk,khd->thd", scores.masked_fill(~allowed, -math.inf).softmax(-1), values)
        torch.testing.assert_close(got[b].double(), want, atol=2e-5, rtol=1e-4)


def test_a_querys_prefix_bits_do_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(2)
    k_pages, v_pages = torch.randn(4, 32, 2, 24), torch.randn(4, 32, 2, 24)
    table, lengths = torch.tensor([[0, 1, 2, 3]]), torch.tensor([101])
    q = torch.randn(90, 4, 24)
    whole = prefix_attention(q, torch.zeros(90, dtype=torch.long), k_pages, v_pages, table, lengths, 0.2)
    for count in (1, 5, 32, 33, 70):
        place = torch.randperm(90)[:count]
        slot = torch.zeros(count, dtype=torch.long)
        part = prefix_attention(q[place], slot, k_pages, v_pages, table, lengths, 0.2)
        for got, want in zip(part, whole, strict=True):
            assert torch.equal(got, want[place])


def test_rope_rotates_pairs_of_halves() -> None:
    x = torch.randn(3, 2, 8)
    angle = torch.rand(3, 4)
    cos, sin = torch.cat((angle.cos(),) * 2, -1), torch.cat((angle.sin(),) * 2, -1)
    got = torch.view_as_complex(torch.stack((apply_rope(x, cos, sin)[..., :4], apply_rope(x, cos, sin)[..., 4:]), -1))
    want = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], want: str) -> None:
    words = philox_4x32([torch.tensor([c]) for c in counter], [torch.tensor([k]) for k in key])
    assert " ".join(f"{int(w):08x}" for w in words) == want


def test_noise_is_gumbel_and_a_function_of_its_counter() -> None:
    rows = 400
    key = torch.randint(0, 2**32, (rows, 2))
    sample, position, left = torch.arange(rows) % 3, torch.arange(rows), torch.arange(rows) % 32
    noise = gumbel_noise(key, sample, position, left, 101)
    # Mean is Euler's constant, variance pi^2 / 6; 40,400 draws put the bounds at over four standard errors.
    assert abs(noise.mean() - 0.5772) < 0.03
    assert abs(noise.var() - 1.6449) < 0.06
    assert torch.isfinite(noise).all()
    tokens = torch.randint(0, 101, (rows, 7))
    assert torch.equal(gumbel_noise_of(key, sample, position, left, tokens), noise.gather(1, tokens))
    for other in ((sample + 1, position, left), (sample, position + 1, left), (sample, position, left + 1)):
        assert not torch.equal(gumbel_noise(key, *other, 101), noise)


def greedy_rows(count: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int = 0) -> RowSampling:
    return RowSampling(
        torch.full((count,), temperature),
        torch.full((count,), top_p),
        torch.full((count,), top_k),
        torch.randint(0, 2**32, (count, 2), generator=torch.Generator().manual_seed(0)),
        torch.zeros(count, dtype=torch.long),
        torch.arange(count),
        torch.full((count,), 5),
    )


def test_head_in_slices_is_the_head_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    h, weight = torch.randn(130, 16), torch.randn(50, 16)
    settings_ = greedy_rows(130)
    settings_.temperature_R[::2] = 0.7
    whole = head_rows(h, weight, 7, 4, settings_, True)
    monkeypatch.setattr("kernels.head.MAX_LOGITS", 1)
    for got, want in zip(head_rows(h, weight, 7, 4, settings_, True), whole, strict=True):
        assert torch.equal(got, want)
    logits = h @ weight.T
    want_top = logits.index_fill(1, torch.tensor([7]), -math.inf).topk(4)
    assert torch.equal(whole.top_token_RJ, want_top.indices)
    torch.testing.assert_close(whole.top_logprob_RJ, logits.log_softmax(-1).gather(1, want_top.indices))
    assert torch.equal(whole.token_R[1::2], want_top.indices[1::2, 0])


def test_ties_go_to_the_lowest_token_and_masks_are_left_out() -> None:
    weight = torch.zeros(6, 4)
    head = head_rows(torch.randn(3, 4), weight, 0, 2, greedy_rows(3), False)
    assert head.token_R.tolist() == [1, 1, 1]
    torch.testing.assert_close(head.confidence_R, torch.full((3,), 1 / 6))


def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -30.0]])
    count = 20_000
    head = head_rows(torch.ones(count, 1), logits.T.contiguous(), 4, 1, greedy_rows(count, temperature=1.0), True)
    share = torch.bincount(head.token_R, minlength=5) / count
    torch.testing.assert_close(share[:4], logits[0, :4].softmax(-1), atol=0.015, rtol=0)
    torch.testing.assert_close(head.confidence_R, logits[0].softmax(-1)[head.token_R])
    halved = head_rows(torch.ones(count, 1), logits.T.contiguous(), 4, 1, greedy_rows(count, 1.0, top_p=0.7), False)
    assert set(halved.token_R.tolist()) == {0, 1}
    torch.testing.assert_close(halved.confidence_R, logits[0, :2].softmax(-1)[halved.token_R])


def test_top_k_and_top_p_keep_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]] * 4)
    kept = keep_top(logits, torch.tensor([0, 2, 0, 1]), torch.tensor([1.0, 1.0, 0.01, 0.9])).isfinite()
    assert kept.tolist() == [
        [True] * 4,
        [False, True, False, True],
        [False, True, False, False],
        [False, True, False, False],
    ]
