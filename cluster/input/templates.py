"""Prompts as tokens: the user's template, the model's chat template, and text that must not turn into control tokens.

Special-token text in user content (``<|im_end|>`` in a question, say) is encoded as ordinary text, so a row cannot
forge a turn or put the mask into its own prompt. In raw prompts (``--chat-template none``) it is read as tokens,
because there it is the only way to write them; values that a prompt template inserts are user content there, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from cluster.errors import UserError
from cluster.input.problems import RowProblem

_OPEN, _CLOSE = "\ue000", "\ue001"
"""Private characters around the number of a piece of special text while it passes through templates."""
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class PromptTemplate:
    """``--prompt-template``: sandboxed Jinja2 over a row's columns; ``row`` is the whole row."""

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
        environment.filters["tojson"] = _to_json
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"--prompt-template is not valid Jinja2: {_first_line(error)}.") from None

    def render(self, row: Mapping[str, Any]) -> str:
        """The row's prompt. Raises ``RowProblem``."""
        try:
            return self._template.render({"row": row, **row})
        except Exception as error:  # a template can raise anything that its expressions can
            raise RowProblem("template_error", f"The prompt template fails: {_first_line(error)}.") from None


class ChatTemplate:
    """A model's chat template (or a file's), with a system message for rows that bring none."""

    def __init__(self, tokenizer: Any, template: str, system_prompt: str | None) -> None:
        self._tokenizer, self._template, self._system = tokenizer, template, system_prompt
        try:
            self._apply([{"role": "user", "content": "a"}])
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"The chat template is not valid Jinja2: {_first_line(error)}.") from None
        except Exception:  # a template may refuse this conversation and take those of the rows
            pass

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation as text that ends where the model's turn begins. Raises ``RowProblem``."""
        turns = list(messages)
        if self._system is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system})
        try:
            return self._apply(turns)
        except Exception as error:  # templates refuse conversations by raising, each in its own way
            raise RowProblem("template_error", f"The chat template fails: {_first_line(error)}.") from None

    def _apply(self, turns: list[Any]) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                turns, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        )


def chat_template_of(tokenizer: Any) -> str | None:
    """The tokenizer's default chat template."""
    template = getattr(tokenizer, "chat_template", None)
    return template.get("default") if isinstance(template, dict) else template


class PromptEncoder:
    """Text to token ids, many at a time, keeping special text in user content apart."""

    def __init__(self, tokenizer: Any, control_ids: Iterable[int]) -> None:
        """``control_ids``: tokens that user content must not yield, beside those that the tokenizer calls special."""
        self._tokenizer = tokenizer
        # Only text of added tokens is matched as a whole, so only it needs care.
        added = tokenizer.added_tokens_decoder
        control = {*control_ids, *tokenizer.all_special_ids, *(token for token in added if added[token].special)}
        texts = {added[token].content for token in control if token in added}
        self._special = [*sorted(texts, key=len, reverse=True), _OPEN, _CLOSE]
        self._pattern = re.compile("|".join(map(re.escape, self._special)))
        self._plain = [self._encode_plain(text) for text in self._special]
        self._before, self._after = self._frame()

    def protect(self, value: Any) -> Any:
        """User content with special text replaced by stand-ins, at any depth."""
        if isinstance(value, str):
            return self._pattern.sub(self._stand_in, value) if self._pattern.search(value) else value
        if isinstance(value, list):
            return [self.protect(item) for item in value]
        if isinstance(value, dict):
            return {name: self.protect(item) for name, item in value.items()}
        return value

    def encode_raw(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts in which special text means its token, with what the tokenizer puts around a text."""
        return self._tokens(list(texts), raw=True) if texts else []

    def encode(self, texts: Sequence[str], raw: bool) -> list[list[int]]:
        """Tokens of protected texts. ``raw``: with the tokens that the tokenizer puts around a plain text."""
        plain = [i for i, text in enumerate(texts) if _OPEN not in text]
        encoded: dict[int, list[int]] = {}
        if plain:
            tokens = self._tokens([texts[i] for i in plain], raw)
            encoded = dict(zip(plain, tokens, strict=True))
        return [encoded[i] if i in encoded else self._encode_protected(text, raw) for i, text in enumerate(texts)]

    def _encode_protected(self, text: str, raw: bool) -> list[int]:
        # re.split with one group: text, number, text, number, … text
        pieces = _STAND_IN.split(text)
        texts = iter(self._tokens(pieces[::2], raw=False))
        tokens = list(next(texts))
        for number in pieces[1::2]:
            tokens += self._plain[int(number)]
            tokens += next(texts)
        return [*self._before, *tokens, *self._after] if raw else tokens

    def _stand_in(self, match: re.Match[str]) -> str:
        return f"{_OPEN}{self._special.index(match[0])}{_CLOSE}"

    def _encode_plain(self, text: str) -> list[int]:
        """Tokens of special text read as ordinary text: cut behind its first character, it is no longer special."""
        if len(text) == 1:
            return self._tokens([text], raw=False)[0]
        head, tail = self._tokens([text[:1]], raw=False)[0], text[1:]
        inner = self._pattern.search(tail)
        if inner is None:
            return [*head, *self._tokens([tail], raw=False)[0]]
        before, after = self._tokens([tail[: inner.start()], tail[inner.end() :]], raw=False)
        return [*head, *before, *self._encode_plain(inner[0]), *after]

    def _tokens(self, texts: list[str], raw: bool) -> list[list[int]]:
        encoded = self._tokenizer(
            texts, add_special_tokens=raw, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return list(encoded["input_ids"])

    def _frame(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer puts before and after a plain text."""
        bare, framed = self._tokens(["a"], raw=False)[0], self._tokens(["a"], raw=True)[0]
        for start in range(len(framed) - len(bare) + 1):
            if framed[start : start + len(bare)] == bare:
                return framed[:start], framed[start + len(bare) :]
        return [], []


def _to_json(value: Any, indent: int | None = None) -> str:
    """As in chat templates: Jinja's own filter escapes for HTML, which a prompt does not want."""
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0].strip().rstrip(".") or type(error).__name__
