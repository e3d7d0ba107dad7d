"""What binaries need from the system, read with readelf."""

import re
import subprocess

# The newest libstdc++ symbols that a system with this glibc has: manylinux's policies.
GLIBCXX = [(24, 28), (28, 31), (29, 34), (30, 35), (33, 39)]

# The libraries that every manylinux system has.
ALLOWED = re.compile(
    r"(libc\.so\.6|libm\.so\.6|libdl\.so\.2|librt\.so\.1|libpthread\.so\.0"
    r"|libgcc_s\.so\.1|libstdc\+\+\.so\.6|ld-linux[-_a-z0-9]*\.so\.[12])"
)


def readelf(option, binary):
    command = ["readelf", "--wide", option, binary]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def glibc_minor(binary):
    """The minor version of the oldest glibc 2 that the binary runs with."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("--dynamic", binary))
    foreign = [name for name in needed if not ALLOWED.fullmatch(name)]
    if foreign:
        raise SystemExit(f"{binary} needs {foreign}, which not every system has")
    versions = readelf("--version-info", binary)
    minors = [int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", versions)]
    for symbols in map(int, re.findall(r"Name: GLIBCXX_3\.4\.(\d+)", versions)):
        minors.append(next(glibc for newest, glibc in GLIBCXX if symbols <= newest))
    # manylinux2014, which no system is older than.
    return max(minors + [17])
