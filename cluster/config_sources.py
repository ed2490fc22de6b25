"""Reads a configuration: file < environment < flags. The only reader of YAML and of the environment.

Every error is a ConfigError that names the key, what it may be, and where it was set.
"""

from __future__ import annotations

import copy
import ipaddress
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from kvferry.cluster.config import OVERRIDABLE, ClusterConfig, RoleConfig, WorkerConfig
from kvferry.core import ConfigError, Role
from kvferry.resolution import find_card, merge_defaults

Tree = dict[str, Any]

# Flags with names of their own; every other key is its own flag: --engine.max_batch 8.
SHORT_FLAGS = {
    "backend": "transceiver.backend",
    "runtime": "transceiver.runtime",
    "manager": "kv_cache.manager",
    "transfer-timeout-ms": "transceiver.transfer_timeout_ms",
    "prefix-reuse": "kv_cache.prefix_reuse",
    "prefill": "prefill.count",
    "decode": "decode.count",
    "grpc-port": "router.grpc_port",
    "http-port": "router.http_port",
}


def state_dir(given: str | os.PathLike[str] | None, environ: Mapping[str, str] = os.environ) -> Path:
    """--state-dir, else $KVFERRY_STATE_DIR, else the user's state directory."""
    if given:
        return Path(given).expanduser().absolute()
    if environ.get("KVFERRY_STATE_DIR"):
        return Path(environ["KVFERRY_STATE_DIR"]).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "kvferry"


def load_config(
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ClusterConfig:
    """`flags`: dotted key -> value, as `parse_flags` returns them. Raises ConfigError."""
    tree = _read_yaml(file) if file else {}
    set_by_flag = set()
    for key, value in (flags or {}).items():
        _put(tree, key, value)
        set_by_flag.add(key)
    tree["state_dir"] = str(state_dir(tree.get("state_dir"), environ))
    try:
        config = ClusterConfig.model_validate(tree)
        for role in _roles(config):
            worker_config(config, role)
    except ValidationError as error:
        raise _config_error(error.errors()[0], file, set_by_flag) from None
    _check_together(config)
    return config


def worker_config(config: ClusterConfig, role: Role, model_config: Mapping[str, Any] | None = None) -> WorkerConfig:
    """The role's settings: our defaults < the model's < what was set < the role's overrides.

    Without a `model_config` the model's are left out. Raises ConfigError naming the override.
    """
    given = config.model_dump(include=set(OVERRIDABLE), exclude_unset=True)
    if model_config is not None:
        given = merge_defaults({}, find_card(model_config), given, model_config)
    try:
        return WorkerConfig.model_validate(_merged(given, config.role_overrides(role)))
    except ValidationError as error:
        raise _config_error(error.errors()[0], None, set(), prefix=_override_section(role)) from None


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """``--engine.max_batch 8 --prefill=2`` -> {"engine.max_batch": 8, "prefill.count": 2}; values are YAML."""
    flags: dict[str, Any] = {}
    remaining = list(arguments)
    while remaining:
        argument = remaining.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"unexpected argument {argument!r}: settings are given as --KEY VALUE", field=argument)
        name, equals, value = argument[2:].partition("=")
        key = flag_key(name)
        if not equals:
            if not remaining:
                raise ConfigError(f"--{name} needs a value", field=key)
            value = remaining.pop(0)
        flags[key] = parse_value(value)
    return flags


def parse_value(text: str) -> Any:
    """A flag's value, typed as it would be in the file."""
    try:
        return _load_yaml(text)
    except yaml.YAMLError:
        return text


def flag_key(name: str) -> str:
    """The configuration key of a flag; raises ConfigError naming the nearest ones."""
    if name in SHORT_FLAGS:
        return SHORT_FLAGS[name]
    key = name.replace("-", "_")
    known = dict(config_keys())
    if key in known:
        return key
    near = get_close_matches(key, [*known, *SHORT_FLAGS], n=3)
    hint = f": did you mean --{', --'.join(near)}?" if near else ""
    raise ConfigError(f"unknown flag --{name}{hint}", field=key)


def config_keys() -> Iterator[tuple[str, FieldInfo]]:
    """Every key that can be set, dotted, with its field."""
    yield from _keys_of(ClusterConfig, "")
    for role in ("prefill", "decode"):
        for section in OVERRIDABLE:
            model = WorkerConfig.model_fields[section].annotation
            assert isinstance(model, type)
            yield from _keys_of(model, f"{role}.{section}.")


def _keys_of(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys_of(kind, f"{prefix}{name}.")
        elif model is not RoleConfig or name not in OVERRIDABLE:
            yield f"{prefix}{name}", field


def _roles(config: ClusterConfig) -> tuple[Role, ...]:
    return (Role.AGGREGATED,) if config.aggregated else (Role.PREFILL, Role.DECODE)


def _override_section(role: Role) -> str:
    return "prefill" if role is Role.PREFILL else "decode"


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that is given twice: YAML would take the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`: what it brings may be overridden
                continue
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None,
                    None,
                    f"the key {key!r} is given twice, first in line {seen[key].line + 1}",
                    key_node.start_mark,
                )
            if isinstance(key, Hashable):
                seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


def _load_yaml(text: str) -> Any:
    return yaml.load(text, Loader=_StrictLoader)  # a SafeLoader


def _read_yaml(file: Path) -> Tree:
    try:
        loaded = _load_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read configuration {file}: {error.strerror}", field="config") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read as YAML: {error}", field="config") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} must hold keys and values, not a {type(loaded).__name__}", field="config")
    return loaded


def _put(tree: Tree, key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            # `prefill: 2` in the file, and --prefill.engine.max_batch 8 beside it.
            inner = {} if inner is None else {"count": inner}
        tree[section] = inner = dict(inner)
        tree = inner
    tree[name] = value


def _merged(base: Tree, over: Mapping[str, Any]) -> Tree:
    result = copy.deepcopy(base)
    for name, value in over.items():
        result[name] = _merged(result[name], value) if isinstance(value, Mapping) and name in result else value
    return result


def _check_together(config: ClusterConfig) -> None:
    """What no single key can be blamed for by itself."""
    if config.aggregated and config.decode.count < 1:
        raise ConfigError("decode.count must be at least 1 on backend NONE", field="decode.count")
    if not config.aggregated:
        for name, count in (("prefill", config.prefill.count), ("decode", config.decode.count)):
            if count < 1:
                message = f"{name}.count must be at least 1, got {count} (without prefill: transceiver.backend NONE)"
                raise ConfigError(message, field=f"{name}.count")
    ports = config.router
    if ports.grpc_port and ports.grpc_port == ports.http_port:
        raise ConfigError(
            f"router.grpc_port and router.http_port are both {ports.grpc_port}: give them different ports, or 0",
            field="router.http_port",
        )
    for name in ("prefill", "decode"):
        backend = getattr(config, name).transceiver.get("backend")
        if backend is not None and str(backend).upper() != config.transceiver.backend:
            raise ConfigError(
                f"{name}.transceiver.backend is {backend}, but workers of a pair share one backend: "
                "set transceiver.backend",
                field=f"{name}.transceiver.backend",
            )
    for name in ("host", "worker_host"):
        if not (config.insecure_bind or is_loopback(getattr(config, name))):
            raise ConfigError(
                f"{name} {getattr(config, name)} is reachable from other machines and nothing is encrypted or "
                "authenticated: set insecure_bind true to allow it",
                field=name,
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    return host == "localhost" or (host != "auto" and ipaddress.ip_address(host).is_loopback)


def _config_error(error: ErrorDetails, file: Path | None, flags: set[str], prefix: str = "") -> ConfigError:
    """One pydantic error in the project's words."""
    parts = [str(part) for part in error["loc"] if not str(part).startswith("function-")]
    key = ".".join([prefix, *parts] if prefix else parts)
    where = f" (flag --{key})" if key in flags else f" (in {file})" if file else ""
    if error["type"] == "extra_forbidden":
        siblings = [known for known, _ in config_keys()]
        near = get_close_matches(key, siblings, n=3)
        hint = f": did you mean {', '.join(near)}?" if near else ""
        return ConfigError(f"unknown configuration key {key}{where}{hint}", field=key)
    if error["type"] == "value_error":
        return ConfigError(f"{key} must be {error['ctx']['error']}{where}", field=key)
    message = error["msg"].replace("Input should be ", "")
    return ConfigError(f"{key} must be {message}, got {error['input']!r}{where}", field=key)
