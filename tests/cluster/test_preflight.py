"""What the check tells before a job: lengths, parts, memory and time. No Ray."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from cluster.driver.check import RowCheck, check_rows
from cluster.driver.findings import findings
from cluster.driver.footprint import Footprint, measure_model
from cluster.driver.preflight import EarlierRun, JobPlan, earlier_run, full_report, short_report
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from cluster.messages import ShardRecord
from cluster.models import resolve_model
from cluster.output.identity import resolve
from cluster.output.storage import Store
from cluster.output.told import preflight_lines
from specfold import DecodeStats, ModelError
from tests.cluster.jobs import JobFolder


def check(folder: JobFolder, prompts: str) -> RowCheck:
    config = folder.config(prompts)
    source = open_input(config)
    return check_rows(source, config, resolve_model(config.model), carried_schema(source, config), None)


def report(folder: JobFolder, found: RowCheck, earlier: EarlierRun | None = None, standing: int = 0) -> str:
    config = resolve(folder.config("unused"), "cpu", 8)
    footprint = Footprint(weights=3 << 30, position=1 << 20, logits=5 << 20)
    return "\n".join(full_report(found, JobPlan(config, 2, footprint, earlier, standing)))


def test_lengths_budgets_and_stop_tokens_are_counted(folder: JobFolder) -> None:
    body = json.dumps({"custom_id": "a", "body": {"prompt": [5] * 40, "max_tokens": 7}})
    stopped = json.dumps({"prompt_token_ids": [4, 1, 6]})
    masked, long = json.dumps({"prompt_token_ids": [9_999]}), json.dumps({"prompt_token_ids": [5] * 4000})
    found = check(folder, folder.write_prompts(6, {1: body, 2: stopped, 3: masked, 4: long}))
    assert found.lengths == {3: 3, 40: 1}
    assert found.new_tokens == 3 * 256 + 7
    assert found.with_stop == 1
    assert found.failed == {"mask_in_prompt": 1, "too_long": 1}


def test_rows_that_the_template_rejects_are_counted(folder: JobFolder) -> None:
    prompts = folder.write_prompts(5, {1: json.dumps({"n": 1}), 2: json.dumps({"id": "x", "n": None})})
    config = folder.config(prompts, prompt_template="{{ id.strip() }}", chat_template="none")
    source = open_input(config)
    found = check_rows(source, config, resolve_model(config.model), carried_schema(source, config), None)
    assert found.failed["template_error"] == 1
    assert "  template_error: 1 row, first row 1: The prompt template fails:" in "\n".join(found.report())


def test_the_report_tells_output_memory_and_that_the_time_is_unknown(folder: JobFolder) -> None:
    found = RowCheck(rows=20, lengths=Counter({100: 15, 120: 5}), new_tokens=20 * 256)
    text = report(folder, found)
    assert "Prompt tokens: 100 to 120, median 100, mean 105.0." in text
    bars = {line.split()[0]: line.count("#") for line in text.splitlines() if line.endswith("#")}
    assert bars == {"100-101": 40, "120-121": 14}
    assert "20 outputs in 3 parts of 8 input rows, 2 workers." in text
    assert "At most 5,120 tokens" in text
    assert "Weights 3.0 GiB in each worker (float32)." in text
    assert "1.0 MiB a token: 356.0 MiB for a typical row, 376.0 MiB for the longest," in text
    assert "2.9 GiB for 8 such rows at once." in text
    assert "Time      Unknown: " in text
    assert max(map(len, text.splitlines())) <= 120


def test_lengths_far_apart_are_shown_in_octaves(folder: JobFolder) -> None:
    text = report(folder, RowCheck(rows=3, lengths=Counter({1: 1, 3: 1, 30_000: 1})))
    labels = [line.split()[0] for line in text.splitlines() if line.endswith("#")]
    assert labels == ["1", "2-3", "16,384-32,767"]


def test_an_earlier_run_gives_size_and_time_of_what_is_left(folder: JobFolder) -> None:
    found = RowCheck(rows=100, lengths=Counter({10: 100}), new_tokens=25_600)
    earlier = EarlierRun(rows=40, output_tokens=4_000, num_bytes=40 << 10, tokens_per_s=50.0, workers=4)
    text = report(folder, found, earlier, standing=40)
    assert "(100.0 tokens a row): about 10,000 tokens and 100.0 KiB." in text
    assert "About 2m00s for 60 outputs, at the 50 tokens/s that the run in the folder had with 4 workers." in text
    assert "About 3m20s for 100 outputs" in report(folder, found, earlier)


def part(index: int, worker: str, started: float, ended: float, tokens: int) -> ShardRecord:
    return ShardRecord(
        index, index * 8, 8, 1, "", "id", {}, {}, DecodeStats(output_tokens=tokens), worker=worker, started=started,
        ended=ended,
    )  # fmt: skip


def test_an_earlier_run_is_read_off_its_parts(folder: JobFolder) -> None:
    store = Store(str(folder.output))
    store.write("summary.json", json.dumps({"output_tokens": 9, "rows": {"done": 1}}).encode())  # an old one
    store.write("data/train-0000000.parquet", b"12345")
    assert earlier_run(store, []) is None
    # Two workers for ten seconds, and after a pause of a day one for five.
    parts = [part(0, "worker-0", 100.0, 110.0, 300), part(1, "worker-1", 100.0, 110.0, 250)]
    assert earlier_run(store, parts) == EarlierRun(16, 550, 5, 55.0, 2)
    assert earlier_run(store, [*parts, part(2, "worker-0", 90_000.0, 90_005.0, 50)]) == EarlierRun(24, 600, 5, 40.0, 2)


def test_what_was_found_is_kept_for_the_page_and_for_programs(folder: JobFolder) -> None:
    twin = json.dumps({"prompt_token_ids": [2, 5, 3], "id": "row-1"})
    found = check(folder, folder.write_prompts(12, {4: "broken", 9: twin}))
    config = resolve(folder.config("unused", num_samples=2), "cpu", 8)
    values = findings(found, config, 12, Footprint(weights=3 << 30, position=2048, logits=5 << 20))
    assert (values["rows_checked"], values["failed_by_kind"], values["outputs"]) == (12, {"invalid_json": 1}, 24)
    assert (values["repeated_ids"], values["repeated_prompts"]) == (1, 1)
    assert values["prompt_tokens"] == {"least": 3, "median": 3, "mean": 3.0, "most": 3, "bins": {"3": 11}}
    lines = dict(preflight_lines(values))
    assert lines["invalid_json"].startswith("1 row, first row 4: ")
    assert lines["Repeat the prompt of an earlier row"] == "1"
    assert lines["Planned"] == "24 outputs in 2 parts of 8 input rows"
    assert lines["Memory of a worker"].startswith("weights 3.0 GiB, keys and values 2.0 KiB a token")


def test_no_row_that_can_be_decoded_is_still_a_report(folder: JobFolder) -> None:
    text = report(folder, RowCheck(rows=1, failed=Counter({"too_long": 1}), first={"too_long": (0, "Too long.")}))
    assert "1 row checked, 1 cannot be decoded." in text
    assert "#" not in text


@pytest.mark.parametrize(
    ("checked", "total", "line"),
    [
        (5, 5, "Checked 5 input rows, prompts of 7 tokens: 5 outputs in 1 part of 8 input rows."),
        (5, 90, "Checked the first 5 input rows of 90, prompts of 7 tokens: 90 outputs in 12 parts of 8 input rows."),
    ],
)
def test_a_job_opens_with_one_line(folder: JobFolder, checked: int, total: int, line: str) -> None:
    found = RowCheck(rows=checked, lengths=Counter({7: checked}))
    assert short_report(found, resolve(folder.config("unused"), "cpu", 8), total) == line


def test_the_model_is_measured_without_loading_it(folder: JobFolder) -> None:
    config = resolve(folder.config("unused", batch_size=2, drafts=3, dtype="bfloat16"), "cpu", 8)
    folder.write_weights()
    model = resolve_model(config.model)
    # Embedding and head of 10,000 tokens, one layer of width 8: projections 4 * 64, FFN 3 * 64, biases 24, norms 24.
    assert measure_model(config, model) == Footprint(
        weights=2 * (2 * 10_000 * 8 + 7 * 64 + 24 + 24), position=2 * 8 * 2, logits=2 * 4 * 32 * 10_000 * 4
    )


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model__norm__weight": None}, "The weights lack tensor model.norm.weight."),
        ({"extra": torch.zeros(1)}, "The weights hold the unexpected tensor extra."),
        (
            {"model__norm__weight": torch.zeros(9)},
            "Tensor model.norm.weight has shape [9], the config asks for [8].",
        ),
    ],
)
def test_weights_that_cannot_be_loaded_are_one_sentence(folder: JobFolder, changes: dict, sentence: str) -> None:
    folder.write_weights(**changes)
    config = resolve(folder.config("unused"), "cpu", 8)
    assert measure_model(config, resolve_model(config.model)).problem == sentence


def test_a_folder_without_a_config_is_no_model(folder: JobFolder) -> None:
    config = resolve(folder.config("unused"), "cpu", 8)
    (folder.model / "config.json").unlink()
    with pytest.raises(ModelError, match="is not a model folder"):
        measure_model(config, resolve_model(config.model))
