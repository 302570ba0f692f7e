"""The Dockerfile and compose.yaml of docker/, read without a docker: what is pinned, who runs it,
and whether the parts know each other."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from hybridrl import __version__
from hybridrl.job.config_resolution import load_config

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def instructions():
    """Of the Dockerfile: the word and the rest, lines that go on joined."""
    text = re.sub(r"^\s*#.*\n", "", (DOCKER / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def stages():
    """Instructions of each stage by its name, the first being its FROM."""
    found = {}
    for word, rest in instructions():
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            assert name, f"the stage from {base} has no name"
            current = found[name] = [(word, base)]
        else:
            current.append((word, rest))
    return found


def test_every_image_is_pinned_by_version_and_every_stage_is_there():
    found = stages()
    earlier = set()
    for name, (first, *rest) in found.items():
        base = first[1]
        assert base in earlier or re.fullmatch(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*", base), base
        for copied in re.findall(r"--from=(\S+)", " ".join(one for _, one in rest)):
            assert copied in earlier
        earlier.add(name)
    assert {"cpu", "gpu"} <= earlier


def test_images_run_as_a_user_that_is_not_root():
    for name in ("cpu", "gpu"):
        (user,) = [rest for word, rest in stages()[name] if word == "USER"]
        assert stages()[name][-1] == ("USER", user) and user not in ("root", "0")


def test_nothing_from_the_network_is_run_as_it_comes():
    text = " ".join(rest for word, rest in instructions() if word == "RUN")
    assert not re.search(r"(curl|wget)[^&]*\|\s*(ba|z)?sh", text)
    for install in re.findall(r"apt-get install[^&]*", text):
        assert "--no-install-recommends" in install
    assert text.count("apt-get update") == text.count("rm -rf /var/lib/apt/lists/*")


def test_packages_come_before_sources_so_that_layers_are_kept():
    found = stages()
    for kind in ("packages-cpu", "packages-gpu"):
        words = found["packages"] + found[kind]
        places = [rest.split()[0] for word, rest in words if word in ("COPY", "RUN")]
        installs = [n for n, (word, rest) in enumerate(words) if word == "RUN" and "pip" in rest]
        sources = next(n for n, one in enumerate(words) if one == ("COPY", "hybridrl hybridrl"))
        assert "requirements" in places and installs[0] < sources < installs[-1]


def test_what_is_copied_is_there_and_not_ignored():
    ignored = (ROOT / ".dockerignore").read_text().split()
    for word, rest in instructions():
        if word == "COPY" and "--from" not in rest:
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists() and f"!{source}" in ignored


KNOWN = {
    *("image", "build", "init", "shm_size", "environment", "volumes", "command", "healthcheck"),
    *("deploy", "depends_on"),
}


@pytest.fixture
def compose():
    return yaml.safe_load((DOCKER / "compose.yaml").read_text())


def test_the_services_of_compose_know_each_other(compose):
    services = compose["services"]
    assert services.keys() == {"head", "worker"} and services["worker"]["deploy"]["replicas"] == 2
    for service in services.values():
        assert service.keys() <= KNOWN
        build = service["build"]
        assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert build["target"] in stages()
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert {volume.split(":")[0] for volume in service["volumes"]} == compose["volumes"].keys()
    assert services["worker"]["depends_on"] == {"head": {"condition": "service_healthy"}}
    port = re.search(r"--port=(\d+)", services["head"]["command"][-1])[1]
    assert f"--address=head:{port}" in services["worker"]["command"]


def test_the_object_stores_of_compose_fit_into_shared_memory(compose):
    for service in compose["services"].values():
        started = (
            " ".join(service["command"])
            if isinstance(service["command"], list)
            else service["command"]
        )
        store = int(re.search(r"--object-store-memory=(\d+)", started)[1])
        assert store < 0.9 * int(service["shm_size"].removesuffix("gb")) * 2**30


def test_compose_runs_the_default_job_when_all_nodes_are_there(compose):
    *_, command = compose["services"]["head"]["command"]
    assert "wait_for_nodes.py auto 3" in command
    words = shlex.split(command.partition("hybridrl.main ")[2])
    config = load_config(words)
    assert (config.ray.address, config.num_devices, config.devices) == ("auto", 2, "cpu")


@pytest.mark.parametrize("name", ["Dockerfile", "compose.yaml", "rayjob.yaml", "raycluster.yaml"])
def test_our_images_are_called_by_their_version(name):
    tags = re.findall(r"\bhybridrl:([\w.-]+)", (DOCKER / name).read_text())
    assert tags and {*tags} <= {__version__, f"{__version__}-gpu"}
