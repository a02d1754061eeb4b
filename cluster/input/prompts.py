"""What a row's prompt may look like, and how each form becomes the text or the tokens that the model sees."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cluster.config import JobConfig
from cluster.errors import UserError
from cluster.input.parse import Row, what
from cluster.input.problems import RowProblem
from cluster.input.templates import ChatTemplate, PromptEncoder, PromptTemplate, chat_template_of


class PromptReader:
    """Reads text, messages, token ids and templated rows; encodes text. Every method but ``encode`` raises
    ``RowProblem`` for a value that is no prompt."""

    def __init__(self, config: JobConfig, tokenizer: Any | None, control_ids: Iterable[int]) -> None:
        self._template = None if config.prompt_template is None else PromptTemplate(config.prompt_template)
        self._encoder = None if tokenizer is None else PromptEncoder(tokenizer, control_ids)
        self._chat = _chat_template(config, tokenizer)

    def from_template(self, row: Row) -> str:
        """What ``--prompt-template`` makes of the row."""
        assert self._template is not None
        if self._chat is None:
            return self._text(self._template.render(self._protected(row)))
        return self._as_user_turn(self._text(self._template.render(row)))

    def from_text(self, name: str, value: Any) -> str:
        """The prompt column: a user's turn, or the raw text where there is no chat template."""
        if not isinstance(value, str):
            raise RowProblem("wrong_type", f"The column {name} must be a string, not {what(value)}.")
        text = self._text(value)
        return text if self._chat is None else self._as_user_turn(text)

    def from_messages(self, value: Any) -> str:
        """A conversation, written with the chat template."""
        if not isinstance(value, list):
            raise RowProblem("wrong_type", f"The column messages must be a list, not {what(value)}.")
        if not value:
            raise RowProblem("empty_prompt", "The list of messages is empty.")
        turns = [_turn(message) for message in value]
        if self._chat is None:
            raise RowProblem(
                "template_error", "The row has messages, but there is no chat template to write them with."
            )
        return self._chat.render(self._protected(turns))

    def from_ids(self, value: Any) -> list[int]:
        """Token ids, as they are; their range is the model's to check."""
        if not isinstance(value, list) or not set(map(type, value)) <= {int}:
            raise RowProblem("wrong_type", "The column prompt_token_ids must be a list of whole numbers.")
        return value

    def encode(self, texts: list[str]) -> list[list[int] | RowProblem]:
        """Tokens of what the other methods returned."""
        if self._encoder is None:
            message = "The prompt is text, but the model has no tokenizer; give prompt_token_ids."
            return [RowProblem("wrong_type", message) for _ in texts]
        if self._chat is None and self._template is None:
            return [*self._encoder.encode_raw(texts)]
        return [*self._encoder.encode(texts, raw=self._chat is None)]

    def _as_user_turn(self, text: str) -> str:
        assert self._chat is not None
        return self._chat.render([{"role": "user", "content": self._protected(text)}])

    def _protected(self, value: Any) -> Any:
        return value if self._encoder is None else self._encoder.protect(value)

    @staticmethod
    def _text(text: str) -> str:
        if not text:
            raise RowProblem("empty_prompt", "The prompt is empty.")
        return text


def _chat_template(config: JobConfig, tokenizer: Any | None) -> ChatTemplate | None:
    text = config.chat_template_text
    if config.chat_template == "auto":
        text = chat_template_of(tokenizer)
    elif config.chat_template != "none" and text is None:
        text = Path(config.chat_template).read_text(encoding="utf-8")
    if text is None:
        if config.system_prompt is not None:
            raise UserError("--system-prompt needs a chat template, and the model has none.")
        return None
    if tokenizer is None:
        raise UserError("--chat-template needs a tokenizer, and the model has none.")
    return ChatTemplate(tokenizer, text, config.system_prompt)


def _turn(message: Any) -> dict[str, Any]:
    """One message without nulls, its content a string."""
    if not isinstance(message, dict):
        raise RowProblem("wrong_type", f"A message must be an object with role and content, not {what(message)}.")
    turn = {name: value for name, value in message.items() if value is not None}
    if not isinstance(turn.get("role"), str):
        raise RowProblem("wrong_type", f"A message's role must be a string, not {what(turn.get('role'))}.")
    content = turn.get("content")
    if isinstance(content, list):
        turn["content"] = "".join(map(_part, content))
    elif not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
        raise RowProblem("wrong_type", f"A message's content must be a string, not {what(content)}.")
    return turn


def _part(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise RowProblem("wrong_type", "A part of a message's content is not text.")
