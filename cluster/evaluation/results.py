"""``results.json`` and the samples' files, in the shapes of lm-evaluation-harness, so that its tools read them.

Shape: https://github.com/EleutherAI/lm-evaluation-harness (``--output_path`` and ``--log_samples``). With several
variants a result's name is ``task:variant``. What the harness has no place for stands under ``intervals``, ``costs``,
``runs`` and ``comparison``.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from cluster.evaluation.comparison import TaskResult, VariantResult
from cluster.evaluation.gradebook import Answer
from cluster.evaluation.records import Grade
from cluster.evaluation.task import Task
from cluster.output.identity import other_versions, token_versions
from cluster.output.rundir import RunDir
from cluster.output.storage import Store

RESULTS, PAGE = "results.json", "comparison.md"
_GENERATION = ("mode", "delta", "threshold", "max_new_tokens", "temperature", "top_p", "top_k", "stop", "seed")


def results_json(results: Sequence[TaskResult]) -> bytes:
    """All results as JSON. Numbers that are not finite become null."""
    values: dict[str, Any] = {
        "results": {}, "group_subtasks": {}, "configs": {}, "versions": {}, "n-shot": {}, "higher_is_better": {},
        "n-samples": {}, "intervals": {}, "costs": {}, "runs": {}, "comparison": {},
    }  # fmt: skip
    for result in results:
        names = [result_name(result, variant) for variant in result.variants]
        for name, variant in zip(names, result.variants, strict=True):
            for key, value in _entry(name, variant).items():
                values[key][name] = value
        if result.against:
            values["comparison"][result.name] = {
                "baseline": names[0],
                "metric": result.main_metric,
                "against": {name: a.to_dict() for name, a in zip(names[1:], result.against, strict=True)},
            }
    values |= _setting(results)
    return orjson.dumps(_finite(values), option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def write_samples(store: Store, result: TaskResult) -> None:
    """One file of samples a variant: what was asked, what came, how it was graded."""
    for variant in result.variants:
        lines = (orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE) for line in _samples(variant))
        store.write(samples_name(result, variant), b"".join(lines))


def samples_name(result: TaskResult, variant: VariantResult) -> str:
    return f"samples_{result.name}{'_' + variant.run.variant.folder if result.against else ''}.jsonl"


def result_name(result: TaskResult, variant: VariantResult) -> str:
    """What a run is called in ``results.json``."""
    return f"{result.name}:{variant.run.variant.label}" if result.against else result.name


def _entry(name: str, variant: VariantResult) -> dict[str, Any]:
    run, task = variant.run, variant.run.task
    scores: dict[str, Any] = {"alias": name}
    for metric, score in variant.scores.items():
        suffix = _filter(task, metric)
        scores |= {f"{metric},{suffix}": score.value, f"{metric}_stderr,{suffix}": score.stderr}
    shots = run.planned.fewshot
    return {
        "results": scores,
        "group_subtasks": [],
        "configs": {
            "task": name,
            "description": task.description,
            "test_split": run.planned.split,
            "num_fewshot": shots,
            "output_type": "generate_until",
            "repeats": run.config.num_samples,
            "generation_kwargs": _generation(variant),
            "metric_list": [{"metric": metric, "higher_is_better": True} for metric in variant.scores],
            "metadata": {"task": task.name, "variant": run.variant.label, "fingerprint": task.fingerprint},
        },
        "versions": f"sha256:{task.fingerprint.removeprefix('sha256:')[:12]}",
        "n-shot": shots,
        "higher_is_better": dict.fromkeys(variant.scores, True),
        "n-samples": {"original": len(run.planned.items), "effective": len(run.items)},
        "intervals": {metric: [score.low, score.high] for metric, score in variant.scores.items()},
        "costs": variant.cost.to_dict() | {"failed_rows": variant.num_failed, "cut_rows": variant.num_cut},
        "runs": run.config.output,
    }


def _setting(results: Sequence[TaskResult]) -> dict[str, Any]:
    """What all runs share: the model, the settings, the versions."""
    config = results[0].first.run.config
    file = RunDir(Store(config.output)).read()
    model = {} if file is None else {name: value for name, value in file.model.items() if name != "path"}
    versions = token_versions() | other_versions()
    settings = config.to_dict()
    return {
        "config": {
            "model": "specfold",
            "model_args": {"pretrained": settings["model"], "revision": config.revision},
            "batch_size": config.batch_size,
            "device": None if file is None else file.config.get("device"),
            "dtype": None if file is None else file.config.get("dtype"),
            "limit": config.limit,
            "gen_kwargs": {},
            "random_seed": config.seed,
        },
        "model_source": "specfold",
        "model_name": settings["model"],
        "model_name_sanitized": settings["model"].replace("/", "__"),
        "model_pinned": model,
        "system_instruction": config.system_prompt,
        "chat_template": config.chat_template,
        "transformers_version": versions.get("transformers"),
        "package_versions": versions,
        "date": time.time(),
    }


def _samples(variant: VariantResult) -> Iterator[dict[str, Any]]:
    """Lines of the samples' file, one a question: all its samples, and the mean of their scores."""
    size = variant.run.config.num_samples
    answers, grades = variant.graded.answers, variant.graded.grades
    for start in range(0, len(answers), size):
        yield _sample(variant, answers[start : start + size], grades[start : start + size])


def _sample(variant: VariantResult, answers: Sequence[Answer], grades: Sequence[Grade]) -> dict[str, Any]:
    item = answers[0].item
    question = item.prompt if item.messages is None else item.messages
    target = item.reference.get("answer", item.reference)
    scores = {
        name: sum(float(grade.scores[metric.score]) for grade in grades) / len(grades)
        for name, metric in variant.run.task.metrics.items()
    }
    return {
        "doc_id": answers[0].key.row_id,
        "doc": {"id": item.id, **item.reference},
        "target": target,
        "arguments": {"gen_args_0": {"arg_0": question, "arg_1": _generation(variant)}},
        "resps": [[answer.text for answer in answers]],
        "filtered_resps": [grade.extracted for grade in grades],
        "filter": _filter(variant.run.task),
        "metrics": list(scores),
        "doc_hash": _hash({"id": item.id, **item.reference}),
        "prompt_hash": _hash(question),
        "target_hash": _hash(target),
        "errors": [answer.error for answer in answers],
        "problems": [grade.problem for grade in grades],
        "grades": [asdict(grade)["scores"] for grade in grades],
        **scores,
    }


def _filter(task: Task, metric: str | None = None) -> str:
    """How the harness calls a metric's extraction; that of the main metric where the task has no such metric."""
    return task.metrics.get(metric or "", next(iter(task.metrics.values()))).filter


def _generation(variant: VariantResult) -> dict[str, Any]:
    """The settings of decoding under the names that the harness' users know."""
    settings = variant.run.config.to_dict()
    values = {name: settings[name] for name in _GENERATION}
    return {"until": values.pop("stop"), "max_gen_toks": values.pop("max_new_tokens"),
            "do_sample": settings["temperature"] > 0, **values}  # fmt: skip


def _hash(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
