"""The pages on tracking and inspection run in order and print what they show."""

import os
import subprocess
import sys

import pytest

from tests.helpers.pages import ROOT

# A process of its own: JAX's profiler is refused where another test has loaded libtpu.
PAGE = """
import sys
from pathlib import Path
from shardwise import use_cpu_devices
use_cpu_devices(8)
from tests.helpers.pages import DOCS, run_page
run_page(DOCS / f"{sys.argv[1]}.md", Path(sys.argv[2]))
"""


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
    found = subprocess.run(
        [sys.executable, "-c", PAGE, name, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert list(tmp_path.glob(written))
