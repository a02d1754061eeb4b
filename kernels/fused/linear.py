"""Projections of compacted rows whose number only the device knows.

R rows, K input width, N output width, E model width, I feed-forward width, P partial sums. In kernels BN weight rows,
BM rows of x, BK of the inner dimension.

The operands are swapped, ``tile[BN, BM] = W[BN, BK] @ x[BM, BK].T``: weights fill the fixed 64 rows of a Hopper
tensor-core instruction, x its width, which goes from 8 to 256 in steps. So a program can fit its tile to the rows there
are, and a row's arithmetic is the same chain of products whichever tile holds it (see ``linear_plan``). Rows beyond the
count are read (whatever they hold stays in their own column of the tile) but never written.

Memory idles while the small kernels between two projections run, so a program first asks for the beginning of its
weight tile and only then waits for x (``Plan.prefetch``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.fused.launch import early, overlapped, wait_for_inputs
from kernels.fused.layout import Parts
from kernels.fused.linear_plan import PIECES, Plan, num_splits, plan, prefetch_depth, split_width
from kernels.fused.linear_tiles import best_cut, run_tile
from kernels.fused.prefetch import prefetch_tile
from kernels.linear import pad_rows

MOST_WAVES = 12
"""Launched programs, in waves, beyond those that the tallest tiles need; a cut into more is not considered."""


@triton.jit(do_not_specialize=["rows_per_count", "splits"], do_not_specialize_on_alignment=["p_used", "p_count"])
def _project_kernel(
    x16, x32, x64, x128, x256, w, p_weight, p_out, p_used, p_count, rows_per_count, room_m, N, K, splits, split_k,
    part_stride, side_by_side_rows,
    HEIGHTS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GATED: tl.constexpr, SEQUENTIAL: tl.constexpr,
    COUNTED: tl.constexpr, ROOM: tl.constexpr, GROUP: tl.constexpr, SLOTS: tl.constexpr, TMA: tl.constexpr,
    EVEN_K: tl.constexpr, EVICT: tl.constexpr, ONE_TILE: tl.constexpr, DEPTH: tl.constexpr, THREADS: tl.constexpr,
    EARLY: tl.constexpr, OVERLAP: tl.constexpr, COSTS: tl.constexpr,
):  # fmt: skip
    """One program a tile of the output and a split; the first ones are active, the rest of the grid does nothing.

    Order: groups of GROUP row tiles; in a group by weight tile, then split, then row tile, so that neighbours in time
    share a weight tile. SEQUENTIAL: a program does all splits of its tile in turn, unless COUNTED, which lets the
    number of rows decide. SLOTS: programs that run at a time, if the heights of the tiles should fill them; else row
    tiles are equally high, as low as their number allows.
    """
    TALL: tl.constexpr = HEIGHTS[len(HEIGHTS) - 1]
    pid = tl.program_id(0)
    parallel = 1 if SEQUENTIAL else splits
    columns = tl.cdiv(N, BN) * parallel
    if (DEPTH > 0) and (pid < columns):
        # Which program asks for which tile does not matter, and the first ones start first.
        prefetch_tile(p_weight, pid // parallel * BN, pid % parallel * split_k, N, K, DEPTH, BN, GATED, THREADS)
    if EARLY:
        rows = tl.minimum(tl.load(p_count, cache_modifier=".cg") * rows_per_count, room_m)
        wait_for_inputs(OVERLAP)
    else:
        wait_for_inputs(OVERLAP)
        rows = tl.minimum(tl.load(p_count) * rows_per_count, room_m)
    if ONE_TILE:
        # Nothing but the stores' mask waits for the count.
        run_tile(
            x16, x32, x64, x128, x256, w, p_out, 0, rows, room_m - 1, pid // parallel * BN, pid % parallel, splits,
            split_k, N, K, part_stride, TALL, BN, BK, GATED, SEQUENTIAL, ROOM, TMA, EVEN_K, EVICT,
        )  # fmt: skip
    else:
        height = TALL
        if SLOTS > 0:
            # Whatever the cut is: programs without a tile come in waves too.
            most = tl.cdiv(rows, HEIGHTS[0]) * columns
            if COUNTED:
                most *= tl.where(rows <= side_by_side_rows, splits, 1)
            if (pid >= most) & (pid > 0):
                return
            height, chosen = best_cut(
                rows, tl.cdiv(N, BN), K, splits, split_k, side_by_side_rows, HEIGHTS, COSTS, SLOTS, COUNTED
            )
            if COUNTED:
                parallel = chosen
                columns *= parallel
                if pid == 0:
                    tl.store(p_used, parallel)
        else:
            needed = tl.cdiv(rows, tl.maximum(tl.cdiv(rows, TALL), 1))
            for i in tl.static_range(len(HEIGHTS) - 1):
                height = tl.where(needed <= HEIGHTS[len(HEIGHTS) - 2 - i], HEIGHTS[len(HEIGHTS) - 2 - i], height)
        tiles_m = tl.cdiv(rows, height)
        if pid >= tiles_m * columns:
            return
        first_m = pid // (GROUP * columns) * GROUP
        group_m = tl.minimum(tiles_m - first_m, GROUP)
        in_group = pid - first_m * columns
        i_m = first_m + in_group % group_m
        column = in_group // group_m
        in_turn = splits
        if COUNTED:
            in_turn = tl.where(parallel > 1, 1, splits)
        o_m = i_m * height
        end_m = tl.minimum(o_m + height, rows)
        for i in tl.static_range(len(HEIGHTS)):
            if (end_m - o_m <= HEIGHTS[i]) & (end_m - o_m > (HEIGHTS[i - 1] if i > 0 else 0)):
                run_tile(
                    x16, x32, x64, x128, x256, w, p_out, o_m, end_m, room_m - 1, column // parallel * BN,
                    column % parallel, in_turn, split_k, N, K, part_stride, HEIGHTS[i], BN, BK, GATED, SEQUENTIAL, ROOM,
                    TMA, EVEN_K, EVICT,
                )  # fmt: skip


def project_rows(
    x_RK: torch.Tensor, weight: torch.Tensor, count_1: torch.Tensor, rows_per_count: int, out: Parts,
    N: int, splits: int, gated: bool, tiles: Plan,
) -> None:  # fmt: skip
    """Both operations with everything chosen. ``out``: parts [splits, R, N] or [1, R, N]; hidden rows [1, R, N]."""
    assert x_RK.is_contiguous()
    assert weight.is_contiguous()
    assert count_1.dtype == torch.int32, "the compiler refuses tiles at places of 64 bits"
    assert out.values_KRN[0].is_contiguous()
    room, K = x_RK.shape
    counted = out.used_1 is not None
    assert tiles.slots or not counted, "who counts the sums also picks the tiles' height"
    assert len(tiles.step_costs) == len(tiles.heights)
    sequential = counted or (splits > 1 and len(out.values_KRN) == 1)
    x_by_rows: list[object] = [x_RK] * len(PIECES)
    w: object = weight
    if tiles.tma:
        used = {piece for height in tiles.heights for piece in PIECES if height & piece}
        x_by_rows = [
            TensorDescriptor.from_tensor(x_RK, [piece, tiles.tile_k]) if piece in used else None for piece in PIECES
        ]
        w = TensorDescriptor.from_tensor(weight, [tiles.tile_n, tiles.tile_k])
    row_tiles, columns = triton.cdiv(room, tiles.tall), triton.cdiv(N, tiles.tile_n) * (1 if sequential else splits)
    programs = row_tiles * columns
    if tiles.slots:
        most = triton.cdiv(room, tiles.heights[0]) * columns
        if counted:
            most = max(most, triton.cdiv(min(room, out.stride), tiles.heights[0]) * columns * splits)
        programs = max(programs, min(most, MOST_WAVES * tiles.slots))
    width, overlap = split_width(K, splits), overlapped(x_RK)
    # Output and down projections: the kernel before does not write their count. Of the others it does.
    reads_early = early(x_RK)["EARLY"] and not gated and N <= K
    _project_kernel[(programs,)](
        *x_by_rows, w, weight, out.values_KRN, count_1 if out.used_1 is None else out.used_1, count_1, rows_per_count,
        room, N, K, splits, width, out.values_KRN.stride(0), out.stride,
        HEIGHTS=tiles.heights, BN=tiles.tile_n, BK=tiles.tile_k, GATED=gated, SEQUENTIAL=sequential,
        COUNTED=counted, SLOTS=tiles.slots, ROOM=tiles.shared // x_RK.element_size(), GROUP=tiles.group,
        TMA=tiles.tma, EVEN_K=K % tiles.tile_k == 0,
        EVICT="evict_first" if tiles.evict_first else "", ONE_TILE=row_tiles == 1 and len(tiles.heights) == 1,
        DEPTH=prefetch_depth(tiles, columns, min(width, K), gated) if overlap["OVERLAP"] else 0,
        THREADS=32 * tiles.num_warps, EARLY=reads_early, COSTS=tiles.step_costs, num_warps=tiles.num_warps, **overlap,
    )  # fmt: skip


def linear_rows(
    x_RK: torch.Tensor,
    weight_NK: torch.Tensor,
    count_1: torch.Tensor,
    rows_per_count: int,
    parts: Parts,
    tiles: Plan | None = None,
) -> None:
    """Rows r < count * rows_per_count of ``x @ weight.T`` in float32, as partial sums over slices of the inner width.

    There are ``num_splits(N, K)`` of them, to be added in order; or one, which then holds just that sum, the same bits:
    where ``parts`` has one place, or where it counts them and rows are many. ``make_parts`` makes what suits a shape.
    Other rows are left alone.
    """
    N, K = weight_NK.shape
    splits = num_splits(N, K, weight_NK.dtype)
    assert len(parts.values_KRN) in (1, splits)
    assert parts.values_KRN.shape[1:] == (x_RK.shape[0], N)
    tiles = tiles or plan(N, K, weight_NK.dtype, x_RK.shape[0])
    project_rows(x_RK, weight_NK, count_1, rows_per_count, parts, N, splits, False, tiles)


def swiglu_rows(
    x_RE: torch.Tensor,
    gate_up_2IE: torch.Tensor,
    count_1: torch.Tensor,
    rows_per_count: int,
    hidden_RI: torch.Tensor,
    tiles: Plan | None = None,
) -> None:
    """Rows r < count * rows_per_count of ``silu(x @ gate.T) * (x @ up.T)``; gate and up stand stacked in one weight.

    Gate and up are rounded to the model's dtype, as if they had been stored; silu and product are float32, rounded once
    (``kernels.linear`` rounds silu too). Other rows are left alone.
    """
    I, E = gate_up_2IE.shape[0] // 2, gate_up_2IE.shape[1]  # noqa: E741
    assert hidden_RI.shape == (x_RE.shape[0], I)
    tiles = tiles or plan(I, E, gate_up_2IE.dtype, x_RE.shape[0], gated=True)
    project_rows(x_RE, gate_up_2IE, count_1, rows_per_count, Parts(hidden_RI[None]), I, 1, True, tiles)


def linear_rows_reference(
    x_RK: torch.Tensor,
    weight_NK: torch.Tensor,
    count_1: torch.Tensor,
    rows_per_count: int,
    parts: Parts,
    tiles: Plan | None = None,
) -> None:
    N, K = weight_NK.shape
    rows = int(count_1) * rows_per_count
    splits = num_splits(N, K, weight_NK.dtype)
    width = split_width(K, splits)
    x_rK = pad_rows(x_RK[:rows].float())
    sums = [
        F.linear(x_rk, w_Nk) for x_rk, w_Nk in zip(x_rK.split(width, 1), weight_NK.float().split(width, 1), strict=True)
    ]
    if parts.used_1 is not None:
        parts.used_1.fill_(1)
    if parts.used_1 is not None or len(parts.values_KRN) == 1:
        sums = [sum(sums[1:], start=sums[0])]
    for part_RN, sum_rN in zip(parts.values_KRN, sums, strict=parts.used_1 is None):
        part_RN[:rows] = sum_rN[:rows]


def swiglu_rows_reference(
    x_RE: torch.Tensor,
    gate_up_2IE: torch.Tensor,
    count_1: torch.Tensor,
    rows_per_count: int,
    hidden_RI: torch.Tensor,
    tiles: Plan | None = None,
) -> None:
    rows = int(count_1) * rows_per_count
    gate, up = F.linear(pad_rows(x_RE[:rows].float()), gate_up_2IE.float()).to(x_RE.dtype).float().chunk(2, dim=-1)
    # Contiguous, so that every element takes the vectorised path, as in ``kernels.linear``.
    hidden_RI[:rows] = (F.silu(gate.contiguous()) * up)[:rows].to(hidden_RI.dtype)
