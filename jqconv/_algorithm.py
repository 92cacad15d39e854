"""Which kernel runs a convolution: how that is written down, chosen and remembered.

The choice is made once for each spec and device, at trace time, and from then on is a static
parameter of the primitives. Order: what the caller gave, then what this process chose before,
then a search (cuDNN's heuristic list: its first plan that builds).
"""

from __future__ import annotations

import collections
import dataclasses
import re
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, TypeAlias

import jax

from jqconv import _native
from jqconv._spec import ConvSpec, Direction

#: Bytes of workspace that a plan may use.
WORKSPACE_LIMIT = 32 * 2**20

DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad")

#: The form in which a spec's operands are presented to cuDNN, by their dtype.
_CUDNN_FORMS = {"int8": "int8", "bfloat16": "bf16", "float16": "fp16"}

_TEXT = re.compile(
    r"(?P<form>int8|bf16|fp16)/(?P<formulation>[a-z]+)"
    r":eng(?P<engine>\d+)(?P<knobs>(?:_k\d+=\d+)*)"
    r"(?:,ws=(?P<workspace>\d+))?@(?P<cudnn>\d+)",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to run one convolution.

    Parameters
    ----------
    form : str
        How the operands are presented: ``"int8"``, ``"bf16"`` or ``"fp16"`` to cuDNN, or
        ``"xla"``, the lax lowering, in which case the other fields are empty.
    formulation : str
        The epilogue's pointwise steps in order, one letter each: ``s`` multiplier, ``b`` bias,
        ``z`` residual, ``r`` activation, ``o`` out_multiplier; ``c`` alone for none.
    engine : int
        cuDNN's engine.
    knobs : tuple of (int, int)
        The engine's knobs and their values.
    workspace : int
        Bytes of device memory that the plan needs beside its operands.
    cudnn : int
        The cuDNN version that has this engine, for example 91900.
    source : str
        Where the choice came from (``"user"``, ``"heuristic"``, ``"table"``); takes no part in
        equality, so that it causes no retrace.

    Examples
    --------
    >>> Algorithm.parse("int8/sbr:eng4_k24=0@91900").engine
    4
    >>> str(Algorithm.parse("int8/sbr:eng4_k24=0@91900"))
    'int8/sbr:eng4_k24=0@91900'
    """

    form: str
    formulation: str = ""
    engine: int = -1
    knobs: tuple[tuple[int, int], ...] = ()
    workspace: int = 0
    cudnn: int = 0
    source: str = dataclasses.field(default="user", compare=False)

    @classmethod
    def parse(cls, text: str, source: str = "user") -> Algorithm:
        """Read a text form.

        Raises
        ------
        ValueError
            If `text` is none.
        """
        if text == "xla":
            return cls("xla", source=source)
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(
                f"algorithm={text!r} is no text form of an algorithm; expected 'xla' or one like "
                "'int8/sbr:eng4_k24=0@91900' (form/formulation:engine_knobs[,ws=bytes]@cuDNN)"
            )
        knobs = [knob[1:].split("=") for knob in match["knobs"].split("_") if knob]
        return cls(
            form=match["form"],
            formulation=match["formulation"],
            engine=int(match["engine"]),
            knobs=tuple((int(knob), int(value)) for knob, value in knobs),
            workspace=int(match["workspace"] or 0),
            cudnn=int(match["cudnn"]),
            source=source,
        )

    def __str__(self) -> str:
        if self.form == "xla":
            return "xla"
        knobs = "".join(f"_k{knob}={value}" for knob, value in self.knobs)
        workspace = f",ws={self.workspace}" if self.workspace else ""
        return f"{self.form}/{self.formulation}:eng{self.engine}{knobs}{workspace}@{self.cudnn}"


AlgorithmLike: TypeAlias = "str | Algorithm | ConvAlgorithms | None"


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ConvAlgorithms:
    """The algorithms of a differentiated convolution, one for each direction.

    ``None`` leaves a direction open. It is a pytree without leaves: it travels in residuals and
    through transformations as static metadata.

    Parameters
    ----------
    fprop, dgrad, wgrad : Algorithm or str, optional
        Text forms are parsed.
    """

    fprop: Algorithm | None = None
    dgrad: Algorithm | None = None
    wgrad: Algorithm | None = None

    def __post_init__(self) -> None:
        for direction in DIRECTIONS:
            given = getattr(self, direction)
            if isinstance(given, str):
                object.__setattr__(self, direction, Algorithm.parse(given))
            elif given is not None and not isinstance(given, Algorithm):
                raise TypeError(f"{direction}={given!r} must be an Algorithm or its text form")

    @classmethod
    def parse(cls, algorithm: AlgorithmLike) -> ConvAlgorithms:
        """Return the canonical form of what a user gives as `algorithm`.

        A single algorithm is that of fprop; the other two directions stay open.
        """
        if algorithm is None:
            return cls()
        if isinstance(algorithm, ConvAlgorithms):
            return algorithm
        if isinstance(algorithm, str):
            algorithm = Algorithm.parse(algorithm)
        if not isinstance(algorithm, Algorithm):
            raise TypeError(
                f"algorithm={algorithm!r} must be a text form, an Algorithm or a ConvAlgorithms"
            )
        return cls(fprop=algorithm)


def runs_on_cudnn(spec: ConvSpec) -> bool:
    """Whether cuDNN has engines for `spec`, as far as can be said without a device.

    What it cannot run takes the ``xla`` form on a GPU. The table is that of an H200 with cuDNN
    9.19, measured by benchmarks/support.py.
    """
    if spec.empty or spec.x_dtype != spec.w_dtype or spec.x_dtype not in _CUDNN_FORMS:
        return False
    if spec.direction != "fprop":
        return True
    k, _, _, c_group = spec.w_shape
    return c_group % 4 == 0 if spec.groups > 1 else (c_group, k) != (1, 1)


def check_legal(spec: ConvSpec, algorithm: Algorithm) -> None:
    """Raise ValueError where `algorithm` cannot be meant for `spec`."""
    if algorithm.form == "xla" or spec.empty:
        return
    form, formulation = _CUDNN_FORMS.get(spec.x_dtype), spec.formulation
    if not runs_on_cudnn(spec):
        expected = "'xla' (cuDNN has no engine for this convolution)"
    else:
        expected = f"'xla' or '{form}/{formulation}:...'"
    if not runs_on_cudnn(spec) or (algorithm.form, algorithm.formulation) != (form, formulation):
        raise ValueError(
            f"algorithm={str(algorithm)!r} does not fit {spec.direction} of this convolution: "
            f"expected {expected}"
        )


class _Choices:
    """What this process has chosen, for each spec and kind of device, and how often it searched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chosen: dict[tuple[ConvSpec, str], Future[Algorithm]] = {}
        self._searches: collections.Counter[str] = collections.Counter()

    def get(self, spec: ConvSpec, device: jax.Device) -> Algorithm:
        """Return the algorithm for `spec`, searching if it has none yet.

        Threads that need the same spec wait for one search; other specs are searched beside it.
        """
        key = (spec, _device_key(device))
        with self._lock:
            found = self._chosen.get(key)
            future = found or self._chosen.setdefault(key, Future())
            if found is None:
                self._searches[spec.direction] += 1
        if found is None:
            try:
                future.set_result(_search(spec, device))
            except BaseException as error:
                with self._lock:
                    self._chosen.pop(key, None)
                future.set_exception(error)
        return future.result()

    def searches(self) -> dict[str, int]:
        with self._lock:
            return {direction: self._searches[direction] for direction in DIRECTIONS}

    def clear(self) -> None:
        with self._lock:
            self._chosen.clear()
            self._searches.clear()


_choices = _Choices()


def search_counts() -> Mapping[str, int]:
    """Return how many searches this process has made, by direction.

    A search asks cuDNN for its candidates and builds one. There is one for each distinct
    convolution, direction and kind of device, however often and under whatever transformation
    it runs.

    Returns
    -------
    dict
        Keys ``"fprop"``, ``"dgrad"`` and ``"wgrad"``.
    """
    return _choices.searches()


def clear_algorithms() -> None:
    """Forget every choice made in this process, and reset :func:`search_counts`."""
    _choices.clear()


def choose(spec: ConvSpec, given: Algorithm | None = None) -> Algorithm | None:
    """Return the algorithm for `spec`: the one given, else the one that this process uses for it.

    ``None`` leaves the engine to the device that will run the program: there is no GPU here now.

    Raises
    ------
    ValueError
        If `given` does not fit `spec`, or the GPU that is here does not have it.
    """
    _native.report_warnings()
    if given is not None:
        check_legal(spec, given)
        return given if given.form == "xla" else _require(spec, given)
    device = target_gpu()
    if device is None:
        return None
    if not _native.is_built() or not runs_on_cudnn(spec):
        return Algorithm("xla", source="table")
    return _choices.get(spec, device)


def target_gpu() -> jax.Device | None:
    """Return the CUDA device that what is traced now will run on, or None."""
    config: Any = jax.config  # whose options are typed in some versions of JAX only
    default = config.jax_default_device
    if isinstance(default, str):
        device = jax.local_devices(backend=default)[0]
    else:
        device = default or jax.local_devices()[0]
    is_cuda = device.platform == "gpu" and "cuda" in device.client.platform_version.lower()
    return device if is_cuda else None


def _device_key(device: jax.Device) -> str:
    version = _native.versions()["cudnn"]
    capability = getattr(device, "compute_capability", "")
    return f"{device.device_kind} sm{capability} cudnn{version}"


def _search(spec: ConvSpec, device: jax.Device) -> Algorithm:
    """Return cuDNN's first plan for `spec` that builds, or the xla form where it has none."""
    text, _ = _native.resolve(str(spec), "", device.local_hardware_id, WORKSPACE_LIMIT)
    return Algorithm.parse(text, "heuristic") if text else Algorithm("xla", source="heuristic")


def _require(spec: ConvSpec, algorithm: Algorithm) -> Algorithm:
    """Return `algorithm`, its workspace filled in, or raise where the GPU that is here lacks it."""
    device = target_gpu()
    if device is None:
        return algorithm
    limit = max(algorithm.workspace, WORKSPACE_LIMIT)
    text, reason = _native.resolve(str(spec), str(algorithm), device.local_hardware_id, limit)
    if not text:
        raise ValueError(
            f"algorithm={str(algorithm)!r} is not available on {device.device_kind}: {reason}; "
            "leave algorithm out to let jqconv choose"
        )
    return Algorithm.parse(text)
