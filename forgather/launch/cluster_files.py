"""Files that start a run in a cluster or a cloud: a TrainJob of Kubeflow, a task of SkyPilot, a task of dstack.

The input is a `LaunchJob`; the output is YAML. Each machine runs `fgcli train` once, which starts the processes there.
Values of environment variables are not written: Kubeflow reads them from a secret of the cluster, and SkyPilot and
dstack from the environment in which the file is submitted. The folders that all machines share are mounted at the
places that they have here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from forgather.errors import ProjectError
from forgather.launch.launch_job import CPUS, LaunchJob, refuse_word_as_number, shell_text

_SECRET = "forgather"
_CHECK = "python -m forgather --version"


def kubeflow(job: LaunchJob) -> str:
    """Returns a TrainJob for Kubeflow Trainer.

    Raises:
        ProjectError: FG530 if the number of machines or processes is not known.

    Source:
        API `trainer.kubeflow.org/v1alpha1`, in which `runtimePatches` mount volumes; recorded in
        tests/runs/recorded/launch_schemas.json.
    """
    processes = refuse_word_as_number(job, "Kubeflow")
    # The runtime gives each pod its rank and the address of the first one, which `fgcli train` reads.
    script = "; ".join([*job.preparation, f"exec {shell_text(job.command)}"])
    quantities = f'{{cpu: "{processes * CPUS}", nvidia.com/gpu: "{processes}"}}'
    lines = [
        f"# Starts {job.name}:  kubectl create -f FILE",
        "# Set spec.trainer.image to an image in which `python -m forgather` works.",
        *_of_claims(job),
        *_of_secret(job),
        "apiVersion: trainer.kubeflow.org/v1alpha1",
        "kind: TrainJob",
        "metadata:",
        f"  name: {job.name}",
        "spec:",
        "  runtimeRef:",
        "    name: torch-distributed",
        "  trainer:",
        f"    numNodes: {job.asked.num_nodes}",
        f"    numProcPerNode: {processes}",
        "    command: [bash, -c]",
        # Kubernetes replaces `$(NAME)`, and `$$` by `$`.
        f"    args: [{_quoted(script.replace('$', '$$'))}]",
        f"    resourcesPerNode: {{requests: {quantities}, limits: {quantities}}}",
        *_environment_of_pods(job),
        *_patches(job),
    ]
    return "\n".join(lines) + "\n"


def _of_claims(job: LaunchJob) -> Iterator[str]:
    for name, folder in _volumes(job):
        yield f"# All pods need {shell_text([folder])}: the claim {name} (access mode ReadWriteMany) is mounted there."


def _of_secret(job: LaunchJob) -> Iterator[str]:
    if job.variables:
        values = " ".join(f'--from-literal={name}="${name}"' for name in job.variables)
        yield f"# The run reads a secret; make it once:  kubectl create secret generic {_SECRET} {values}"


def _environment_of_pods(job: LaunchJob) -> Iterator[str]:
    if job.variables:
        yield "    env:"
    for name in job.variables:
        yield f"      - {{name: {name}, valueFrom: {{secretKeyRef: {{name: {_SECRET}, key: {name}}}}}}}"


def _patches(job: LaunchJob) -> list[str]:
    """Returns the changes of the runtime's pods: the volumes, and the time that a pod has to save when it is ended."""
    pod = " " * 22
    volumes = [f"{{name: {name}, persistentVolumeClaim: {{claimName: {name}}}}}" for name, _ in _volumes(job)]
    mounts = [f"{{name: {name}, mountPath: {_quoted(folder)}}}" for name, folder in _volumes(job)]
    # NCCL and data loaders share memory there, and a container has 64 MiB by default.
    volumes.append("{name: shared-memory, emptyDir: {medium: Memory}}")
    mounts.append("{name: shared-memory, mountPath: /dev/shm}")
    return [
        "  runtimePatches:",
        "    - manager: forgather.launch/train",
        "      trainingRuntimeSpec:",
        "        template:",
        "          spec:",
        "            replicatedJobs:",
        "              - name: node",
        "                template:",
        "                  spec:",
        "                    template:",
        "                      spec:",
        # The run finishes its step and saves when its pod is ended.
        f"{pod}  terminationGracePeriodSeconds: 300",
        f"{pod}  volumes:",
        *(f"{pod}    - {volume}" for volume in volumes),
        f"{pod}  containers:",
        f"{pod}    - name: node",
        f"{pod}      volumeMounts:",
        *(f"{pod}        - {mount}" for mount in mounts),
    ]


def skypilot(job: LaunchJob) -> str:
    """Returns a task for `sky launch`.

    Raises:
        ProjectError: FG530 if the number of machines or processes is not known.
    """
    processes = refuse_word_as_number(job, "SkyPilot")
    command = job.command_on('"$SKYPILOT_NUM_NODES"', '"$SKYPILOT_NODE_RANK"', "\"${SKYPILOT_NODE_IPS%%$'\\n'*}\"")
    lines = [
        f"# Starts {job.name}:  sky launch --gpus NAME:{processes} FILE   (`sky gpus list` shows the names)",
        *(f"# The run reads {name} from your environment: add `--secret` with this name." for name in job.variables),
        *(
            f"# All machines need {shell_text([folder])}: the volume {name} is mounted there."
            for name, folder in _volumes(job)
        ),
        "# A managed job that is to go on after a preemption resumes if `--resume auto` is added to the command.",
        f"name: {job.name}",
        f"num_nodes: {job.asked.num_nodes}",
        "resources:",
        f'  cpus: "{processes * CPUS}+"',
        "volumes:",
        *(f"  {_quoted(folder)}: {name}" for name, folder in _volumes(job)),
        *(["secrets:"] if job.variables else []),
        *(f"  {name}: null" for name in job.variables),
        "setup: |",
        f"  {_CHECK}",
        "run: |",
        f'  if [ "${{SKYPILOT_NUM_GPUS_PER_NODE:-0}}" -lt {processes} ]; then',
        f'    echo "each machine needs {processes} GPUs: sky launch --gpus NAME:{processes}" >&2; exit 1',
        "  fi",
        *(f"  {line}" for line in [*job.preparation, command]),
    ]
    return "\n".join(lines) + "\n"


def dstack(job: LaunchJob) -> str:
    """Returns a task for `dstack apply`.

    Raises:
        ProjectError: FG530 if the number of machines or processes is not known, or dstack would change the command.
    """
    processes = refuse_word_as_number(job, "dstack")
    text = "\n".join([*job.preparation, *job.words])
    changed = next((mark for mark in ("${{", "$$") if mark in text), None)
    if changed is not None:
        message = f"the command contains {changed!r}, which dstack replaces before the shell reads it"
        raise ProjectError(message, code="FG530", hint="write the value into the config")
    command = job.command_on('"$DSTACK_NODES_NUM"', '"$DSTACK_NODE_RANK"', '"$DSTACK_MASTER_NODE_IP"')
    lines = [
        f"# Starts {job.name}:  dstack apply -f FILE",
        "# Set image to one in which `python -m forgather` works.",
        *_needed(job, "mount one network file system there on each"),
        *([f"# The run reads {', '.join(job.variables)} from your environment."] if job.variables else []),
        "type: task",
        f"name: {job.name}",
        *([f"nodes: {job.asked.num_nodes}"] if job.asked.num_nodes != 1 else []),
        *(["env:"] if job.variables else []),
        *(f"  - {name}" for name in job.variables),
        "shell: bash",
        "commands:",
        "  - |",
        *(f"    {line}" for line in [*job.preparation, command]),
        "resources:",
        f"  gpu: {processes}",
        f"  cpu: {processes * CPUS}..",
        "  shm_size: 16GB",
        # The run finishes its step and saves when it is stopped.
        "stop_duration: 5m",
        "volumes:",
        *(
            f"  - {{instance_path: {_quoted(folder)}, path: {_quoted(folder)}}}"
            for _, folder in _volumes(job)
        ),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Returns a text in quotes, as YAML reads it. JSON alone would write a character beyond 16 bits as two."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _needed(job: LaunchJob, how: str) -> Iterator[str]:
    for name, folder in _volumes(job):
        yield f"# All machines need {shell_text([folder])}: {how.format(name=name)}."


def _volumes(job: LaunchJob) -> list[tuple[str, str]]:
    """Returns a name for each folder that all machines share, and the folder.

    Raises:
        ProjectError: FG530 if a container cannot have a folder of that name.
    """
    strange = next((folder for folder in job.folders if ":" in folder or not folder.isprintable()), None)
    if strange is not None:
        message = f"no volume can be mounted at {strange!r}: the name has a colon or a control character"
        raise ProjectError(message, code="FG530", hint="rename the folder, or use --print slurm or --print torchrun")
    return [(f"shared-{n}", folder) for n, folder in enumerate(job.folders, 1)]
