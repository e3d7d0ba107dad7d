"""Checks rendered manifests on stdin: the API's schemas of Kubernetes, and what must fit together.

`check.py FILE` names the schema of PodMonitor.
"""

import json
import sys

import jsonschema
import kubernetes_validate
import yaml

# With sidecars (`restartPolicy` of init containers) by default.
VERSION = "1.29"


def template(doc):
    """The template of the pods that an object makes."""
    spec = doc.get("spec", {})
    return spec.get("jobTemplate", {}).get("spec", spec).get("template", {})


def pod(doc):
    return template(doc).get("spec", {})


def containers(doc):
    return pod(doc).get("initContainers", []) + pod(doc).get("containers", [])


def check_readiness(doc):
    """Pods are ready by their own probes. A gate is named by the controller that sets it."""
    # One that no controller sets keeps each pod out of service.
    assert "readinessGates" not in pod(doc), doc["metadata"]
    if doc["kind"] in ("Deployment", "StatefulSet"):
        for container in containers(doc):
            assert "readinessProbe" in container, container["name"]
    ports = doc.get("spec", {}).get("ports", [])
    found = doc["metadata"].get("annotations", {})
    checked = found.get("service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol")
    if checked and doc["spec"].get("type") == "LoadBalancer":
        assert [port["name"] for port in ports] == [checked], doc["metadata"]


def check_autoscaling(docs):
    """An autoscaler and a manifest must not both set a number of replicas."""
    scaled = {
        (target["kind"], target["name"])
        for doc in docs
        if doc["kind"] == "HorizontalPodAutoscaler"
        for target in [doc["spec"]["scaleTargetRef"]]
    }
    for doc in docs:
        if (doc["kind"], doc["metadata"]["name"]) in scaled:
            assert "replicas" not in doc["spec"], doc["metadata"]


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        pod_monitor = json.load(file)
    docs = [doc for doc in yaml.safe_load_all(sys.stdin) if doc]
    for doc in docs:
        if doc["apiVersion"].startswith("monitoring.coreos.com/"):
            jsonschema.validate(doc, pod_monitor)
        else:
            kubernetes_validate.validate(doc, VERSION, strict=True)
    check_autoscaling(docs)
    named = {(doc["kind"], doc["metadata"]["name"]) for doc in docs}
    by_labels = [template(doc)["metadata"]["labels"] for doc in docs if template(doc)]
    for doc in docs:
        spec = doc.get("spec", {})
        check_readiness(doc)
        # A selector without a pod is a typing error.
        selector = spec.get("selector") or spec.get("podSelector") or {}
        wanted = selector.get("matchLabels", selector if doc["kind"] == "Service" else {})
        if wanted:
            assert any(wanted.items() <= labels.items() for labels in by_labels), doc
        if "serviceName" in spec:
            assert ("Service", spec["serviceName"]) in named, doc["metadata"]
        for container in containers(doc):
            ports = {port["name"] for port in container.get("ports", [])}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                port = container.get(probe, {}).get("httpGet", {}).get("port")
                assert port is None or port in ports, (container["name"], probe)
        for volume in pod(doc).get("volumes", []):
            config = volume.get("configMap", {}).get("name")
            outside = config in (None, "warmroute-tls")
            assert outside or ("ConfigMap", config) in named, volume
    for kind in sys.argv[2:]:
        assert any(found == kind for found, _ in named), f"no {kind}"
    print(f"{len(docs)} objects")


main()
