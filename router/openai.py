"""The OpenAI-style JSON: bodies in, answers and stream chunks out. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError

from kvferry.core import InvalidRequestError, SamplingParams
from kvferry.core.sampling import LIMITS, MAX_INTEGER, MAX_LOGPROBS, shown
from kvferry.router.intake import Ask, ChatPrompt, TextPrompt, TokensPrompt

# Fields that would change the answer and are not built: refused unless they say what happens anyway.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "prompt_logprobs": (None,),
    "modalities": (None, ["text"]),
    "audio": (None,),
}
_SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
Number = StrictFloat  # takes integers too, but neither true nor "1"

# What each field must be, for the errors; [] stands for every position of a list.
_WANTED: Mapping[str, str] = {
    **LIMITS,
    "model": "a string",
    "stream": "true or false",
    "stream_options": "an object",
    "stream_options.include_usage": "true or false",
    "cache_salt": "a string",
    "stop": f"a string, or a list of {LIMITS['stop']}",
    "stop_token_ids": f"a list of {LIMITS['stop_token_ids']}",
    "logit_bias": f"an object of {LIMITS['logit_bias']}",
}


class StreamOptions(BaseModel):
    include_usage: StrictBool = False


class _Body(BaseModel):
    """What both endpoints take. Unknown fields are ignored, as clients send many; `_HARMLESS` names exceptions."""

    model_config = ConfigDict(extra="allow")
    wanted: ClassVar[Mapping[str, str]] = _WANTED

    model: StrictStr | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    seed: StrictInt | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: list[StrictInt] | None = None
    ignore_eos: StrictBool | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[int, Number] | None = None
    cache_salt: StrictStr = ""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, logprobs: int | None) -> SamplingParams:
        """Raises InvalidRequestError naming field and limit."""
        for name, harmless in _HARMLESS.items():
            value = (self.model_extra or {}).get(name)
            if value not in harmless:
                raise InvalidRequestError(f"{name} is not supported here: leave it out", field=name)
        values = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(stop=stop, logprobs=logprobs, **values)


class CompletionBody(_Body):
    wanted: ClassVar[Mapping[str, str]] = {**_WANTED, "prompt": "a string or a list of token ids"}

    prompt: StrictStr | list[Any]
    logprobs: StrictInt | None = None

    def ask(self, client_id: str) -> Ask:
        return Ask(
            prompt=self._prompt(),
            sampling=self.sampling(self.logprobs),
            model=self.model or "",
            client_id=client_id,
            cache_salt=self.cache_salt,
        )

    def _prompt(self) -> TextPrompt | TokensPrompt:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            if len(prompt) > 1:
                raise InvalidRequestError(
                    f"prompt holds {len(prompt)} prompts; the limit is 1 per request", field="prompt"
                )
            prompt = prompt[0]
        if isinstance(prompt, str):
            return TextPrompt(prompt)
        if all(type(token_id) is int for token_id in prompt):
            return TokensPrompt(prompt)
        raise InvalidRequestError("prompt must be a string or a list of token ids", field="prompt")


class TextPart(BaseModel):
    type: StrictStr
    text: StrictStr = ""


class Message(BaseModel):
    role: StrictStr
    content: StrictStr | list[TextPart]

    def plain(self, position: int) -> dict[str, str]:
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        for part in self.content:
            if part.type != "text":
                raise InvalidRequestError(
                    f"messages[{position}] holds a part of type {part.type!r}; only text is served", field="messages"
                )
        return {"role": self.role, "content": "".join(part.text for part in self.content)}


class ChatBody(_Body):
    wanted: ClassVar[Mapping[str, str]] = {
        **_WANTED,
        "messages": "a list of messages",
        "messages[]": "an object with a role and a content",
        "messages[].role": "a string",
        "messages[].content": "a string or a list of text parts",
        "messages[].content[]": "an object with a type and a text",
        "messages[].content[].type": "a string",
        "messages[].content[].text": "a string",
        "logprobs": "true or false",
        "top_logprobs": LIMITS["logprobs"],
        "max_completion_tokens": LIMITS["max_tokens"],
    }

    messages: list[Message]
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[StrictInt, Field(ge=1, le=MAX_INTEGER)] | None = None

    def ask(self, client_id: str) -> Ask:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true", field="top_logprobs")
        return Ask(
            prompt=ChatPrompt([message.plain(position) for position, message in enumerate(self.messages)]),
            sampling=self.sampling((self.top_logprobs or 0) if self.logprobs else None),
            model=self.model or "",
            client_id=client_id,
            cache_salt=self.cache_salt,
        )


B = TypeVar("B", CompletionBody, ChatBody)
"""Either body."""


_NAMES = frozenset(
    name for kind in (CompletionBody, ChatBody, Message, TextPart, StreamOptions) for name in kind.model_fields
)


def parse_body(kind: type[B], data: bytes) -> B:
    """Raises InvalidRequestError naming the first field at fault and what it must be."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if errors[0]["type"] == "json_invalid":
        raise InvalidRequestError(f"the body is not valid JSON: {errors[0]['ctx']['error']}", field="body")
    if not errors[0]["loc"]:
        raise InvalidRequestError(f"the body must be a JSON object, got {_kind(errors[0]['input'])}", field="body")
    field = str(errors[0]["loc"][0])
    # Where a field may be of several kinds there is an error for each; the deepest is of the kind that was meant.
    fault = max((one for one in errors if one["loc"][0] == field), key=lambda one: len(_path(one["loc"])))
    where, wanted = _worded(kind.wanted, _path(fault["loc"]))
    if fault["type"] == "missing":
        raise InvalidRequestError(f"{where} is missing: it must be {wanted}", field=field)
    raise InvalidRequestError(f"{where} must be {wanted}, got {_kind(fault['input'])}", field=field)


def _path(place: tuple[int | str, ...]) -> list[str]:
    """Without what pydantic adds: the names of the kinds it tried, and the keys of objects that may have any."""
    return [
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in place if part in _NAMES or type(part) is int
    ]


def _worded(words: Mapping[str, str], path: list[str]) -> tuple[str, str]:
    """The innermost part there are words for, as a client writes it, and the words."""
    while True:
        name = "".join("[]" if part.startswith("[") else part for part in path).removeprefix(".")
        if name in words:
            return "".join(path).removeprefix("."), words[name]
        path = path[:-1]


def _kind(value: object) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shown(value)
