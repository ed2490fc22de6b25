import json
from pathlib import Path

import pytest

from kvferry.core import CheckpointError
from kvferry.resolution import ResolveRequest, read_config, resolve


def test_a_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8}))
    assert read_config(tmp_path)["hidden_size"] == 8
    assert resolve(ResolveRequest("", read_config(str(tmp_path)))).architecture == "Qwen3ForCausalLM"


def test_a_known_name_resolves_without_any_file() -> None:
    config = read_config("smollm2")
    assert config["architectures"] == ["LlamaForCausalLM"]
    config["architectures"] = []
    assert read_config("smollm2")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "has no config.json"), ("{", "cannot be read"), ("[1]", "holds a list"), (b"\xff\xfe", "cannot be read")],
)
def test_a_bad_directory_says_what_is_wrong(tmp_path: Path, content: str | bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError, match=words) as raised:
        read_config(tmp_path)
    assert raised.value.field == "model"


def test_no_directory_lists_the_known_names(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="smollm2"):
        read_config(tmp_path / "gone")


def test_an_unknown_name_says_what_a_model_can_be_and_a_file_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown model 'smol': no such directory or \.gguf file, and no known name"
    ):
        read_config("smol")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(CheckpointError, match=r"x\.gguf is a file: `kvferry convert "):
        read_config(tmp_path / "x.gguf")
