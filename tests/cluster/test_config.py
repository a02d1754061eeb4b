"""The job's settings: checked at the edge, one sentence a mistake, and an identity of just what can change a token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import MAX_PARTS, JobConfig, default_shard_rows
from cluster.config_checks import check_parts
from cluster.errors import UserError
from specfold import DecodeConfig


def test_engine_settings_and_defaults_are_the_engines() -> None:
    assert JobConfig().decode == DecodeConfig()
    assert JobConfig(mode="spiffy", drafts=7, stop=("a",)).decode == DecodeConfig(mode="spiffy", drafts=7, stop=("a",))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"limit": 0}, "--limit must be at least 1, not 0."),
        ({"num_samples": 10**11}, "--num-samples must be at most 10000, not 100000000000."),
        ({"batch_size": 99999999999999}, "--batch-size must be at most 65536, not 99999999999999."),
        ({"workers": 99999999999}, "--workers must be at most 10000, not 99999999999."),
        ({"workers": -1}, "--workers must be at least 1, not -1."),
        ({"batch_size": 0}, "--batch-size must be at least 1, not 0."),
        ({"max_failed": 1.5}, "--max-failed is a share between 0 and 1, not 1.5."),
        ({"stall_timeout": 0}, "--stall-timeout must be above 0 seconds, not 0."),
        ({"gpus_per_worker": 1.5}, "--gpus-per-worker above 1 must be whole, not 1.5."),
        ({"gpus_per_worker": float("inf")}, "--gpus-per-worker above 1 must be whole, not inf."),
        ({"gpus_per_worker": -1}, "--gpus-per-worker must not be negative, as -1 is."),
        ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, not 0."),
        ({"temperature": -1}, "--temperature must be between 0 and 100, not -1."),
        ({"max_thinking_tokens": 5}, "--max-thinking-tokens and --end-think-token-id must be given together."),
        ({"delta_time": 11.0}, "--delta-time must be a number up to 10 or left out, not 11.0."),
        ({"delta_time": float("nan")}, "--delta-time must be a number up to 10 or left out, not nan."),
        (
            {"refresh_every": 4},
            "--refresh-every needs --delta-time: without folding in time every step computes everything.",
        ),
        (
            {"refresh_every": -1, "delta_time": 0.1},
            "--refresh-every must be 0 (never) or more, not -1.",
        ),
        (
            {"mode": "ar", "delta_time": 0.1},
            "--delta-time goes with modes vanilla, spiffy and specfold: mode ar does not denoise step by step.",
        ),
        ({"use_block_cache": True}, "--use-block-cache takes no drafts: give mode vanilla."),
        (
            {"mode": "linear_spec", "use_block_cache": True},
            "--use-block-cache needs mode vanilla; mode linear_spec has no sub-blocks.",
        ),
        (
            {"mode": "vanilla", "use_block_cache": True, "delta_time": 0.1},
            "--use-block-cache and --delta-time are two ways to save work; give one of them.",
        ),
        ({"carry": " "}, "--carry is all, none or column names such as a,b; it must not be empty."),
        ({"system_prompt": "a\udcff"}, "--system-prompt is not UTF-8 text."),
        (
            {"overwrite": True, "retry_failed": True},
            "--overwrite starts anew and --retry-failed keeps what there is; give one of them.",
        ),
        (
            {"device": "cpu", "gpus_per_worker": 1},
            "--gpus-per-worker has no meaning with --device cpu.",
        ),
        (
            {"chat_template": "none", "system_prompt": "Be brief."},
            "--system-prompt needs a chat template, but --chat-template is none.",
        ),
        (
            {"prompt_template": "{{ q }}", "prompt_column": "q"},
            "--prompt-template makes the prompt and --prompt-column names it; give one of them.",
        ),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_flag(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as error:
        JobConfig(**settings)  # type: ignore[arg-type]
    assert str(error.value) == sentence
    assert error.value.exit_code == 2


def test_a_part_that_no_worker_could_hold_is_refused() -> None:
    sampled = JobConfig(num_samples=1000, shard_rows=2048)
    check_parts(sampled, 1048)
    check_parts(JobConfig(shard_rows=2**62), None)
    for rows in (1049, None):
        with pytest.raises(UserError, match=r"^--num-samples 1000 makes .*; give --shard-rows 1048 or less\.$"):
            check_parts(sampled, rows)


def test_identity_names_what_can_change_a_token_and_nothing_else() -> None:
    base = JobConfig()
    changes = {
        "seed": 1, "mode": "vanilla", "delta": 0.2, "dtype": "float32", "backend": "torch", "num_samples": 2,
        "delta_time": 0.1, "shard_rows": 10, "carry": "none", "system_prompt": "s", "stop": ("x",), "mask_token_id": 5,
    }  # fmt: skip
    for name, value in changes.items():
        changed = replace(base, **{name: value}).identity()  # type: ignore[arg-type]
        assert {key for key in changed if changed[key] != base.identity()[key]} == {name}
    free = {"workers": 3, "limit": 9, "max_failed": 0.5, "stall_timeout": 9.0, "output": "x", "overwrite": True}
    assert replace(base, **free).identity() == base.identity()  # type: ignore[arg-type]
    assert json.loads(json.dumps(base.identity())) == base.identity()


def test_batch_size_counts_only_where_it_can_change_tokens() -> None:
    assert "batch_size" not in JobConfig().identity()
    assert JobConfig(deterministic=False).identity()["batch_size"] == 8


def test_files_count_by_content_and_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("same")
    (tmp_path / "b.jinja").write_text("same")
    (tmp_path / "c.jinja").write_text("other")
    a, b, c = (JobConfig(chat_template=str(tmp_path / f"{name}.jinja")).with_files().identity() for name in "abc")
    assert a == b != c


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--chat-template /nowhere/x cannot be read: No such file or directory\."):
        JobConfig(chat_template="/nowhere/x").with_files()
    (tmp_path / "latin").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"latin is not UTF-8 text\."):
        JobConfig(draft_graph=str(tmp_path / "latin")).with_files()


def test_run_json_never_holds_a_secret() -> None:
    config = JobConfig(
        prompts="https://me:hunter2@host/p.jsonl?sig=hunter2",
        output="s3://key:hunter2@bucket/out",
        ray_address="hunter2",
    )
    text = json.dumps(config.to_dict())
    assert "hunter2" not in text
    assert "https://host/p.jsonl" in text
    assert "s3://bucket/out" in text


def test_default_shards_are_a_rule_of_the_count_alone() -> None:
    assert default_shard_rows(64) == 8
    assert default_shard_rows(1319) == 64
    assert default_shard_rows(100_000) == 256
    assert default_shard_rows(200_000) == 512
    assert default_shard_rows(1_000_000) == 2048
    assert default_shard_rows(10_000_000) == 2048
    assert default_shard_rows(None) == 1024
    assert default_shard_rows(10_000_000, 1000) == 1024  # a worker holds all samples of a part
    assert default_shard_rows(None, 10_000) == 64
    for count in (1, 7, 2_560_001, 10**9):
        assert -(-count // default_shard_rows(count)) <= MAX_PARTS
