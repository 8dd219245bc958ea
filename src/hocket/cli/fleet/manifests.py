"""``hocket fleet manifests``: jobs as files for Kubernetes, experimental."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from hocket.base.errors import UsageError, did_you_mean
from hocket.cli.output import emit, json_option
from hocket.cli.written import write_folder

if TYPE_CHECKING:
    from hocket.contrib.kubernetes.manifests import KubernetesJob, KubernetesKind
    from hocket.service.spec import JobSpec

_NOT_CARRIED = (
    "resume", "weight", "team", "total_steps", "deadline_s", "silence_s", "model", "batch", "plans",
    "gangs",
)  # fmt: skip
"""What a job file may say and a JobSet cannot."""


@click.command("manifests")
@click.argument("jobs", metavar="JOB.TOML...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--on",
    "kinds",
    required=True,
    metavar="KIND,...",
    help="Kinds of devices; KIND=VALUE where the label of its nodes has another value.",
)
@click.option("--image", required=True, help="Container image that the command runs in.")
@click.option("--queue", default="hocket", show_default=True, help="LocalQueue of Kueue.")
@click.option("--namespace", default="default", show_default=True, help="Of the JobSets.")
@click.option("--node-label", default="", help="Label of nodes. [default: nvidia.com/gpu.product]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Folder to write to.",
)
@json_option
def command(
    jobs: tuple[str, ...],
    kinds: str,
    image: str,
    queue: str,
    namespace: str,
    node_label: str,
    output: Path,
    as_json: bool,
) -> None:
    """Write manifests for Kubernetes with JobSet and Kueue: one per job and kind (experimental).

    Apply the one of the kind that a job shall run on; Kueue starts it when there is room.
    """
    from hocket.api.jobs import read_spec
    from hocket.contrib.kubernetes.manifests import job_set, job_set_name, resource_flavors
    from hocket.contrib.kubernetes.plain_yaml import to_yaml

    known = _kinds(kinds, node_label)
    specs = [read_spec(path) for path in jobs]
    files = {"resource-flavors.yaml": to_yaml(resource_flavors(known))}
    for spec in specs:
        for kind in _allowed(spec, known):
            job = _job(spec, image)
            name = f"jobset-{job_set_name(job, kind)}.yaml"
            if name in files:
                raise UsageError(
                    f"two jobs are called {spec.name!r}", hint="give each a name of its own"
                )
            files[name] = to_yaml([job_set(job, kind, queue=queue, namespace=namespace)])
    write_folder(output, files)
    left_out = {spec.name: _left_out(spec) for spec in specs}
    if as_json:
        emit({"folder": str(output), "files": sorted(files), "left_out": left_out})
        return
    click.echo(f"wrote {len(files)} files — next: kubectl apply -f {output}/resource-flavors.yaml")
    for fields in left_out.values():
        if fields:
            click.echo(f"  not in the manifests: {', '.join(fields)}")


def _kinds(text: str, node_label: str) -> list[KubernetesKind]:
    from hocket.contrib.kubernetes.manifests import NODE_LABEL, KubernetesKind

    found: dict[str, KubernetesKind] = {}
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if not name or name in found:
            hint = "name each kind once, as KIND or KIND=VALUE"
            raise UsageError(f"cannot take {part.strip()!r} in --on", hint=hint)
        found[name] = KubernetesKind(
            name=name, label_value=value or name, label_key=node_label or NODE_LABEL
        )
    return list(found.values())


def _allowed(spec: JobSpec, kinds: list[KubernetesKind]) -> list[KubernetesKind]:
    """Kinds that a job may run on; raises where there is none."""
    if spec.throughputs is None:
        return kinds
    allowed = [kind for kind in kinds if spec.throughputs.get(kind.name, 0.0) > 0.0]
    if not allowed:
        hint = did_you_mean(kinds[0].name, spec.throughputs)
        raise UsageError(f"{spec.name!r} runs on none of the kinds in --on", hint=hint)
    return allowed


def _job(spec: JobSpec, image: str) -> KubernetesJob:
    from hocket.contrib.kubernetes.manifests import KubernetesJob

    return KubernetesJob(
        name=spec.name,
        command=spec.command,
        image=image,
        gang=spec.gang,
        is_process_per_device=spec.processes == "per-device",
        environment=spec.environment,
        folder=spec.folder,
        grace_s=spec.grace_s,
    )


def _left_out(spec: JobSpec) -> list[str]:
    """What a job says and no manifest can."""
    defaults = type(spec).model_fields
    return [name for name in _NOT_CARRIED if getattr(spec, name) != defaults[name].default]
