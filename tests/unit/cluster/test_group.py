"""How a process finds out that it is one of several."""

import os

import pytest

from shardwise.cluster.group import ProcessGroup, start_group
from shardwise.errors import ConfigError

CLUSTERS = ("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "TPU_WORKER")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in list(os.environ):
        if name.startswith(CLUSTERS):
            monkeypatch.delenv(name)


def test_without_a_cluster_a_process_is_alone():
    assert start_group() == ProcessGroup()
    assert ProcessGroup().is_first
    assert ProcessGroup().union("x", 1) == [1]
    assert ProcessGroup().share("x", 2) == 2


def test_a_single_slurm_task_is_alone(monkeypatch):
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "node1",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert start_group() == ProcessGroup()


def test_a_pod_outside_an_indexed_job_is_alone_and_does_not_query_kubernetes(
    monkeypatch,
):
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert start_group() == ProcessGroup()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"coordinator": "127.0.0.1:1234"},
            "--num-processes, --process-id must be set too",
        ),
        ({"coordinator": "here", "num_processes": 2, "process_id": 0}, "host:port"),
        (
            {"coordinator": "127.0.0.1:1234", "num_processes": 2, "process_id": 2},
            "indices run from 0 to 1",
        ),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ConfigError, match=message):
        start_group(**arguments)


def test_one_process_of_one_is_alone():
    assert start_group("127.0.0.1:1234", 1, 0) == ProcessGroup()
