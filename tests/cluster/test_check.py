"""The check of a folder that a job has left: it counts what is there, whatever the summary says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from cluster.driver import check_job
from cluster.driver.check import check_rows
from cluster.driver.session import ray_map, worker_environment
from cluster.errors import UserError
from cluster.input.schema import carried_schema
from cluster.input.source import open_input
from cluster.models import resolve_model
from tests.cluster.fake_engine import NAN
from tests.cluster.jobs import JobFolder

pytestmark = pytest.mark.usefixtures("local_ray")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, local_ray: str) -> JobFolder:
    """40 rows, of which a job has made 24 when it was killed; its summary is older still."""
    folder = JobFolder(tmp_path_factory.mktemp("killed"))
    folder.write_weights()
    folder.write_prompts(40, {3: NAN})
    assert folder.run(str(folder.root / "in.jsonl"), shard_rows=8) == 0
    for part in folder.parts[3:]:
        part.unlink()
    summary = folder.summary()
    summary["rows"]["done"], summary["output_tokens"], summary["state"] = 8, 80, "running"
    summary["tokens_per_second"] = {"decode": 12_345.0, "end_to_end": 12_345.0}
    (folder.output / "summary.json").write_text(json.dumps(summary))
    return folder


def check(folder: JobFolder, capsys: pytest.CaptureFixture[str], **settings: object) -> str:
    assert check_job(folder.config(str(folder.root / "in.jsonl"), **settings)) == 0
    return capsys.readouterr().out


def test_after_a_kill_the_parts_count_and_not_the_summary(
    killed: JobFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in killed.output.rglob("*"))
    shown = check(killed, capsys)
    assert "for 16 outputs, at the " in shown
    assert "12,345" not in shown
    assert "with 1 worker." in shown
    assert "for 17 outputs" in check(killed, capsys, retry_failed=True)
    assert sorted(path.name for path in killed.output.rglob("*")) == before


@pytest.mark.parametrize("damage", ["no summary", "a summary of something else", "a torn part"])
def test_a_folder_in_any_state_is_checked(killed: JobFolder, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    file = killed.output / ("data/train-0000001.parquet" if damage == "a torn part" else "summary.json")
    whole = file.read_bytes()
    try:
        if damage == "no summary":
            file.unlink()
        else:
            file.write_bytes(whole[: len(whole) // 2] if damage == "a torn part" else b"[1, 2]")
        assert f"for {24 if damage == 'a torn part' else 16} outputs" in check(killed, capsys)
    finally:
        file.write_bytes(whole)


def test_helper_tasks_find_the_same_as_one_process(folder: JobFolder) -> None:
    twins = dict.fromkeys((700, 4_321), json.dumps({"prompt": "5 6 7", "id": "a"}))
    prompts = folder.write_prompts(4_500, twins | {9: "broken", 4_400: json.dumps({"prompt_token_ids": []})})
    config = folder.config(prompts, chat_template="none")
    source = open_input(config)
    schema, model = carried_schema(source, config), resolve_model(config.model)
    alone = check_rows(source, config, model, schema, None)
    helped = check_rows(source, config, model, schema, None, partial(ray_map, "check rows", worker_environment()))
    assert helped == alone
    assert (helped.rows, helped.num_failed, helped.repeated_ids) == (4_500, 4, 1)


def test_an_input_that_has_changed_is_told_before_the_job(
    killed: JobFolder, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = (killed.root / "in.jsonl").read_text().splitlines()
    lines[9] = json.dumps({"prompt_token_ids": [6, 6], "id": "row-9", "n": 9})
    changed = tmp_path / "changed.jsonl"
    changed.write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"train-0000001\.parquet was made from other input rows"):
        check_job(killed.config(str(changed)))
    with pytest.raises(UserError, match="max_new_tokens: 256 in the run, 9 now"):
        check(killed, capsys, max_new_tokens=9)
