"""The code and commands of the page on sampling run in order and print what it shows."""

import json

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(tmp_path):
    commands = run_page(DOCS / "sampling.md", tmp_path, stdin="return ").commands
    prompts = ["def ", "return ", "--- 1 of 2\nimport ", "class "]
    assert [
        command.printed[: len(prompt)]
        for command, prompt in zip(commands, prompts, strict=False)
    ] == prompts
    assert len(json.loads((tmp_path / "texts.json").read_text())["continuations"]) == 2
    assert sorted(path.name for path in (tmp_path / "hub").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
