"""docs/errors.md is generated from the source and up to date."""

import importlib.util
import sys

from shardwise.errors import ExitCode
from tests.helpers.pages import ROOT

spec = importlib.util.spec_from_file_location(
    "make_errors", ROOT / "docs" / "make_errors.py"
)
make_errors = sys.modules["make_errors"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_errors)


def test_the_page_is_up_to_date():
    assert make_errors.PAGE.read_text() == make_errors.page(), (
        "run `python docs/make_errors.py`"
    )


def test_every_exit_code_and_every_class_is_on_the_page():
    text = make_errors.page()
    for code in ExitCode:
        assert f"| {int(code)} | {code.meaning} |" in text
    raised = {message.kind for message in make_errors.find_messages()}
    assert raised >= {
        "ConfigError",
        "DataError",
        "CheckpointError",
        "NumericsError",
        "LostError",
    }
    for kind in raised:
        assert f"`{kind}`\n" in text


def test_a_new_message_is_found_with_its_values_replaced(tmp_path):
    (tmp_path / "new.py").write_text(
        'raise ConfigError(f"the moon is {phase}: wait for the sun."\n    " Then continue.")\n'
    )
    (message,) = make_errors.find_messages(tmp_path)
    assert (message.kind, message.module) == ("ConfigError", "new.py")
    assert message.text == "the moon is …: wait for the sun. Then continue."
