"""The doctor finds problems, says what to do, and survives broken installations."""

import json
import os
import time
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.doctor import packages, system
from shardwise.doctor.check import check_private, run_check
from shardwise.doctor.devices import DeviceProbe, probe_results, run_probe
from shardwise.doctor.environment import check_environment
from shardwise.doctor.gpus import check_gpus
from shardwise.doctor.machine import check_machine
from shardwise.files.lock import lock_directory
from tests.helpers.command import run

RECIPE = """
from pathlib import Path
import numpy as np, optax
from flax import nnx
from shardwise import Batches, Run

def recipe(steps: int = 4, out: Path | None = None) -> Run:
    return Run(
        model=lambda rngs: nnx.Linear(4, 2, rngs=rngs),
        loss=lambda model, batch: (model(batch["x"]) ** 2).mean(),
        optimizer=optax.sgd(0.1),
        data=Batches({"x": np.ones((64, 4), "f4")}, 8),
        steps=steps,
        out=out,
        save_every=2,
    )
"""


def by_name(results):
    return {result.name: result for result in results}


def check_devices(timeout=60.0, cpu_devices=None):
    probe = run_probe(timeout, lambda text: None, cpu_devices)
    return by_name(probe_results(probe, timeout))


def check_packages():
    return [result for check in packages.CHECKS for result in check()]


def check_disks():
    return by_name(result for check in system.DISK_CHECKS for result in check())


def test_the_command_on_this_machine(tmp_path):
    before = set(tmp_path.iterdir())
    done = run("doctor", "--cpu-devices", 2, "--json", "found.json", cwd=tmp_path)
    answer = json.loads((tmp_path / "found.json").read_text())
    found = {finding["name"]: finding for finding in answer["findings"]}
    assert done.returncode == (2 if answer["problem"] else 0)
    assert set(tmp_path.iterdir()) - before == {tmp_path / "found.json"}
    for name in (
        "Python",
        "jax",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "extras",
        "training step",
        "memory",
        "loopback",
        "disk",
    ):
        assert found[name]["state"] == "ok", found[name]
    assert found["found by JAX"]["text"] == "2 cpu (cpu)"
    assert "on 2 devices: first" in found["training step"]["text"]
    assert "training step" in done.stdout
    assert all(
        finding["remedy"] for finding in answer["findings"] if finding["state"] != "ok"
    )


def test_an_unknown_xla_flag(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_nonsense=3")
    # XLA ends the whole process.
    found = check_devices()["device check"]
    assert found.state == "problem"
    assert "Unknown flag in XLA_FLAGS: --xla_nonsense=3" in found.text
    assert "unset XLA_FLAGS" in found.remedy


def test_a_platform_without_a_plugin(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    found = check_devices()["device check"]
    assert found.state == "problem"
    assert "unset JAX_PLATFORMS" in found.remedy


@pytest.mark.parametrize(
    ("code", "timeout", "text", "remedy"),
    [
        (
            "raise ImportError('libfoo.so: cannot open')",
            30,
            "importing jax: ImportError: libfoo.so: cannot open",
            "Reinstall",
        ),
        (
            "import time; time.sleep(1000)",
            1.0,
            "importing jax: no answer for 1 s; the process was killed",
            "--timeout 600",
        ),
        ("import os; os.abort()", 30, "importing jax: ended by SIGABRT", "Reinstall"),
        (
            "import sys\n"
            "print('CUDA driver version is insufficient', file=sys.stderr)\n"
            "sys.exit(3)",
            30,
            "insufficient",
            "nvidia-smi",
        ),
    ],
)
def test_a_broken_jax_is_reported(tmp_path, monkeypatch, code, timeout, text, remedy):
    (tmp_path / "jax.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    began = time.monotonic()
    found = check_devices(timeout)
    assert time.monotonic() - began < 10
    assert list(found) == ["device check"]
    assert found["device check"].state == "problem"
    assert text in found["device check"].text
    assert remedy in found["device check"].remedy


def test_wrong_results_are_a_problem():
    kinds = [{"kind": "odd", "is_right": False, "seconds": 1.0}]
    step = {"count": 2, "losses": [1.0, 2.0], "first": 1.0, "second": 1.0}
    probe = DeviceProbe(found={"compute": {"kinds": kinds}, "step": step})
    found = by_name(probe_results(probe, 1.0))
    assert found["arithmetic"].state == found["training step"].state == "problem"


@pytest.mark.parametrize(
    ("variables", "name", "state", "words"),
    [
        (
            {"JAX_ENABEL_X64": "1"},
            "JAX_ENABEL_X64",
            "warning",
            "Did you mean 'JAX_ENABLE_X64'",
        ),
        ({"JAX_ENABLE_X64": "true"}, "JAX_ENABLE_X64", "warning", "float64"),
        ({"JAX_DISABLE_JIT": "1"}, "JAX_DISABLE_JIT", "warning", "many times as long"),
        ({"JAX_PLATFORMS": "cudda"}, "JAX_PLATFORMS", "warning", "Did you mean 'cuda'"),
        (
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"},
            "XLA_FLAGS",
            "warning",
            "wait forever",
        ),
        ({"XLA_FLAGS": "xla_gpu_x=1"}, "XLA_FLAGS", "problem", "not a flag"),
        (
            {"XLA_PYTHON_CLIENT_MEM_FRACTION": "90"},
            "XLA_PYTHON_CLIENT_MEM_FRACTION",
            "problem",
            "up to 1",
        ),
        (
            {"SHARDWISE_FAILPOINT": "x:1:kill"},
            "SHARDWISE_FAILPOINT",
            "warning",
            "for tests",
        ),
        (
            {"SHARDWISE_JOBB": "1"},
            "SHARDWISE_JOBB",
            "warning",
            "Did you mean 'SHARDWISE_JOB'",
        ),
    ],
)
def test_variables(variables, name, state, words):
    settings = {"jax_enable_x64": False, "jax_platforms": None}
    found = by_name(check_environment(settings, variables))[name]
    assert (found.state, bool(found.remedy)) == (state, True)
    assert words in found.text


def test_harmless_variables_are_not_reported():
    fine = {
        "JAX_ENABLE_X64": "0",
        "JAX_DISABLE_JIT": "False",
        "HOME": "/x",
        "SHARDWISE_JOB": "3",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".9",
    }
    assert list(by_name(check_environment({"jax_enable_x64": False}, fine))) == [
        "variables"
    ]


def test_a_compilation_cache_that_others_can_write_to_is_reported(tmp_path):
    """Regression: the variable was reported as harmless, and the folder was not looked at."""
    name = "JAX_COMPILATION_CACHE_DIR"
    tmp_path.chmod(0o777)
    found = by_name(check_environment({}, {name: str(tmp_path)}))[name]
    assert (found.state, found.remedy[:9]) == ("warning", "chmod 700")
    tmp_path.chmod(0o700)
    assert by_name(check_environment({}, {name: str(tmp_path)}))[name].state == "ok"
    remote = by_name(check_environment({}, {name: "gs://bucket/cache"}))[name]
    assert (remote.state, "gs://bucket/cache" in remote.text) == ("ok", True)


def test_a_check_that_fails_does_not_hide_the_others():
    def check():
        yield from check_private("x", Path("/nowhere"))
        raise ValueError("broken")

    results = run_check("disk", check)
    assert [(result.group, result.state) for result in results] == [
        ("disk", "ok"),
        ("disk", "warning"),
    ]
    assert "ValueError: broken" in results[1].text


def test_incompatible_versions(monkeypatch):
    real = packages.version_of
    monkeypatch.setattr(
        packages,
        "version_of",
        lambda name: {"jaxlib": "0.4.1", "flax": "0.8.0", "grain": None}.get(
            name, real(name)
        ),
    )
    found = by_name(check_packages())
    assert {found[name].state for name in ("jax", "flax", "grain")} == {"problem"}
    assert found["rich"].state == "ok"
    assert "is not compatible with jaxlib 0.4.1" in found["jax"].text
    assert "0.8.0; shardwise needs >=0.12" in found["flax"].text
    assert "not installed" in found["grain"].text


@pytest.mark.parametrize(
    ("plugins", "state", "words"),
    [
        (
            {"jax-cuda12-plugin": "0.9.0"},
            "warning",
            "ignores such a plugin with a warning, or crashes",
        ),
        (
            {"jax-cuda12-plugin": "X", "jax-cuda13-plugin": "X"},
            "warning",
            "are both installed",
        ),
        ({"jax-metal": "0.1.1"}, "problem", "older releases"),
    ],
)
def test_plugins(monkeypatch, plugins, state, words):
    jaxlib = packages.version_of("jaxlib")
    monkeypatch.setattr(
        packages,
        "installed_plugins",
        lambda: {name: v.replace("X", jaxlib) for name, v in plugins.items()},
    )
    assert any(
        result.state == state and words in result.text for result in check_packages()
    )


NVIDIA_SMI = """#!/bin/sh
case "$1" in
  --query-gpu*) echo "0, NVIDIA H200, 470.57, 143771, 120000, 97" ;;
  *) echo "{pid}, /usr/bin/python3, 119000" ;;
esac
"""


def test_gpus_and_their_driver(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(
        packages, "installed_plugins", lambda: {"jax-cuda12-plugin": "1"}
    )
    tool.write_text(NVIDIA_SMI.format(pid=os.getpid()))
    tool.chmod(0o755)
    found = by_name(check_gpus())
    assert (found["NVIDIA driver"].state, found["GPU 0"].state) == (
        "problem",
        "warning",
    )
    assert "470.57 is too old for cuda12" in found["NVIDIA driver"].text
    assert (
        found[f"process {os.getpid()}"].text
        == "python3 (this user's) holds 119000 MiB of a GPU"
    )
    tool.write_text("#!/bin/sh\nexec sleep 100\n")
    assert "the driver hangs" in by_name(check_gpus(0.3))["NVIDIA driver"].text
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML'; exit 9\n")
    assert "Failed to initialize NVML" in by_name(check_gpus())["NVIDIA driver"].text


def test_limits_of_a_container(tmp_path, monkeypatch):
    for name, text in {
        "memory.max": "300000000",
        "memory.current": "200000000",
        "cpu.max": "50000 100000",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(
        system, "_cgroup_files", lambda new, old, kind: iter([tmp_path / new])
    )
    found = by_name([*system.check_memory(), *system.check_processors()])
    assert (found["memory"].state, found["processors"].state) == ("problem", "warning")
    assert "95.4 MiB of 286.1 MiB free in this container" in found["memory"].text
    assert "may use 0.5" in found["processors"].text


def test_the_program_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "does not exist yet" in check_disks()["program cache"].text
    assert not list(tmp_path.iterdir())
    folder = tmp_path / "shardwise" / "programs"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "a").write_bytes(b"0" * 2048)
    assert check_disks()["program cache"].text.startswith(
        "1 files, 2.0 KiB of at most 8.0 GiB"
    )
    folder.chmod(0o777)
    found = check_disks()["program cache"]
    assert (found.state, found.remedy[:9]) == ("warning", "chmod 700")
    assert [result.state for result in check_private("x", folder)] == ["warning"]


def test_without_devices_no_process_is_started():
    results = check_machine(None, lambda text: None)
    assert {result.group for result in results} == {
        "packages",
        "environment",
        "system",
        "disk",
    }


def test_a_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(RECIPE)
    assert main(["train", "tiny.py", "--out", "a"]) == 0

    def check(code):
        capsys.readouterr()
        assert main(["doctor", "a", "--json", "found.json"]) == code
        return [
            (f["name"], f["state"], f["text"], f["remedy"])
            for f in json.loads(Path("found.json").read_text())["findings"]
        ]

    def has(name, state, words, code=0):
        return any(row[:2] == (name, state) and words in row[2] for row in check(code))

    files = {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    assert has("next", "ok", "finished: shardwise report a")
    assert has("checkpoints", "ok", "step 4 is the newest of 2, and undamaged")
    assert has("lock", "ok", "free")
    # Nothing was written.
    assert files == {path: path.stat().st_mtime_ns for path in Path("a").rglob("*")}
    with lock_directory(Path("a")):
        assert has("lock", "ok", f"in use by process {os.getpid()}")
    Path("a/lock").write_text(
        json.dumps({"pid": 1, "host": "far", "boot_id": "other", "started": 1.0})
    )
    assert has("lock", "warning", "process 1 on far did not release it")
    Path("a/stacks").mkdir()
    Path("a/stacks/process-0.txt").write_text("Mon: saving step 3\nThread ...")
    assert has("stacks", "warning", "process-0.txt: Mon: saving step 3")
    Path("a/checkpoints/4/meta.json").write_text("{}")
    assert has(
        "checkpoints",
        "warning",
        "step 4: a/checkpoints/4/meta.json is damaged: its digest",
    )
    assert has("checkpoints", "ok", "step 2 is undamaged; the run would resume from it")
    assert has("next", "ok", "the same command resumes at step 2")
    Path("a/checkpoints/2/MANIFEST").unlink()
    assert has("checkpoints", "problem", "step 2: ", code=2)


def test_a_directory_without_a_run(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nowhere")]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not a run directory" in capsys.readouterr().err
