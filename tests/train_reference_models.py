"""Train a reference model from nothing and write its folder, on a GPU in minutes.

    python tests/train_reference_models.py --family fast_dllm_v2 --out /tmp/fast_dllm_v2
    python tests/train_reference_models.py --family nemotron_labs_diffusion --out /tmp/nemotron_labs_diffusion
    python tests/train_reference_models.py --prompts jobs/prompts.jsonl            # the bundled prompts
    python tests/train_reference_models.py --family fast_dllm_v2 --out /tmp/tiny --micro --steps 100 --problems 1000

The last line printed is JSON: losses, and the accuracy on 200 held-out problems by a plain exact decoder, computed in
float32 from the bfloat16 weights that were written. Seeds and steps are fixed and the arithmetic is deterministic, so
the same command on the same chip and versions repeats itself.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # repeatable matrix products; read when torch starts CUDA

import torch
from reference_training import decode, training
from reference_training.dataset import build_dataset
from reference_training.model import FAMILIES, NEMOTRON, ReferenceModel, make_config
from reference_training.task import Problem, heldout_problems, is_right
from reference_training.tokenizer import MASK, PAD, STOP, chat_prompt, save_tokenizer, train_tokenizer
from safetensors.torch import save_file
from tokenizers import Tokenizer

NUM_PROMPTS = 96
NUM_EVALUATED = 200
MAX_NEW_TOKENS = 128
MICRO = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2,
         "intermediate_size": 128, "head_dim": 32}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prompts", type=Path, help="write the bundled prompts to this file")
    parser.add_argument("--steps", type=int, default=7_500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--problems", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that encode the data")
    parser.add_argument("--micro", action="store_true", help="a far smaller network: a trial of the code")
    args = parser.parse_args()
    if args.prompts:
        write_prompts(args.prompts)
    if args.family:
        args.out.mkdir(parents=True, exist_ok=True)
        print(json.dumps(train_model(args)))


def write_prompts(path: Path) -> None:
    lines = [json.dumps({"prompt": p.question, "answer": p.answer}) for p in heldout_problems(NUM_PROMPTS)]
    path.write_text("\n".join(lines) + "\n")


def train_model(args: argparse.Namespace) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer()
    mask_id, stop_id, pad_id = (tokenizer.token_to_id(token) for token in (MASK, STOP, PAD))
    started = time.perf_counter()
    data = build_dataset(tokenizer, args.problems, args.workers)
    sizes = MICRO if args.micro else {}
    config = make_config(args.family, mask_id=mask_id, stop_id=stop_id, pad_id=pad_id, **sizes)
    model = ReferenceModel(config).to("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "family": args.family,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": args.steps,
        "samples": args.steps * args.batch,
        "data_seconds": round(time.perf_counter() - started, 1),
    }
    print(json.dumps(result), flush=True)
    loop = {"steps": args.steps, "batch": args.batch, "lr": args.lr, "seed": args.seed}
    result |= training.train(model, args.family, data, mask_id, **loop)
    model.to(torch.bfloat16)
    save_model(model, tokenizer, args.out)
    return result | evaluate(model.float(), args.family, tokenizer, mask_id, stop_id)


def save_model(model: ReferenceModel, tokenizer: Tokenizer, folder: Path) -> None:
    weights = {name: tensor.contiguous().cpu() for name, tensor in sorted(model.state_dict().items())}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config, indent=2) + "\n")
    save_tokenizer(tokenizer, folder)


def evaluate(model: ReferenceModel, family: str, tokenizer: Tokenizer, mask_id: int, stop_id: int) -> dict[str, float]:
    """Accuracy and forwards of vanilla decoding on held-out problems; of plain next-token decoding too for Nemotron."""
    problems = heldout_problems(NUM_EVALUATED)
    prompts = [tokenizer.encode(chat_prompt(p.question)).ids for p in problems]
    outputs, forwards = decode.decode(model, family, prompts, MAX_NEW_TOKENS, mask_id, stop_id)
    result = {"accuracy": accuracy(tokenizer, problems, outputs), "forwards": round(forwards, 2)}
    result["output_tokens"] = sum(map(len, outputs)) / len(outputs)
    if family == NEMOTRON:
        greedy = decode.decode_autoregressively(model, prompts, MAX_NEW_TOKENS, stop_id)
        result["ar_accuracy"] = accuracy(tokenizer, problems, greedy)
    return result


def accuracy(tokenizer: Tokenizer, problems: list[Problem], outputs: list[list[int]]) -> float:
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in outputs]
    wrong = [(p, text) for p, text in zip(problems, texts, strict=True) if not is_right(text, p.answer)]
    for problem, text in wrong[:10]:
        print(f"wrong: {problem.question}\n    {text}\n    not {problem.solution}", flush=True)
    return 1 - len(wrong) / len(problems)


if __name__ == "__main__":
    main()
