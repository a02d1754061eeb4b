"""The bench times what it says, here on the fused backend's references with a random model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from specfold import DecodeConfig, Engine
from specfold.benchmark.forward_cost import fill_blocks, measure_step
from specfold.benchmark.throughput import measure_throughput
from tests.specfold.random_models import random_engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    random = random_engine("nemotron_labs_diffusion", block_size=16)
    # No stop token: what random weights say must not end a row early.
    return Engine(random.model, replace(random.info, stop_token_ids=()), None, "reference")


def test_a_folded_step_computes_the_forced_share_of_rows(engine: Engine) -> None:
    block = engine.info.spec.block_size
    dense = measure_step(engine, 2, 2, None, prompt_len=20, repeats=2)
    folded = measure_step(engine, 2, 2, 0.75, prompt_len=20, repeats=2)
    assert 0 < dense.masks_left <= block // 2, "the step before may have accepted drafts"
    assert dense.positions == dense.qkv_rows == dense.ffn_rows == 2 * 3 * block
    assert folded.positions == dense.positions
    assert folded.qkv_rows == folded.ffn_rows == 2 * block + 4 * block // 4
    assert folded.step_ms > 0


def test_a_step_folded_in_time_computes_the_forced_share_of_rows(engine: Engine) -> None:
    block = engine.info.spec.block_size
    alone = measure_step(engine, 2, 0, None, prompt_len=20, repeats=2, time_share=0.75)
    both = measure_step(engine, 2, 2, 0.75, prompt_len=20, repeats=2, time_share=0.5)
    assert alone.positions == 2 * block
    assert alone.qkv_rows == alone.ffn_rows == 2 * block // 4
    assert both.qkv_rows == both.ffn_rows == 2 * block // 2 + 4 * block // 4


def test_masks_left_are_those_at_the_end_of_the_block() -> None:
    state_ST = torch.tensor([[5, 9, 9, 9, 9], [9, 5, 9, 5, 9]])
    fill_blocks(state_ST, mask_id=9, masks_left=2)
    assert state_ST.tolist() == [[5, 0, 0, 9, 9], [0, 5, 9, 5, 9]]


def test_throughput_counts_the_rows_after_the_first_batch(engine: Engine) -> None:
    config = DecodeConfig(mode="spiffy", drafts=2, max_new_tokens=8)
    result = measure_throughput(engine, config, batch_size=2, rounds=2, prompt_len=20)
    assert result.rows == 4
    assert result.tokens_per_s > 0
    assert result.tokens_per_forward == pytest.approx(8 / result.forwards_per_row)
    assert result.step_ms is None, "steps are timed on a GPU only"
    assert result.time_fold_rate is None
    in_time = DecodeConfig(mode="vanilla", delta_time=0.1, max_new_tokens=8)
    forced = measure_throughput(engine, in_time, 2, 1, prompt_len=20, forced=(None, 0.5), name="time")
    assert forced.mode == "time"
    assert 0.25 < (forced.time_fold_rate or 0) < 0.5, "a block's first step folds nothing"
