"""The engine as a model of lm-evaluation-harness: the same texts as the engine's own, likelihoods refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specfold import DecodeConfig, Engine, reference_models

pytest.importorskip("lm_eval", reason="the extra lm_eval is not installed")

PROMPTS = Path(__file__).resolve().parents[2] / "jobs" / "prompts.jsonl"
ROWS = 3
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<stop>"], max_gen_toks: 96, do_sample: false}}
filter_list:
  - name: number
    filter:
      - {{function: regex, regex_pattern: "The answer is (-?[0-9]+)"}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


@pytest.fixture(scope="module")
def model() -> Any:
    from lm_eval.api.registry import get_model

    import cluster.evaluation.harness  # noqa: F401  registers the model

    return get_model("specfold").create_from_arg_string("mode=specfold,drafts=4,delta=0.1", {"device": "cpu"})


def test_the_harness_scores_what_the_engine_answers(model: Any, tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    lines = PROMPTS.read_text().splitlines()[:ROWS]
    (tmp_path / "sums.jsonl").write_text("\n".join(lines))
    (tmp_path / "sums.yaml").write_text(TASK.format(file=tmp_path / "sums.jsonl"))
    results = simple_evaluate(
        model, tasks=["sums"], task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=True, log_samples=True, bootstrap_iters=0,
    )  # fmt: skip
    assert results["results"]["sums"]["exact_match,number"] == 1.0
    engine = Engine.from_pretrained(reference_models.path("fast_dllm_v2"))
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in lines]
    texts = [engine.tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in chats]
    ids = [engine.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    direct = engine.generate(ids, DecodeConfig(mode="vanilla", max_new_tokens=96))
    assert [sample["resps"][0][0] for sample in results["samples"]["sums"]] == [out.text for out in direct]


def test_likelihoods_are_refused_in_a_sentence(model: Any) -> None:
    for refused in (model.loglikelihood, model.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match="gives no likelihoods"):
            refused([])


def test_unknown_arguments_are_named(model: Any) -> None:
    with pytest.raises(ValueError, match="no argument 'dleta'"):
        type(model)(dleta=0.1)
    from cluster.evaluation.harness import request_settings

    assert request_settings({"until": "\n\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.7}) == {
        "stop": ("\n\n",), "max_new_tokens": 7, "temperature": 0.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="'num_beams'"):
        request_settings({"num_beams": 4})
