"""The files of docker/ against what KubeRay, Slurm and our own settings know."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from hybridrl.job.config_resolution import load_config

jsonschema = pytest.importorskip("jsonschema", reason="jsonschema comes with Ray")
DOCKER = Path(__file__).parents[2] / "docker"


def closed(properties, required=()):
    """An object with these fields and no other: a misspelt one is found."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
QUANTITY = {"anyOf": [COUNT, {"type": "string", "pattern": r"^\d+(\.\d+)?(m|Ki|Mi|Gi|Ti|k|M|G)?$"}]}
RESOURCES = {"type": "object", "additionalProperties": QUANTITY}
NAMED = closed({"name": TEXT, "value": TEXT}, ["name"])
CONTAINER = closed(
    {
        "name": TEXT,
        "image": TEXT,
        "env": {"type": "array", "items": NAMED},
        "ports": {
            "type": "array",
            "items": closed({"containerPort": COUNT, "name": TEXT}, ["containerPort"]),
        },
        "resources": closed({"requests": RESOURCES, "limits": RESOURCES}),
        "volumeMounts": {
            "type": "array",
            "items": closed({"name": TEXT, "mountPath": TEXT}, ["name", "mountPath"]),
        },
    },
    ["name", "image"],
)
VOLUME = closed(
    {
        "name": TEXT,
        "persistentVolumeClaim": closed({"claimName": TEXT}, ["claimName"]),
        "emptyDir": closed({"medium": {"enum": ["", "Memory"]}, "sizeLimit": QUANTITY}),
    },
    ["name"],
)
TEMPLATE = closed(
    {
        "metadata": {"type": "object"},
        "spec": closed(
            {
                "securityContext": closed(
                    {
                        "runAsNonRoot": {"const": True},
                        "runAsUser": {"type": "integer", "minimum": 1},
                        "fsGroup": {"type": "integer", "minimum": 1},
                    },
                    ["runAsNonRoot"],
                ),
                "containers": {"type": "array", "minItems": 1, "items": CONTAINER},
                "volumes": {"type": "array", "items": VOLUME},
            },
            ["containers", "securityContext"],
        ),
    },
    ["spec"],
)
# Flags of `ray start` without their dashes; KubeRay takes them as text.
START = {"type": "object", "additionalProperties": TEXT}
RAY_CLUSTER_SPEC = closed(
    {
        "rayVersion": TEXT,
        "authOptions": closed({"mode": {"enum": ["disabled", "token"]}}),
        "headGroupSpec": closed(
            {"rayStartParams": START, "template": TEMPLATE},
            ["template"],
        ),
        "workerGroupSpecs": {
            "type": "array",
            "items": closed(
                {
                    "groupName": TEXT,
                    "replicas": COUNT,
                    "minReplicas": COUNT,
                    "maxReplicas": COUNT,
                    "rayStartParams": START,
                    "template": TEMPLATE,
                },
                ["groupName", "maxReplicas", "minReplicas", "template"],
            ),
        },
    },
    ["headGroupSpec"],
)
RAY_CLUSTER = closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": RAY_CLUSTER_SPEC,
    },
    ["apiVersion", "kind", "metadata", "spec"],
)
RAY_JOB = closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": closed(
            {
                "entrypoint": TEXT,
                "backoffLimit": COUNT,
                "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode"]},
                "shutdownAfterJobFinishes": {"type": "boolean"},
                "ttlSecondsAfterFinished": COUNT,
                "activeDeadlineSeconds": {"type": "integer", "minimum": 1},
                "runtimeEnvYAML": TEXT,
                "rayClusterSpec": RAY_CLUSTER_SPEC,
            },
            ["entrypoint", "rayClusterSpec"],
        ),
    },
    ["apiVersion", "kind", "metadata", "spec"],
)
"""The fields of KubeRay's RayJob (v1), and of the pods in it, that we use."""


def ray_job():
    return yaml.safe_load((DOCKER / "rayjob.yaml").read_text())


def test_the_ray_job_is_one():
    jsonschema.validate(ray_job(), RAY_JOB)


def ray_cluster():
    return yaml.safe_load((DOCKER / "raycluster.yaml").read_text())


def test_the_ray_cluster_is_one():
    jsonschema.validate(ray_cluster(), RAY_CLUSTER)


def test_a_misspelt_field_is_found():
    job = ray_job()
    job["spec"]["rayClusterSpec"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(job, RAY_JOB)


def test_what_the_pods_mount_is_there():
    for cluster in (ray_job()["spec"]["rayClusterSpec"], ray_cluster()["spec"]):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            pod = group["template"]["spec"]
            volumes = {volume["name"] for volume in pod["volumes"]}
            assert all({m["name"] for m in c["volumeMounts"]} == volumes for c in pod["containers"])


def test_the_object_store_fits_into_shared_memory():
    for cluster in (ray_job()["spec"]["rayClusterSpec"], ray_cluster()["spec"]):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            (size,) = [
                volume["emptyDir"]["sizeLimit"]
                for volume in group["template"]["spec"]["volumes"]
                if volume["name"] == "shm"
            ]
            store = int(group["rayStartParams"]["object-store-memory"])
            assert store < 0.9 * int(size.removesuffix("Gi")) * 2**30


def test_the_entrypoint_speaks_our_settings():
    words = shlex.split(ray_job()["spec"]["entrypoint"])
    assert words[:3] == ["python", "-m", "hybridrl.main"]
    config = load_config(words[3:])
    assert config.ray.address == "auto" and config.devices == "cuda"


def test_the_ray_of_the_manifest_is_the_pinned_one():
    pinned = (DOCKER.parent / "requirements" / "cpu.txt").read_text()
    for cluster in (ray_job()["spec"]["rayClusterSpec"], ray_cluster()["spec"]):
        assert f"ray=={cluster['rayVersion']}\n" in pinned


def test_the_slurm_script_is_bash_and_speaks_our_settings():
    script = DOCKER / "slurm.sbatch"
    if bash := shutil.which("bash"):
        subprocess.run([bash, "-n", str(script)], check=True)
    (line,) = re.findall(r"python -m hybridrl\.main (.*) \"\$@\"", script.read_text())
    config = load_config([w for w in shlex.split(line) if "$" not in w])
    assert config.devices == "cuda"
    (warning,) = re.findall(r"--signal=B:TERM@(\d+)", script.read_text())
    assert 0 < int(warning) - config.recover.grace_s <= 30  # but for the requeue


def test_every_ray_that_is_started_asks_for_a_token():
    assert ray_job()["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    for page in (DOCKER / "slurm.sbatch", DOCKER.parent / "docs" / "cluster.md"):
        text = page.read_text()
        assert "RAY_AUTH_MODE=token" in text[: text.index("ray start --head")]
