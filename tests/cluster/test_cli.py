"""The command line: flags, YAML, help, and mistakes that are one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config import JobConfig
from cluster.errors import UserError
from jobs.cli import load_config

ROOT = Path(__file__).resolve().parents[2]


def load(*argv: str, environment: dict[str, str] | None = None) -> JobConfig:
    config = load_config(argv, environment or {})
    assert config is not None
    return config


def mistake(*argv: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(UserError) as error:
        load_config(argv, environment or {})
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    return str(error.value)


def yaml(tmp_path: Path, text: str) -> str:
    (tmp_path / "run.yaml").write_text(text)
    return str(tmp_path / "run.yaml")


def test_no_arguments_mean_the_bundled_model_and_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load()
    assert config.model == "fast_dllm_v2"
    assert Path(config.prompts) == ROOT / "jobs" / "prompts.jsonl"
    assert Path(config.output).parent == tmp_path / "runs"
    assert config.ray_address is None
    assert not config.submitted


def test_flags_reach_the_settings() -> None:
    argv = "--mode spiffy --delta=-1 --drafts 8 --stop A --stop B --stop-token-ids 1 --stop-token-ids 2"
    more = "--no-deterministic --retry-failed --gpus-per-worker 0.5 --temperature 1e-1 --output /out"
    config = load(*argv.split(), *more.split())
    assert (config.mode, config.delta, config.drafts, config.stop) == ("spiffy", -1.0, 8, ("A", "B"))
    assert config.stop_token_ids == (1, 2)
    assert (config.deterministic, config.retry_failed, config.gpus_per_worker) == (False, True, 0.5)
    assert (config.temperature, config.output) == (0.1, "/out")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = yaml(tmp_path, "max-new-tokens: 7\nseed: 3\nstop: [a, b]\ncarry: [x, y]\ndeterministic: false\nlimit:\n")
    config = load("--config", file, "--seed", "4")
    assert (config.max_new_tokens, config.seed, config.stop, config.carry) == (7, 4, ("a", "b"), "x,y")
    assert config.deterministic is False
    assert config.limit is None
    assert load(f"--config={file}", "--stop", "c").stop == ("c",)


def test_keys_may_be_written_with_underscores(tmp_path: Path) -> None:
    assert load("--config", yaml(tmp_path, "max_new_tokens: 5")).max_new_tokens == 5


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--drfts", "3"], "Unknown option: --drfts. Did you mean --drafts?"),
        (["--mode", "fast"], 'Invalid value "fast" for --mode.'),
        (["--drafts", "all"], "Invalid value for --drafts: it must be a whole number or auto, not 'all'."),
        (["--limit", "1.5"], "Invalid value for --limit: it must be a whole number, not '1.5'."),
        (["--shard-rows", "9" * 20], f"Invalid value for --shard-rows: it must fit 64 bits, not {'9' * 20}."),
        (["--backend", "jax"], 'Invalid value "jax" for --backend. Choose from: "auto", "torch", "triton".'),
        (
            ["--backend", "triton", "--device", "cpu"],
            "--backend triton needs a GPU, but --device is cpu; leave --backend out or give torch.",
        ),
        (["--limit"], "Parameter --limit requires an argument."),
        (["prompts.jsonl"], "Unexpected arguments ['prompts.jsonl']."),
        (["--chat-template-text", "x"], "Unknown option: --chat-template-text."),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml cannot be read: No such file or directory."),
        (["--output", ""], "Invalid value for --output: it must not be empty."),
        (["--prompt-template", " "], "Invalid value for --prompt-template: it must not be empty."),
        (["--revision="], "Invalid value for --revision: it must not be empty."),
        (["--config", ""], "--config must not be empty."),
        (["--top-p", "0"], "--top-p must be above 0 and at most 1, not 0.0."),
        (["--delta-time", "much"], "Invalid value for --delta-time: unable to convert"),
        (["--use-block-cache"], "--use-block-cache takes no drafts: give mode vanilla."),
        (["--refresh-every", "8"], "--refresh-every needs --delta-time:"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(argv: list[str], sentence: str) -> None:
    assert mistake(*argv).startswith(sentence)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("drfts: 3", "has the unknown key 'drfts'. Did you mean drafts?"),
        ("ray-address: x", "has the unknown key 'ray-address'."),
        ("no-deterministic: true", "has the unknown key 'no-deterministic'. Did you mean deterministic?"),
        ('output: ""', "Invalid value for [output]: it must not be empty."),
        ("delta-tyme: 0.1", "has the unknown key 'delta-tyme'. Did you mean delta-time?"),
        ("limit: 1.5", "it must be a whole number, not '1.5'."),
        ("limit: [1, 2]", "limit must be a single value, not [1, 2]."),
        ("mode: {a: 1}", "mode must be a single value, not {'a': 1}."),
        ("deterministic: maybe", 'unable to convert "maybe" into bool.'),
        ("seed: 1\n--seed: 3", "has the key seed twice."),
        ("drafts: 2\nseed: 1\ndrafts: 3", "has the key 'drafts' twice, again in line 3."),
        ('drafts: 2\n"drafts": 2', "has the key 'drafts' twice, again in line 2."),
        ("- a\n- b", "must hold flags as keys, one a line, such as delta: 0.1."),
        ("a: [", "is not valid YAML:"),
    ],
)
def test_a_mistake_in_the_file_is_one_line(tmp_path: Path, text: str, sentence: str) -> None:
    assert sentence in mistake("--config", yaml(tmp_path, text))


def test_the_same_command_names_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load().output == load("--workers", "3", "--limit", "5").output
    assert load().output != load("--delta", "0.2").output
    assert load("--output", "here").output == str(tmp_path / "here")
    assert load("--output", "s3://bucket/out").output == "s3://bucket/out"


def test_a_submitted_job_refuses_a_relative_output() -> None:
    submitted = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_ADDRESS": "10.0.0.1:6379"}
    for argv in ([], ["--output", "out"]):
        assert "--output must be an absolute path on shared storage" in mistake(*argv, environment=submitted)
    config = load("--output", "/shared/out", environment=submitted)
    assert (config.output, config.submitted, config.ray_address) == ("/shared/out", True, "10.0.0.1:6379")


def test_help_gives_every_flag_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_config(["--help"], {}) is None
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in ("--model", "--prompt-template", "--max-failed", "--check", "--config", "--retry-failed"):
        assert f"{name} " in text
    for shown in ("[default: fast_dllm_v2]", "[default: specfold]", "[default: 0.05]", "[default: bundled]"):
        assert shown in text
    assert "Ctrl-C in ray job submit only detaches the log" in text
    assert "--ray-address" not in text


def test_run_by_hand_from_any_folder(tmp_path: Path) -> None:
    script = str(ROOT / "jobs" / "generate.py")
    helped = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert helped.returncode == 0
    assert "Usage: python jobs/generate.py" in helped.stdout
    wrong = subprocess.run([sys.executable, script, "--drfts", "3"], cwd=tmp_path, capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr == "error: Unknown option: --drfts. Did you mean --drafts?\n"
    assert wrong.stdout == ""
