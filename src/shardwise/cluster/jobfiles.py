"""Job files for clusters: a script for Slurm, objects for Kubernetes.

The functions return text for people to read, change and keep. Nothing is submitted from here.
"""

import math
import re
import shlex
from dataclasses import dataclass

from shardwise.errors import ConfigError, ExitCode

# 128 + the signal that ended a process: it was lost and could not say so.
KILLED = (134, 135, 137, 139, 143)
# An error in the program, its arguments, data, checkpoint or numerics would occur again. 126 and
# 127 are the shell's codes for a command that cannot be run.
FINAL = (
    ExitCode.FAILURE,
    ExitCode.CONFIG,
    ExitCode.DATA,
    ExitCode.CHECKPOINT,
    ExitCode.NUMERICS,
    ExitCode.IN_USE,
    126,
    127,
)
# Seconds that Slurm gives the other tasks when one has ended. They mostly end by themselves within
# 15 s, and within 300 s if one of them has never joined.
WAIT = 360


@dataclass(frozen=True, kw_only=True)
class Job:
    """The resources that a cluster is asked for, and the command to run.

    Attributes:
        command: the words after `shardwise`, such as ("train", "gpt2.py", "--out", "runs/a").
        nodes: number of machines.
        processes: number of processes in total, a multiple of `nodes`; usually one per GPU or one
            per node.
        gpus: GPUs per node.
        cpus: CPU cores per process; 0 leaves the choice to the cluster.
        memory: memory per node, such as "64G"; "" leaves the choice to the cluster.
        hours: Slurm only: time limit of one start. A longer run is stopped, saved and resumed.
        grace: seconds between the signal and the end, for the last checkpoint.
        restarts: how often the job is restarted at most.
        name: name of the job.
        image: Kubernetes only: the container image.
        volume: Kubernetes only: the PersistentVolumeClaim with the recipe, the data and the run
            directory.
        port: Kubernetes only: the port on which process 0 waits for the others.
    """

    command: tuple[str, ...]
    nodes: int = 1
    processes: int = 1
    gpus: int = 0
    cpus: int = 0
    memory: str = ""
    hours: float = 24.0
    grace: int = 120
    restarts: int = 30
    name: str = "shardwise"
    image: str = ""
    volume: str = ""
    port: int = 8476


def slurm(job: Job) -> str:
    """Return a script for `sbatch`.

    Raises:
        ConfigError: if the job is invalid.
    """
    _check(job)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job.name):
        raise ConfigError(
            f"the job name '{job.name}' is invalid: use letters, digits, '.', '_' and '-'."
        )
    if job.hours * 3600 < job.grace + 120:
        raise ConfigError(
            f"a time limit of {job.hours:g} hours leaves no time to train: {job.grace} s of it are "
            "reserved for the last checkpoint."
        )
    # srun does not inherit this option from sbatch since Slurm 22.05.
    cpus = " --cpus-per-task=$SLURM_CPUS_PER_TASK" if job.cpus else ""
    return f"""\
#!/bin/bash
# A job for Slurm, written by shardwise: {_describe(job)}.
#
#   sbatch FILE                  submits it; relative paths start at the directory you submit from
#   scancel --signal=TERM JOB    saves, ends and restarts it: to move it, or after changing the code
#   scancel JOB                  ends it without saving; submitted again, it resumes from the last
#                                checkpoint
#
# The job is restarted up to {job.restarts} times if a signal stopped it or a process was lost, but
# never after an error that would occur again. Every start resumes from the last verified
# checkpoint in the directory of --out.
#
{_slurm_options(job)}

# Put here what makes the command `shardwise` available on the nodes, for example:
#   module load cuda
#   source .venv/bin/activate

# A later start reads what an earlier one compiled. All nodes must see this directory, and nobody
# else may write to it, because programs are loaded from it.
export JAX_COMPILATION_CACHE_DIR="${{JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/shardwise/jax}}"
{{ mkdir -p "$JAX_COMPILATION_CACHE_DIR" && chmod 700 "$JAX_COMPILATION_CACHE_DIR"; }} ||
  exit {ExitCode.CHECKPOINT}

# Slurm restarts a job only after its last start has ended. A lock that this job left in the run
# directory, on a lost node, may therefore be taken over.
export SHARDWISE_JOB="slurm-$SLURM_JOB_ID"
restarts=${{SLURM_RESTART_COUNT:-0}}

# The processes find each other through Slurm's variables. When one has ended, the others end by
# themselves and say why. Slurm must not kill them at once: --kill-on-bad-exit=1 would turn every
# exit code into 143 or 75. It may kill them if they have not ended after {WAIT} s. The tasks must
# be shardwise itself, without a wrapper script: most clusters signal only the process that Slurm
# started.
srun --kill-on-bad-exit=0 --wait={WAIT}{cpus} \\
  shardwise {shlex.join(job.command)}
# The highest exit code of all tasks.
code=$?

case $code in
  0) echo "shardwise job: done"; exit 0 ;;
  {ExitCode.STOPPED}) why="stopped by a signal and saved" ;;
  {ExitCode.LOST}) why="a process was lost or hung" ;;
  129 | 1[3-5][0-9]) why="a process was ended by signal $((code - 128))" ;;
  *) echo "shardwise job: exit code $code would occur again, so the job ends"; exit "$code" ;;
esac
if [ "$restarts" -ge {job.restarts} ]; then
  echo "shardwise job: $why (exit code $code); ending after $restarts restarts. Submit it again" \\
    "to resume."
  exit "$code"
fi
echo "shardwise job: $why (exit code $code); resuming with start $((restarts + 2))"
scontrol requeue "$SLURM_JOB_ID" || echo "shardwise job: Slurm did not requeue it; submit it again"
exit "$code"
"""


def _slurm_options(job: Job) -> str:
    """Return the #SBATCH lines, with aligned comments."""
    minutes = math.ceil(job.hours * 60)
    time_limit = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    options: list[tuple[str, str]] = [
        (f"job-name={job.name}", ""),
        (f"nodes={job.nodes}", ""),
        (f"ntasks={job.processes}", "the processes of the run, one per task"),
        (f"ntasks-per-node={job.processes // job.nodes}", ""),
    ]
    if job.gpus:
        options.append((f"gpus-per-node={job.gpus}", ""))
    if job.cpus:
        options.append((f"cpus-per-task={job.cpus}", ""))
    if job.memory:
        options.append((f"mem={job.memory}", "per node"))
    options += [
        (f"time={time_limit}", "of one start; a longer run resumes in the next one"),
        (
            f"signal=TERM@{job.grace}",
            "seconds before the limit, to the tasks: B:TERM would mean this script",
        ),
        ("requeue", "Slurm restarts the job when a node is lost"),
        ("open-mode=append", "one log for all starts"),
        ("output=%x-%j.log", "name and number of the job, in the directory of sbatch"),
    ]
    lines = [(f"#SBATCH --{option}", comment) for option, comment in options]
    width = max(len(line) for line, comment in lines if comment)
    return "\n".join(
        f"{line:{width}}  # {comment}" if comment else line for line, comment in lines
    )


def kubernetes(job: Job) -> str:
    """Return objects for `kubectl apply`.

    These are an Indexed Job, a Service that gives its pods the names by which they find each
    other, and a NetworkPolicy that says who may reach them.

    Raises:
        ConfigError: if the job is invalid.
    """
    _check(job)
    # The name of a pod is a DNS label.
    longest = 63 - len(f"-{job.processes - 1}")
    if (
        not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name)
        or len(job.name) > longest
    ):
        raise ConfigError(
            f"the job name '{job.name}' is invalid: Kubernetes allows at most {longest} lowercase "
            "letters, digits and '-', starting with a letter."
        )
    per_node = job.processes // job.nodes
    if job.gpus % per_node:
        raise ConfigError(
            f"{job.gpus} GPUs per node cannot be divided among the {per_node} processes on it, "
            "which are separate pods."
        )
    image = _quoted(job.image, "an image that has the command shardwise")
    volume = _quoted(job.volume, "a PersistentVolumeClaim")
    return f"""\
# A job for Kubernetes 1.31 or newer, written by shardwise: {_describe(job)}.
# Each process is a pod.
#
#   kubectl apply -f FILE           submits it
#   kubectl logs -f job/{job.name:<12}shows its progress
#   kubectl delete job {job.name:<13}saves and ends it; applied again, it resumes

# Gives the pods the names {job.name}-0.{job.name} and so on. They meet at process 0.
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # pods look for each other before they are ready
  selector:
    batch.kubernetes.io/job-name: {job.name}
---
# Only the pods of this job may reach each other, because the ports that JAX opens between them have
# no authentication. All ports are allowed, because collectives use arbitrary ones. A network plugin
# without support for policies ignores this silently: ask whoever runs the cluster.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {job.name}
spec:
  podSelector:
    matchLabels:
      batch.kubernetes.io/job-name: {job.name}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels:
              batch.kubernetes.io/job-name: {job.name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job.name}
spec:
  completionMode: Indexed
  completions: {job.processes}
  parallelism: {job.processes}
  # The run has succeeded when process 0, which writes and decides, says so.
  successPolicy:
    rules:
      - succeededIndexes: "0"
  # When one pod is lost, the others notice within seconds and exit with {ExitCode.LOST}. All are
  # restarted and resume together from the last verified checkpoint, up to {job.restarts} times.
  backoffLimitPerIndex: {job.restarts}
  maxFailedIndexes: 0
  podFailurePolicy:
    rules:  # the first one that matches applies
      # Evicted, preempted or drained: not counted.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      # Stopped by a signal and saved. All pods stop when one is asked to; not counted.
      - action: Ignore
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [{ExitCode.STOPPED}]
      # An error in the program, its arguments, data, checkpoint or numerics would occur again: the
      # job ends.
      - action: FailJob
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [{", ".join(map(str, FINAL))}]
      # A process was lost or hung ({ExitCode.LOST}), or killed by a signal, for example for lack of
      # memory (137): restarted, and counted.
      - action: Count
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [{", ".join(map(str, (ExitCode.LOST, *KILLED)))}]
  template:
    spec:
      subdomain: {job.name}
      restartPolicy: Never  # the job starts new pods, by the rules above
      terminationGracePeriodSeconds: {job.grace}  # for the last checkpoint, after the signal
      automountServiceAccountToken: false  # it does not use the Kubernetes API
      enableServiceLinks: false
      securityContext:
        runAsNonRoot: true
        runAsUser: 1000
        runAsGroup: 1000
        fsGroup: 1000
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: shardwise
          image: {image}
          command: ["shardwise"]
          # Kubernetes replaces $(JOB_COMPLETION_INDEX) with the index of the pod.
          args:
{_kubernetes_args(job)}
          # Relative paths start here: the recipe, the data and --out are on the volume.
          workingDir: /workspace
          env:
            - name: HOME
              value: /tmp
            # A lock that this job left in the run directory, on a lost node, may be taken over: a
            # pod starts only after the last one has ended.
            - name: SHARDWISE_JOB
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
            # A later start reads what an earlier one compiled. Programs are loaded from here, so
            # nobody else may write to the volume.
            - name: JAX_COMPILATION_CACHE_DIR
              value: /workspace/.cache/jax
          resources:
            limits:{_kubernetes_limits(job)}
          securityContext:
            allowPrivilegeEscalation: false
            capabilities:
              drop: [ALL]
          volumeMounts:
            - name: workspace
              mountPath: /workspace
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: workspace
          persistentVolumeClaim:
            claimName: {volume}
            # Pods on several nodes need a claim with the access mode ReadWriteMany.
        - name: shm  # NCCL communicates through it and needs more than the default 64 MiB
          emptyDir:
            medium: Memory
"""


def _kubernetes_args(job: Job) -> str:
    """Return the lines of the container's `args`."""
    words = [*job.command]
    if job.processes > 1:
        words += ["--coordinator", f"{job.name}-0.{job.name}:{job.port}"]
        words += ["--num-processes", str(job.processes), "--process-id"]
    # Kubernetes would replace $(NAME); $$ means a plain $.
    quoted = [_yaml(word.replace("$", "$$")) for word in words]
    if job.processes > 1:
        quoted.append('"$(JOB_COMPLETION_INDEX)"')
    return "\n".join(f"            - {word}" for word in quoted)


def _kubernetes_limits(job: Job) -> str:
    """Return the resource limits of one pod."""
    per_node = job.processes // job.nodes
    limits = []
    if job.gpus:
        limits.append(f"nvidia.com/gpu: {job.gpus // per_node}")
    if job.cpus:
        limits.append(f"cpu: {job.cpus}")
    if job.memory:
        limits.append(f"memory: {_mebibytes(job.memory) // per_node}Mi")
    if not limits:
        return " {}  # for example cpu: 8, memory: 32Gi"
    return "".join(f"\n              {limit}" for limit in limits)


def _check(job: Job) -> None:
    """Raise `ConfigError` for a job that no cluster could run."""
    if "train" not in job.command:
        raise ConfigError(
            f"a job file runs `shardwise train`, not `shardwise {shlex.join(job.command)}`."
        )
    if not any(word.partition("=")[0] == "--out" for word in job.command):
        raise ConfigError(
            "a restarted job must find its run directory: add --out, for example --out runs/a."
        )
    for word in job.command:
        if re.search("[\0\ud800-\udfff]", word):
            raise ConfigError(
                f"the argument {word!r} cannot be written to a text file."
            )
    if job.nodes < 1 or job.processes < 1 or job.processes % job.nodes:
        raise ConfigError(
            f"{job.processes} processes cannot be divided evenly among {job.nodes} nodes."
        )
    if min(job.gpus, job.cpus, job.grace, job.restarts) < 0:
        raise ConfigError(
            f"the job asks for {job.gpus} GPUs, {job.cpus} CPUs, {job.grace} s and {job.restarts} "
            "restarts: none of them can be negative."
        )
    if job.memory and not re.fullmatch(r"[1-9][0-9]*[MGT]", job.memory):
        raise ConfigError(f"memory '{job.memory}' is invalid: write it as 64G or 900M.")


def _describe(job: Job) -> str:
    """Return the size of a job, such as "16 processes on 2 nodes with 8 GPUs each"."""
    processes = "1 process" if job.processes == 1 else f"{job.processes} processes"
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    text = f"{processes} on {nodes}"
    if job.gpus:
        text += f" with {job.gpus} GPU{'s' if job.gpus > 1 else ''} each"
    return text


def _mebibytes(memory: str) -> int:
    return int(memory[:-1]) * {"M": 1, "G": 1024, "T": 1024**2}[memory[-1]]


def _quoted(value: str, what: str) -> str:
    """Return a value for YAML, or a placeholder that says what to insert."""
    return _yaml(value) if value else f'"REPLACE-ME"  # {what}'


def _yaml(text: str) -> str:
    """Return a double-quoted YAML string; characters that cannot be printed are escaped."""
    escaped = {'"': '\\"', "\\": "\\\\"}
    characters = [
        escaped.get(
            character,
            character if character.isprintable() else f"\\U{ord(character):08x}",
        )
        for character in text
    ]
    return f'"{"".join(characters)}"'
