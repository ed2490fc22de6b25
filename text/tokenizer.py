"""The tokenizer of a checkpoint directory. Loads `tokenizers` only, so importing it costs milliseconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from kvferry.core import CheckpointError, InvalidRequestError
from kvferry.text.chat import ChatTemplate
from kvferry.text.encoding import token_ids
from kvferry.text.literal import LiteralEncoder, new_mark
from kvferry.text.pieces import ByteStream, PieceTable, TextStream, WindowStream, piece_rule

_SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """Text <-> token ids of one checkpoint. Safe to share between threads."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, eos_token_ids: frozenset[int], chat_template: ChatTemplate | None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        rule = piece_rule(tokenizer)
        self._pieces = PieceTable(tokenizer, rule) if rule else None
        self._literal = LiteralEncoder(tokenizer)
        self._longest_token_chars = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, model_dir: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json, generation_config.json, config.json and
        chat_template.jinja. Raises CheckpointError naming the file at fault."""
        folder = Path(model_dir)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: a checkpoint needs its tokenizer.json", field="model")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path} cannot be read: {error}", field="model") from None
        # A checkpoint may carry training-time settings; a prompt is never cut or padded silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config)
        return cls(tokenizer, _eos_token_ids(folder, tokenizer, special), _chat_template(folder, config, special))

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows, added ones included; a model's own vocabulary may be padded beyond it."""
        size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        return size

    @property
    def longest_token_chars(self) -> int:
        """No token stands for more characters than this, unless the tokenizer drops or merges characters."""
        return self._longest_token_chars

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens (such as BOS) the checkpoint adds to one."""
        return token_ids(self._tokenizer, text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer begins.

        Only the template's own special tokens are tokens: those spelled out in a message are text, or whoever
        writes a message could forge the next speaker's. Raises InvalidRequestError when the checkpoint has no chat
        template, or its template refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError("this model has no chat template: send a plain prompt", field="messages")
        mark = new_mark()
        rendered = self._chat_template.render(messages, lambda content: self._literal.protect(content, mark))
        return self._literal.encode(rendered, mark)

    def decode(self, token_ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of a whole sequence; with skip_special False, special tokens are written out."""
        if not skip_special:
            text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
            return text
        stream = self.text_stream()
        return stream.feed(token_ids) + stream.finish()

    def text_stream(self) -> TextStream:
        """A fresh incremental decoder; what it returns adds up to `decode` of all it was fed."""
        return ByteStream(self._pieces) if self._pieces else WindowStream(self._tokenizer)


def _read_json(path: Path) -> dict[str, Any]:
    """{} when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}", field="model") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object", field="model")
    return value


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; the file writes each as a string or as an object with its `content`."""
    found = {}
    for name in _SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(folder: Path, tokenizer: tokenizers.Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """generation_config.json's, else config.json's, and the tokenizer's own end-of-sequence token."""
    ids: set[Any] = set()
    config = _read_json(folder / "config.json")
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        declared = source.get("eos_token_id")
        if declared is not None:
            ids.update(declared if isinstance(declared, list) else [declared])
            break
    named = special.get("eos_token")
    if named is not None:
        ids.add(tokenizer.token_to_id(named))
    return frozenset(token_id for token_id in ids if isinstance(token_id, int))


def _chat_template(folder: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> ChatTemplate | None:
    """chat_template.jinja wins over tokenizer_config.json, where it is a string or a list of named ones."""
    path = folder / "chat_template.jinja"
    source: Any = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return ChatTemplate(source, special) if isinstance(source, str) else None
