"""The wheel and the sdist hold the right files; the wheel works in an empty environment."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BACKEND = (
    "import sys; from setuptools import build_meta as b; to = sys.argv[1]; "
    "b.build_sdist(to); b.build_wheel(to)"
)
EXTRAS = {
    "tensorboard",
    "wandb",
    "mlflow",
    "trackio",
    "hf",
    "parquet",
    "tokenizers",
    "chex",
    "gpu-plan",
    "tpu-plan",
    "docs",
    "dev",
}


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Build the wheel and the sdist, and return their folder.

    The build uses a copy of the files that git would commit, so that no other file of this
    machine gets in or helps.
    """
    copy, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", BACKEND, str(dist)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return dist


@pytest.fixture(scope="session")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    source = ROOT / "src"
    files = {
        str(path.relative_to(source))
        for path in (source / "shardwise").rglob("*")
        if path.suffix in (".py", ".pyi", ".css", ".js")
    }
    info = f"shardwise-{PROJECT['version']}.dist-info"
    meta = {
        f"{info}/{name}"
        for name in (
            "METADATA",
            "WHEEL",
            "RECORD",
            "entry_points.txt",
            "top_level.txt",
            "licenses/LICENSE",
        )
    }
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == files | meta | {"shardwise/py.typed"}
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    assert set(metadata.get_all("Provides-Extra")) == EXTRAS
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_source_distribution_holds_no_tests_and_no_benchmarks(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "src/shardwise/py.typed",
        "src/shardwise/report/static/page.css",
        "src/shardwise/report/static/page.js",
        "CHANGELOG.md",
        "LICENSE",
        "pyproject.toml",
    } <= names
    assert {name.split("/")[0] for name in names if "/" in name} == {"src"}


def test_the_version_is_said_in_one_place_and_the_changelog_has_it():
    import shardwise

    assert re.fullmatch(r"\d+\.\d+\.\d+", PROJECT["version"])
    assert shardwise.__version__ == PROJECT["version"]
    sections = re.findall(
        r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$",
        (ROOT / "CHANGELOG.md").read_text(),
        re.MULTILINE,
    )
    assert sections[0] == ("Unreleased", "")
    assert PROJECT["version"] in [version for version, _ in sections]
    assert all(date for version, date in sections if version != "Unreleased")


def test_the_tests_pin_what_an_extra_pins():
    pins = (ROOT / "requirements-test.txt").read_text().splitlines()
    assert PROJECT["optional-dependencies"]["tpu-plan"][0] in pins


def find_python(version):
    """An interpreter of that version, also where pyenv's shim must be told which."""
    for name in (f"python{version}", f"/usr/bin/python{version}"):
        for more in ({}, {"PYENV_VERSION": version}):
            if shutil.which(name):
                words = [
                    name,
                    "-c",
                    "import sys, venv; print(sys.executable, '%d.%d' % sys.version_info[:2])",
                ]
                done = subprocess.run(
                    words, env={**os.environ, **more}, capture_output=True, text=True
                )
                if done.returncode == 0 and done.stdout.split()[1] == version:
                    return done.stdout.split()[0]
    return pytest.fail(
        f"this test needs Python {version}: put python{version} on the PATH"
    )


def recipe_of_the_readme():
    """The ten lines, three steps of them, as a recipe."""
    (block,) = re.findall(
        r"^```python\n(import numpy.*?)^result = fit\(run\)$",
        (ROOT / "README.md").read_text(),
        re.DOTALL | re.MULTILINE,
    )
    assert block.count("    steps=200,") == 1
    block = block.replace("    steps=200,", "    steps=3,")
    head = "from dataclasses import replace\nfrom pathlib import Path\n"
    return f"{head}{block}\n\ndef recipe(out: Path) -> Run:\n    return replace(run, out=out)\n"


IMPORT_ALL = """\
import importlib, pkgutil, sys
import shardwise
assert "jax" not in sys.modules
for name in shardwise.__all__:
    getattr(shardwise, name)
for module in pkgutil.walk_packages(shardwise.__path__, "shardwise."):
    importlib.import_module(module.name)
print(shardwise.__version__, shardwise.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_the_wheel_works_in_an_empty_environment(version, wheel, tmp_path):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV", "PYENV"))
    }
    env = {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }

    def run(*words):
        done = subprocess.run(
            [str(word) for word in words],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    run(find_python(version), "-m", "venv", tmp_path / "venv")
    bin = tmp_path / "venv" / "bin"
    run(bin / "python", "-m", "pip", "install", "--quiet", wheel)
    assert run(bin / "shardwise", "--version") == f"shardwise {PROJECT['version']}\n"
    assert "trains any Flax NNX model" in run(bin / "shardwise", "--help")
    said, place = run(bin / "python", "-c", IMPORT_ALL).split()
    assert said == PROJECT["version"]
    assert Path(place).is_relative_to(tmp_path)
    (tmp_path / "recipe.py").write_text(recipe_of_the_readme())
    run(
        bin / "shardwise", "train", "recipe.py", "--out", "runs/a", "--cpu-devices", "2"
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    run(bin / "shardwise", "report", "runs/a")
    assert "shardwise" in (tmp_path / "runs" / "a" / "report.html").read_text()
    run(bin / "python", "-m", "pip", "check")
