"""Image, compose file and manifests are valid for their schemas, and match options and routes of the server."""

import ast
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from nestrec.base.config_overrides import apply_overrides, parse_overrides
from nestrec.cli.app import app
from nestrec.serving.http.serve_config import ServeConfig
from nestrec.serving.security.security_config import check_exposure

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
PROXIES = DEPLOY / "proxies"
DOCKERFILE = DEPLOY / "Dockerfile"
SERVER = {"app.kubernetes.io/name": "nestrec", "app.kubernetes.io/component": "server"}
ROUTER = {**SERVER, "app.kubernetes.io/component": "router"}


def serve_options(words):
    """Return the configuration of a command line of `nestrec serve`; an unknown option is an error."""
    assert words[0] == "serve"
    assert words[1] == "--model"
    cfg = apply_overrides(ServeConfig(), parse_overrides(words[3:]))
    check_exposure(cfg.host, cfg.security, is_insecure=cfg.insecure, health_port=cfg.health_port)
    return cfg


# The image.


def stages():
    """Return the instructions of each stage by its name, after those of the stage that it is based on."""
    found = {}
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    for line in text.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            found[match[2]] = current = [*found.get(match[1], [line])]
        elif line and not line.startswith("#") and found:
            current.append(line)
    return found


def test_dockerfiles_pass_linter():
    hadolint = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_image_is_unprivileged_with_health_check_and_keys(target):
    lines = stages()[target]
    assert [line for line in lines if line.startswith("USER ")] == ["USER 10001:10001"]
    copied_in = [line for line in lines if line.startswith(("COPY", "ADD"))]
    assert copied_in == ["COPY requirements.txt /constraints.txt"], "the code comes by the wheel alone, last"
    assert "/wheels/*.whl" in [line for line in lines if line.startswith("RUN")][-1]
    checks = [line for line in lines if line.startswith("HEALTHCHECK")]
    assert len(checks) == 1
    words = json.loads(checks[0].partition("CMD ")[2])
    cfg = serve_options(json.loads(next(line for line in lines if line.startswith("CMD ")).removeprefix("CMD ")))
    assert words == ["nestrec", "health", f"127.0.0.1:{cfg.health_port}"]
    assert cfg.security.api_keys
    assert not cfg.insecure


def test_packages_of_the_image_are_those_of_the_project():
    packages = subprocess.run(
        [sys.executable, DEPLOY / "list_packages.py", DEPLOY.parent / "pyproject.toml", "serve,redis,otel"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.split()
    for name in ("torch>=2.11", "uvicorn>=0.54,<0.55", "redis>=8,<9", "opentelemetry-sdk>=1.30"):
        assert name in packages
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    text = DOCKERFILE.read_text()
    copied = {word for line in re.findall(r"^COPY ([^-].*) \S+$", text, re.M) for word in line.split()}
    mounted = set(re.findall(r"type=bind,source=([^,]+)", text))
    assert {"nestrec", "pyproject.toml"} < copied
    assert "deploy/list_packages.py" in mounted
    for source in copied | mounted:
        assert f"!{source}" in ignored, f"{source} would not reach the builder"


def test_health_check_fails_without_server():
    from nestrec.serving.fleet.readiness_probes import free_port

    done = CliRunner().invoke(app, ["health", f"127.0.0.1:{free_port()}"])
    assert done.exit_code != 0
    assert CliRunner().invoke(app, ["health", "somewhere"]).exit_code != 0


# Compose.


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_file_is_valid(compose):
    from compose_spec.models import ComposeSpecification, Service  # half a second of every worker

    ComposeSpecification.model_validate(compose)
    with pytest.raises(ValueError, match="stop_grace_period"):
        ComposeSpecification.model_validate({**compose, "services": {"a": {"stop_grace_period": ["x"]}}})
    known = {field.alias or name for name, field in Service.model_fields.items()}
    assert set(compose["services"]) == {"nestrec", "redis", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert set(service) <= known, name
        assert set(service.get("secrets", [])) <= set(compose["secrets"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert ":" in service["image"], "a version"
        assert not service["image"].endswith(":latest")
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("./"):
                assert (DEPLOY / source).exists(), volume
            elif "/" not in source:
                assert source in compose["volumes"]


def test_compose_server_has_keys_and_history_store(compose):
    cfg = serve_options(compose["services"]["nestrec"]["command"])
    assert cfg.security.api_keys == "/run/secrets/nestrec_keys"
    assert cfg.history_store.url == "redis://redis:6379/0"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": [f"nestrec:{cfg.health_port}"]}]
    assert "nestrec" in cfg.allowed_hosts
    assert scraped["authorization"]["credentials_file"] == "/run/secrets/prometheus_key"


# Kubernetes.


@pytest.fixture(scope="module")
def manifests():
    folder = DEPLOY / "kubernetes"
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"]
    files = [folder / name for name in listed if (folder / name).is_file()]
    return [document for file in files for document in yaml.safe_load_all(file.read_text())]


def one(manifests, kind, name="nestrec"):
    (found,) = [m for m in manifests if m["kind"] == kind and m["metadata"]["name"] == name]
    return found


def test_kubernetes_manifests_pass_their_schemas(manifests):
    for manifest in manifests:
        kubernetes_validate.validate(manifest, "1.32", strict=True)
    broken = {**one(manifests, "HorizontalPodAutoscaler"), "specc": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.32", strict=True)
    assert sorted({m["kind"] for m in manifests}) == [
        "Deployment",
        "HorizontalPodAutoscaler",
        "Namespace",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    ]


def test_kubernetes_pods_match_selectors_and_are_unprivileged(manifests):
    pods = {
        name: one(manifests, kind, name)["spec"]["template"]
        for kind, name in (("StatefulSet", "nestrec"), ("Deployment", "nestrec-router"))
    }
    assert pods["nestrec"]["metadata"]["labels"] == SERVER
    assert pods["nestrec-router"]["metadata"]["labels"] == ROUTER
    for pod in pods.values():
        assert pod["spec"]["securityContext"]["runAsNonRoot"]
        for container in pod["spec"]["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert {"readinessProbe", "livenessProbe", "resources"} <= set(container)
            mounted, volumes = (
                {v["name"] for v in container["volumeMounts"]},
                {v["name"] for v in pod["spec"]["volumes"]},
            )
            assert mounted == volumes
    assert one(manifests, "Service", "nestrec-slots")["spec"]["selector"] == SERVER
    assert one(manifests, "Service")["spec"]["selector"] == ROUTER
    assert one(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"] == SERVER
    assert one(manifests, "PodDisruptionBudget", "nestrec-router")["spec"]["selector"]["matchLabels"] == ROUTER
    assert one(manifests, "NetworkPolicy", "nestrec-server")["spec"]["podSelector"]["matchLabels"] == SERVER


def test_kubernetes_server_options_and_grace_period(manifests):
    pod = one(manifests, "StatefulSet")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    cfg = serve_options(container["args"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (ports["health"], ports["http"]) == (cfg.health_port, cfg.port)
    assert cfg.security.api_keys.startswith("/keys/")
    assert cfg.security.admin_on_health_port
    assert pod["terminationGracePeriodSeconds"] > cfg.service.drain_timeout_s + 5
    assert cfg.history_store.url == f"env:{container['env'][0]['name']}"


def test_users_are_hashed_over_as_many_slots_as_there_may_be(manifests):
    text = (DEPLOY / "kubernetes" / "nginx.conf").read_text()
    named, most = one(manifests, "StatefulSet"), one(manifests, "HorizontalPodAutoscaler")["spec"]["maxReplicas"]
    slots = re.findall(r"server (\S+):8000 resolve ", text)
    suffix = f"{named['spec']['serviceName']}.{named['metadata']['namespace']}.svc.cluster.local"
    assert slots == [f"{named['metadata']['name']}-{slot}.{suffix}" for slot in range(most)]
    assert "hash $nestrec_key consistent;" in text


def test_cluster_shares_routes_of_nginx_template(manifests):
    """kustomize makes one ConfigMap of both folders, which is mounted in place of the configuration of nginx."""
    kubernetes = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert "../proxies/nginx" in kubernetes["resources"]
    template = yaml.safe_load((PROXIES / "nginx" / "kustomization.yaml").read_text())
    (shared,) = template["configMapGenerator"]
    (own,) = kubernetes["configMapGenerator"]
    pod = one(manifests, "Deployment", "nestrec-router")["spec"]["template"]["spec"]
    assert {"name": "config", "configMap": {"name": own["name"]}} in pod["volumes"]
    assert (own["name"], own["behavior"]) == (shared["name"], "merge")
    included = set(re.findall(r"include (\S+);", (DEPLOY / "kubernetes" / "nginx.conf").read_text()))
    assert included == set(shared["files"])
    assert included == set(re.findall(r"include (\S+);", (PROXIES / "nginx" / "nginx.conf").read_text()))


def test_instances_behind_proxies_start_with_real_options():
    lines = re.findall(r"nestrec (serve --model .*)", (PROXIES / "README.md").read_text())
    assert len(lines) == 4
    for slot, line in enumerate(lines):
        cfg = serve_options(line.replace("%i", "1").split())
        assert (cfg.port, cfg.health_port) == (8101 + slot % 3, 8201 + slot % 3)
        assert cfg.security.admin_on_health_port
        assert cfg.limits.max_connections_per_address == cfg.limits.max_connections


def test_kubernetes_autoscaler_metrics_exist(manifests):
    asked = {
        metric["pods"]["metric"]["name"] for metric in one(manifests, "HorizontalPodAutoscaler")["spec"]["metrics"]
    }
    rules = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert asked == {rule["name"]["as"] for rule in rules}


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.py")), ids=lambda path: path.name)
def test_deploy_scripts_import_existing_names(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nestrec"):
            module = importlib.import_module(str(node.module))
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
