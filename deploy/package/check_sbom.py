"""Checks a bill of materials: check_sbom.py FILE. Against CycloneDX's schema, and for its links."""

import json
import sys

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

text = open(sys.argv[1]).read()
fault = JsonStrictValidator(SchemaVersion.V1_5).validate_str(text)
if fault:
    raise SystemExit(f"not CycloneDX 1.5: {fault}")
bom = json.loads(text)
components = {component["bom-ref"] for component in bom["components"]} | {"warmroute"}
links = {edge["ref"]: edge["dependsOn"] for edge in bom["dependencies"]}
if set(links) != components or any(set(needs) - components for needs in links.values()):
    raise SystemExit("components and dependencies differ")
for crate in bom["components"]:
    if "licenses" not in crate or not ("hashes" in crate or crate["name"].startswith("warmroute-")):
        raise SystemExit(f"no licence or no checksum: {crate}")
names = {crate["name"] for crate in bom["components"]}
if not {"warmroute-router", "warmroute-shim", "tokio", "zmq"} <= names:
    raise SystemExit("crates are missing")
print(f"{len(components) - 1} components: ok")
