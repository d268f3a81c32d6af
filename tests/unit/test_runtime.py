"""Output that cannot be written, and how native code allocates memory on CPUs."""

import os
import subprocess
import sys
from textwrap import dedent

import pytest

from shardwise import runtime

WRITING = """
    import os, sys, threading
    from shardwise.runtime import filter_native_output, protect_output
    protect_output()
    with open(sys.argv[1], "w") as file:
        assert file.fileno() > 2
        if sys.argv[2] == "filtered":
            filter_native_output()
        for _ in range(3):
            print("\u2502" * 100_000)
            print("text", file=sys.stderr)
            os.write(1, b"native\\n" * 10_000)
            os.write(2, b"native\\n" * 10_000)
        names = [thread.name for thread in threading.enumerate()]
        file.write(" ".join(names))
"""


@pytest.mark.parametrize("native", ["filtered", "unfiltered"])
@pytest.mark.parametrize(
    "redirection",
    [
        "2>&1 | true",
        "2>&1 >/dev/null | true",
        ">/dev/full 2>&1",
        ">&- 2>&-",
        "<&- >&- 2>&-",
        "<&- 2>/dev/full",
    ],
)
def test_output_that_cannot_be_written_is_dropped(tmp_path, redirection, native):
    code = dedent(WRITING)
    if native == "unfiltered":
        # Without the filter nobody catches the errors of native code.
        code = "\n".join(line for line in code.splitlines() if "os.write" not in line)
    file = tmp_path / "file"
    command = f'set -o pipefail; "$@" {redirection}'
    words = [sys.executable, "-c", code, str(file), native]
    ended = subprocess.run(
        ["bash", "-c", command, "bash", *words],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        timeout=60,
    )
    assert ended.returncode == 0
    # The threads of the filter still run.
    found = file.read_text().split()
    assert ("shardwise-stdout" in found) == (native == "filtered")
    assert ("shardwise-stderr" in found) == (native == "filtered")


def test_output_that_can_be_written_arrives():
    code = """
        import sys
        from shardwise.runtime import is_lost, protect_output
        protect_output()
        print("out \u2502")
        print("err", file=sys.stderr)
        assert not is_lost(sys.stdout)
    """
    ended = subprocess.run(
        [sys.executable, "-c", dedent(code)], capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == ("out \u2502\n", "err\n")


KEPT = """
    import resource
    from shardwise.runtime import keep_freed_memory
    keep_freed_memory()
    import jax, jax.numpy as jnp

    @jax.jit
    def step(x):  # allocates 32 MiB
        parts = jax.lax.optimization_barrier([x * (i + 1) for i in range(2)])
        return x + 1e-9 * (parts[0] @ parts[1])

    x = jnp.ones((2048, 2048))
    faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
    for _ in range(40):  # the heap grows until everything fits
        x = step(x).block_until_ready()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    print(faults[-1] - faults[-11])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_step_allocates_no_new_pages():
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    result = subprocess.run(
        [sys.executable, "-c", dedent(KEPT)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    # Page faults in 10 steps: about 40,000 without the settings. Occasionally the heap grows by
    # 4,096 pages.
    assert int(result.stdout) < 20_000


FILLED = """
    import ctypes, random
    from shardwise.runtime import PIECE, Gaps
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)
    gaps = Gaps(libc)
    pieces = [gaps.malloc(random.randint(PIECE, 4 * PIECE)) for _ in range(2000)]
    for at in pieces[::2]:
        gaps.free(at)
    for _ in range(2):
        gaps.fill()
        held = len(gaps.held)
        inside = sum(pieces[0] <= at <= pieces[-1] for at in gaps.held)
        fresh = [gaps.malloc(PIECE) for _ in range(10)]
        assert all(not pieces[0] < at < pieces[-1] for at in fresh)
        for at in fresh:
            gaps.free(at)
        print(held, inside)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_gaps_are_filled_repeatedly():
    result = subprocess.run(
        [sys.executable, "-c", dedent(FILLED)],
        capture_output=True,
        text=True,
        check=True,
    )
    first, again = (list(map(int, line.split())) for line in result.stdout.splitlines())
    assert first[1] >= 1000
    assert abs(again[0] - first[0]) < 100


BOUNDED = """
    import ctypes
    from shardwise import runtime
    libc = ctypes.CDLL(None)
    libc.mallopt(-4, 0)
    gaps = runtime.Gaps(libc)
    # 128 MiB of gaps, each just large enough for one block.
    blocks = [gaps.malloc(runtime.PIECE) for _ in range(16384)]
    for address in blocks[::2]:
        gaps.free(address)
    gaps.fill()
    print(len(gaps.held) * runtime.PIECE)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_gaps_hold_at_most_64_mib():
    result = subprocess.run(
        [sys.executable, "-c", dedent(BOUNDED)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert 60 << 20 < int(result.stdout) <= 64 << 20


def devices_without_a_tpu(vendors):
    """Print the devices in a process like that of a command, and return all that it prints."""
    code = f"""
    from shardwise.runtime import quiet_without_tpu
    quiet_without_tpu({str(vendors)!r})
    import jax
    print(jax.devices())
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TPU_", "XLA_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout, done.stderr


def test_libtpu_is_silent_on_a_machine_without_a_tpu(tmp_path):
    card = tmp_path / "0000:00:01.0"
    card.mkdir()
    (card / "vendor").write_text("0x8086\n")
    printed, noise = devices_without_a_tpu(tmp_path / "*" / "vendor")
    assert "CpuDevice" in printed
    assert noise == ""
    # Where there may be a TPU, libtpu looks for it, and says what it finds.
    (card / "vendor").write_text("0x1ae0\n")
    assert "TPU" in devices_without_a_tpu(tmp_path / "*" / "vendor")[1]


def test_the_compiler_for_gpus_is_quiet_only_without_a_gpu(tmp_path, monkeypatch):
    # A folder of packages, as `pip install 'shardwise[gpu-plan]'` makes one.
    (tmp_path / "jax_plugins" / "xla_cuda12").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_plugins", raising=False)
    for variable in runtime.QUIET_GPU:
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    driver = tmp_path / "nvidiactl"
    driver.touch()
    runtime.quiet_without_gpu([str(driver)])
    assert not runtime.QUIET_GPU.keys() & os.environ.keys()
    runtime.quiet_without_gpu([str(tmp_path / "none")])
    assert {name: os.environ[name] for name in runtime.QUIET_GPU} == runtime.QUIET_GPU


def test_without_the_compiler_for_gpus_nothing_is_set(tmp_path, monkeypatch):
    monkeypatch.setattr(runtime, "GPU_PLUGINS", ("jax_plugins.not_installed",))
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL")
    runtime.quiet_without_gpu([str(tmp_path / "none")])
    assert "TF_CPP_MIN_LOG_LEVEL" not in os.environ
