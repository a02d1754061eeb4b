"""``README.md`` of an output folder: the dataset card, as the hub reads it and as people do."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from cluster.config import JobConfig, flag_fields, without_secrets
from cluster.flags import flag
from cluster.models import ModelRef
from cluster.words import count

CARD = "README.md"
_SIZES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"),
          (10_000_000, "1M<n<10M"), (100_000_000, "10M<n<100M"), (1_000_000_000, "100M<n<1B"))  # fmt: skip
_MAX_TEXT = 200
_NOT_REPEATED = {
    "output", "overwrite", "retry_failed", "check", "push_to_hub", "hub_public", "workers", "gpus_per_worker",
}  # fmt: skip
_COLUMNS = """\
Every row is one output. `row_id` counts the input rows and `sample_id` the outputs of one; the columns of the input are
carried along. `output_text` and `output_token_ids` are empty where `finish_reason` is `error`; `error` and `error_kind`
say why. `flags` names what looks wrong with an output that was made. The counters `num_prompt_tokens`,
`num_output_tokens`, `num_forwards`, `drafts_proposed`, `drafts_accepted`, `accepted_by_depth`, `fold_rate`,
`recomputed_rows` and `seconds` tell how it was decoded."""


def dataset_card(config: JobConfig, model: ModelRef, summary: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    """The card of a finished run; ``summary`` is what ``summary.json`` says.

    There is no ``configs`` block: with one ``datasets`` caches by the folder's name and shows another run's rows.
    """
    # Imported here: a third of a second that only a job's end needs.
    from huggingface_hub import DatasetCardData

    name = PurePosixPath(config.model.rstrip("/")).name or "model"
    data = DatasetCardData(
        pretty_name=f"Outputs of {_line(name)}",
        task_categories=["text-generation"],
        size_categories=[_size(_num_rows(summary))],
        tags=["synthetic", "diffusion-language-model", "specfold"],
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# Outputs of {_text(name)}",
        _opening(config, model, summary),
        f"## Rows\n\n{_table(('', 'rows'), _counts(summary))}",
        f"## Decoding\n\n{_table(('setting', 'value'), _settings(config))}",
        f"## Speed\n\n{_table(('', ''), _speed(summary))}",
        f"## The same run again\n\n{_fenced(reproduction(config, model))}\n\n{_versions(versions)}",
        f"## Columns\n\n{_COLUMNS}",
    ]
    return "\n\n".join(parts) + "\n"


def reproduction(config: JobConfig, model: ModelRef) -> str:
    """The command that does the same: every flag that is not at its default, but for those of one session, of one
    machine, and of where the results go."""
    words = ["python", "jobs/generate.py"]
    for field in flag_fields():
        value = getattr(config, field.name)
        if field.name == "revision":
            value = model.commit
        if field.name == "drafts":
            value = config.decode.drafts  # what auto has chosen: another machine would choose otherwise
        if field.name in _NOT_REPEATED or value == field.default:
            continue
        if isinstance(value, bool):
            words.append(flag(field.name if value else f"no_{field.name}"))
            continue
        for item in value if isinstance(value, tuple) else (value,):
            text = without_secrets(item) if field.name in ("model", "prompts") else str(item)
            # One word: a value that begins with a dash is no flag.
            words.append(f"{flag(field.name)}={shlex.quote(text)}")
    return " \\\n    ".join([" ".join(words[:2]), *words[2:], "--output=out"])


def _opening(config: JobConfig, model: ModelRef, summary: Mapping[str, Any]) -> str:
    pinned = f"commit {model.commit}" if model.commit else f"content {model.content_hash}"
    prompts = without_secrets(config.prompts) + (f", split {config.split}" if config.split else "")
    note = "" if config.deterministic else "\n\nNot deterministic: tokens may depend on the rows decoded together."
    return (
        f"{count(_num_rows(summary), 'output')}, made by a diffusion language model.\n\n"
        f"- Model: {_text(config.model)} ({_text(pinned)})\n- Prompts: {_text(prompts)}{note}"
    )


def _counts(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    rows, audit = summary["rows"], summary.get("audit") or {}
    repeats = (summary.get("preflight") or {}).get("repeated_prompts")
    yield "decoded", f"{rows['done'] - rows['failed']:,}"
    if repeats:
        yield "input rows whose prompt repeats an earlier one", f"{repeats:,}"
    yield "left out, as their flags say that they are degenerate", f"{rows['quarantined']:,}"
    for what, found in (
        ("finish reason", rows["by_finish_reason"]),
        ("error", rows["failed_by_kind"]),
        ("flag", summary.get("flags") or {}),
    ):
        for name, number in found.items():
            yield f"{what} {name}", f"{number:,}"
    if audit.get("rows"):
        again = f"decoded again with mode {audit['audit_mode']}"
        yield f"{again}, all tokens identical", f"{audit['identical']:,} of {audit['rows']:,}"


def _settings(config: JobConfig) -> Iterable[tuple[str, str]]:
    for name, value in config.identity().items():
        if value is not None and value != []:
            yield name, " ".join(map(repr, value)) if isinstance(value, list) else str(value)


def _speed(summary: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    speed = summary["tokens_per_second"]
    yield "output tokens", f"{summary['output_tokens']:,}"
    yield "tokens per second while decoding", _number(speed["decode"])
    yield "tokens per second end to end", _number(speed["end_to_end"])
    yield "tokens per forward", _number(summary["tokens_per_forward"])
    yield "acceptance by draft depth", ", ".join(map(_percent, summary["acceptance_by_depth"])) or "no drafts"
    yield "draft positions folded", _percent(summary["fold_rate"])
    if summary.get("time_fold_rate") is not None:
        yield "positions folded in time", _percent(summary["time_fold_rate"])
    yield "positions computed for an output token, all layers", _number(summary.get("recomputed_rows_per_token"))
    yield "workers", str(len(summary["workers"]))


def _versions(versions: Mapping[str, Any]) -> str:
    return "Made with " + ", ".join(f"{_text(k)} {_text(str(v))}" for k, v in versions.items() if v) + "."


def _num_rows(summary: Mapping[str, Any]) -> int:
    """Rows in ``data/``."""
    return int(summary["rows"]["done"] - summary["rows"]["quarantined"])


def _size(rows: int) -> str:
    return next((name for limit, name in _SIZES if rows < limit), "n>1T" if rows >= 10**12 else "1B<n<10B")


def _table(head: tuple[str, str], lines: Iterable[tuple[str, str]]) -> str:
    rows = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    rows += [f"| {_text(name)} | {_text(value)} |" for name, value in lines]
    return "\n".join(rows)


def _fenced(text: str) -> str:
    """A code block whose fence is longer than any run of backticks in it, and that holds no control characters."""
    clean = "".join(c if c == "\n" or c.isprintable() else "\ufffd" for c in text)
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", clean)), default=0))
    return f"{fence}bash\n{clean}\n{fence}"


def _text(value: str) -> str:
    """Text that Markdown and HTML show as it is, on one line and not too long."""
    # An underscore stays: names are full of them, and it can do no more than make text slanted.
    return re.sub(r"[\\`*\[\]<>|&!~$#{}@]", lambda found: f"&#{ord(found[0])};", _line(value))


def _line(value: str) -> str:
    """One printable line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in value).split())
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f}%"
