"""Manifests for Kubernetes: their structure, the rules for names, and texts that stay texts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from hocket.base.errors import InputFileError, UsageError
from hocket.cli.root import root
from hocket.contrib.kubernetes.manifests import (
    KubernetesJob,
    KubernetesKind,
    dns_label,
    job_set,
    literal,
    resource_flavors,
)
from hocket.contrib.kubernetes.plain_yaml import to_yaml

DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
V100 = KubernetesKind(name="v100", label_value="Tesla-V100-SXM2-16GB")
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=60)


def job(**more: Any) -> KubernetesJob:
    given = {"name": "resnet", "command": ("python", "train.py"), "image": "team/train:v3"}
    return KubernetesJob(**{**given, **more})


def made(one: KubernetesJob, kind: KubernetesKind = V100) -> dict[str, Any]:
    text = to_yaml([job_set(one, kind, queue="team-a", namespace="ml")])
    assert text.isascii()
    read: dict[str, Any] = yaml.safe_load(text)
    check_job_set(read)
    return read


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    (replicated,) = manifest["spec"]["replicatedJobs"]
    pod: dict[str, Any] = replicated["template"]["spec"]["template"]["spec"]
    return pod


def check_job_set(manifest: dict[str, Any]) -> None:
    """The fields that the schema of JobSet v1alpha2 asks for, and the rules for names."""
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    metadata = manifest["metadata"]
    assert DNS_LABEL.fullmatch(metadata["name"])
    for value in metadata["labels"].values():
        assert LABEL_VALUE.fullmatch(value)
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert DNS_LABEL.fullmatch(f"{metadata['name']}-{replicated['name']}-0-99999-abcde")
    pods = replicated["template"]["spec"]
    assert pods["parallelism"] == pods["completions"] >= 1
    assert pods["completionMode"] == "Indexed"
    pod = pods["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert all(isinstance(word, str) for word in container["command"])
    names = [entry["name"] for entry in container["env"]]
    assert len(names) == len(set(names))
    for entry in container["env"]:
        assert ("value" in entry) != ("valueFrom" in entry)
        assert isinstance(entry.get("value", ""), str)
    resources = container["resources"]
    assert resources["requests"] == resources["limits"]
    assert isinstance(resources["limits"]["nvidia.com/gpu"], int)


def expanded(text: str) -> str:
    """What Kubernetes makes of a text, after third_party/forked/golang/expansion/expand.go."""
    result, at = "", 0
    while at < len(text):
        if text[at] == "$" and at + 1 < len(text):
            if text[at + 1] == "$":
                result, at = result + "$", at + 2
                continue
            if text[at + 1] == "(" and ")" in text[at + 2 :]:
                result, at = result + "EXPANDED", text.index(")", at + 2) + 1
                continue
        result, at = result + text[at], at + 1
    return result


def test_one_process_has_a_pod_with_the_whole_gang() -> None:
    manifest = made(job(gang=4, folder="/work", grace_s=12.5))
    pod = pod_of(manifest)
    assert manifest["metadata"]["name"] == "resnet-v100"
    assert manifest["metadata"]["namespace"] == "ml"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team-a"}
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "Tesla-V100-SXM2-16GB"}
    assert pod["terminationGracePeriodSeconds"] == 13
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4}
    assert container["workingDir"] == "/work"
    assert container["env"] == [{"name": "HOCKET_KIND", "value": "v100"}]


def test_a_process_per_device_has_a_pod_each_and_a_rank() -> None:
    manifest = made(job(gang=8, is_process_per_device=True))
    pods = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (pods["parallelism"], pods["completions"]) == (8, 8)
    (container,) = pod_of(manifest)["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    environment = {entry["name"]: entry for entry in container["env"]}
    assert environment["WORLD_SIZE"]["value"] == "8"
    assert environment["MASTER_ADDR"]["value"] == "resnet-v100-workers-0-0.resnet-v100"
    assert "job-completion-index" in environment["RANK"]["valueFrom"]["fieldRef"]["fieldPath"]


def test_flavors_say_which_nodes_have_a_kind() -> None:
    kinds = [V100, KubernetesKind(name="A100 80GB", label_value="a100", label_key="team/gpu")]
    first, second = yaml.safe_load_all(to_yaml(resource_flavors(kinds)))
    assert (first["apiVersion"], first["kind"]) == ("kueue.x-k8s.io/v1beta1", "ResourceFlavor")
    assert first["metadata"]["name"] == "v100"
    assert DNS_LABEL.fullmatch(second["metadata"]["name"])
    assert second["spec"]["nodeLabels"] == {"team/gpu": "a100"}


@settings(derandomize=True, deadline=None, max_examples=150)
@given(
    name=texts.filter(bool),
    command=st.lists(texts, min_size=1, max_size=4),
    environment=st.dictionaries(st.sampled_from(["A", "B", "no", "null", "RANK"]), texts),
    folder=st.none() | texts,
    kind=texts.filter(bool),
    is_process_per_device=st.booleans(),
)
def test_hostile_texts_arrive_as_they_are(
    name: str,
    command: list[str],
    environment: dict[str, str],
    folder: str | None,
    kind: str,
    is_process_per_device: bool,
) -> None:
    hostile = job(
        name=name,
        command=tuple(command),
        environment=environment,
        folder=folder,
        gang=2,
        is_process_per_device=is_process_per_device,
    )
    manifest = made(hostile, KubernetesKind(name=kind, label_value="v100"))
    (container,) = pod_of(manifest)["containers"]
    assert [expanded(word) for word in container["command"]] == command
    assert container.get("workingDir") == folder
    seen = {entry["name"]: expanded(entry.get("value", "")) for entry in container["env"]}
    assert {key: seen[key] for key in environment} == environment
    assert manifest["metadata"]["annotations"] == {"hocket-job": name, "hocket-kind": kind}


@pytest.mark.parametrize(
    "text",
    ["$(HOME)", "$$(HOME)", "$", "$$", "a: b", "- x", "#", "true", "012", "1e3", "~", "&a *a",
     "!!python/object/apply:os.system [id]", "\x1b[31m", "\x85\u2028\u2029", "😀", "}{", "'",
     '"\\'],
)  # fmt: skip
def test_texts_with_a_meaning_elsewhere_mean_nothing(text: str) -> None:
    (container,) = pod_of(made(job(command=(text,))))["containers"]
    assert expanded(container["command"][0]) == text


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.text(max_size=100), st.text(max_size=100))
def test_names_are_labels_and_stay_different(one: str, other: str) -> None:
    assert DNS_LABEL.fullmatch(dns_label(one))
    assert len(dns_label(one)) <= 40
    assert (dns_label(one) == dns_label(other)) == (one == other)


def test_the_same_job_gives_the_same_file() -> None:
    one = job(environment={"B": "2", "A": "1"})
    same = job(environment={"A": "1", "B": "2"})
    texts = [
        to_yaml([job_set(entry, V100, queue="q", namespace="n")]) for entry in (one, one, same)
    ]
    assert len(set(texts)) == 1


@pytest.mark.parametrize("wrong", ["", "a b", "-a", "x" * 64, "ä", "a\n"])
def test_labels_that_kubernetes_refuses_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        KubernetesKind(name="v100", label_value=wrong)
    with pytest.raises(UsageError):
        KubernetesKind(name="v100", label_value="v100", label_key=f"{wrong}/x y")
    with pytest.raises(UsageError):
        job_set(job(), V100, queue=wrong or "A", namespace="n")
    with pytest.raises(UsageError):
        job(image=wrong if wrong != "x" * 64 else "a b")


def test_a_null_character_is_refused() -> None:
    with pytest.raises(InputFileError, match="null"):
        literal("a\0b")


# ── command ──────────────────────────────────────────────────────────────────────────────────────

JOB = """
name = "ResNet 50; rm -rf /"
command = ["python", "train.py", "--name=$(HOSTNAME)"]
gang = 2
processes = "per-device"
weight = 2.0
[throughputs]
v100 = 10.0
k80 = 1.0
"""


def run(folder: Path, *arguments: str) -> Any:
    (folder / "job.toml").write_text(JOB)
    command = ["fleet", "manifests", str(folder / "job.toml"), "--image", "team/train:v3"]
    return CliRunner().invoke(root, [*command, "-o", str(folder / "out"), *arguments])


def test_the_command_writes_a_manifest_per_kind_that_the_job_allows(tmp_path: Path) -> None:
    told = run(tmp_path, "--on", "v100=Tesla-V100,p100,k80")
    assert told.exit_code == 0, told.output
    assert "not in the manifests: weight" in told.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(names) == 3
    assert names[-1] == "resource-flavors.yaml"
    for name in names[:2]:
        assert re.fullmatch(r"jobset-resnet-50-rm-rf-(v100|k80)-[0-9a-f]{8}\.yaml", name)
        manifest = yaml.safe_load((tmp_path / "out" / name).read_text())
        check_job_set(manifest)
        (container,) = pod_of(manifest)["containers"]
        assert container["command"][2] == "--name=$$(HOSTNAME)"
    flavors = list(yaml.safe_load_all((tmp_path / "out" / names[-1]).read_text()))
    assert [flavor["metadata"]["name"] for flavor in flavors] == ["v100", "p100", "k80"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--on", "a100"],
        ["--on", "v100,v100"],
        ["--on", "v100,=x"],
        ["--on", "v100=a b"],
        ["--on", "v100", "--queue", "Not A Name"],
        ["--on", "v100", "--node-label", "a b"],
    ],
)
def test_the_command_refuses_what_kubernetes_would(tmp_path: Path, arguments: list[str]) -> None:
    told = run(tmp_path, *arguments)
    assert isinstance(told.exception, UsageError)
    assert not (tmp_path / "out").exists()
