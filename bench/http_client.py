"""Streaming completions over HTTP, as OpenAI's API has them: what every server under test speaks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from kvferry.bench.load import Ask, CallFailedError, Client, Part


class HTTPClient(Client):
    """OpenAI-style completions, prompts as token ids. base: http://host:port. model: what the server calls it."""

    def __init__(self, base: str, model: str) -> None:
        self._url = f"{base}/v1/completions"
        self._model = model
        self._session: aiohttp.ClientSession | None = None

    async def parts(self, ask: Ask) -> AsyncGenerator[Part, None]:
        body = {
            "model": self._model,
            "prompt": list(ask.prompt),
            "max_tokens": ask.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._open().post(self._url, json=body) as response:
                if response.status != 200:
                    raise CallFailedError(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for line in response.content:
                    if line.startswith(b"data:"):
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield event_part(json.loads(data))
        except (aiohttp.ClientError, ValueError) as error:
            raise CallFailedError(f"{type(error).__name__}: {error}") from None
        raise CallFailedError("the stream broke off")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:  # needs a running loop
            # A connection for each call: llama-server closes one after a stream without having said so, and what is
            # then sent over it is lost.
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def event_part(event: dict[str, Any]) -> Part:
    """Raises CallFailedError for an error event. A last message with no text holds no token."""
    if "error" in event:
        raise CallFailedError(f"error event: {json.dumps(event['error'])[:300]}")
    usage = event.get("usage") or {}
    has_tokens = any(choice.get("text") for choice in event.get("choices") or ())
    return Part(has_tokens, usage.get("prompt_tokens"), usage.get("completion_tokens"))
