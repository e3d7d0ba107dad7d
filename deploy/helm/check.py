"""Checks the chart with Helm's library: its rendering equals kustomize's, for each switch.

`check.py VALUES COMMAND…` names further values to render, and the command that renders a
kustomization.
"""

import copy
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import helm_python
import yaml

HERE = Path(__file__).parent
CHART = HERE / "warmroute"
KUBERNETES = HERE.parent / "kubernetes"
CARGO = HERE.parent.parent / "Cargo.toml"
KUSTOMIZE = sys.argv[2:]
# The switch of each component, by the component's directory.
SWITCHES = {
    path.name: re.sub("-(.)", lambda match: match[1].upper(), path.name)
    for path in sorted((KUBERNETES / "components").iterdir())
}
# The tag that the base names; the chart's own default is its version.
TAG = {"image": {"tag": "latest"}}
# Changes of values that the schema must refuse.
WRONG = [
    {"routr": {}},
    {"router": {"replica": 2}},
    {"router": {"replicas": "2"}},
    {"indexer": {"replicas": 0}},
    {"worker": {"drainSeconds": "2m"}},
    {"ha": {"enabled": "yes"}},
    {"ha": {"streamReplicas": 2}},
    {"nats": {"url": ""}},
    # A field of the chart's own would stand twice.
    {"router": {"pod": {"volumes": []}}},
    {"worker": {"pod": {"tolerations": []}}},
    {"indexer": {"podAnnotations": {"a": 1}}},
    {"image": {"pullPolicy": "always"}},
]
# Values of a form that their names imply.
FORMS = {
    "imagePullSecrets": [{"name": "registry"}],
    "env": [{"name": "EXTRA", "value": "1"}],
    "volumes": [{"name": "extra", "secret": {"secretName": "extra"}}],
    "volumeMounts": [{"name": "extra", "mountPath": "/etc/extra", "readOnly": True}],
    "podAnnotations": {"example.com/pod": "yes"},
    "serviceAnnotations": {"example.com/service": "yes"},
    "serviceAccountName": "existing",
    "nodeSelector": {"pool": "gpu"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "pod": {"priorityClassName": "high"},
    "pullPolicy": "Always",
    "args": ["--other"],
}


def render(chart, values):
    """Rendered files by name, with the values that an installation would use."""
    chart.validate_schema(values)
    # `render` uses no default of values.yaml by itself.
    return chart.render(chart.merge_values(values), name="warmroute", namespace="warmroute")


def objects(text):
    return [doc for doc in yaml.safe_load_all(text) if doc]


def rendered(chart, values):
    files = render(chart, values)
    return [doc for name in files if name.endswith(".yaml") for doc in objects(files[name])]


def kustomized(components):
    """What kustomize makes of the base with some of the components."""
    with tempfile.TemporaryDirectory(dir=KUBERNETES, prefix="check.") as overlay:
        made = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["../base"],
            "components": [f"../components/{component}" for component in components],
        }
        (Path(overlay) / "kustomization.yaml").write_text(yaml.safe_dump(made))
        command = [*KUSTOMIZE, overlay]
        return objects(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def by_name(docs):
    """Objects by kind and name, without the differences that deploy/README.md lists."""
    found = {}
    text = json.dumps(docs)
    # kustomize gives new content of a ConfigMap a new name, the chart gives it to the Job.
    for doc in docs:
        name = doc["metadata"]["name"]
        if doc["kind"] in ("ConfigMap", "Job"):
            text = text.replace(f'"{name}"', f'"{re.sub("-[a-z0-9]{10}$", "", name)}"')
    for doc in json.loads(text):
        doc.get("spec", {}).pop("ttlSecondsAfterFinished", None)
        template = doc.get("spec", {}).get("template", {})
        annotations = template.get("metadata", {}).pop("annotations", {})
        assert all(name.startswith("checksum/") for name in annotations), annotations
        if settings := doc.get("data", {}).get("router.toml"):
            doc["data"]["router.toml"] = settings.split("[tls]")[0].strip()
        pod = template.get("spec", {})
        pod.get("volumes", []).sort(key=lambda volume: volume["name"])
        for container in pod.get("initContainers", []) + pod.get("containers", []):
            container.get("volumeMounts", []).sort(key=lambda mount: mount["name"])
        key = (doc["kind"], doc["metadata"]["name"])
        assert key not in found, key
        found[key] = doc
    return found


def check_equal(chart, components):
    """The chart and the kustomization have the same objects."""
    switched = {SWITCHES[component]: {"enabled": True} for component in components}
    docs = rendered(chart, {**TAG, **switched})
    ours, theirs = by_name(docs), by_name(kustomized(components))
    assert ours.keys() == theirs.keys(), (components, ours.keys() ^ theirs.keys())
    for key, doc in ours.items():
        if doc != theirs[key]:
            shown = [yaml.safe_dump(found) for found in (doc, theirs[key])]
            sys.exit(f"{components}: {key} differs\nchart:\n{shown[0]}\nkustomize:\n{shown[1]}")
    validate(docs)


def validate(docs):
    command = [sys.executable, KUBERNETES / "check.py", KUBERNETES / "pod-monitor.schema.json"]
    text = yaml.safe_dump_all(docs)
    subprocess.run(command, check=True, text=True, input=text, stdout=subprocess.DEVNULL)


def changes(values, path=()):
    """Each leaf of the values with another value of its type."""
    for name, value in values.items():
        if name in FORMS:
            yield (*path, name), FORMS[name]
        elif isinstance(value, dict) and value and name != "resources":
            yield from changes(value, (*path, name))
        elif path == ("ha",) and name == "streamReplicas":
            yield (*path, name), 5
        elif isinstance(value, bool):
            yield (*path, name), not value
        elif isinstance(value, int):
            yield (*path, name), value + 3
        elif isinstance(value, str):
            yield (*path, name), "1m" if name == "interval" else f"{value}x"
        else:
            yield (*path, name), {"other": {"cpu": "3"}}


def check_values(chart, defaults):
    """Each value has an effect, and is in the schema."""
    base = copy.deepcopy(defaults)
    for switch in SWITCHES.values():
        base[switch]["enabled"] = True
    # An autoscaler owns the number of replicas.
    fixed = copy.deepcopy(base)
    fixed["autoscaling"]["enabled"] = False
    for path, changed in changes(defaults):
        used = fixed if path == ("router", "replicas") else base
        values = copy.deepcopy(used)
        inner = values
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = not inner[path[-1]] if isinstance(changed, bool) else changed
        assert render(chart, values) != render(chart, used), f"{path} has no effect"


def check_forms(chart, defaults):
    """With all values of a form set, the objects are valid, and each container can mount its volumes."""
    values = copy.deepcopy(defaults)
    values["doctor"]["enabled"] = True
    for path, changed in changes(defaults):
        if path[-1] in FORMS:
            inner = values
            for name in path[:-1]:
                inner = inner[name]
            inner[path[-1]] = changed
    docs = rendered(chart, values)
    validate(docs)
    for doc in docs:
        spec = doc.get("spec", {})
        pod = spec.get("jobTemplate", {}).get("spec", spec).get("template", {}).get("spec", {})
        volumes = [volume["name"] for volume in pod.get("volumes", [])]
        assert len(volumes) == len(set(volumes)), volumes
        for container in pod.get("initContainers", []) + pod.get("containers", []):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= set(volumes), (container["name"], mounted)
        for field in ("serviceAccountName", "nodeSelector", "tolerations", "imagePullSecrets"):
            assert not pod or pod[field] == FORMS[field], doc["metadata"]


def check_refusals(chart):
    for wrong in WRONG:
        try:
            chart.validate_schema(wrong)
        except helm_python.HelmValuesError:
            continue
        sys.exit(f"the schema accepts {wrong}")


def check_without_workers(chart):
    values = {switch: {"enabled": True} for switch in SWITCHES.values()}
    docs = rendered(chart, {**values, "worker": {"enabled": False}})
    names = {doc["metadata"]["name"] for doc in docs}
    assert not names & {"worker", "warmroute-shim", "warmroute-drain"}, names


def check_replacement(chart):
    """Another environment replaces each pod, and runs the init Job again."""
    before, after = (
        {(doc["kind"], doc["metadata"]["name"]): doc for doc in rendered(chart, values)}
        for values in ({}, {"nats": {"url": "nats://other:4222"}})
    )
    kept = sorted(kind for kind, name in before.keys() & after.keys() if kind != "Service")
    assert kept == ["ConfigMap"] * 3 + ["Deployment"] * 2 + ["StatefulSet"], kept
    for key, doc in before.items():
        template = doc.get("spec", {}).get("template")
        assert template is None or after.get(key, {}).get("spec", {}).get("template") != template, key


def check_image(chart):
    """Without a tag, all of Warmroute's containers have the chart's version."""
    text = yaml.safe_dump_all(rendered(chart, {}))
    version = re.search('^version = "(.*)"', CARGO.read_text(encoding="utf-8"), re.MULTILINE)[1]
    assert [chart.metadata["version"], chart.metadata["appVersion"]] == [version, version]
    # Router, indexer, shim and init.
    assert text.count(f"image: warmroute:{version}\n") == 4, text


def check_tls(chart):
    """The component adds a table of TLS that the settings lack, and no second one."""
    for settings in ("", "# [tls] below\n", "[tls]\n", "  [tls]\n"):
        values = {"https": {"enabled": True}, "router": {"settings": settings}}
        maps = [doc["data"] for doc in rendered(chart, values) if doc["kind"] == "ConfigMap"]
        text = next(data["router.toml"] for data in maps if "router.toml" in data)
        assert len(re.findall(r"(?m)^\s*\[tls\]", text)) == 1, text


def main():
    findings = helm_python.lint(CHART, strict=True)
    assert not findings["errors"], findings
    with helm_python.Chart.load(CHART) as chart:
        check_equal(chart, [])
        for component in SWITCHES:
            check_equal(chart, [component])
        # kustomize takes `replicas` of `autoscaling` away after `ha` has set it.
        check_equal(chart, sorted(SWITCHES, key=lambda component: component == "autoscaling"))
        validate(rendered(chart, yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))))
        check_values(chart, chart.values)
        check_forms(chart, chart.values)
        check_refusals(chart)
        check_without_workers(chart)
        check_replacement(chart)
        check_image(chart)
        check_tls(chart)


main()
