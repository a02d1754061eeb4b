"""The fused LM head against its reference, and that against a formula of its own. D rows, V tokens, J kept ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kernels.fused.head import head_rows, head_rows_reference
from kernels.fused.head_plan import HeadPlan, plan
from kernels.fused.head_scratch import HeadScratch
from kernels.fused.head_tiles import logit_tiles
from kernels.fused.layout import HeadRows, Predictions, Sampling
from kernels.head import RowSampling
from kernels.head import head_rows as plain_head_rows
from tests.kernels.fused_inputs import DEVICE, DTYPES, on_gpu, poisoned

BRANCHES, BLOCK, SLOTS, MASK = 7, 6, 3, 200
JUNK = 2**30
"""In list entries beyond the count: an address that no test survives using."""


@dataclass(frozen=True)
class Case:
    hidden: torch.Tensor
    weight: torch.Tensor
    rows: HeadRows
    sampling: Sampling
    num_top: int = 4
    plain: bool = True
    sampled: bool = False
    limited: bool = False
    slice_rows: int | None = None

    def run(self, op) -> Predictions:
        """Answers of ``op``, in poisoned buffers with poisoned scratch."""
        vocab = self.weight.shape[0]
        scratch = HeadScratch.make(
            self.slice_rows or len(self.hidden), vocab, self.num_top, self.sampled, self.limited, DEVICE
        )
        for name in scratch.__slots__:
            getattr(scratch, name).fill_(JUNK)
        shape = (BRANCHES, BLOCK)
        out = Predictions(
            poisoned(*shape, dtype=torch.int64),
            poisoned(*shape),
            poisoned(*shape, self.num_top, dtype=torch.int64),
            poisoned(*shape, self.num_top),
            poisoned(*shape, dtype=torch.int64),
            poisoned(BRANCHES, dtype=torch.int32),
        )
        op(
            self.hidden, self.weight, self.rows, self.sampling, MASK, self.num_top, self.plain, self.sampled,
            self.limited, scratch, out,
        )  # fmt: skip
        return out


def make_case(count: int, vocab: int = 300, width: int = 40, dtype: torch.dtype = torch.float32, **settings) -> Case:
    """``count`` rows for different positions, two fifths of them for what follows a position; room for a few more."""
    generator = torch.Generator().manual_seed(count)
    room = count + 3

    def listed(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((values, torch.full((3,), JUNK))).int().to(DEVICE)

    places = torch.randperm(2 * BRANCHES * BLOCK, generator=generator)[:count]
    rows = HeadRows(
        torch.tensor([count], dtype=torch.int32, device=DEVICE),
        listed(places),
        listed(places),
        listed(torch.arange(count) % SLOTS),
        listed(torch.randint(0, 5000, (count,), generator=generator)),
        listed(torch.randint(0, 32, (count,), generator=generator)),
        listed((torch.arange(count) % 5 == 4).long()),
    )
    sampling = Sampling(
        torch.tensor([0.9, 0.0, 1.5], device=DEVICE),
        torch.tensor([1.0, 1.0, 1.0], device=DEVICE),
        torch.tensor([0, 0, 0], device=DEVICE),
        torch.randint(0, 2**32, (SLOTS, 2), generator=generator).to(DEVICE),
        torch.tensor([0, 1, 5], device=DEVICE),
    )
    hidden = torch.randn(room, width, generator=generator)
    hidden[count:] = torch.nan
    weight = torch.randn(vocab, width, generator=generator) * 2 / width**0.5
    return Case(hidden.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE), rows, sampling, **settings)


def assert_same(case: Case, tolerance: float = 1e-5) -> Predictions:
    """Kernel and reference agree: tokens exactly, probabilities to summation order."""
    got, want = case.run(head_rows), case.run(head_rows_reference)
    for name in Predictions.__slots__:
        x, y = getattr(got, name), getattr(want, name)
        if name == "top_token_ATJ":
            # Tokens are kept in order, but two that are equal but for rounding may change places.
            differ = (x != y).nonzero(as_tuple=True)
            assert torch.allclose(got.top_logprob_ATJ[differ], want.top_logprob_ATJ[differ], atol=tolerance)
            assert len(differ[0]) <= 0.01 * x.numel()
        elif x.dtype.is_floating_point:
            assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), name
        else:
            assert torch.equal(x, y), name
    return got


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "num_top"), [(1, 0), (5, 1), (37, 4), (66, 8)])
def test_greedy_rows(count: int, num_top: int, dtype: torch.dtype) -> None:
    assert_same(make_case(count, num_top=num_top, dtype=dtype))


@pytest.mark.parametrize("op", [head_rows, head_rows_reference])
def test_against_softmax(op) -> None:
    case = make_case(20)
    got = case.run(op)
    probability = (case.hidden[:20].double() @ case.weight.double().T).softmax(-1)
    probability[:, MASK] = 0
    tokens = probability.argsort(-1, descending=True)
    for row, target in enumerate(case.rows.target_D[:20].tolist()):
        if target >= BRANCHES * BLOCK:
            assert got.next_AT.view(-1)[target - BRANCHES * BLOCK] == tokens[row, 0]
            continue
        at = (target // BLOCK, target % BLOCK)
        assert got.token_AT[at] == tokens[row, 0]
        assert float(got.confidence_AT[at]) == pytest.approx(float(probability[row, tokens[row, 0]]), rel=1e-5)
        assert torch.equal(got.top_token_ATJ[at], tokens[row, :4])
        assert torch.allclose(got.top_logprob_ATJ[at].double(), probability[row, tokens[row, :4]].log(), atol=1e-5)
    asked = case.rows.target_D[:20].long()
    asked = asked[asked < BRANCHES * BLOCK]
    silent = torch.ones(BRANCHES * BLOCK, dtype=torch.bool, device=DEVICE)
    silent[asked] = False
    assert (got.confidence_AT.view(-1)[silent] == -torch.inf).all()
    assert (got.top_logprob_ATJ.view(-1, 4)[silent] == -torch.inf).all()


def test_slices_cover_all_rows() -> None:
    assert_same(make_case(45, slice_rows=32, sampled=True))


def test_no_rows_reset_the_answers() -> None:
    got = make_case(0, sampled=True, limited=True).run(head_rows)
    assert (got.confidence_AT == -torch.inf).all()
    assert (got.top_logprob_ATJ == -torch.inf).all()
    assert (got.invalid_A == 0).all()


def test_the_lowest_of_equal_tokens_wins() -> None:
    case = make_case(9)
    best = case.weight[[10, 150, 290]].clone()
    case.weight[:] = 0
    # Rows of one direction: tokens 290, 150 and 10 are equal and best, or all of the zeros are.
    case.hidden[:9] = best[0] * torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1, 1], device=DEVICE)[:, None]
    case.weight[[10, 150, 290]] = best[0]
    got = assert_same(case)
    top = [got.top_token_ATJ.view(-1, 4)[t].tolist() for t in case.rows.target_D[:9].tolist() if t < BRANCHES * BLOCK]
    assert [10, 150, 290, 0] in top
    assert [0, 1, 2, 3] in top


def test_the_mask_id_counts_but_is_never_chosen() -> None:
    case = make_case(30, sampled=True)
    case.weight[MASK] = case.weight[:MASK].amax(0) + 1
    got = assert_same(case)
    assert not (got.token_AT == MASK).any()
    assert not (got.top_token_ATJ == MASK).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_broken_logits_are_reported(bad: float) -> None:
    case = make_case(6, sampled=True)
    case.hidden[5, 3] = bad
    got = case.run(head_rows)
    branch = int(case.rows.target_D[5]) % (BRANCHES * BLOCK) // BLOCK
    assert got.invalid_A.tolist() == [int(a == branch) for a in range(BRANCHES)]
    assert got.token_AT.max() < 300
    limits = replace(case.sampling, top_k_S=torch.full_like(case.sampling.top_k_S, 5))
    assert replace(case, sampling=limits, limited=True).run(head_rows).invalid_A.sum() == 1


@pytest.mark.parametrize("plain", [True, False])
def test_drawn_rows(plain: bool) -> None:
    got = assert_same(make_case(40, plain=plain, sampled=True))
    greedy = make_case(40).run(head_rows)
    assert not torch.equal(got.token_AT, greedy.token_AT)


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [
        ([1, 0, 2], [1.0, 1.0, 1.0]),
        ([3, 5, 0], [1.0, 0.5, 0.9]),
        ([20, 5, 0], [0.8, 1, 0.01]),
    ],
)
def test_drawn_rows_inside_top_k_and_top_p(top_k: list[int], top_p: list[float]) -> None:
    case = make_case(10, plain=False, sampled=True, limited=True)
    limits = replace(
        case.sampling, top_k_S=torch.tensor(top_k, device=DEVICE), top_p_S=torch.tensor(top_p, device=DEVICE)
    )
    assert_same(replace(case, sampling=limits))


def test_top_k_parts_equal_logits_by_token() -> None:
    """All logits are 0: top-k keeps the k lowest tokens, and each is as likely."""
    case = make_case(5, plain=False, sampled=True, limited=True)
    case.weight[:] = 0
    case.rows.greedy_D[:] = 0
    limits = replace(
        case.sampling,
        temperature_S=torch.ones_like(case.sampling.temperature_S),
        top_k_S=torch.full_like(case.sampling.top_k_S, 7),
    )
    got = assert_same(replace(case, sampling=limits))
    asked = got.confidence_AT > -torch.inf
    assert got.token_AT[asked].max() <= 6
    assert torch.allclose(got.confidence_AT[asked], torch.tensor(1 / 7, device=DEVICE))


@pytest.mark.parametrize("plain", [True, False])
def test_the_reference_draws_as_the_step_by_step_head(plain: bool) -> None:
    case = make_case(40, plain=plain, sampled=True, limited=True)
    rows, slot = case.rows, case.rows.slot_D[:40].long()
    limits = replace(case.sampling, top_k_S=torch.tensor([9, 0, 0], device=DEVICE))
    limits.top_p_S[2] = 0.7
    temperature = torch.where(rows.greedy_D[:40] > 0, 0.0, limits.temperature_S[slot])
    by_row = RowSampling(
        temperature,
        limits.top_p_S[slot],
        limits.top_k_S[slot],
        limits.key_S2[slot],
        limits.sample_S[slot],
        rows.position_D[:40].long(),
        rows.masks_left_D[:40].long(),
    )
    want = plain_head_rows(case.hidden[:40], case.weight, MASK, 4, by_row, plain)
    got = replace(case, sampling=limits).run(head_rows_reference)
    target, here = rows.target_D[:40].long(), rows.target_D[:40] < BRANCHES * BLOCK
    assert torch.equal(got.token_AT.view(-1)[target[here]], want.token_R[here])
    assert torch.equal(got.next_AT.view(-1)[target[~here] - BRANCHES * BLOCK], want.token_R[~here])
    assert torch.allclose(got.confidence_AT.view(-1)[target[here]], want.confidence_R[here], rtol=1e-5)
    assert torch.allclose(got.top_logprob_ATJ.view(-1, 4)[target[here]], want.top_logprob_RJ[here], atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_depend_neither_on_count_nor_on_place(dtype: torch.dtype) -> None:
    """One row alone, and among 3, 40 and 70: every size of row tile."""
    full = make_case(70, dtype=dtype, plain=False, sampled=True)
    wanted = full.run(head_rows)
    for first, count in ((0, 1), (17, 3), (3, 40)):
        part = slice(first, first + count)
        rows = HeadRows(
            torch.tensor([count], dtype=torch.int32, device=DEVICE),
            *(getattr(full.rows, name)[part].contiguous() for name in HeadRows.__slots__[1:]),
        )
        got = replace(full, hidden=full.hidden[part].contiguous(), rows=rows).run(head_rows)
        target = rows.target_D.long()
        here = target[target < BRANCHES * BLOCK]
        for name in ("token_AT", "confidence_AT"):
            assert torch.equal(getattr(got, name).view(-1)[here], getattr(wanted, name).view(-1)[here])
        for name in ("top_token_ATJ", "top_logprob_ATJ"):
            assert torch.equal(getattr(got, name).view(-1, 4)[here], getattr(wanted, name).view(-1, 4)[here])
        after = target[target >= BRANCHES * BLOCK] - BRANCHES * BLOCK
        assert torch.equal(got.next_AT.view(-1)[after], wanted.next_AT.view(-1)[after])


def tile_scratch(hidden: torch.Tensor, weight: torch.Tensor, count: int, keep: bool, tiles: HeadPlan) -> HeadScratch:
    """What the first pass leaves of ``count`` rows, in scratch that was poisoned."""
    case = make_case(5)
    scratch = HeadScratch.make(len(hidden), len(weight), 4 if keep else 0, False, False, DEVICE)
    for name in scratch.__slots__:
        getattr(scratch, name).fill_(JUNK)
    shape = (BRANCHES, BLOCK)
    out = Predictions(
        *(poisoned(*shape) for _ in range(2)), *(poisoned(*shape, 4) for _ in range(2)), poisoned(*shape),
        poisoned(BRANCHES, dtype=torch.int32),
    )  # fmt: skip
    rows = replace(case.rows, count_1=torch.tensor([count], dtype=torch.int32, device=DEVICE))
    logit_tiles(hidden, weight, rows, MASK, 4, keep, 0, scratch, out, tiles)
    return scratch


@pytest.mark.parametrize("flatten", [True, False])
@pytest.mark.parametrize(("heights", "count"), [((32, 64, 96), 90), ((64, 288), 130), ((32, 160), 290)])
def test_tiles_of_any_height(heights: tuple[int, ...], count: int, flatten: bool) -> None:
    """Row tiles of one and of two pieces, in halves, several of them, the last one ragged."""
    generator = torch.Generator().manual_seed(count)
    hidden = torch.randn(count + 3, 40, generator=generator).to(DEVICE)
    hidden[count:] = torch.nan
    weight = torch.randn(300, 40, generator=generator).to(DEVICE)
    # Float32 tiles of 288 rows would not fit beside what reductions need with more than 16 of the width at a time.
    tile_k = 16 if max(heights) > 160 else 32
    tiles = HeadPlan(heights, tile_k=tile_k, shared=80 * 1024, tma=False, flatten=flatten, prefetched_lines=0)
    logits = hidden[:count].double() @ weight.double().T
    kept, best = (tile_scratch(hidden, weight, count, keep, tiles) for keep in (True, False))
    assert torch.allclose(kept.mask_logit_R[:count].double(), logits[:, MASK], atol=1e-4)
    logits[:, MASK] = -torch.inf
    assert torch.allclose(kept.logits_RV[:count].double(), logits, atol=1e-4)
    assert (kept.logits_RV[count:] == JUNK).all()
    for i, tile in enumerate(logits.split(128, 1)):
        value, token = tile.max(1)
        assert torch.allclose(kept.best_RN[:count, i].double(), value, atol=1e-4)
        assert torch.allclose(kept.sum_RN[:count, i].double(), (tile - value[:, None]).exp().sum(1), rtol=1e-4)
        assert torch.equal(best.at_RN[:count, i].long(), token + i * 128)


@on_gpu
@pytest.mark.parametrize("keep", [True, False])
def test_bits_do_not_depend_on_the_plan(keep: bool) -> None:
    """Every height of every plan against row tiles of 288."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(700, 1536, generator=generator, device=DEVICE).bfloat16()
    weight = torch.randn(30000, 1536, generator=generator, device=DEVICE).bfloat16() / 40
    want = tile_scratch(hidden, weight, 576, keep, plan(700, 1536, torch.bfloat16))
    names = ("best_RN", "sum_RN", "mask_logit_R", "logits_RV" if keep else "at_RN")
    for count, room in ((1, 1), (8, 8), (32, 32), (40, 144), (100, 144), (144, 160), (20, 288), (128, 288), (170, 288),
                        (250, 288), (288, 288), (300, 700), (400, 700), (700, 700)):  # fmt: skip
        got = tile_scratch(hidden[:room], weight, count, keep, plan(room, 1536, torch.bfloat16))
        same = min(count, 576)
        for name in names:
            assert torch.equal(getattr(got, name)[:same], getattr(want, name)[:same]), (name, count, room)


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_real_vocabulary(dtype: torch.dtype) -> None:
    """Noise at distance, candidates by thousands, tiles by a thousand."""
    case = make_case(80, 151936, 1536, dtype, plain=False, sampled=True, limited=True)
    for top_k, top_p in (([50, 0, 0], [0.95, 1.0, 0.95]), ([0, 0, 5000], [1.0, 1.0, 1.0])):
        limits = replace(
            case.sampling, top_k_S=torch.tensor(top_k, device=DEVICE), top_p_S=torch.tensor(top_p, device=DEVICE)
        )
        assert_same(replace(case, sampling=limits), 1e-3)
