"""Records the names of the variables that NCCL and PyTorch read, with which `fgcli doctor` compares the environment.

NCCL's names are those that occur in its library, in each wheel of a folder: more than its manual describes, because a
variable that is not described is not a mistake. PyTorch's names are those in its own headers and Python files. Run
`make oracles`, which downloads the wheel; it needs the package index.

Usage:
    python scripts/oracles/nccl_variables.py FOLDER        writes forgather/doctor/nccl_variables.json
"""

import json
import re
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import torch

RECORD = Path(__file__).parents[2] / "forgather/doctor/nccl_variables.json"
NAME = rb"(?<![A-Za-z0-9_])NCCL_[A-Z0-9_]+(?![A-Za-z0-9_])"
OF_TORCH = rb"(?<![A-Za-z0-9_])(?:TORCH_NCCL|TORCH_FR|TORCH_GLOO|GLOO)_[A-Z0-9_]+(?![A-Za-z0-9_])"
# PyTorch reads these, too, and warns that their names have changed.
FORMER = ["NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_DESYNC_DEBUG"]


def of_wheel(file):
    with zipfile.ZipFile(file) as wheel:
        library = next(name for name in wheel.namelist() if "libnccl.so" in name)
        return {found.decode() for found in re.findall(NAME, wheel.read(library))}


def of_torch():
    root = Path(torch.__file__).parent
    files = [*root.glob("include/torch/csrc/distributed/c10d/**/*.hpp"), *root.glob("distributed/**/*.py")]
    files += root.glob("lib/libtorch_*.so")
    return {found.decode() for file in files for found in re.findall(OF_TORCH, file.read_bytes())}


if __name__ == "__main__":
    wheels = sorted(Path(sys.argv[1]).glob("nvidia_nccl_*.whl"))
    names = set().union(*map(of_wheel, wheels)) | of_torch() | set(FORMER)
    sources = [f"{file.name.split('-')[0]} {file.name.split('-')[1]}" for file in wheels] + [
        f"torch {version('torch')}"
    ]
    record = {"sources": sources, "names": sorted(names)}
    RECORD.write_text(json.dumps(record, indent=0) + "\n", encoding="utf-8")
    print(f"{len(names)} names of {', '.join(sources)} in {RECORD}")
