"""Jobs as manifests for Kubernetes: a JobSet per kind of device, and Kueue's flavors for them.

Experimental: written after the published schemas of JobSet (``jobset.x-k8s.io/v1alpha2``) and Kueue
(``kueue.x-k8s.io/v1beta1``) and checked in structure only. A gang is one JobSet, so its pods start
and end together; Kueue admits it as a whole. Each kind is a ResourceFlavor that says which nodes
have it, and a JobSet asks for nodes of its kind.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hocket.base.errors import InputFileError, UsageError
from hocket.contrib.kubernetes.plain_yaml import Value

NODE_LABEL = "nvidia.com/gpu.product"
"""What NVIDIA's device discovery tells the kind of a node with."""
WORKERS = "workers"

_MAX_NAME = 40
"""Names of pods add the worker, two numbers and a suffix, and have 63 characters at most."""
_PORT = 29500
_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(
    r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
)
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,500}")
_RANK = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """What a manifest needs of a job."""

    name: str
    command: tuple[str, ...]
    image: str
    gang: int = 1
    is_process_per_device: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str | None = None
    grace_s: float = 30.0

    def __post_init__(self) -> None:
        if not _IMAGE.fullmatch(self.image):
            hint = "write one like registry.example.org/team/train:v3"
            raise UsageError(f"{self.image!r} is no name of a container image", hint=hint)


@dataclass(frozen=True, kw_only=True)
class KubernetesKind:
    """A kind of device, and the label of the nodes that have it."""

    name: str
    label_value: str
    label_key: str = NODE_LABEL

    def __post_init__(self) -> None:
        if not _LABEL_VALUE.fullmatch(self.label_value):
            hint = "write KIND=VALUE with letters, digits, '-', '_' and '.', 63 at most"
            raise UsageError(f"{self.label_value!r} cannot be the label of a node", hint=hint)
        if not _LABEL_KEY.fullmatch(self.label_key):
            hint = f"write one like {NODE_LABEL}"
            raise UsageError(f"{self.label_key!r} cannot be the key of a label", hint=hint)


def resource_flavors(kinds: Sequence[KubernetesKind]) -> list[dict[str, Value]]:
    """Kueue's flavors of the kinds."""
    return [
        {
            "apiVersion": "kueue.x-k8s.io/v1beta1",
            "kind": "ResourceFlavor",
            "metadata": {"name": dns_label(kind.name)},
            "spec": {"nodeLabels": {kind.label_key: kind.label_value}},
        }
        for kind in kinds
    ]


def job_set(
    job: KubernetesJob, kind: KubernetesKind, *, queue: str, namespace: str
) -> dict[str, Value]:
    """The JobSet of a job on one kind of device, for a LocalQueue of Kueue."""
    for what, name in (("queue", queue), ("namespace", namespace)):
        if not _DNS_LABEL.fullmatch(name) or len(name) > 63:
            hint = "use small letters, digits and '-', 63 at most"
            raise UsageError(f"{name!r} cannot be the name of a {what}", hint=hint)
    name = job_set_name(job, kind)
    num_pods = job.gang if job.is_process_per_device else 1
    pods: dict[str, Value] = {
        "parallelism": num_pods,
        "completions": num_pods,
        "completionMode": "Indexed",
        # A gang with a member less is no gang: the JobSet starts all of them again.
        "backoffLimit": 0,
        "template": {"spec": _pod(job, kind, name)},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"kueue.x-k8s.io/queue-name": queue},
            "annotations": {"hocket-job": job.name, "hocket-kind": kind.name},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": 3},
            "replicatedJobs": [{"name": WORKERS, "replicas": 1, "template": {"spec": pods}}],
        },
    }


def job_set_name(job: KubernetesJob, kind: KubernetesKind) -> str:
    """What the JobSet of a job on one kind of device is called."""
    return dns_label(f"{job.name}-{kind.name}")


def _pod(job: KubernetesJob, kind: KubernetesKind, name: str) -> dict[str, Value]:
    num_devices = 1 if job.is_process_per_device else job.gang
    container: dict[str, Value] = {
        "name": "worker",
        "image": job.image,
        "command": [literal(word) for word in job.command],
        "env": _environment(job, kind, name),
        "resources": {
            # For extended resources, requests and limits must agree.
            "requests": {"nvidia.com/gpu": num_devices},
            "limits": {"nvidia.com/gpu": num_devices},
        },
    }
    if job.folder is not None:
        container["workingDir"] = job.folder
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": math.ceil(job.grace_s),
        "nodeSelector": {kind.label_key: kind.label_value},
        "containers": [container],
    }


def _environment(job: KubernetesJob, kind: KubernetesKind, name: str) -> list[Value]:
    given = {key: literal(text) for key, text in sorted(job.environment.items())}
    ranks: dict[str, str] = {}
    if job.is_process_per_device:
        ranks = {
            "WORLD_SIZE": str(job.gang),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            # The first pod, by the name that the JobSet's own service gives it.
            "MASTER_ADDR": f"{name}-{WORKERS}-0-0.{name}",
            "MASTER_PORT": str(_PORT),
        }
    fixed = {**ranks, **given, "HOCKET_KIND": literal(kind.name)}
    entries: list[Value] = [{"name": key, "value": text} for key, text in fixed.items()]
    if job.is_process_per_device and "RANK" not in given:
        entries.append({"name": "RANK", "valueFrom": {"fieldRef": {"fieldPath": _RANK}}})
    return entries


def literal(text: str) -> str:
    """A text that Kubernetes passes on as it is: ``$(NAME)`` in it is not replaced."""
    if "\0" in text:
        raise InputFileError("no program can be given a text with a null character")
    return text.replace("$", "$$")


def dns_label(name: str) -> str:
    """A name that Kubernetes takes: the same where it can be, else similar and still unique."""
    if len(name) <= _MAX_NAME and _DNS_LABEL.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    similar = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[: _MAX_NAME - 9].strip("-")
    return f"{similar}-{digest}" if similar else f"x-{digest}"
