"""The engine as a model of lm-evaluation-harness. Importing this registers it under the name ``specfold``.

It decodes on this machine, in the harness' own process, without Ray. Needs the extra ``lm_eval``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, NoReturn

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from tqdm import tqdm

from specfold import DecodeConfig, Engine, Request, reference_models
from specfold.request import ERROR

_BATCH_SIZE = 8
_DECODE = {field.name for field in fields(DecodeConfig)} - {"stop", "max_new_tokens"}
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_SAMPLING = ("temperature", "top_p", "top_k")
_log = logging.getLogger(__name__)


@register_model("specfold")
class SpecFoldLM(LM):
    """``generate_until`` by diffusion decoding; a diffusion model gives no likelihood of a text.

    ``pretrained``: a folder, a hub id or a bundled model. ``max_gen_toks``: where a task says none. Any other argument
    is a setting of ``DecodeConfig``, such as ``mode=specfold,delta=0.1,drafts=8``. Raises ``ValueError`` for an unknown
    one, ``specfold.ConfigError`` and ``specfold.ModelError``.
    """

    def __init__(
        self,
        pretrained: str = reference_models.NAMES[0],
        revision: str | None = None,
        device: str | None = None,
        dtype: str = "auto",
        backend: str = "auto",
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        max_gen_toks: int = 256,
        **decode: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(decode.keys() - _DECODE)
        if unknown:
            raise ValueError(
                f"The model specfold has no argument {unknown[0]!r}; there are {', '.join(sorted(_DECODE))}."
            )
        self._config = DecodeConfig(**decode, max_new_tokens=max_gen_toks)
        where = device or ("cuda" if torch.cuda.is_available() else "cpu")
        on_gpu = where.startswith("cuda")
        name = reference_models.path(pretrained) if pretrained in reference_models.NAMES else pretrained
        self._engine = Engine.from_pretrained(
            name,
            device=where,
            dtype=("bfloat16" if on_gpu else "float32") if dtype == "auto" else dtype,
            backend=("triton" if on_gpu else "torch") if backend == "auto" else backend,
            revision=revision,
        )
        if self._engine.tokenizer is None:
            raise ValueError(f"The model {pretrained} has no tokenizer, which lm-evaluation-harness needs.")
        self._tokenizer = self._engine.tokenizer
        self._engine.check_config(self._config)
        self._device = torch.device(where)
        self._name = pretrained
        self._batch_size = _whole(batch_size) or _BATCH_SIZE

    @property
    def tokenizer_name(self) -> str:
        """Part of the key under which the harness caches rendered requests."""
        return self._name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as text, with the model's own template."""
        return str(
            self._tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template's text, which the harness records."""
        template = getattr(self._tokenizer, "chat_template", None)
        return template if chat_template is not False and isinstance(template, str) else None

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Texts in the order of the requests. One that cannot be decoded is empty, with a warning that says why."""
        texts = [""] * len(requests)
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="specfold")
        for completion in self._engine.stream(self._requests(requests), self._config, self._batch_size):
            request = requests[completion.row_id]
            if completion.finish_reason == ERROR:
                _log.warning("Request %d has no output: %s", completion.row_id, completion.error)
            else:
                texts[completion.row_id] = completion.text
            self.cache_hook.add_partial("generate_until", request.args, texts[completion.row_id])
            bar.update()
        bar.close()
        return texts

    def loglikelihood(self, requests: Sequence[Any]) -> NoReturn:
        """Always raises ``NotImplementedError``."""
        raise NotImplementedError(
            "The model specfold generates text and gives no likelihoods; take tasks of the output type generate_until."
        )

    loglikelihood_rolling = loglikelihood

    def _requests(self, requests: Sequence[Any]) -> Iterator[Request]:
        for number, request in enumerate(requests):
            context, settings = request.args
            yield Request(self._encode(context), row_id=number, **request_settings(settings))

    def _encode(self, text: str) -> list[int]:
        """Tokens of a context, which a chat template may have begun with the token of the beginning already."""
        tokenizer = self._tokenizer
        begun = bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
        return list(tokenizer(text, add_special_tokens=not begun)["input_ids"])


def request_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """A task's ``generation_kwargs`` as fields of ``Request``. Raises ``ValueError`` for an unknown one."""
    left = dict(settings)
    until = left.pop("until", None) or []
    values: dict[str, Any] = {"stop": tuple(text for text in ([until] if isinstance(until, str) else until) if text)}
    lengths = [left.pop(name) for name in _LENGTHS if left.get(name) is not None]
    if lengths:
        values["max_new_tokens"] = int(lengths[0])
    sampled = left.pop("do_sample", None)
    found = {name: left.pop(name) for name in _SAMPLING if left.get(name) is not None}
    if sampled is False:
        values["temperature"] = 0.0
    else:
        values |= found
        if sampled and "temperature" not in found:
            values["temperature"] = 1.0
    unknown = [name for name, value in left.items() if value is not None]
    if unknown:
        raise ValueError(f"The model specfold does not know the generation setting {unknown[0]!r}.")
    return values


def _whole(batch_size: int | str | None) -> int | None:
    """The harness' batch size; None for ``auto``."""
    if batch_size is None or str(batch_size).startswith("auto"):
        return None
    return int(batch_size)
