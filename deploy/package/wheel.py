"""Writes the Python wheel: wheel.py VERSION BINARIES LIBRARY SBOM OUT. Prints its path.

BINARIES is a directory with nothing else in it. The platform tag is computed from the symbols that
the binaries need. Why this is no build backend: docs/adr/0019-packages.md.
"""

import base64
import hashlib
import os
import platform
import sys
import time
import zipfile
from pathlib import Path

from elf import glibc_minor

ROOT = Path(__file__).resolve().parents[2]
PUBLISHER = ROOT / "publisher-shim/publisher"


def metadata(version):
    readme = (ROOT / "README.md").read_text()
    return (
        f"Metadata-Version: 2.4\nName: warmroute\nVersion: {version}\n"
        "Summary: KV-cache-aware request router for fleets of vLLM servers\n"
        "License-Expression: Apache-2.0\nLicense-File: LICENSE\n"
        "Classifier: Operating System :: POSIX :: Linux\n"
        "Description-Content-Type: text/markdown\n\n" + readme
    ).encode()


def write(version, binaries, library, sbom, out):
    binaries = sorted(Path(binaries).iterdir())
    minor = max(glibc_minor(binary) for binary in [*binaries, library])
    tag = f"py3-none-manylinux_2_{minor}_{platform.machine()}"
    info = f"warmroute-{version}.dist-info"
    wheel = f"Wheel-Version: 1.0\nGenerator: warmroute\nRoot-Is-Purelib: false\nTag: {tag}\n"
    files = [
        (f"warmroute-{version}.data/scripts/{binary.name}", 0o755, binary.read_bytes())
        for binary in binaries
    ]
    files += [
        ("warmroute/__init__.py", 0o644, (PUBLISHER / "python/warmroute/__init__.py").read_bytes()),
        ("warmroute/libwarmroute_publisher.so", 0o755, Path(library).read_bytes()),
        (
            "warmroute/warmroute_publisher.h",
            0o644,
            (PUBLISHER / "include/warmroute_publisher.h").read_bytes(),
        ),
        (f"{info}/METADATA", 0o644, metadata(version)),
        (f"{info}/WHEEL", 0o644, wheel.encode()),
        (f"{info}/licenses/LICENSE", 0o644, (ROOT / "LICENSE").read_bytes()),
        (f"{info}/sboms/warmroute.cdx.json", 0o644, Path(sbom).read_bytes()),
    ]
    record = ""
    for name, _, content in files:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
        record += f"{name},sha256={digest.decode().rstrip('=')},{len(content)}\n"
    files.append((f"{info}/RECORD", 0o644, f"{record}{info}/RECORD,,\n".encode()))

    path = Path(out) / f"warmroute-{version}-{tag}.whl"
    # The archive's format has no time before 1980.
    built = max(int(os.environ.get("SOURCE_DATE_EPOCH", "0")), 315532800)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, mode, content in files:
            entry = zipfile.ZipInfo(name, time.gmtime(built)[:6])
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            archive.writestr(entry, content)
    print(path)


write(*sys.argv[1:])
