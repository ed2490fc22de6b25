"""`kvferry generate`: complete one prompt through a running cluster."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from kvferry.cli.client import (
    Completed,
    GenerateRequest,
    GenerationClient,
    chat_request,
    label_request,
    prompt_request,
    token_request,
)
from kvferry.cli.options import Endpoint, Json, StateDir, find_endpoint
from kvferry.cli.output import print_json, refusals, say
from kvferry.core import InvalidRequestError, SamplingParams


def generate_command(
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    prompt_ids: Annotated[str | None, typer.Option(help="Token ids to continue, as JSON: [1, 2, 3].")] = None,
    chat: Annotated[str | None, typer.Option(help="A user's message; the chat template is applied.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message before --chat.")] = None,
    model: Annotated[str, typer.Option(help="The served model's name; empty: whatever is served.")] = "",
    max_tokens: Annotated[int | None, typer.Option(help="At most this many new tokens.")] = None,
    min_tokens: Annotated[int, typer.Option(help="At least this many.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0: off.")] = 0,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Log probabilities: the chosen token's and the top N.")] = None,
    cache_salt: Annotated[str, typer.Option(help="Prompts with different salts share no cached prefix.")] = "",
    request_id: Annotated[str, typer.Option(help="Echoed back.")] = "",
    stream: Annotated[bool, typer.Option("--stream", help="Show tokens as they come.")] = False,
    timeout: Annotated[float, typer.Option(help="Deadline in seconds.")] = 600.0,
    endpoint: Endpoint = None,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> None:
    """Complete one prompt: --prompt, --prompt-ids or --chat."""
    with refusals(as_json):
        sampling = SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop=tuple(stop or ()),
            ignore_eos=ignore_eos,
            logprobs=logprobs,
        )
        request = build_request(prompt, prompt_ids, chat, system, sampling)
        label_request(request, model=model, cache_salt=cache_salt, request_id=request_id)
        with GenerationClient(find_endpoint(endpoint, state_dir), timeout) as client:
            completed = _stream(client, request, echo=not as_json) if stream else client.generate(request)
        if as_json:
            print_json(completed.as_dict(logprobs is not None))
        else:
            sys.stdout.write("\n" if stream else completed.text + "\n")
            say(route_line(completed))


def build_request(
    prompt: str | None, prompt_ids: str | None, chat: str | None, system: str | None, sampling: SamplingParams
) -> GenerateRequest:
    """Raises InvalidRequestError unless exactly one kind of input is given."""
    given = [
        name for name, value in (("prompt", prompt), ("prompt_ids", prompt_ids), ("chat", chat)) if value is not None
    ]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of --prompt, --prompt-ids and --chat, got {', '.join(given) or 'none'}", field="prompt"
        )
    if prompt is not None:
        return prompt_request(prompt, sampling)
    if prompt_ids is not None:
        return token_request(parse_ids(prompt_ids), sampling)
    messages = [("system", system)] if system is not None else []
    return chat_request([*messages, ("user", chat or "")], sampling)


def parse_ids(text: str) -> list[int]:
    """Raises InvalidRequestError for anything but a JSON list of ids that fit the wire."""
    try:
        ids: Any = json.loads(text)
    except ValueError:
        raise InvalidRequestError(f"--prompt-ids is not JSON: {text[:80]!r}", field="prompt_ids") from None
    if not isinstance(ids, list):
        raise InvalidRequestError("--prompt-ids must be a JSON list of token ids", field="prompt_ids")
    for position, token_id in enumerate(ids):
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < 2**32:
            raise InvalidRequestError(
                f"--prompt-ids: {token_id!r} at position {position} is no token id (0 to {2**32 - 1})",
                field="prompt_ids",
            )
    return ids


def route_line(completed: Completed) -> str:
    """Where the request went, what moved and how long each stage took, in one line."""
    route, timings, usage = completed.route, completed.timings, completed.usage
    path = f"{route['prefill']} -> {route['decode']}" if route.get("disaggregated") else route.get("decode") or "-"
    stages = ", ".join(f"{name.removesuffix('_ms')} {value:.1f} ms" for name, value in timings.items() if value)
    return (
        f"[{path}] {route.get('transferred_bytes', 0):,} KV bytes moved; {usage.get('prompt_tokens', 0)} prompt "
        f"({usage.get('cached_tokens', 0)} cached) + {usage.get('completion_tokens', 0)} tokens; {stages}"
    )


def _stream(client: GenerationClient, request: GenerateRequest, echo: bool) -> Completed:
    completed = Completed()
    for message in client.stream(request):
        completed.add(message)
        if echo:
            sys.stdout.write(message.text)
            sys.stdout.flush()
    return completed
