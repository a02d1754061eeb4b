"""Command line and YAML file of the jobs, read into one checked ``JobConfig``. Only here is the environment read."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import App, CycloptsError, Group, MissingArgumentError, Parameter
from cyclopts.config import Dict

from cluster.config import BUNDLED_PROMPTS, JobConfig, flag_fields
from cluster.errors import UserError
from cluster.strict_yaml import read_yaml

HELP = """Generate outputs for a file of prompts, on this machine or on a Ray cluster.

Without arguments it decodes the bundled prompts with the bundled model on a local Ray and writes to runs/; \
the same command again resumes where it stopped."""
EPILOGUE = """On a cluster: ray job submit --working-dir . -- python jobs/generate.py --output /shared/out. \
RAY_ADDRESS names a cluster; without it a local Ray is started. \
Ctrl-C in ray job submit only detaches the log, and the job goes on; ray job stop ends it.

Exit codes: 0 every row is there; 1 rows are missing or were not pushed, run it again; \
2 the command or its input is wrong; 3 every row is there, but more of them failed than --max-failed allows; \
130 and 143 interrupted, run it again."""
_CONFIG_FLAG = "--config"
CONFIG = Parameter(name=_CONFIG_FLAG, group=Group("Model", sort_key=1), negative=())


@dataclass(frozen=True)
class Command:
    """A command line: what its help says, its flags in snake case, and what makes settings of them."""

    name: str
    help: str
    epilogue: str
    flags: Collection[str]
    settings: Callable[..., Any]


Settings = TypeVar("Settings", bound=JobConfig)


def load_config(argv: Sequence[str], environment: Mapping[str, str]) -> JobConfig | None:
    """The settings of this call; None when help was asked for and printed. Raises ``UserError``."""
    parsed = parse(argv, Command("python jobs/generate.py", HELP, EPILOGUE, job_flags(), _settings))
    return None if parsed is None else complete(parsed[0], environment)


def parse(argv: Sequence[str], command: Command) -> tuple[Any, frozenset[str]] | None:
    """What the command's settings are, and which the user has given, on the command line or in the file.

    None when help was asked for and printed. Raises ``UserError``.
    """
    file = _config_file(argv)
    values = {} if file is None else _read_yaml(file, command.flags)
    app = App(
        name=command.name,
        help=command.help,
        help_epilogue=command.epilogue,
        help_format="markdown",
        version_flags=(),
        config=Dict(values, source=str(file)),
        default_command=command.settings,
    )
    app["--help"].show = False
    try:
        settings = app(list(argv), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        raise UserError(one_line(error)) from None
    return None if settings is None else (settings, _given(argv, values))


def job_flags() -> list[str]:
    """The main job's flags in snake case."""
    return [field.name for field in flag_fields()]


def _given(argv: Sequence[str], values: Collection[str]) -> frozenset[str]:
    flags = [argument.partition("=")[0].removeprefix("--") for argument in argv if argument.startswith("--")]
    return frozenset(name.removeprefix("no-").replace("-", "_") for name in (*flags, *values))


def _settings(
    *,
    config: Annotated[JobConfig | None, Parameter(name="*")] = None,
    config_file: Annotated[Path | None, CONFIG] = None,
) -> JobConfig:
    """
    Parameters
    ----------
    config_file
        YAML file with any of these flags as keys; flags on the command line win.
    """
    return config or JobConfig()


def complete(
    config: Settings, environment: Mapping[str, str], name: Callable[[JobConfig], str] | None = None
) -> Settings:
    """Fill in what depends on where the command runs: bundled files, the environment, absolute paths.

    ``name``: of the output folder, where the user has named none; by default that of a job of these settings.
    """
    submitted = "RAY_JOB_CONFIG_JSON_ENV_VAR" in environment or "runtime_resources" in Path.cwd().parts
    prompts = config.prompts
    if prompts == BUNDLED_PROMPTS:
        prompts = str(Path(__file__).with_name("prompts.jsonl"))
    config = replace(config, prompts=prompts, ray_address=environment.get("RAY_ADDRESS") or None, submitted=submitted)
    config = config.with_files()
    return replace(config, output=_output(config, name or _run_name))


def _output(config: JobConfig, name: Callable[[JobConfig], str]) -> str:
    """Where results go, as an absolute path or URL."""
    if "://" in config.output:
        return config.output
    path = os.path.expanduser(config.output or os.path.join("runs", name(config)))
    if config.submitted and not os.path.isabs(path):
        raise UserError(
            "A submitted job's working directory is temporary, so --output must be an absolute path on shared storage "
            "or a URL."
        )
    return os.path.abspath(path)


def _run_name(config: JobConfig) -> str:
    """The same for the same command, so that it resumes; ``--limit`` may grow and is left out."""
    return named(config, config.mode, [config.prompts, config.split])


def named(config: JobConfig, word: str, others: Sequence[Any]) -> str:
    """A folder's name of the model, a word, and a hash of the identity and of ``others``."""
    values = [config.identity(), config.model, config.revision, *others]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]
    model = Path(config.model.rstrip("/")).name or "model"
    return f"{model}-{word}-{digest}"


def _config_file(argv: Sequence[str]) -> Path | None:
    for position, argument in enumerate(argv):
        name, equals, value = argument.partition("=")
        if name == _CONFIG_FLAG and (equals or position + 1 < len(argv)):
            value = value if equals else argv[position + 1]
            if not value.strip():
                raise UserError("--config must not be empty.")
            return Path(value)
    return None


def _read_yaml(file: Path, known: Collection[str]) -> dict[str, Any]:
    """The file's settings by flag name; ``known``: in snake case. Raises ``UserError`` for what cannot be a setting."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--config {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {file} is not UTF-8 text.") from None
    values = read_yaml(text, f"--config {file}") or {}
    if not isinstance(values, dict):
        raise UserError(f"--config {file} must hold flags as keys, one a line, such as delta: 0.1.")
    flags = [name.replace("_", "-") for name in known]
    settings: dict[str, Any] = {}
    for key, value in values.items():
        name = str(key).removeprefix("--").replace("_", "-")
        if name not in flags:
            close = difflib.get_close_matches(name, flags, 1)
            hint = f" Did you mean {close[0]}?" if close else " See --help for the keys."
            raise UserError(f"--config {file} has the unknown key {key!r}.{hint}")
        if name in settings:
            raise UserError(f"--config {file} has the key {name} twice.")
        if value is not None:
            settings[name] = _setting(file, name, value)
    return settings


def _setting(file: Path, name: str, value: Any) -> Any:
    """A value in the form that the parser takes: a scalar, or a list where the flag repeats."""
    if name == "carry" and isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict) or (isinstance(value, list) and name not in ("stop", "stop-token-ids")):
        raise UserError(f"--config {file}: {name} must be a single value, not {value!r}.")
    return value


def one_line(error: CycloptsError) -> str:
    # The library's sentence is that of a flag without its value, also where the flag itself is missing.
    if isinstance(error, MissingArgumentError) and error.argument and not error.keyword and not error.argument.tokens:
        return f"{error.argument.name} is missing."
    message = " ".join(str(error).split())
    return message.replace("Unused Tokens:", "Unexpected arguments")
