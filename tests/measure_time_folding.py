"""Measure what folding in time and the sub-block cache cost in accuracy and save in rows, on the bundled models.

    python tests/measure_time_folding.py out.jsonl                        # goes on where the file ends
    python tests/measure_time_folding.py out.jsonl --seconds 500          # start no further run after this time
    python tests/measure_time_folding.py out.jsonl --table                # the file as Markdown
    python tests/measure_time_folding.py out.jsonl --plot time.png        # rows and agreement, the first model alone

Texts: held-out word problems, which the models answer; the same at a temperature that makes them err; and GSM8K
questions, on which they are unsure of every token: accuracy means nothing there, agreement with plain decoding is the
strictest test there is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # also where the project is not installed, as on a GPU machine
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from evaluate_reference_models import chat_ids  # noqa: E402
from reference_training.task import heldout_problems, is_right  # noqa: E402

from cluster.evaluation.statistics import wilson_interval  # noqa: E402
from specfold import DecodeConfig, Engine, reference_models  # noqa: E402
from specfold.benchmark.profile_plots import plot_time  # noqa: E402
from specfold.config import FfnGate  # noqa: E402
from specfold.stats import DecodeStats  # noqa: E402

DELTAS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
SHARED = Path(os.environ.get("SPECFOLD_SHARED", ROOT.parent / "shared"))


def runs(deltas: Sequence[float], gates: Sequence[FfnGate]) -> list[dict[str, Any]]:
    """Plain decoding comes first, the others are held against it."""
    settings: list[dict[str, Any]] = [{"mode": "vanilla"}, {"mode": "vanilla", "use_block_cache": True}]
    settings.append({"mode": "specfold"})
    for gate in gates:
        for mode in ("vanilla", "specfold"):
            settings += [{"mode": mode, "ffn_gate": gate, "delta_time": delta} for delta in deltas]
    return settings


@dataclass(frozen=True)
class Text:
    """Questions, and answers where the models can know them."""

    questions: list[str]
    answers: list[int] | None = None
    temperature: float = 0.0


def texts(problems: int, sampled: int, temperature: float, hard: int) -> dict[str, Text]:
    lines = (SHARED / "data" / "gsm8k" / "test.jsonl").read_text().splitlines()[:hard] if hard else []
    easy = heldout_problems(max(problems, sampled))
    asked, answers = [p.question for p in easy], [p.answer for p in easy]
    return {
        "problems": Text(asked[:problems], answers[:problems]),
        f"problems at temperature {temperature:g}": Text(asked[:sampled], answers[:sampled], temperature),
        "gsm8k": Text([json.loads(line)["question"] for line in lines]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", nargs="*", choices=reference_models.NAMES, default=reference_models.NAMES)
    parser.add_argument("--problems", type=int, default=100)
    parser.add_argument("--sampled", type=int, default=0, help="problems answered at a temperature")
    parser.add_argument("--temperature", type=float, default=2.0)
    parser.add_argument("--hard", type=int, default=24, help="GSM8K questions")
    parser.add_argument("--delta", type=float, nargs="+", default=DELTAS)
    parser.add_argument("--gate", nargs="+", choices=["own", "entry"], default=["own", "entry"])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    done = [json.loads(line) for line in args.file.read_text().splitlines()] if args.file.exists() else []
    if args.table:
        print(table(done))
        return
    if args.plot:
        plot(done, args.model[0], args.plot)
        return
    torch.set_num_threads(1)
    end = time.monotonic() + args.seconds
    engines = {name: Engine.from_pretrained(reference_models.path(name)) for name in args.model}
    for name, text in texts(args.problems, args.sampled, args.temperature, args.hard).items():
        for setting, (model, engine) in product(runs(args.delta, args.gate), engines.items()):
            key = {"text": name, "model": model, "setting": setting}
            impossible = "use_block_cache" in setting and not engine.info.family.has_sub_blocks
            if impossible or not text.questions or any(key == {k: r[k] for k in key} for r in done):
                continue
            if time.monotonic() > end:
                return
            same = [r for r in done if (r["text"], r["model"]) == (name, model)]
            done.append(key | measure(engine, text, setting, args.batch_size, same))
            with args.file.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")


def measure(
    engine: Engine,
    text: Text,
    setting: dict[str, Any],
    batch_size: int,
    before: list[dict[str, Any]],
) -> dict[str, Any]:
    """One run; ``before``: the runs on the same text, plain decoding first."""
    asked, answers = text.questions, text.answers
    base = DecodeConfig(delta=0.1, drafts=4, max_new_tokens=128 if answers else 64, temperature=text.temperature)
    config = replace(base, **setting)
    outs = engine.generate([chat_ids(engine, q) for q in asked], config, batch_size=batch_size)
    total = DecodeStats()
    for out in outs:
        total.add(out.stats)
    tokens = [out.token_ids for out in outs]
    plain = before[0]["tokens"] if before else tokens
    per_forward = engine.info.spec.num_layers * engine.info.spec.block_size * total.num_forwards
    return {
        "questions": len(asked),
        "right": sum(is_right(o.text, a) for o, a in zip(outs, answers, strict=True)) if answers else None,
        "same": sum(a == b for a, b in zip(tokens, plain, strict=True)),
        "forwards": total.num_forwards / len(asked),
        "qkv_share": total.recomputed_qkv_rows / per_forward,
        "ffn_share": total.recomputed_ffn_rows / per_forward,
        "qkv_rows_per_token": total.recomputed_rows_per_token,
        "ffn_rows_per_token": total.recomputed_ffn_rows / max(total.output_tokens, 1),
        "fold_rate": total.fold_rate,
        "time_fold_rate": total.time_fold_rate,
        "tokens": tokens,
    }


def plot(records: list[dict[str, Any]], model: str, path: Path) -> None:
    """What the profile draws, from the problems."""
    chosen = []
    for r in records:
        if (r["text"], r["model"]) == ("problems", model):
            setting = {"ffn_gate": None, "delta_time": None} | r["setting"]
            mode = "sub-block cache" if "use_block_cache" in setting else setting["mode"]
            shares = {"agreement": r["same"] / r["questions"], "accuracy": r["right"] / r["questions"]}
            chosen.append(r | setting | shares | {"mode": mode})
    chosen[1:] = sorted(chosen[1:], key=lambda r: r["delta_time"] or 0)
    plot_time(chosen, path, timed=False)


def table(records: list[dict[str, Any]]) -> str:
    """Markdown, one table a text and model; both gates side by side."""
    groups: dict[tuple[str, str], dict[tuple[str, str], dict[str, str]]] = {}
    for r in records:
        setting = r["setting"]
        name = "sub-block cache" if "use_block_cache" in setting else setting["mode"]
        name = "4 drafts, delta 0.1" if name == "specfold" else name
        lines = groups.setdefault((r["text"], r["model"]), {})
        delta = setting.get("delta_time")
        cells = lines.setdefault((name, "" if delta is None else f"{delta:g}"), {})
        cells[setting.get("ffn_gate", "own")] = _cell(r)
    page = []
    for (text, model), lines in groups.items():
        page += [f"{text}, {model}", "", "| | delta_time | own gate | entry gate |", "|---|---|---|---|"]
        order = sorted(lines, key=lambda line: (line[0] != "vanilla", line[0], float(line[1] or 0)))
        page += [
            f"| {name} | {delta} | {lines[name, delta].get('own', '')} | {lines[name, delta].get('entry', '')} |"
            for name, delta in order
        ]
        page.append("")
    return "\n".join(page)


def _cell(r: dict[str, Any]) -> str:
    """Right answers with their interval, share of outputs like plain decoding's, forwards a row, and QKV and FFN rows
    of a forward as a share of a plain one's."""
    n, right = r["questions"], ""
    if r["right"] is not None:
        low, high = wilson_interval(r["right"], n)
        right = f"{r['right']} ({100 * low:.0f} to {100 * high:.0f}%), "
    return f"{right}{r['same'] / n:.0%}, {r['forwards']:.1f}, {r['qkv_share']:.2f} / {r['ffn_share']:.2f}"


if __name__ == "__main__":
    main()
