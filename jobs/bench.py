"""Measures what the engine costs and what drafts and folding bring.

    python jobs/bench.py                                       # modes against each other on the bundled model
    python jobs/bench.py decode --prompts 16 --delta 0 0.1 0.3 --delta-time 0.1
    python jobs/bench.py step --shape nemotron-8b --batch-size 1 4 --drafts 0 8   # a step at a real checkpoint's shape
    python jobs/bench.py step --shape nemotron-8b --batch-size 64 --drafts 0 --time-fold 0.73   # folded in time
    python jobs/bench.py auto --size 1.5b --batch-size 1 16                       # --drafts auto beside 0 to 8 drafts
    python jobs/bench.py throughput --shape fast-dllm-v2-1.5b                     # prompt to last token, random weights
    python jobs/bench.py report step-*.json decode.json --plot bench.png          # merge what several calls measured

Each call prints a table and ends with one line of JSON; ``report`` merges files that end with such lines. ``step`` and
``throughput`` use random weights: their speed is real, their text is not. ``decode`` and ``auto`` measure a model that
answers: as it is (``model``), or the same function at three times the hidden and twice the feed-forward width
(``wide``), at the shape of Fast-dLLM-v2 1.5B (``1.5b``) or of Nemotron 8B (``8b``), for GPUs.
Needs torch, triton, safetensors and transformers only (a plot: matplotlib).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if sys.path and Path(sys.path[0]).resolve() == ROOT / "jobs":
    sys.path[0] = str(ROOT)  # a file in jobs/ must not hide a library's module of its name

if __name__ == "__main__":
    from jobs.stopping import stop_at_once

    stop_at_once()  # the imports below take seconds

import torch  # noqa: E402

from specfold import ConfigError, DecodeConfig, Engine, ModelError, reference_models  # noqa: E402
from specfold.backends.memory import free_device_memory  # noqa: E402
from specfold.backends.select import check_backend  # noqa: E402
from specfold.benchmark.decoding import Question, compare, read_questions  # noqa: E402
from specfold.benchmark.draft_choice import measure_choice  # noqa: E402
from specfold.benchmark.modes import MODES, mode_configs  # noqa: E402
from specfold.benchmark.plots import plot_report  # noqa: E402
from specfold.benchmark.report import make_part, print_tables, read_parts  # noqa: E402
from specfold.benchmark.shapes import OFFICIAL_TOKENS_PER_S, SHAPES, random_engine  # noqa: E402
from specfold.engine import DTYPES, usable_device  # noqa: E402
from specfold.enlarge import Growth, enlarge  # noqa: E402

SIZES = {
    "model": Growth(),
    "wide": Growth(hidden_times=3, ffn_times=2),
    # From the bundled models' 256 x 6 layers, 4/2 heads of 64, 512, 640 tokens: within 3% of the checkpoints' weights.
    "1.5b": Growth(
        hidden_times=6, ffn_times=17, extra_layers=22, head_dim_times=2, num_heads=12, num_kv_heads=2, vocab_times=237
    ),
    "8b": Growth(
        hidden_times=16, ffn_times=28, extra_layers=28, head_dim_times=2, num_heads=32, num_kv_heads=8, vocab_times=204
    ),
}


def main(argv: list[str]) -> int:
    commands = {
        "decode": bench_decode,
        "auto": bench_auto,
        "step": bench_step,
        "throughput": bench_throughput,
        "report": bench_report,
    }
    named = bool(argv) and (argv[0] in commands or argv[0] in ("-h", "--help"))
    args = parse_arguments(argv if named else ["decode", *argv])
    try:
        report = commands[args.command](args)
    except (ConfigError, ModelError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print_tables(report)
    print(json.dumps(report))
    return 0


def bench_decode(args: argparse.Namespace) -> dict[str, Any]:
    """Mode against mode on prompts, with a model that answers."""
    engine, questions = _engine_that_answers(args)
    base = DecodeConfig(
        mode="vanilla", drafts=args.drafts, draft_graph=args.draft_graph, max_new_tokens=args.max_new_tokens
    )
    # What the others are held against goes first.
    modes = ["vanilla", *(mode for mode in args.mode if mode != "vanilla")]
    if not engine.info.family.has_sub_blocks:
        modes = [mode for mode in modes if mode != "block-cache"]
    configs = mode_configs(modes, base, args.delta, args.delta_time, entry=True)
    records = []
    for size in args.size:
        resized = resize(engine, size)
        rows = compare(resized, questions, configs, args.batch_size, args.repeats)
        fastest = rows[0].seconds
        records += [{"size": size} | row.to_dict() | {"speed": round(fastest / row.seconds, 3)} for row in rows]
    return make_part("decode", args.device, _settings(args), records)


def bench_auto(args: argparse.Namespace) -> dict[str, Any]:
    """Every fixed number of drafts, and the one that a job would choose."""
    engine, questions = _engine_that_answers(args)
    config = DecodeConfig(
        mode=args.mode, delta=args.delta, delta_time=args.delta_time, draft_graph=args.draft_graph,
        max_new_tokens=args.max_new_tokens,
    )  # fmt: skip
    records = []
    for size in args.size:
        resized = resize(engine, size)
        for batch in args.batch_size:
            found = measure_choice(resized, questions, config, batch, args.drafts, args.repeats, args.choose_seconds)
            records += [{"size": size} | record for record in found]
            print(json.dumps(records[-1]), file=sys.stderr, flush=True)
        del resized
        _free_memory(args.device)
    return make_part("auto", args.device, _settings(args), records)


def bench_step(args: argparse.Namespace) -> dict[str, Any]:
    """One step at the shapes of real checkpoints: dense, and with forced shares of folded positions."""
    # Needs Triton, which the other commands do without on a CPU.
    from specfold.benchmark.forward_cost import measure_step

    deadline = time.monotonic() + args.seconds
    records = []
    for shape, engine in _random_engines(args, deadline):
        for batch in args.batch_size:
            for drafts in args.drafts:
                folds = [(fold, None) for fold in ((None, args.fold) if drafts else (None,))]
                for fold, in_time in [*folds, *((args.fold if drafts else None, share) for share in args.time_fold)]:
                    if time.monotonic() > deadline:
                        break
                    settings = (fold, args.prompt_len, args.repeats, args.masks_left, in_time)
                    cost = measure_step(engine, batch, drafts, *settings)
                    records.append({"shape": shape} | cost.to_dict())
                    print(json.dumps(records[-1]), file=sys.stderr, flush=True)
        del engine  # before the next one is made
    return make_part("step", args.device, _settings(args), records)


def bench_throughput(args: argparse.Namespace) -> dict[str, Any]:
    """Rows from prompt to last token at the shapes of real checkpoints."""
    from specfold.benchmark.throughput import measure_throughput  # Needs Triton, too.

    deadline = time.monotonic() + args.seconds
    records = []
    for shape, engine in _random_engines(args, deadline):
        for batch in args.batch_size:
            base = DecodeConfig(mode="vanilla", drafts=args.drafts, max_new_tokens=args.max_new_tokens)
            for name, config in mode_configs(args.mode, base, [args.delta], [args.delta_time]).items():
                if time.monotonic() > deadline:
                    break
                forced = (
                    args.fold if config.fold_delta >= 0 else None,
                    args.time_fold if config.time_delta >= 0 else None,
                )
                result = measure_throughput(engine, config, batch, args.rounds, args.prompt_len, forced, name)
                official = OFFICIAL_TOKENS_PER_S[shape] if name == "vanilla" and batch == 1 else None
                records.append(
                    {"shape": shape}
                    | result.to_dict()
                    | {"over_official": official and round(result.tokens_per_s / official, 2)}
                )
                print(json.dumps(records[-1]), file=sys.stderr, flush=True)
        del engine  # before the next one is made
    return make_part("throughput", args.device, _settings(args), records)


def bench_report(args: argparse.Namespace) -> dict[str, Any]:
    """What several calls measured, in one."""
    report = read_parts(args.parts)
    if args.plot:
        plot_report(report, args.plot)
    return report


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gpu = torch.cuda.is_available()
    answering = ("decode", "auto")

    def command(name: str, summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        if name != "report":
            added.add_argument("--device", default="cuda" if gpu and name not in answering else "cpu")
            added.add_argument("--dtype", default="bfloat16" if gpu and name not in answering else "float32")
            default = "torch" if name in answering else "triton"
            added.add_argument("--backend", default=default, help=f"torch or triton (default {default})")
        return added

    def add_prompts(command: argparse.ArgumentParser, sizes: list[str]) -> None:
        command.add_argument("--model", help="model folder or hub id (default: the bundled model)")
        command.add_argument("--size", nargs="+", choices=list(SIZES), default=sizes)
        command.add_argument("--prompt-file", type=Path, default=ROOT / "jobs" / "prompts.jsonl")
        command.add_argument("--prompts", type=positive, default=16, help="number of prompts (default 16)")
        command.add_argument("--repeats", type=positive, default=3, help="runs of each setting, the median counts (3)")
        command.add_argument("--draft-graph", help="JSON file of python jobs/calibrate.py (default: the default graph)")
        command.add_argument("--max-new-tokens", type=positive, default=128)

    decode = command("decode", "modes against each other on prompts, with a model that answers")
    add_prompts(decode, ["model", "wide"])
    decode.add_argument("--batch-size", type=positive, default=4, help="rows decoded together (default 4)")
    decode.add_argument("--drafts", type=int, default=4)
    decode.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES), help="beside vanilla (default: all)")
    decode.add_argument("--delta", type=float, nargs="+", default=[0.1])
    decode.add_argument("--delta-time", type=float, nargs="+", default=[0.1])

    auto = command("auto", "--drafts auto beside every fixed number of drafts")
    add_prompts(auto, ["model"])
    auto.add_argument("--batch-size", type=positive, nargs="+", default=[1, 4, 16, 64])
    auto.add_argument("--mode", default="specfold", choices=["spiffy", "specfold"])
    auto.add_argument("--drafts", type=int, nargs="+", default=list(range(9)), help="fixed numbers (default 0 to 8)")
    auto.add_argument("--delta", type=float, default=0.1)
    auto.add_argument("--delta-time", type=float, help="fold in time, too, with and without drafts (default: off)")
    auto.add_argument(
        "--choose-seconds", type=seconds, default=60.0, help="time to choose in (default 60, as in a job)"
    )

    step = command("step", "one step at the shapes of real checkpoints, dense and folded")
    step.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    step.add_argument("--batch-size", type=positive, nargs="+", default=[1, 4, 16, 64])
    step.add_argument("--drafts", type=int, nargs="+", default=[0, 2, 4, 6, 8])
    step.add_argument("--fold", type=share, default=0.85, help="share of draft positions made to fold (0.85)")
    step.add_argument("--time-fold", type=share, nargs="*", default=[], help="shares of main positions, folded in time")
    step.add_argument("--masks-left", type=positive, help="masks of each block (default: half of it, the mean)")
    step.add_argument("--prompt-len", type=positive, default=500)
    step.add_argument("--repeats", type=positive, default=30)
    step.add_argument("--seconds", type=seconds, default=1e9, help="start no further measurement after this time")

    throughput = command("throughput", "rows from prompt to last token at the shapes of real checkpoints")
    throughput.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    throughput.add_argument("--mode", nargs="+", default=["vanilla"], choices=MODES)
    throughput.add_argument("--delta", type=float, default=0.1)
    throughput.add_argument("--delta-time", type=float, default=0.1)
    throughput.add_argument("--fold", type=share, help="share of draft positions made to fold (default: the gate's)")
    throughput.add_argument("--time-fold", type=share, help="share of main positions made to fold (the gate's)")
    throughput.add_argument("--drafts", type=int, default=8)
    throughput.add_argument("--batch-size", type=positive, nargs="+", default=[1])
    throughput.add_argument("--rounds", type=positive, default=3, help="batches that are timed (3)")
    throughput.add_argument("--seconds", type=seconds, default=1e9, help="start no further measurement after this time")
    throughput.add_argument("--prompt-len", type=positive, default=500)
    throughput.add_argument("--max-new-tokens", type=positive, default=64)

    report = command("report", "merge files that end with the JSON line of other calls")
    report.add_argument("parts", nargs="+", type=Path)
    report.add_argument("--plot", type=Path, help="write step times as an image")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {value}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"it must be above 0, not {value}")
    return value


def share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 0 and below 1, not {value}")
    return value


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | float | list) or value is None else str(value)
        for name, value in vars(args).items()
        if name != "command"
    }


def _engine_that_answers(args: argparse.Namespace) -> tuple[Engine, list[Question]]:
    model = args.model or reference_models.path("fast_dllm_v2")
    engine = Engine.from_pretrained(model, device=args.device, dtype=args.dtype, backend=args.backend)
    questions = read_questions(engine, args.prompt_file, args.prompts)
    args.prompts = len(questions)  # there may be fewer; the report tells what was measured
    return engine, questions


def _random_engines(args: argparse.Namespace, deadline: float) -> Iterator[tuple[str, Engine]]:
    """Each shape with an engine of random weights, until the time is over. Callers let go of one before the next."""
    if args.dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {args.dtype!r}.")
    device = usable_device(args.device)
    check_backend(args.backend, device)
    for shape in args.shape:
        if time.monotonic() > deadline:
            return
        yield shape, random_engine(shape, device, DTYPES[args.dtype], args.backend)
        _free_memory(args.device)


def resize(engine: Engine, size: str) -> Engine:
    if size == "model":
        return engine
    model = enlarge(engine.model, SIZES[size], engine.mask_token_id)
    return Engine(model, replace(engine.info, spec=model.spec), engine.tokenizer, engine.backend)


def _free_memory(device: str) -> None:
    """Gives back what the last model's measurements took, before the next one is made."""
    if device.startswith("cuda"):
        free_device_memory(torch.device(device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
