"""Which kernel runs a convolution: how that is written down, and what fits which convolution."""

from __future__ import annotations

import dataclasses
import re
from typing import TypeAlias

import jax

from jqconv import _forms
from jqconv._spec import ConvSpec, Direction

DIRECTIONS: tuple[Direction, ...] = ("fprop", "dgrad", "wgrad")

_TEXT = re.compile(
    r"(?P<form>[a-z_]+\d*(?:\+[a-z_]+\d*)*)/(?P<formulation>[a-z]+)"
    r":eng(?P<engine>\d+)(?P<knobs>(?:_k\d+=-?\d+)*)"
    r"(?:,ws=(?P<workspace>\d+))?@(?P<cudnn>\d+)",
    re.ASCII,
)


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """One way to run one convolution.

    Parameters
    ----------
    form : str
        How the convolution is presented to cuDNN: as it is (``"int8"``, ``"bf16"``, ``"fp16"``),
        rewritten in steps (``"padded64"``, ``"widened"``, ``"space_to_depth"``, ``"dense"``, or
        several with ``+`` between), or ``"xla"``, the lax lowering, in which case the other
        fields are empty.
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
        Where the choice came from (``"user"``, ``"tuned"``, ``"cached"``, ``"heuristic"``,
        ``"table"``); takes no part in equality, so that it causes no retrace.

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
    """Whether cuDNN has engines for `spec` as it is, as far as can be said without a device.

    What it cannot run takes another form on a GPU, ``xla`` if none was chosen by time. The table
    is that of an H200 with cuDNN 9.19, measured by benchmarks/support.py.
    """
    if spec.empty or spec.x_dtype != spec.w_dtype or spec.x_dtype not in _forms.BASE_FORMS:
        return False
    if spec.direction != "fprop":
        return True
    k, _, _, c_group = spec.w_shape
    return c_group % 4 == 0 if spec.groups > 1 else (c_group, k) != (1, 1)


def core_of(spec: ConvSpec, algorithm: Algorithm) -> tuple[ConvSpec, Algorithm]:
    """Return what cuDNN is to run for `spec`, and the algorithm's name there."""
    core = _forms.present(spec, algorithm.form).core
    return core, dataclasses.replace(algorithm, form=_forms.BASE_FORMS[core.x_dtype])


def check_legal(spec: ConvSpec, algorithm: Algorithm) -> None:
    """Raise ValueError where `algorithm` cannot be meant for `spec`."""
    if algorithm.form == "xla" or spec.empty:
        return
    base = _forms.BASE_FORMS.get(spec.x_dtype)
    try:
        core, _ = core_of(spec, algorithm)
        fits = runs_on_cudnn(core) and algorithm.formulation in core.formulations
    except ValueError:
        fits = False
    if not fits:
        plain = f" or '{base}/{spec.formulation}:...'" if runs_on_cudnn(spec) else ""
        others = ", ".join(form for form in _forms.forms(spec) if form != base)
        raise ValueError(
            f"algorithm={str(algorithm)!r} does not fit {spec.direction} of this convolution: "
            f"expected 'xla'{plain}"
            + (f", or one of the forms {others}" if others else "")
            + ("" if plain else " (cuDNN has no engine for this convolution as it is)")
        )
