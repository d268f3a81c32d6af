"""The commands of docs/processes.md run and print what the page shows, except for figures."""

import pytest

from tests.helpers.pages import DOCS, run_page


@pytest.mark.slow
def test_the_commands_of_the_page_run(tmp_path):
    _, slurm, kubernetes = run_page(DOCS / "processes.md", tmp_path).commands
    for done, name, start in (
        (slurm, "job.sbatch", "sbatch"),
        (kubernetes, "job.yaml", "kubectl"),
    ):
        assert f"submit it with: {start}" in done.said
        assert "recipes/gpt2.py" in (tmp_path / name).read_text()
