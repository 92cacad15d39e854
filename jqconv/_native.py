"""The native extension: found, registered with JAX, and asked.

Importing this never needs a GPU or cuDNN. The handlers are registered for CUDA at import, which
JAX only queues until a CUDA backend exists; cuDNN itself is loaded when something first needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import pathlib
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax

#: Where the pip packages that JAX's CUDA extras install keep each library, newest first.
_WHEEL_LIBRARIES = {
    "cudnn": ("cudnn/lib/libcudnn.so.9",),
    "cudart": ("cu13/lib/libcudart.so.13", "cuda_runtime/lib/libcudart.so.12"),
}


def _load() -> ModuleType | None:
    """Import the extension; None where the package was built without it (JQCONV_CUDA=OFF)."""
    if importlib.util.find_spec("jqconv._ext") is None:
        return None
    ext = importlib.import_module("jqconv._ext")
    ext.configure(**{name: _wheel_library(name) for name in _WHEEL_LIBRARIES})
    registrations = ext.registrations()
    # Types before targets: a handler's registration refers to the type of its state.
    for name, registration in registrations["types"].items():
        jax.ffi.register_ffi_type(name, registration, platform="CUDA")
    for name, handler in registrations["targets"].items():
        jax.ffi.register_ffi_target(name, handler, platform="CUDA")
    return ext


def _wheel_library(name: str) -> str:
    """Return the path of a library in the nvidia packages, or ``""``."""
    package = importlib.util.find_spec("nvidia")
    roots = [] if package is None else list(package.submodule_search_locations or [])
    for candidate in _WHEEL_LIBRARIES[name]:
        for root in roots:
            path = pathlib.Path(root) / candidate
            if path.exists():
                return str(path)
    return ""


_ext = _load()


def is_built() -> bool:
    """Whether the package was built with its CUDA handlers."""
    return _ext is not None


def extension() -> Any:
    """Return the extension module, or say how to get it."""
    if _ext is None:
        raise RuntimeError(why_missing())
    return _ext


def why_missing() -> str:
    """Say where a package without the extension lies, and what that can mean."""
    return (
        f"the jqconv in {pathlib.Path(__file__).parent} has no CUDA handlers: it was built with "
        "JQCONV_CUDA=OFF, or is a checkout's own sources, which Python found before what is "
        "installed; install it without that option, or start Python in another directory"
    )


@functools.cache
def warn_missing() -> None:
    """Warn, once, that a program for a GPU is made without the handlers."""
    warnings.warn(
        f"convolutions on a GPU run as lax operations, unfused: {why_missing()}",
        RuntimeWarning,
        stacklevel=2,
    )


def resolve(
    spec: str, algorithm: str, device: int, workspace_limit: int, deterministic: bool = False
) -> tuple[str, str]:
    """Build the plan for `spec` on GPU `device` and return its full text form.

    Parameters
    ----------
    spec : str
        Text form of a ConvSpec.
    algorithm : str
        Text form of the algorithm wanted, or ``""`` for cuDNN's heuristic.
    device : int
        The GPU's ordinal in this process.
    workspace_limit : int
        Most bytes of workspace that a plan may need.
    deterministic : bool, default False
        Whether the heuristic may only choose plans that return the same bits every time.

    Returns
    -------
    tuple of str
        The algorithm's text form and ``""``, or ``""`` and why no plan fits.

    Raises
    ------
    ValueError
        If a text is malformed.
    RuntimeError
        If there is no cuDNN or no such device.
    """
    found: tuple[str, str] = extension().resolve(
        spec, algorithm, device, workspace_limit, deterministic
    )
    return found


def propose(spec: str, device: int) -> list[str]:
    """Return the text forms of what cuDNN proposes for `spec` on GPU `device`, best guess first.

    Not all of them build. There are none where cuDNN refuses the convolution itself.
    """
    found: list[str] = extension().propose(spec, device)
    return found


def vary(spec: str, algorithm: str, device: int) -> list[str]:
    """Return the text forms of what differs from `algorithm` in the value of one knob.

    Not all of them build.
    """
    found: list[str] = extension().vary(spec, algorithm, device)
    return found


def serialize(spec: str, algorithm: str, device: int) -> bytes:
    """Return the plan of `algorithm`, which was resolved, in the form in which it is stored."""
    found: bytes = extension().serialize(spec, algorithm, device)
    return found


def forget(spec: str, algorithm: str, device: int) -> None:
    """Drop a plan from the cache; what holds it keeps it."""
    extension().forget(spec, algorithm, device)


@contextlib.contextmanager
def room_for(plans: int) -> Iterator[None]:
    """Let the cache hold that many plans more than it does otherwise, for the scope."""
    extension().cache_reserve(plans)
    try:
        yield
    finally:
        extension().cache_reserve(-plans)


def set_store(
    choice: Callable[[int, str], tuple[str | None, bool]],
    plan: Callable[[int, str, str], bytes | None],
) -> None:
    """Tell the handlers whom to ask for what earlier processes stored.

    Parameters
    ----------
    choice : callable
        From a GPU's ordinal and a spec to the text of the algorithm chosen for it, or None, and
        whether another must return the same bits every time.
    plan : callable
        From a GPU's ordinal, a spec and an algorithm to the plan as :func:`serialize` returned
        it, or None. Both are called from threads of XLA's.
    """
    if _ext is not None:
        _ext.set_store(choice, plan)
        # No thread of XLA's may call into an interpreter that is on its way out.
        atexit.register(_ext.clear_store)


def versions() -> dict[str, Any]:
    """Return the versions and paths of the libraries that the handlers use; loads them."""
    found: dict[str, Any] = extension().versions()
    return found


def report_warnings() -> None:
    """Raise as Python warnings what the handlers noted since the last call."""
    if _ext is not None:
        for message in _ext.take_warnings():
            warnings.warn(message, RuntimeWarning, stacklevel=2)
