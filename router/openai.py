"""The OpenAI-style JSON: bodies in, answers and stream chunks out. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError

from kvferry.core import InvalidRequestError, SamplingParams
from kvferry.router.intake import Ask, ChatPrompt, TextPrompt, TokensPrompt

# Fields that would change the answer and are not built: refused unless they say what happens anyway.
_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
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
Number = StrictInt | float


class StreamOptions(BaseModel):
    include_usage: StrictBool = False


class _Body(BaseModel):
    """What both endpoints take. Unknown fields are ignored, as clients send many; `_HARMLESS` names exceptions."""

    model_config = ConfigDict(extra="allow")

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
    messages: list[Message]
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0)] | None = None
    max_completion_tokens: StrictInt | None = None

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


def parse_body(kind: type[B], data: bytes) -> B:
    """Raises InvalidRequestError naming the first field at fault."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = [str(part) for part in first["loc"]]
        field = place[0] if place else "body"
        where = ".".join(place) or "the body"
        raise InvalidRequestError(f"{where}: {first['msg']}", field=field) from None
