"""What a model needs in memory, told from its config and the headers of its weight files; nothing is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.config import JobConfig
from cluster.models import ModelRef, local_folder
from specfold import ModelError
from specfold.checkpoint import check_weights, read_model_info

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_LOGIT_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker. ``problem``: why the weights cannot be loaded, in one sentence."""

    weights: int = 0
    position: int = 0
    """Keys and values of one token of a row, over all layers."""
    logits: int = 0
    """Scores of one step, if every position of every branch of a full batch needed them."""
    problem: str | None = None


def measure_model(config: JobConfig, model: ModelRef) -> Footprint:
    """Look at the model of a job whose ``auto`` choices are made. Raises ``ModelError`` for a folder that is none."""
    folder = local_folder(model)
    info = read_model_info(folder, None, config.mask_token_id, config.stop_token_ids)
    try:
        num_parameters = check_weights(folder, info)
    except ModelError as error:
        return Footprint(problem=str(error))
    spec, item = info.spec, _ITEM_BYTES[config.dtype]
    block = config.block_size or spec.block_size
    branches = config.batch_size * (1 + config.decode.num_drafts)
    return Footprint(
        weights=num_parameters * item,
        position=2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * item,
        logits=branches * block * spec.vocab_size * _LOGIT_BYTES,
    )
