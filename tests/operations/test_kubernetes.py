"""The manifests for Kubernetes: valid by its schemas, and true to the server."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from kvboost.serve.settings import parse_keys
from support.fake_engine import ReadsForever
from support.live_server import live_server
from support.serve_command import serve_options

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
VERSION = "1.30"


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


@pytest.fixture(scope="module")
def kustomization() -> dict[str, Any]:
    (found,) = load("kustomization.yaml")
    return found


def test_kustomize_renders_valid_manifests(kustomization) -> None:
    """With kubectl what it renders; without it the files, where labels are missing."""
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which holds kustomize, is not installed")
    done = subprocess.run(["kubectl", "kustomize", FOLDER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    assert len(rendered) == 7
    for manifest in rendered:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    by_kind = {manifest["kind"]: manifest for manifest in rendered}
    pod = by_kind["StatefulSet"]["spec"]["template"]
    selector = by_kind["StatefulSet"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= pod["metadata"]["labels"].items()
    assert by_kind["Service"]["spec"]["selector"] == selector
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "registry.example/kvboost:1.0.0"
    names = {manifest["metadata"]["name"] for manifest in rendered}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert volumes["config"]["configMap"]["name"] in names
    assert volumes["keys"]["secret"]["secretName"] in names


def test_every_manifest_is_listed_and_valid(kustomization) -> None:
    listed = set(kustomization["resources"]) | {"kustomization.yaml"}
    assert {path.name for path in FOLDER.glob("*.yaml")} == listed
    selector = {"matchLabels": {"app": "kvboost"}}
    for name in kustomization["resources"]:
        for manifest in load(name):
            if manifest["kind"] == "StatefulSet":  # kustomize adds selectors
                manifest["spec"]["selector"] = selector
                manifest["spec"]["template"]["metadata"]["labels"] = selector["matchLabels"]
            kubernetes_validate.validate(manifest, VERSION, strict=True)


def test_the_server_understands_its_configuration() -> None:
    assert serve_options("--config", str(FOLDER / "serve.toml"))["max_running"] == 16
    keys = parse_keys((FOLDER / "keys.txt").read_text().splitlines(), "keys.txt")
    assert [key.is_admin for key in keys] == [True, False]


def test_a_pod_that_reads_its_documents_gets_no_requests_and_is_not_restarted() -> None:
    (stateful,) = load("statefulset.yaml")
    (container,) = stateful["spec"]["template"]["spec"]["containers"]
    with live_server(ReadsForever(), warm=(("handbook.md", "A lamp."),)) as server:
        status = {
            probe: httpx.get(server.url + container[probe]["httpGet"]["path"]).status_code
            for probe in ("startupProbe", "livenessProbe", "readinessProbe")
        }
    assert status == {"startupProbe": 200, "livenessProbe": 200, "readinessProbe": 503}


def test_the_pod_is_restricted_and_its_mounts_are_where_the_configuration_says() -> None:
    (stateful,) = load("statefulset.yaml")
    pod = stateful["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    paths = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert f"{paths['config']}/serve.toml" in container["args"]
    assert f'api-keys = "{paths["keys"]}/keys.txt"' in (FOLDER / "serve.toml").read_text()
    assert paths["data"] == "/data"  # KVBOOST_HOME and KVBOOST_CACHE_DIR of the image
