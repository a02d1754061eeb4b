"""The training of the bundled models, on small random networks: what it learns from is what decoding will show it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_training import training
from reference_training.dataset import LENGTH, Dataset, build_dataset
from reference_training.decode import decoding_mask
from reference_training.model import BLOCK, FAMILIES, FAST_DLLM_V2, ReferenceModel, make_config
from reference_training.objective import Objective, build_objective, locate_blocks
from reference_training.tokenizer import MASK, STOP, train_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "intermediate_size": 96, "head_dim": 32}  # fmt: skip
MASK_ID, STOP_ID = 3, 2


@pytest.fixture(scope="module")
def data() -> Dataset:
    tokenizer = train_tokenizer()
    assert [tokenizer.token_to_id(token) for token in (STOP, MASK)] == [STOP_ID, MASK_ID]
    return build_dataset(tokenizer, 6, workers=1)


def small_model(family: str) -> ReferenceModel:
    torch.manual_seed(0)
    model = ReferenceModel(make_config(family, mask_id=MASK_ID, stop_id=STOP_ID, pad_id=0, **SIZES))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)  # far from the near-linear start, so that a wrong mask shows
    return model


def objective_of(family: str, data: Dataset) -> Objective:
    rows = [torch.from_numpy(array.astype(np.int64)) for array in data]
    return build_objective(family, *rows, MASK_ID, torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_noisy_block_is_forwarded_as_in_decoding(family: str, data: Dataset) -> None:
    model, objective = small_model(family), objective_of(family, data)
    clean = torch.from_numpy(data.tokens_NL.astype(np.int64))
    prompt_len = torch.from_numpy(data.prompt_len_N.astype(np.int64))
    blocks = locate_blocks(family, prompt_len, LENGTH, torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH)
    with torch.no_grad():
        trained = model(objective.tokens_BT, positions.repeat(3), objective.mask_BTT)
        for row in range(len(clean)):
            for start in (blocks.offset_BL[row] == 0).nonzero()[:, 0].tolist():
                end = min(start + BLOCK, LENGTH)
                for copy in (LENGTH, 2 * LENGTH):
                    tokens = clean[row : row + 1].clone()
                    tokens[0, start:end] = objective.tokens_BT[row, copy + start : copy + end]
                    tokens[0, end:] = MASK_ID
                    decoded = model(tokens, positions, decoding_mask(family, positions, torch.tensor([[start]])))
                    torch.testing.assert_close(
                        trained[row, copy + start : copy + end], decoded[0, start:end], rtol=0, atol=1e-4
                    )


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_masked_is_answer_and_is_predicted(family: str, data: Dataset) -> None:
    objective = objective_of(family, data)
    shift = 1 if family == FAST_DLLM_V2 else 0
    for row in range(len(data.tokens_NL)):
        answer = data.tokens_NL[row, data.prompt_len_N[row] :]
        for copy in (LENGTH, 2 * LENGTH):
            masked = (objective.tokens_BT[row, copy : copy + LENGTH] == MASK_ID).nonzero()[:, 0]
            assert (masked >= data.prompt_len_N[row]).all()
            predicted = objective.weights_BT[row, copy : copy + LENGTH].nonzero()[:, 0] + shift
            assert predicted.tolist() == masked.tolist()
            targets = objective.targets_BT[row, copy + masked - shift]
            assert targets.tolist() == answer[masked - int(data.prompt_len_N[row])].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss_and_repeats_exactly(family: str, data: Dataset) -> None:
    def run() -> tuple[dict[str, float], torch.Tensor]:
        model = small_model(family)
        settings = {"steps": 12, "batch": 4, "lr": 0.05, "seed": 0}
        return training.train(model, family, data, MASK_ID, **settings), model.body.norm.weight.detach()

    (losses, weight), (_, again) = run(), run()
    assert losses["noisy_loss"] < 6.0  # ln(640) = 6.5 at the start
    assert torch.equal(weight, again)
