"""Measures what drafts and folding bring: forwards, recomputed rows and time per output token of the three modes.

    python jobs/bench.py                                     # both configurations of the bundled model
    python jobs/bench.py --prompts 16 --batch-size 4 --repeats 3
    python jobs/bench.py --model DIR --size model            # another checkpoint as it is

``bundled`` is the bundled model. ``wide`` computes the same function at three times the hidden and twice the
feed-forward width, so its tokens, acceptance and fold rate are those of a model that answers, at a larger model's cost.
Needs torch, safetensors and transformers only. Timings compare modes within one run; the last line is JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from specfold import ConfigError, DecodeConfig, Engine, ModelError, reference_models  # noqa: E402
from specfold.benchmark.decoding import Measurement, compare  # noqa: E402
from specfold.enlarge import enlarge  # noqa: E402

SIZES = {"bundled": {}, "wide": {"hidden_times": 3, "ffn_times": 2}}


def main() -> int:
    args = parse_arguments()
    try:
        engine = Engine.from_pretrained(
            args.model or reference_models.path("fast_dllm_v2"), device=args.device, dtype=args.dtype
        )
        prompts = read_prompts(engine, args.prompt_file, args.prompts)
        results = {size: measure_size(engine, size, prompts, args) for size in args.size}
    except (ConfigError, ModelError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for size, rows in results.items():
        print_table(size, rows)
    print(json.dumps(report(args, results)))
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model folder or hub id (default: the bundled model)")
    parser.add_argument("--size", nargs="+", choices=[*SIZES, "model"], default=list(SIZES))
    parser.add_argument("--prompt-file", type=Path, default=ROOT / "jobs" / "prompts.jsonl")
    parser.add_argument("--prompts", type=positive, default=16, help="number of prompts (default 16)")
    parser.add_argument("--batch-size", type=positive, default=4, help="rows decoded together (default 4)")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each mode, of which the median counts (3)")
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--delta", type=float, default=0.1)
    parser.add_argument("--max-new-tokens", type=positive, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {value}")
    return value


def read_prompts(engine: Engine, path: Path, count: int) -> list[list[int]]:
    """Token ids of the first prompts of a JSONL file, as one user turn each."""
    if engine.tokenizer is None:
        raise ConfigError("The bench needs a model with a tokenizer.")
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
        turns = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{path} cannot be read as JSONL with a prompt in every line: {e!r}.") from None
    if not turns:
        raise ConfigError(f"{path} holds no prompts.")
    render = engine.tokenizer.apply_chat_template
    texts = [render(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    return [engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def measure_size(engine: Engine, size: str, prompts: list[list[int]], args: argparse.Namespace) -> list[Measurement]:
    if SIZES.get(size):
        model = enlarge(engine.model, **SIZES[size])
        engine = Engine(model, replace(engine.info, spec=model.spec), engine.tokenizer)
    base = DecodeConfig(mode="vanilla", drafts=args.drafts, delta=args.delta, max_new_tokens=args.max_new_tokens)
    configs = {
        "vanilla": base,
        "spiffy": replace(base, mode="spiffy"),
        "specfold": replace(base, mode="specfold"),
        "specfold, entry gate": replace(base, mode="specfold", ffn_gate="entry"),
    }
    return compare(engine, prompts, configs, args.batch_size, args.repeats)


def print_table(size: str, rows: list[Measurement]) -> None:
    print(f"\n{size}")
    head = ("mode", "ms/token", "speed", "forwards", "tok/fwd", "qkv rows/tok", "ffn rows/tok", "fold", "same")
    print("{:22}{:>10}{:>8}{:>10}{:>9}{:>14}{:>14}{:>7}{:>7}".format(*head))
    for row in rows:
        values = row.to_dict()
        fold = "-" if values["fold_rate"] is None else f"{values['fold_rate']:.2f}"
        print(
            f"{row.name:22}{values['ms_per_token']:>10.3f}{rows[0].seconds / row.seconds:>8.2f}"
            f"{values['forwards']:>10}{values['tokens_per_forward']:>9.2f}"
            f"{values['recomputed_qkv_rows_per_token']:>14.0f}{values['recomputed_ffn_rows_per_token']:>14.0f}"
            f"{fold:>7}{values['agreement']:>7.2f}"
        )


def report(args: argparse.Namespace, results: dict[str, list[Measurement]]) -> dict[str, Any]:
    """The JSON line: settings, machine, source hash (parts of one source can be merged), results."""
    chip = (
        torch.cuda.get_device_name() if args.device.startswith("cuda") else platform.processor() or platform.machine()
    )
    settings = {
        name: value if isinstance(value, int | float | list) else str(value) for name, value in vars(args).items()
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "chip": chip,
        "torch": torch.__version__,
        "sources": source_hash(),
        "settings": settings,
        "results": {size: [row.to_dict() for row in rows] for size, rows in results.items()},
    }


def source_hash() -> str:
    """Hash of everything that decides a measurement."""
    files = [Path(__file__), *(ROOT / "specfold").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
