"""Bash, YAML and the published schema of Kubernetes read the job files."""

import math
import os
import re
import shlex
import subprocess
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.cluster.jobfiles import Job, kubernetes, slurm
from shardwise.errors import ConfigError

SMALL = Job(command=("train", "recipe.py", "--out", "runs/a"))
LARGE = Job(
    command=(
        "train",
        "recipes/gpt2.py",
        "--mesh",
        "replica=2,fsdp=8",
        "--out",
        "runs/a b",
    ),
    nodes=2,
    processes=16,
    gpus=8,
    cpus=12,
    memory="512G",
    hours=2.5,
    grace=300,
    restarts=7,
    name="gpt2",
    image="example/shardwise:1",
    volume="shared",
    port=9999,
)
WORDS = st.lists(
    st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30
    ),
    max_size=6,
)
NASTY = [
    "",
    "a b",
    "it's",
    '"',
    "\\",
    "$HOME",
    "$(id)",
    "$$(id)",
    "`id`",
    "a\nb",
    "#SBATCH",
    "*",
    "é",
    "😀",
    "\x07",
    "\x85",
    "\u2028",
    "\ufeff",
    "\x7f",
]


def options_of(script):
    """Return the options that `sbatch` reads at the top of the script."""
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?", script, re.M))


@pytest.mark.parametrize("job", [SMALL, LARGE])
def test_bash_can_parse_the_slurm_script(job):
    subprocess.run(
        ["bash", "-n"], input=slurm(job), text=True, check=True, capture_output=True
    )


def test_sbatch_options_match_the_job():
    assert options_of(slurm(LARGE)) == {
        "job-name": "gpt2",
        "nodes": "2",
        "ntasks": "16",
        "ntasks-per-node": "8",
        "gpus-per-node": "8",
        "cpus-per-task": "12",
        "mem": "512G",
        "time": "02:30:00",
        "signal": "TERM@300",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
    }
    assert not {"gpus-per-node", "cpus-per-task", "mem"} & set(options_of(slurm(SMALL)))


@pytest.fixture
def cluster(tmp_path):
    """Return a function that runs the script with an `srun` that exits with a given code.

    `cluster(code, restarts)` returns the finished script and the calls to `srun` and `scontrol`.
    """
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text(
            "#!/bin/bash\n"
            f'echo {name} "$@" >> {tmp_path}/called\n'
            f"[ {name} = scontrol ] || exit $CODE\n"
        )
        (tmp_path / name).chmod(0o755)

    def start(code, restarts=0, job=SMALL):
        (tmp_path / "called").unlink(missing_ok=True)
        environment = {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "HOME": str(tmp_path),
            "CODE": str(code),
            "SLURM_JOB_ID": "7",
        }
        # Slurm sets the variable from the first restart on.
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        ended = subprocess.run(
            ["bash"], input=slurm(job), text=True, capture_output=True, env=environment
        )
        assert ended.stderr == ""
        return ended, (tmp_path / "called").read_text().splitlines()

    return start


@pytest.mark.parametrize("code", [6, 75, 134, 137, 139, 143])
def test_a_stopped_or_lost_start_is_requeued(cluster, code):
    ended, called = cluster(code)
    assert called[1:] == ["scontrol requeue 7"]
    assert ended.returncode == code
    assert f"exit code {code}" in ended.stdout


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 7, 126, 127, 253])
def test_an_error_that_would_occur_again_ends_the_job_with_its_code(cluster, code):
    ended, called = cluster(code)
    assert len(called) == 1, "only srun"
    assert ended.returncode == code
    assert "would occur again" in ended.stdout


def test_a_finished_run_is_not_requeued(cluster):
    ended, called = cluster(0)
    assert len(called) == 1
    assert ended.returncode == 0


def test_restarts_are_limited(cluster):
    job = replace(SMALL, restarts=3)
    _, called = cluster(75, 2, job)
    assert called[0].endswith("shardwise train recipe.py --out runs/a")
    assert called[1] == "scontrol requeue 7"
    ended, called = cluster(75, 3, job)
    assert len(called) == 1
    assert ended.returncode == 75
    assert "after 3 restarts" in ended.stdout


def test_the_compilation_cache_is_private(cluster, tmp_path):
    cluster(0)
    assert (tmp_path / ".cache/shardwise/jax").stat().st_mode & 0o777 == 0o700


@settings(max_examples=50)
@given(WORDS)
@example(NASTY)
def test_arguments_survive_bash(words):
    script = slurm(replace(SMALL, command=(*SMALL.command, *words)))
    start = script.index("  shardwise train") + len("  shardwise ")
    end = script.index("\n# The highest exit code")
    ended = subprocess.run(
        ["bash"],
        input=f"printf '%s\\0' {script[start:end]}".encode(),
        capture_output=True,
        check=True,
    )
    assert ended.stdout.decode().split("\0")[:-1] == [*SMALL.command, *words]


def objects_of(text):
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


def container_of(text):
    return objects_of(text)["Job"]["spec"]["template"]["spec"]["containers"][0]


def expanded(word, variables):
    """Expand a word as Kubernetes does: $(NAME) if it is known, and $$ to $."""
    return re.sub(
        r"\$\$|\$\(([^)]*)\)",
        lambda found: "$" if found[0] == "$$" else variables.get(found[1], found[0]),
        word,
    )


@pytest.mark.parametrize(
    "version", ["1.31", "1.33", kubernetes_validate.latest_version()]
)
@pytest.mark.parametrize("job", [SMALL, LARGE])
def test_the_kubernetes_schema_accepts_every_object(job, version):
    found = list(yaml.safe_load_all(kubernetes(job)))
    assert [one["kind"] for one in found] == ["Service", "NetworkPolicy", "Job"]
    for one in found:
        kubernetes_validate.validate(one, version, strict=True)


def test_the_schema_rejects_a_misspelt_field():
    one = objects_of(kubernetes(SMALL))["Job"]
    one["spec"]["backoffLimitPerIndexes"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(one, "1.33", strict=True)


def test_pods_meet_at_process_0_and_share_a_node():
    container = container_of(kubernetes(LARGE))
    words = [
        expanded(word, {"JOB_COMPLETION_INDEX": "5"}) for word in container["args"]
    ]
    where = [
        "--coordinator",
        "gpt2-0.gpt2:9999",
        "--num-processes",
        "16",
        "--process-id",
        "5",
    ]
    assert words == [*LARGE.command, *where]
    assert container["resources"]["limits"] == {
        "nvidia.com/gpu": 1,
        "cpu": 12,
        "memory": "65536Mi",
    }
    assert container["image"] == "example/shardwise:1"
    job = objects_of(kubernetes(LARGE))["Job"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 16
    pod = job["spec"]["template"]["spec"]
    assert (
        pod["subdomain"] == objects_of(kubernetes(LARGE))["Service"]["metadata"]["name"]
    )
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"
    assert pod["terminationGracePeriodSeconds"] == 300


def test_a_single_process_gets_no_coordinator():
    assert container_of(kubernetes(SMALL))["args"] == [*SMALL.command]


def action_for(code):
    for rule in objects_of(kubernetes(SMALL))["Job"]["spec"]["podFailurePolicy"][
        "rules"
    ]:
        if code in rule.get("onExitCodes", {}).get("values", []):
            return rule["action"]
    # What Kubernetes does when no rule matches.
    return "Count"


def test_kubernetes_restarts_after_the_same_codes_as_slurm():
    assert {code: action_for(code) for code in (75, 6, 134, 137, 143)} == {
        75: "Ignore",
        6: "Count",
        134: "Count",
        137: "Count",
        143: "Count",
    }
    assert {action_for(code) for code in (1, 2, 3, 4, 5, 7, 127)} == {"FailJob"}


def test_only_pods_of_the_job_reach_each_other_without_privileges():
    found = objects_of(kubernetes(LARGE))
    policy = found["NetworkPolicy"]["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": policy["podSelector"]}]}]
    assert found["Service"]["spec"]["selector"] == policy["podSelector"]["matchLabels"]
    pod = found["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_missing_values_are_marked():
    text = kubernetes(SMALL)
    assert text.count('"REPLACE-ME"  # ') == 2
    assert "REPLACE" not in kubernetes(LARGE)


@given(WORDS)
@example(NASTY)
def test_arguments_survive_yaml_and_kubernetes(words):
    found = container_of(kubernetes(replace(SMALL, command=(*SMALL.command, *words))))[
        "args"
    ]
    variables = dict.fromkeys(("id", "HOME", "JOB_COMPLETION_INDEX"), "wrong")
    assert [expanded(word, variables) for word in found] == [*SMALL.command, *words]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"command": ("train", "recipe.py")}, "must find its run directory"),
        ({"command": ("plan", "recipe.py", "--out", "a")}, "not `shardwise plan"),
        ({"command": ("train", "recipe.py", "--out", "a\0")}, "cannot be written"),
        ({"command": ("train", "recipe.py", "--out", "\udcff")}, "cannot be written"),
        (
            {"processes": 3, "nodes": 2},
            "3 processes cannot be divided evenly among 2 nodes",
        ),
        ({"processes": 0}, "0 processes"),
        ({"memory": "64 GB"}, "'64 GB' is invalid: write it as 64G"),
        ({"name": "a b"}, "'a b'"),
        ({"cpus": -1}, "-1 CPUs"),
    ],
)
@pytest.mark.parametrize("write", [slurm, kubernetes])
def test_invalid_jobs_are_refused(write, change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        write(replace(SMALL, **change))


def test_each_cluster_has_its_own_limits():
    assert slurm(replace(SMALL, name="GPT_2.a"))
    with pytest.raises(ConfigError, match="at most 60 lowercase letters"):
        kubernetes(replace(SMALL, name="GPT_2.a", processes=16))
    with pytest.raises(
        ConfigError, match="3 GPUs per node cannot be divided among the 2 processes"
    ):
        kubernetes(replace(SMALL, gpus=3, processes=2))
    with pytest.raises(ConfigError, match="leaves no time to train"):
        slurm(replace(SMALL, hours=0.05))


def test_out_may_be_written_with_an_equals_sign():
    assert shlex.quote("--out=runs/a") in slurm(
        replace(SMALL, command=("train", "recipe.py", "--out=runs/a"))
    )


@pytest.mark.parametrize("hours", [0.1, 1, 2.01, 24, 200])
def test_the_time_limit_is_rounded_up(hours):
    parts = options_of(slurm(replace(SMALL, hours=hours)))["time"].split(":")
    assert int(parts[0]) * 60 + int(parts[1]) == math.ceil(hours * 60)
