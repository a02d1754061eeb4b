"""Measure the bundled models with the real engine on held-out problems: accuracy, forwards, folded share.

    python tests/evaluate_reference_models.py                                    # both models, 200 problems
    python tests/evaluate_reference_models.py --model nemotron_labs_diffusion --problems 24 --modes vanilla specfold

Prints one line of JSON per model and mode.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # also where the project is not installed, as on a GPU machine
    sys.path.insert(0, str(ROOT))

from reference_training.task import heldout_problems, is_right  # noqa: E402

from specfold import DecodeConfig, Engine, reference_models  # noqa: E402

MAX_NEW_TOKENS = 128
DRAFTS = 4
DELTA = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", choices=reference_models.NAMES, default=reference_models.NAMES)
    parser.add_argument("--modes", nargs="*", default=("vanilla", "spiffy", "specfold", "ar", "linear_spec"))
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--drafts", type=int, default=DRAFTS)
    parser.add_argument("--delta", type=float, default=DELTA)
    parser.add_argument("--threshold", type=float)
    parser.add_argument("--system", help="a system message before every problem")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--backend", default="torch")
    args = parser.parse_args()
    for name in args.model:
        engine = Engine.from_pretrained(
            reference_models.path(name), device=args.device, dtype=args.dtype, backend=args.backend
        )
        for mode in args.modes:
            if name == "fast_dllm_v2" and mode in ("ar", "linear_spec"):
                continue
            config = DecodeConfig(
                mode=mode,
                drafts=args.drafts,
                delta=args.delta,
                threshold=args.threshold,
                max_new_tokens=MAX_NEW_TOKENS,
            )
            result = evaluate(engine, config, args.problems, args.system, args.batch_size)
            print(json.dumps({"model": name, "mode": mode} | result), flush=True)


def chat_ids(engine: Engine, question: str, system: str | None = None) -> list[int]:
    """Token ids of one user turn, through the chat template."""
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": question})
    text = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return engine.tokenizer.encode(text, add_special_tokens=False)


def evaluate(
    engine: Engine, config: DecodeConfig, num_problems: int, system: str | None = None, batch_size: int = 8
) -> dict[str, Any]:
    """Counters of the first ``num_problems`` held-out problems; forwards and tokens are means per row."""
    problems = heldout_problems(num_problems)
    prompts = [chat_ids(engine, p.question, system) for p in problems]
    started = time.perf_counter()
    completions = engine.generate(prompts, config, batch_size=batch_size)
    seconds = time.perf_counter() - started
    right = [is_right(c.text, p.answer) for c, p in zip(completions, problems, strict=True)]
    forwards = sum(c.stats.num_forwards for c in completions)
    folded = [c.stats.fold_rate for c in completions if c.stats.fold_rate is not None]
    return {
        "problems": num_problems,
        "accuracy": sum(right) / num_problems,
        "forwards": round(forwards / num_problems, 2),
        "output_tokens": round(sum(len(c.token_ids) for c in completions) / num_problems, 2),
        "fold_rate": round(sum(folded) / len(folded), 3) if folded else None,
        "recomputed_qkv_rows": sum(c.stats.recomputed_qkv_rows for c in completions),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
