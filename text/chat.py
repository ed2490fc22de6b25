"""Chat templates: the checkpoint's own jinja source, run in a sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.core import CheckpointError, InvalidRequestError

_ROLES = ("system", "user", "assistant")
# Served where the template itself speaks of them.
_FURTHER_ROLES = ("tool", "developer")
_SHOWN_CHARS = 32


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares an instance attribute

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which templates written for chat do not expect.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled template. special_tokens: what it may name, such as ``bos_token``."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"the chat template is malformed: {error}", field="model") from None
        self._special_tokens = dict(special_tokens)
        further = (role for role in _FURTHER_ROLES if re.search(rf"""(['"]){role}\1""", source))
        self._roles = (*_ROLES, *further)

    def render(self, messages: Sequence[Mapping[str, str]], protect: Callable[[str], str]) -> str:
        """The prompt for the assistant's next turn, each content passed through `protect`.

        Raises InvalidRequestError for messages it cannot take.
        """
        _check_messages(messages, self._roles)
        spoken = [{"role": message["role"], "content": protect(message["content"])} for message in messages]
        values = {**self._special_tokens, "messages": spoken}
        try:
            return self._template.render(values, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}", field="messages") from None


def _check_messages(messages: Sequence[Mapping[str, str]], roles: Sequence[str]) -> None:
    if not messages:
        raise InvalidRequestError("messages is empty: at least 1 message is needed", field="messages")
    for position, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidRequestError(f"messages[{position}] needs a {key} that is a string", field="messages")
        if message["role"] not in roles:
            raise InvalidRequestError(
                f"messages[{position}] has the role {message['role'][:_SHOWN_CHARS]!r}; this model's chat template "
                f"knows {', '.join(roles)}",
                field="messages",
            )
