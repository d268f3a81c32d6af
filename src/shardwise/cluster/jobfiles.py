"""Job files for clusters: a script for Slurm, objects for Kubernetes. Text to read, change and keep; nothing is handed in from here."""

import math
import re
import shlex
from dataclasses import dataclass

from shardwise.errors import ConfigError

SIGNALLED = (
    134,
    135,
    137,
    139,
    143,
)  # 128 + the signal that ended a process: it was lost, and could not say so
FINAL = (
    1,
    2,
    3,
    4,
    5,
    7,
    126,
    127,
)  # a mistake in the program, its arguments, data, checkpoint or numbers: it would come again
WAIT = 360  # seconds for the other processes to end by themselves when one has ended: mostly 15, 300 if it has never joined them


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the cluster is asked for, and the command to run there."""

    command: tuple[
        str, ...
    ]  # the words after `shardwise`: ("train", "recipes/gpt2.py", "--mesh", "data=16", "--out", "runs/a")
    nodes: int = 1  # machines
    processes: int = 1  # in all, a multiple of nodes; one for each GPU or one for each node
    gpus: int = 0  # on each node
    cpus: int = 0  # for each process; 0: left to the cluster
    memory: str = ""  # on each node, such as "64G"; "": left to the cluster
    hours: float = (
        24.0  # Slurm only: the time limit of one start; a longer run is stopped, saved and goes on
    )
    grace: int = 120  # seconds for the last checkpoint, from the signal to the end
    restarts: int = 30  # at most
    name: str = "shardwise"
    image: str = ""  # Kubernetes only: the container image
    volume: str = ""  # Kubernetes only: the PersistentVolumeClaim with the recipe, the data and the run directory
    port: int = 8476  # Kubernetes only: where process 0 waits for the others


def slurm(job: Job) -> str:
    """A script for `sbatch`."""
    _check(job)
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", job.name):
        raise ConfigError(f"the job name '{job.name}': use letters, digits, '.', '_' and '-'.")
    if job.hours * 3600 < job.grace + 120:
        raise ConfigError(
            f"a time limit of {job.hours:g} hours leaves no time to train: {job.grace} s of it are for the last checkpoint."
        )
    minutes = math.ceil(job.hours * 60)
    asked = [
        ("job-name", job.name, ""),
        ("nodes", job.nodes, ""),
        ("ntasks", job.processes, "the processes of the run, one for each task"),
        ("ntasks-per-node", job.processes // job.nodes, ""),
        *([("gpus-per-node", job.gpus, "")] if job.gpus else []),
        *([("cpus-per-task", job.cpus, "")] if job.cpus else []),
        *([("mem", job.memory, "on each node")] if job.memory else []),
        (
            "time",
            f"{minutes // 60:02d}:{minutes % 60:02d}:00",
            "of one start; a run that needs longer goes on in the next",
        ),
        (
            "signal",
            f"TERM@{job.grace}",
            "before the time limit, to the tasks (B: would be to this script): they save and end with 75",
        ),
        ("requeue", "", "after the loss of a node, Slurm itself starts the job again"),
        ("open-mode", "append", "one log for all starts"),
        (
            "output",
            "%x-%j.log",
            "name and number of the job, in the directory where sbatch is called",
        ),
    ]
    options = [
        (f"#SBATCH --{name}={value}" if value != "" else f"#SBATCH --{name}", comment)
        for name, value, comment in asked
    ]
    width = max(len(text) for text, comment in options if comment)
    header = "\n".join(
        f"{text:{width}}  # {comment}" if comment else text for text, comment in options
    )
    cpus = (
        " --cpus-per-task=$SLURM_CPUS_PER_TASK" if job.cpus else ""
    )  # srun does not take it over from sbatch since Slurm 22.05
    return f"""\
#!/bin/bash
# A job for Slurm, written by shardwise: {_size(job)}.
#
#   sbatch FILE                  hands it in; relative paths are meant from the directory where you do that
#   scancel --signal=TERM JOB    saves, ends and starts it again: to move it, or after a change of the code
#   scancel JOB                  ends it for good, without saving; handed in again it goes on from the last checkpoint
#
# It is started again, at most {job.restarts} times, when a signal has stopped it or a process was lost, never after a mistake that
# would come again. Every start goes on from the last verified checkpoint in the directory of --out.
#
{header}

# The place for what makes the command `shardwise` known on the nodes, such as:
#   module load cuda
#   source .venv/bin/activate

# What one start compiles, the next ones read. The directory must be seen by all nodes, and writable for you alone: programs come from it.
export JAX_COMPILATION_CACHE_DIR="${{JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/shardwise/jax}}"
mkdir -p "$JAX_COMPILATION_CACHE_DIR" && chmod 700 "$JAX_COMPILATION_CACHE_DIR" || exit 4

# Slurm starts a job again only when its last start has ended. So a lock that this job has left in the run directory, on a lost node, may
# be taken over.
export SHARDWISE_JOB="slurm-$SLURM_JOB_ID"
restarts=${{SLURM_RESTART_COUNT:-0}}

# The processes find each other by Slurm's variables. When one has ended the others end by themselves and say why; Slurm must not kill
# them at once (--kill-on-bad-exit=1 would make a 143 or a 75 of every exit code), but may if they have not ended {WAIT} s later. The tasks
# must be shardwise itself, without a script around it: most clusters signal only the process that Slurm has started.
srun --kill-on-bad-exit=0 --wait={WAIT}{cpus} \\
  shardwise {shlex.join(job.command)}
code=$?  # the highest of all tasks

case $code in
  0) echo "shardwise job: done"; exit 0 ;;
  75) why="stopped by a signal, saved" ;;
  6) why="a process was lost or hung" ;;
  129 | 1[3-5][0-9]) why="a process was lost, ended by signal $((code - 128))" ;;
  *) echo "shardwise job: exit code $code would come again, so the job ends"; exit "$code" ;;
esac
if [ "$restarts" -ge {job.restarts} ]; then
  echo "shardwise job: $why (exit code $code); it has been started again $restarts times and ends now. Handed in again, it goes on."
  exit "$code"
fi
echo "shardwise job: $why (exit code $code); it goes on with start $((restarts + 2))"
scontrol requeue "$SLURM_JOB_ID" || echo "shardwise job: Slurm does not start it again; hand it in once more"
exit "$code"
"""


def kubernetes(job: Job) -> str:
    """Objects for `kubectl apply`: an Indexed Job, the names by which its pods find each other, and who may reach them."""
    _check(job)
    longest = 63 - len(f"-{job.processes - 1}")  # the name of a pod is a label of DNS
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job.name) or len(job.name) > longest:
        raise ConfigError(
            f"the job name '{job.name}': Kubernetes takes at most {longest} small letters, digits and '-', a letter first."
        )
    on_node = job.processes // job.nodes
    if job.gpus % on_node:
        raise ConfigError(
            f"{job.gpus} GPUs on each node cannot be divided among its {on_node} processes, which are pods of their own."
        )
    together = [
        "--coordinator",
        f"{job.name}-0.{job.name}:{job.port}",
        "--num-processes",
        str(job.processes),
    ]
    words = [_word(word) for word in (*job.command, *(together if job.processes > 1 else ()))]
    if job.processes > 1:
        words += [_word("--process-id"), '"$(JOB_COMPLETION_INDEX)"']
    args = "\n".join(f"            - {word}" for word in words)
    limits = [
        *([f"nvidia.com/gpu: {job.gpus // on_node}"] if job.gpus else []),
        *([f"cpu: {job.cpus}"] if job.cpus else []),
        *([f"memory: {_mebibytes(job.memory) // on_node}Mi"] if job.memory else []),
    ]
    resources = (
        "".join(f"\n              {limit}" for limit in limits)
        or " {}  # such as cpu: 8, memory: 32Gi"
    )
    image = (
        _yaml(job.image) if job.image else '"REPLACE-ME"  # an image that has the command shardwise'
    )
    volume = _yaml(job.volume) if job.volume else '"REPLACE-ME"  # a PersistentVolumeClaim'
    return f"""\
# A job for Kubernetes 1.31 or newer, written by shardwise: {_size(job)}, each a pod.
#
#   kubectl apply -f FILE           hands it in
#   kubectl logs -f job/{job.name:<12}shows how it goes on
#   kubectl delete job {job.name:<13}saves and ends it; applied again it goes on from the last checkpoint

# Gives the pods names: {job.name}-0.{job.name} and so on. Process 0 is where they meet.
apiVersion: v1
kind: Service
metadata:
  name: {job.name}
spec:
  clusterIP: None
  publishNotReadyAddresses: true  # they look for each other before they are ready
  selector:
    batch.kubernetes.io/job-name: {job.name}
---
# Only the pods of this job reach each other: what JAX opens between them asks nobody who they are. On all ports, as the exchange
# of arrays takes any. A network plugin that does not know policies ignores this without a word: ask who runs the cluster.
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
  # The run has ended well when process 0, which writes and decides, says so.
  successPolicy:
    rules:
      - succeededIndexes: "0"
  # When one pod is lost, the others notice within seconds and end with 6. All are started again, and go on together from the last
  # verified checkpoint, at most {job.restarts} times.
  backoffLimitPerIndex: {job.restarts}
  maxFailedIndexes: 0
  podFailurePolicy:
    rules:  # the first that fits
      # Evicted, preempted, drained: nobody's fault, not counted.
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      # Stopped by a signal, saved. All pods do it when one is told to; not counted.
      - action: Ignore
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [75]
      # A mistake in the program, its arguments, data, checkpoint or numbers would come again: the job ends.
      - action: FailJob
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [{", ".join(map(str, FINAL))}]
      # A process was lost or hung (6), or ended by a signal, as for lack of memory (137): tried again, and counted.
      - action: Count
        onExitCodes:
          containerName: shardwise
          operator: In
          values: [{", ".join(map(str, (6, *SIGNALLED)))}]
  template:
    spec:
      subdomain: {job.name}
      restartPolicy: Never  # the job starts new pods, by the rules above
      terminationGracePeriodSeconds: {job.grace}  # from the signal to the end: the time for the last checkpoint
      automountServiceAccountToken: false  # it asks nothing of Kubernetes
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
          # Kubernetes puts the number of the pod in the place of $(JOB_COMPLETION_INDEX).
          args:
{args}
          workingDir: /workspace  # relative paths are meant from here: the recipe, the data and --out are on the volume
          env:
            - name: HOME
              value: /tmp
            # A lock that this job has left in the run directory, on a lost node, may be taken over: a pod starts when the last has ended.
            - name: SHARDWISE_JOB
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['batch.kubernetes.io/controller-uid']
            # What one start compiles, the next ones read. Programs come from it: let nobody else write to the volume.
            - name: JAX_COMPILATION_CACHE_DIR
              value: /workspace/.cache/jax
          resources:
            limits:{resources}
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
        - name: shm  # NCCL exchanges arrays through it; the usual 64 MiB are too few
          emptyDir:
            medium: Memory
"""


def _check(job: Job) -> None:
    """What is wrong for every cluster."""
    if "train" not in job.command:
        raise ConfigError(
            f"a job file is for `shardwise train`, not for `shardwise {shlex.join(job.command)}`."
        )
    if not any(word.partition("=")[0] == "--out" for word in job.command):
        raise ConfigError(
            "a job that is started again must find its run directory: say which, such as --out runs/a."
        )
    for word in job.command:
        if re.search("[\0\ud800-\udfff]", word):
            raise ConfigError(
                f"the word {word!r} of the command cannot be written to a file of text."
            )
    if job.nodes < 1 or job.processes < 1 or job.processes % job.nodes:
        raise ConfigError(
            f"{job.processes} processes cannot be spread evenly over {job.nodes} nodes."
        )
    if min(job.gpus, job.cpus, job.grace, job.restarts) < 0:
        raise ConfigError("GPUs, CPUs, seconds and restarts cannot be fewer than none.")
    if job.memory and not re.fullmatch(r"[1-9][0-9]*[MGT]", job.memory):
        raise ConfigError(f"memory '{job.memory}': write it as 64G or 900M.")


def _size(job: Job) -> str:
    """What it asks for, in words."""
    processes = "1 process" if job.processes == 1 else f"{job.processes} processes"
    nodes = "1 node" if job.nodes == 1 else f"{job.nodes} nodes"
    return f"{processes} on {nodes}" + (
        f" with {job.gpus} GPU{'s' if job.gpus > 1 else ''} each" if job.gpus else ""
    )


def _mebibytes(memory: str) -> int:
    return int(memory[:-1]) * {"M": 1, "G": 1024, "T": 1024**2}[memory[-1]]


def _word(word: str) -> str:
    """A word of the command for Kubernetes, which would otherwise put variables in the place of $(NAME)."""
    return _yaml(word.replace("$", "$$"))


def _yaml(text: str) -> str:
    """A text between quotation marks; what YAML may not show is written by its number."""
    shown = {'"': '\\"', "\\": "\\\\"}
    return (
        '"'
        + "".join(shown.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
        + '"'
    )
