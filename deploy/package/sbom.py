"""Writes the CycloneDX bill of materials of the binaries: sbom.py TARGET NAMES OUT.

NAMES are the packages of the binaries, comma-separated. A component is a crate that one of them is
built with; crates that only tests or build scripts use are left out.
"""

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def cargo_metadata(target):
    command = ["cargo", "metadata", "--locked", "--format-version=1", "--filter-platform", target]
    return json.loads(subprocess.run(command, check=True, capture_output=True, cwd=ROOT).stdout)


def checksums():
    """The SHA-256 of each crate of the registry, by name and version."""
    package = re.compile(r'name = "(.*)"\nversion = "(.*)"\nsource = .*\nchecksum = "(.*)"')
    lock = (ROOT / "Cargo.lock").read_text()
    return {(name, version): digest for name, version, digest in package.findall(lock)}


def purl(package):
    return f"pkg:cargo/{package['name']}@{package['version']}"


def component(package, digests):
    made = {
        "type": "library",
        "bom-ref": purl(package),
        "name": package["name"],
        "version": package["version"],
        "purl": purl(package),
    }
    if package["license"]:
        # Cargo's older form of OR.
        expression = re.sub(r"\s*/\s*", " OR ", package["license"])
        made["licenses"] = [{"expression": expression}]
    digest = digests.get((package["name"], package["version"]))
    if digest:
        made["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return made


def write(target, names, out):
    metadata = cargo_metadata(target)
    packages = {package["id"]: package for package in metadata["packages"]}
    built_with = {
        node["id"]: sorted(
            dependency["pkg"]
            for dependency in node["deps"]
            if any(kind["kind"] is None for kind in dependency["dep_kinds"])
        )
        for node in metadata["resolve"]["nodes"]
    }
    by_name = {packages[member]["name"]: member for member in metadata["workspace_members"]}
    roots = [by_name[name] for name in names.split(",")]
    found, left = set(), list(roots)
    while left:
        package = left.pop()
        if package not in found:
            found.add(package)
            left += built_with[package]
    found = sorted(found)
    digests = checksums()
    version = packages[roots[0]]["version"]
    product = {"type": "application", "bom-ref": "warmroute", "name": "warmroute"}
    edges = [("warmroute", [purl(packages[root]) for root in roots])]
    edges += [
        (purl(packages[package]), [purl(packages[one]) for one in built_with[package]])
        for package in found
    ]
    built = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    lock = (ROOT / "Cargo.lock").read_text()
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        # The same lock file and packages have the same number.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, lock + target + names)}",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(built)),
            "component": {**product, "version": version},
        },
        "components": [component(packages[package], digests) for package in found],
        "dependencies": [
            {"ref": package, "dependsOn": sorted(set(needs))} for package, needs in edges
        ],
    }
    Path(out).write_text(json.dumps(bom, indent=1) + "\n")


write(*sys.argv[1:])
