"""See why and where drafts and folding pay on a model and its prompts: SpecFold's analysis as tables and plots.

python jobs/profile.py --save profile
python jobs/profile.py --model ./model --prompts 'prompts/*.jsonl' --save profile --rows 16 --drafts 8
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

HERE = Path(__file__).resolve().parent
if sys.path and Path(sys.path[0]).resolve() == HERE:
    sys.path[0] = str(HERE.parent)  # a file in jobs/ must not hide a library's module of its name, as this one would

if __name__ == "__main__":
    from jobs.stopping import stop_at_once

    stop_at_once()  # the imports below take seconds

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402
from cyclopts import Group, Parameter  # noqa: E402

from cluster.errors import UserError  # noqa: E402
from cluster.flags import File, Int, Text  # noqa: E402
from cluster.input.sample import sample_answers, sample_rows  # noqa: E402
from cluster.input.source import open_input  # noqa: E402
from jobs.tools import ToolConfig, fixed_drafts, load_engine, run_tool, settle, write_whole  # noqa: E402
from specfold.benchmark.decoding import Question  # noqa: E402
from specfold.benchmark.profile_plots import (  # noqa: E402
    plot_delta,
    plot_drafts,
    plot_ripple,
    plot_shares,
    plot_time,
    require_matplotlib,
)
from specfold.benchmark.report import print_table  # noqa: E402
from specfold.benchmark.sweeps import residuals, sweep_delta, sweep_drafts, sweep_time  # noqa: E402

DELTAS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
DELTA_TIMES = (0.05, 0.1, 0.2, 0.5)
_GROUP = Parameter(group=Group("Profile", sort_key=0))
_SHOWN = (
    "mode", "ffn_gate", "delta", "delta_time", "drafts", "pruned_from", "agreement", "accuracy", "forwards_per_token",
    "accepted_per_forward", "fold_rate", "time_fold_rate", "qkv_rows_per_token", "ffn_rows_per_token", "speed",
)  # fmt: skip


def profile(
    *,
    save: Annotated[File, _GROUP],
    rows: Annotated[Int, _GROUP] = 16,
    deltas: Annotated[tuple[float, ...], _GROUP] = DELTAS,
    delta_times: Annotated[tuple[float, ...], _GROUP] = DELTA_TIMES,
    draft_counts: Annotated[tuple[Int, ...] | None, _GROUP] = None,
    answer_column: Annotated[Text | None, _GROUP] = None,
    repeats: Annotated[Int, _GROUP] = 1,
    config: Annotated[ToolConfig | None, Parameter(name="*")] = None,
) -> int:
    """Measure residuals of drafts, sweep delta and delta_time under both FFN gates, and sweep the number of drafts.

    Parameters
    ----------
    save
        Folder for tables (Parquet), plots (PNG) and profile.json; made if it is not there.
    rows
        Prompts to decode: the first ones of the input.
    deltas
        Values of delta; repeat the flag.
    delta_times
        Values of delta_time, each alone and with --drafts folded by --delta; repeat the flag.
    draft_counts
        Numbers of drafts; repeat the flag. Left out: 1, 2, 4, … up to --drafts.
    answer_column
        Input column with the number that an answer should end with, for accuracy.
    repeats
        Runs of each setting; the median time counts. With one, the plots show no speed.
    """
    config = config or ToolConfig()
    counts = _check(config, rows, repeats, draft_counts)
    require_matplotlib()
    settled = settle(config)
    decode, batch = settled.decode, settled.batch_size
    for delta in deltas:
        replace(decode.plain(), mode="specfold", delta=delta)  # a bad one is refused now, not after minutes
    for delta_time in delta_times:
        replace(decode.plain(), mode="specfold", delta_time=delta_time)
    _make_folder(save)
    engine, model, folder = load_engine(settled)
    source = open_input(settled)
    prepared = sample_rows(settled, source, folder, rows)
    answers = sample_answers(settled, source, folder, prepared, answer_column)
    questions = [Question(row.prompt_ids or [], answer) for row, answer in zip(prepared, answers, strict=True)]

    watch = residuals(engine, questions, decode, batch)
    tables = {"residuals": watch.shares(), "ripple": watch.ripple()}
    if not tables["residuals"]:
        raise UserError("no draft was ever verified on these prompts, so there is nothing to profile.")
    tables["delta"] = sweep_delta(engine, questions, decode, deltas, batch, repeats)
    tables["delta_time"] = sweep_time(engine, questions, decode, delta_times, batch, repeats)
    tables["drafts"] = sweep_drafts(engine, questions, decode, counts, batch, repeats)
    _write_tables(save, tables, timed=repeats > 1)
    summary: dict[str, Any] = {
        "model": model.name,
        "rows": len(questions),
        "device": settled.device,
        "share_below": {
            stage: {str(t): round(watch.share_below(t, stage), 4) for t in (0.1, 0.3)} for stage in ("entry", "middle")
        },
        "settings": {"drafts": decode.drafts, "max_new_tokens": decode.max_new_tokens, "batch_size": batch},
    }
    write_whole(save / "profile.json", json.dumps(summary, indent=1) + "\n")
    print(f"{save}: {len(questions)} prompts. Residuals of draft positions at a layer's entry: "
          f"{watch.share_below(0.1):.0%} at most 0.1, {watch.share_below(0.3):.0%} at most 0.3.")  # fmt: skip
    for title, name in (("By delta", "delta"), ("By delta_time", "delta_time"), ("By number of drafts", "drafts")):
        print(f"\n{title}")
        print_table([{k: r[k] for k in _SHOWN if k in r} for r in tables[name]])
    print(json.dumps(summary))
    return 0


def _check(config: ToolConfig, rows: int, repeats: int, draft_counts: tuple[int, ...] | None) -> list[int]:
    """Refuse what cannot be measured; the numbers of drafts to measure, in order."""
    most = fixed_drafts(config)
    counts = draft_counts or tuple(n for n in (1, 2, 4, 6, 8, 12, 16) if n <= most)
    if config.mode not in ("spiffy", "specfold"):
        raise UserError(f"--mode {config.mode} has no drafts to profile.")
    if not most:
        raise UserError("--drafts 0 leaves no drafts to profile.")
    for name, value in (("rows", rows), ("repeats", repeats), ("draft-counts", min(counts))):
        if value < 1:
            raise UserError(f"--{name} must be at least 1, not {value}.")
    if max(counts) > most:
        raise UserError(f"--draft-counts must be at most --drafts ({most}), not {max(counts)}.")
    return sorted(counts)


def _write_tables(save: Path, tables: dict[str, list[dict[str, Any]]], *, timed: bool) -> None:
    """Every table as Parquet and as a plot. A single run's time says little: it is in the tables alone."""
    for name, records in tables.items():
        pq.write_table(pa.Table.from_pylist(records), save / f"{name}.parquet")
    plot_shares(tables["residuals"], save / "residuals.png")
    plot_ripple(tables["ripple"], save / "ripple.png")
    plot_delta(tables["delta"], save / "delta.png", timed=timed)
    plot_time(tables["delta_time"], save / "delta_time.png", timed=timed)
    plot_drafts(tables["drafts"], save / "drafts.png", timed=timed)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--save {path} cannot be made: {error.strerror}.") from None


def main(argv: Sequence[str]) -> int:
    """Run the command; the last line it prints is JSON. A user's mistake is one line on stderr and exit code 2."""
    return run_tool(profile, "profile", argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
