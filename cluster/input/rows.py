"""From raw rows to prompts in tokens, and to the columns that are carried along."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import count

import pyarrow as pa

from cluster.config import JobConfig
from cluster.input.carry import carried_table, unknown_columns
from cluster.input.options import RowOptions, is_batch_line, read_body
from cluster.input.parse import Row, parse_shard
from cluster.input.problems import INPUT_ERROR_KINDS, RowProblem
from cluster.input.prompts import PromptReader
from cluster.input.schema import PROMPT_COLUMNS, prompt_columns
from cluster.input.shards import RawShard
from specfold.checkpoint import load_tokenizer, read_model_info

__all__ = ["INPUT_ERROR_KINDS", "PreparedRow", "RowPreparer"]

_NO_OPTIONS = RowOptions()


@dataclass(slots=True)  # frozen it takes three times as long to make, for every row
class PreparedRow:
    """An input row ready to decode, or the reason why it is not. None in an override: the job's setting holds."""

    row_id: int
    prompt_ids: list[int] | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    error: str | None = None
    error_kind: str | None = None


class RowPreparer:
    """Turns raw shards into prepared rows. Cheap to build: reads the tokenizer and the model's config, no weights.

    Raises ``UserError`` for templates that cannot work, ``ModelError`` for a folder that is no model, and
    ``ConfigError`` for settings that the model cannot decode with.
    """

    def __init__(self, config: JobConfig, model_folder: str, carried: pa.Schema) -> None:
        tokenizer = load_tokenizer(model_folder)
        self._info = read_model_info(model_folder, tokenizer, config.mask_token_id, config.stop_token_ids)
        self._decode = config.decode
        self._info.check_config(self._decode)
        self._columns = prompt_columns(config)
        self._prompts = PromptReader(config, tokenizer, (self._info.mask_token_id, *self._info.stop_token_ids))
        self._carried, self._prefix = carried, config.input_prefix
        needed = {*self._columns, "custom_id", "body"}
        self._needed = needed if config.prompt_template is None else None
        self._known = {name.removeprefix(self._prefix) for name in carried.names} | {*self._columns, "body"}
        self._carries_all = config.carry == "all"

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return self._info.stop_token_ids

    def prepare(self, raw: RawShard) -> tuple[list[PreparedRow], pa.Table]:
        """One prepared row per input row, and the carried columns of the same rows (nulls for a broken line)."""
        parsed = parse_shard(raw, self._needed)
        table, problems = carried_table(parsed, self._carried, self._prefix, raw.kind)
        if self._carries_all and raw.kind == "jsonl":
            problems |= unknown_columns(parsed.rows, self._known)
        prompts = [self._read(problems.get(i, row)) for i, row in enumerate(parsed.rows)]
        tokens = iter(self._prompts.encode([prompt for prompt, _ in prompts if isinstance(prompt, str)]))
        found = (next(tokens) if isinstance(prompt, str) else prompt for prompt, _ in prompts)
        rows = map(self._prepared, count(raw.first_row), found, (options for _, options in prompts))
        return [*rows], table

    def _read(self, row: Row | RowProblem) -> tuple[str | list[int] | RowProblem, RowOptions]:
        """The row's prompt as text or as tokens, or its problem; and the options that it brings."""
        if isinstance(row, RowProblem):
            return row, _NO_OPTIONS
        try:
            if not self._columns:
                return self._prompts.from_template(row), _NO_OPTIONS
            if not is_batch_line(row):
                return self._choose(row, self._columns), _NO_OPTIONS
            if any(row.get(name) is not None for name in self._columns):
                raise RowProblem("ambiguous_prompt", "The row has a body and a prompt beside it; one is allowed.")
            inner, options = read_body(row["body"], self._decode)
            return self._choose(inner, PROMPT_COLUMNS), options
        except RowProblem as problem:
            return problem, _NO_OPTIONS

    def _choose(self, row: Row, columns: tuple[str, ...]) -> str | list[int]:
        """The prompt out of the one column that has it; a null is no prompt."""
        present = [name for name in columns if row.get(name) is not None]
        if not present:
            raise RowProblem("missing_prompt", f"The row has none of {', '.join(columns[:-1])} and {columns[-1]}.")
        if len(present) > 1:
            raise RowProblem("ambiguous_prompt", f"The row has {' and '.join(present)}; one is allowed.")
        [name] = present
        value = row[name]
        if name == columns[0]:
            return self._prompts.from_text(name, value)
        return self._prompts.from_messages(value) if name == "messages" else self._prompts.from_ids(value)

    def _prepared(self, row_id: int, prompt: list[int] | RowProblem, options: RowOptions) -> PreparedRow:
        if isinstance(prompt, RowProblem):
            return PreparedRow(row_id, error=str(prompt), error_kind=prompt.kind)
        limit = self._decode.max_new_tokens if options.max_new_tokens is None else options.max_new_tokens
        wrong = self._info.check_prompt(prompt, limit)
        if wrong is not None:
            return PreparedRow(row_id, error=wrong[1], error_kind=wrong[0])
        if options is _NO_OPTIONS:
            return PreparedRow(row_id, prompt)
        return PreparedRow(row_id, prompt, **asdict(options))
