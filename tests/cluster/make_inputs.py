"""Small models without weights, input files, and the path from a file to prepared rows, for the tests of the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.config import JobConfig
from cluster.input.rows import PreparedRow, RowPreparer
from cluster.input.schema import carried_schema
from cluster.input.source import open_input

PAD, START, STOP, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "|<MASK>|"
PAD_ID, START_ID, STOP_ID, MASK_ID = 256, 257, 258, 259
VOCAB, CONTEXT = 300, 512
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'forbidden' %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(folder: Path, with_tokenizer: bool = True, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """A model folder without weights whose tokenizer gives one token a byte (its value), beside four special ones."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["Fast_dLLM_QwenForCausalLM"], "model_type": "Fast_dLLM_Qwen", "hidden_size": 32,
        "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "eos_token_id": STOP_ID, "mask_token_id": MASK_ID,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    if with_tokenizer:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": STOP, "pad_token": PAD}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template)
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    """JSON Lines; a row that is bytes already stands as it is."""
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def prepare_all(
    prompts: Path | str, model: Path, shard_rows: int = 4, **settings: Any
) -> tuple[list[PreparedRow], pa.Table]:
    """Every row of the input as a worker would prepare it, and the carried columns."""
    config = JobConfig(prompts=str(prompts), max_new_tokens=settings.pop("max_new_tokens", 16), **settings).with_files()
    source = open_input(config)
    schema = carried_schema(source, config)
    preparer = RowPreparer(config, str(model), schema)
    prepared = [preparer.prepare(raw) for raw in source.shards(shard_rows, config.limit)]
    rows = [row for part, _ in prepared for row in part]
    assert all(len(part) == len(table) or not table.num_columns for part, table in prepared)
    return rows, pa.concat_tables([table for _, table in prepared])


def as_text(ids: list[int] | None) -> str:
    """What the byte tokenizer's ids say; special tokens in double brackets, so that forged ones are seen."""
    special = {PAD_ID: PAD, START_ID: START, STOP_ID: STOP, MASK_ID: MASK}
    parts = [f"[[{special[token]}]]".encode() if token in special else bytes([token]) for token in ids or ()]
    return b"".join(parts).decode()


def user_turn(text: str, system: str | None = None) -> str:
    """How ``as_text`` shows a prompt in the chat template."""
    head = f"[[{START}]]system\n{system}[[{STOP}]]\n" if system is not None else ""
    return f"{head}[[{START}]]user\n{text}[[{STOP}]]\n[[{START}]]assistant\n"


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, its value, and the special tokens behind them."""
    alphabet = _byte_alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in (PAD, START, STOP, MASK)])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]
