"""``python -m jqconv``: what is installed, what was found, and whether it works.

The first thing to run, and to paste into a report, when something is wrong.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import platform
import sys
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import numpy as np

import jqconv
from jqconv import _choice, _native, _policy


def main(argv: list[str] | None = None) -> int:
    """Print the report; return 0 if the self-test passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m jqconv", description=__doc__.splitlines()[0])
    parser.add_argument("--store", action="store_true", help="list the entries of the store")
    args = parser.parse_args(argv)
    _section("installed", _installed)
    _section("device", _device)
    _section("handlers", _handlers)
    _section("settings", _settings)
    _section("store", _store_listing if args.store else _store)
    return _self_test()


def _section(title: str, lines: Callable[[], list[tuple[str, Any]]]) -> None:
    """Print one section; what fails says so and the rest still comes."""
    try:
        found = lines()
    except Exception as error:
        found = [("failed", f"{type(error).__name__}: {error}")]
    print(f"{title}:")
    for name, value in found:
        print(f"  {name:18s} {value}")


def _installed() -> list[tuple[str, Any]]:
    packages = ["jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "numpy"]
    found = [
        ("jqconv", f"{jqconv.__version__} in {pathlib.Path(jqconv.__file__).parent}"),
        ("python", platform.python_version()),
    ]
    for package in packages:
        try:
            found.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return found


def _device() -> list[tuple[str, Any]]:
    devices = jax.local_devices()
    gpu = _choice.gpu_here()
    found = [("default", f"{devices[0].device_kind} ({jax.default_backend()}, {len(devices)})")]
    if gpu is None:
        return [*found, ("NVIDIA GPU", "none that JAX can use: convolutions run as lax operations")]
    capability = getattr(gpu, "compute_capability", "?")
    platform_version = " ".join(gpu.client.platform_version.split())
    return [
        *found,
        ("NVIDIA GPU", f"{gpu.device_kind}, compute capability {capability}"),
        ("CUDA", platform_version),
    ]


def _handlers() -> list[tuple[str, Any]]:
    if not _native.is_built():
        return [("extension", f"none: GPUs run lax operations; {_native.why_missing()}")]
    if _choice.gpu_here() is None:
        return [("extension", "built; cuDNN is loaded when a GPU needs it")]
    versions = _native.versions()
    return [
        ("extension", f"built, XLA FFI {versions['ffi']}"),
        ("cuDNN", f"{versions['cudnn']} ({versions['cudnn_path']})"),
        ("cudnn-frontend", versions["frontend"]),
        ("CUDA runtime", versions["cudart_path"]),
    ]


def _settings() -> list[tuple[str, Any]]:
    now = _policy.settings()
    return [(name, repr(getattr(now, name))) for name in now.__dataclass_fields__]


def _store() -> list[tuple[str, Any]]:
    store = _policy.store()
    if store is None:
        return [("path", "switched off (cache_dir is empty)")]
    entries = jqconv.cache.entries()
    size = sum(entry.size for entry in entries)
    kinds = collections.Counter((entry.device, entry.kind) for entry in entries)
    obstacle = store.obstacle()
    note = "" if obstacle is None else f", which cannot be written: {obstacle}"
    held = f"{len(entries)} entries, {size / 2**20:.1f} MiB"
    found = [("path", f"{store.root}{note}"), ("holds", held)]
    return found + [(kind, f"{n} for {device}") for (device, kind), n in sorted(kinds.items())]


def _store_listing() -> list[tuple[str, Any]]:
    found = _store()
    for entry in jqconv.cache.entries():
        us = "" if entry.microseconds is None else f"{entry.microseconds:.1f} us  "
        found.append((entry.kind, f"{us}{entry.algorithm}  {entry.spec}  {entry.device}"))
    return found


def _self_test() -> int:
    """Run one fused convolution on the default device and compare it with NumPy."""
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (2, 8, 8, 32)).astype(np.int8)
    w = rng.integers(-128, 128, (1, 1, 32, 64)).astype(np.int8)
    want = np.clip(np.round(np.maximum(x.astype(int) @ w[0, 0].astype(int), 0) / 1024), 0, 127)
    print("self-test:")
    try:
        start = time.perf_counter()
        with jqconv.config.using(search="heuristic", cache_dir=""):
            got = jqconv.qconv2d(x, w, np.float32(1 / 1024), activation="relu")
            wrong = int(np.sum(np.asarray(got) != want))
        seconds = time.perf_counter() - start
    except Exception as error:
        print(f"  FAILED: {type(error).__name__}: {error}")
        return 1
    if wrong:
        print(f"  FAILED: {wrong} of {want.size} codes are wrong")
        return 1
    print(f"  passed on {jax.devices()[0].device_kind} in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
