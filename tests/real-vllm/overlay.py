"""Makes a directory for PYTHONPATH with the Python of one vLLM wheel over the libraries of an installed CPU build.

usage: overlay.py WHEEL DIRECTORY, with the interpreter that has the CPU build
"""

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    wheel, out = Path(sys.argv[1]), Path(sys.argv[2])
    version = wheel.name.split("-")[1]
    # A version that ends in +cpu makes vLLM choose its CPU platform.
    metadata, local = f"vllm-{version}.dist-info/", f"{version}+cpu"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(metadata):
                text = archive.read(name).replace(f"Version: {version}\n".encode(), f"Version: {local}\n".encode(), 1)
                to = out / name.replace(metadata, f"vllm-{local}.dist-info/")
                to.parent.mkdir(parents=True, exist_ok=True)
                to.write_bytes(text)
            elif not name.endswith(".so"):
                archive.extract(name, out)
    installed = Path(find_spec("vllm").origin).parent
    for library in installed.glob("*.so"):
        (out / "vllm" / library.name).symlink_to(library)
    print(f"vLLM {local} in {out}")


main()
