"""Nothing in the current directory is imported, except the recipe and what it imports."""

import importlib.util
import os
import subprocess
import sys

import pytest

# As pip writes it.
SCRIPT = """
import sys
from shardwise.cli import entry
if __name__ == "__main__":
    sys.exit(entry())
"""
HELPER = """
import numpy as np

def batches(step):
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(8, 4)).astype("f4")}
"""
RECIPE = """
from pathlib import Path
import optax
from flax import nnx
from helper import batches
from shardwise import Run

def recipe(
    steps: int = 2,
    mesh: str = "data=-1",
    out: Path | None = None,
    lr: float = 0.1,
    processes: int = 0,
) -> Run:
    return Run(
        model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(lr),
        data=batches,
        data_processes=processes,
        steps=steps,
        mesh=mesh,
        out=out,
    )
"""
# Modules of this platform that are files.
STANDARD = sorted(
    name
    for name in sys.stdlib_module_names - set(sys.builtin_module_names)
    if importlib.util.find_spec(name)
)
INSTALLED = ["flax", "jax", "matplotlib", "numpy", "orbax", "rich", "shardwise", "tyro"]
TRAIN = ["train", "RECIPE", "--out", "run", "--cpu-devices", "2"]


@pytest.fixture
def folder(tmp_path):
    """Return a folder with an empty current directory, a recipe elsewhere, and a script."""
    for name in ("here", "elsewhere", "bin"):
        (tmp_path / name).mkdir()
    (tmp_path / "elsewhere" / "tiny.py").write_text(RECIPE)
    (tmp_path / "elsewhere" / "helper.py").write_text(HELPER)
    (tmp_path / "bin" / "shardwise").write_text(SCRIPT)
    return tmp_path


def plant(folder, names):
    """Write modules to the current directory that leave a note when they are executed."""
    for name in names:
        code = f"open({str(folder / 'executed')!r}, 'a').write('{name} ')\n"
        (folder / "here" / f"{name}.py").write_text(code)


def check(folder, *command):
    """Check that a command works and that no planted module was executed."""
    recipe = str(folder / "elsewhere" / "tiny.py")
    words = [recipe if word == "RECIPE" else word for word in command]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder / "here",
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    executed = folder / "executed"
    assert not executed.exists(), executed.read_text()
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    "command",
    [
        [*TRAIN, "--processes", "1"],
        ["launch", "--processes", "2", "--", *TRAIN],
        pytest.param(
            ["sweep", *TRAIN[1:], "--lr", "0.1", "0.2"], marks=pytest.mark.slow
        ),
        ["plan", "RECIPE", "--cpu-devices", "2"],
        ["doctor"],
    ],
    ids=lambda command: command[0],
)
def test_modules_in_the_current_directory_are_not_executed(folder, command):
    plant(folder, [*STANDARD, *INSTALLED])
    check(folder, str(folder / "bin" / "shardwise"), *command)


def test_a_recipe_imports_modules_next_to_it_but_not_instead_of_standard_ones(folder):
    (folder / "elsewhere").rename(folder / "there")
    (folder / "here").rename(folder / "elsewhere")
    for file in (folder / "there").iterdir():
        file.rename(folder / "elsewhere" / file.name)
    (folder / "here").symlink_to("elsewhere")
    plant(folder, STANDARD)
    check(folder, str(folder / "bin" / "shardwise"), *TRAIN, "--processes", "1")


def test_python_m_does_not_import_from_the_current_directory(folder):
    (folder / "elsewhere" / "modules.py").write_text("import sys; print(*sys.modules)")
    # Python itself imports these before it runs a module.
    before = subprocess.run(
        [sys.executable, "-m", "modules"],
        cwd=folder / "elsewhere",
        capture_output=True,
        text=True,
    ).stdout.split()
    plant(folder, {*STANDARD, *INSTALLED} - {*before, "shardwise"})
    check(folder, "-m", "shardwise.cli", *TRAIN)
