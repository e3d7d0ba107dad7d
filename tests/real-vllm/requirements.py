"""Prints what a vLLM wheel requires, with PyPI's torch instead of the one that the wheel names.

usage: requirements.py TORCH_VERSION WHEEL
"""

import re
import sys
import zipfile


def main() -> None:
    torch_version, wheel = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name).decode()
    print(f"torch=={torch_version}\ntorchvision\ntorchaudio")
    for line in metadata.splitlines():
        requirement = line.removeprefix("Requires-Dist: ")
        if requirement == line or "extra ==" in requirement:
            continue
        # torchcodec goes with the rest of them: only video needs it.
        if not re.match("torch", requirement):
            print(requirement)


main()
