"""The pages on tracking and inspection run in order and print what they show."""

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("tracking", "runs/tracked/tensorboard/events.*"),
        (
            "looking_inside",
            "runs/profiled/profile/plugins/profile/*/perfetto_trace.json.gz",
        ),
    ],
)
def test_the_code_and_the_commands_of_the_page_do_what_is_shown(
    name, written, tmp_path
):
    run_page(DOCS / f"{name}.md", tmp_path)
    assert list(tmp_path.glob(written))
