"""What a run has to tell besides its rows, in words: its audit, and what was found before it decoded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cluster.words import count, size, verb


def describe_audit(values: dict[str, Any]) -> str:
    """The audit in one line; ``values`` is the ``audit`` of ``summary.json``."""
    what = "repeated" if values["run_mode"] == values["audit_mode"] else f"decoded with --mode {values['audit_mode']}"
    rows = values["rows"]
    line = f"Audit: {values['identical']:,} of {count(rows, 'row')} {what} {verb(rows, 'is', 'are')} identical"
    if values["identical"] < rows:
        first = values["divergences"][0]
        share = values["tokens_before_divergence"] / max(values["tokens"], 1)
        line += f"; {share:.1%} of the tokens come before a difference"
        line += f"; the first is in row {first['row_id']} (sample {first['sample_id']}) at token {first['position']}"
    if values["error"]:
        line += f"; not finished: {values['error'].rstrip('.')}"
    return line + "."


def divergence_lines(values: dict[str, Any]) -> Iterator[tuple[str, int, int, str, str]]:
    """The rows of the audit that differ: row, sample, position, and the token there in the run and in the audit."""
    for found in values["divergences"]:
        run, again = ("the end" if found[name] is None else str(found[name]) for name in ("run", "audit"))
        yield f"{found['row_id']}", found["sample_id"], found["position"], run, found["reason"] or again


def preflight_lines(values: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What the check before decoding found, as name and text; ``values`` is the ``preflight`` of ``summary.json``."""
    total = values["rows_total"]
    checked = f"{values['rows_checked']:,}"
    yield "Input rows checked", checked if total in (None, values["rows_checked"]) else f"{checked} of {total:,}"
    yield "Cannot be decoded", f"{values['failed']:,}"
    for kind, number in values["failed_by_kind"].items():
        first = values["first_failed"][kind]
        yield kind, f"{count(number, 'row')}, first row {first['row_id']}: {first['error']}"
    yield "Repeat the id of an earlier row", f"{values['repeated_ids']:,}"
    yield "Repeat the prompt of an earlier row", f"{values['repeated_prompts']:,}"
    yield "Prompts with a stop token", f"{values['with_stop_token']:,}"
    lengths = values["prompt_tokens"]
    if lengths:
        yield (
            "Prompt tokens",
            f"{lengths['least']:,} to {lengths['most']:,}, median {lengths['median']:,}, mean {lengths['mean']:,.1f}",
        )
    parts = f"{count(values['parts'], 'part')} of {count(values['shard_rows'], 'input row')}"
    yield "Planned", f"{count(values['outputs'], 'output')} in {parts}"
    most = f"{count(values['most_tokens_of_checked'], 'token')}, about {size(values['most_bytes_of_checked'])}"
    yield "At most, of the checked rows", most
    memory = values["memory_bytes"]
    if memory:
        yield (
            "Memory of a worker",
            f"weights {size(memory['weights'])}, keys and values {size(memory['token'])} a token, logits of a step at "
            f"most {size(memory['logits'])}",
        )
