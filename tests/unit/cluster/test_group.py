"""How a process finds out that it is one of several."""

import pytest

from shardwise.cluster.group import ProcessGroup, start_group
from shardwise.errors import ConfigError

CLUSTERS = ("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "TPU_WORKER")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    import os

    for name in [name for name in os.environ if name.startswith(CLUSTERS)]:
        monkeypatch.delenv(name)


def test_without_a_cluster_a_process_is_alone():
    assert start_group() == ProcessGroup()
    assert ProcessGroup().is_first
    assert ProcessGroup().union("x", 1) == [1]
    assert ProcessGroup().share("x", 2) == 2


def test_a_single_task_of_slurm_is_alone(monkeypatch):
    for name, value in {
        "JOB_ID": "7",
        "STEP_NODELIST": "node1",
        "NTASKS": "1",
        "PROCID": "0",
        "LOCALID": "0",
    }.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert start_group() == ProcessGroup()


def test_a_pod_that_is_no_indexed_job_is_alone(monkeypatch):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert start_group() == ProcessGroup()  # without a word to Kubernetes


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"coordinator": "127.0.0.1:1234"}, "--num-processes, --process-id must be given, too"),
        ({"coordinator": "here", "num_processes": 2, "process_id": 0}, "host:port"),
        (
            {"coordinator": "127.0.0.1:1234", "num_processes": 2, "process_id": 2},
            "count from 0 to 1",
        ),
    ],
)
def test_what_is_said_wrongly_is_refused_at_once(given, words):
    with pytest.raises(ConfigError, match=words):
        start_group(**given)


def test_one_of_one_is_alone():
    assert start_group("127.0.0.1:1234", 1, 0) == ProcessGroup()
