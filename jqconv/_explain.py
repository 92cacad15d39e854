"""What runs each convolution of a function, how long it takes, and how near the limit that is."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jqconv import _choice, _collect
from jqconv._algorithm import Algorithm
from jqconv._choice import Choice
from jqconv._collect import Occurrence
from jqconv._forms import BASE_FORMS
from jqconv._spec import ConvSpec
from jqconv._table import Table


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a device can do at most, by its datasheet.

    Parameters
    ----------
    bytes_per_second : float
        Of its memory.
    int8, half : float
        Dense operations a second on its tensor cores, in int8 and in bf16 or fp16.
    """

    bytes_per_second: float
    int8: float
    half: float


#: By what JAX's name of a device contains; NVIDIA's datasheets, without sparsity.
_LIMITS = {
    "B200": Limits(8.0e12, 4500e12, 2250e12),
    "H200 NVL": Limits(4.8e12, 1671e12, 835e12),
    "H200": Limits(4.8e12, 1979e12, 989e12),
    "H100 NVL": Limits(3.9e12, 1671e12, 835e12),
    "H100 PCIe": Limits(2.0e12, 1513e12, 756e12),
    "H100": Limits(3.35e12, 1979e12, 989e12),
    "A100-SXM4-80GB": Limits(2.039e12, 624e12, 312e12),
    "A100 80GB": Limits(1.935e12, 624e12, 312e12),
    "A100": Limits(1.555e12, 624e12, 312e12),
    "L40S": Limits(0.864e12, 733e12, 362e12),
    "L40": Limits(0.864e12, 362e12, 181e12),
    "L4": Limits(0.3e12, 242e12, 121e12),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One distinct convolution.

    Parameters
    ----------
    spec : ConvSpec
        The convolution.
    count : int
        How often the function has it; in a loop's body, once.
    algorithm : str
        Text form of what runs it; empty where that is not chosen yet.
    source : str
        Where the choice came from: user, cached, tuned, heuristic or table; empty without one.
    microseconds : float or None
        Of one run on the device, where it was timed.
    floor_us : float or None
        The least that the device could take: every byte once at its memory's rate, or every
        product at its peak rate, whichever is longer. None for a device not in the table.
    bound : str
        Which of the two that is: ``"memory"`` or ``"compute"``.
    note : str
        Why nothing better was possible, or what to do.
    """

    spec: ConvSpec
    count: int
    algorithm: str
    source: str
    microseconds: float | None
    floor_us: float | None
    bound: str
    note: str

    @property
    def percent_of_limit(self) -> float | None:
        """How much of the device's rate it reaches."""
        if self.microseconds is None or self.floor_us is None:
            return None
        return 100 * self.floor_us / self.microseconds


@dataclasses.dataclass(frozen=True)
class Report:
    """The convolutions of a function. Prints as a table, in a notebook too.

    Parameters
    ----------
    device : str
        The device's name.
    rows : tuple of Row
        The distinct convolutions, in the order of their first appearance.
    """

    device: str
    rows: tuple[Row, ...]

    @property
    def microseconds(self) -> float | None:
        """Sum over the convolutions, one in a loop once; None if one was not timed."""
        times = [row.microseconds for row in self.rows]
        if None in times:
            return None
        return sum(row.count * (row.microseconds or 0.0) for row in self.rows)

    def __str__(self) -> str:
        return str(self._table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return self._table()._repr_html_()

    def _table(self) -> Table:
        rows = tuple(
            (
                describe(row.spec),
                str(row.count),
                row.algorithm or "-",
                row.source or "-",
                _number(row.microseconds, 1),
                _number(row.floor_us, 1),
                _number(row.percent_of_limit, 0),
                row.bound,
                row.note,
            )
            for row in self.rows
        )
        return Table(_COLUMNS, rows, _NUMERIC, self._summary())

    def _summary(self) -> str:
        total = self.microseconds
        convs = sum(row.count for row in self.rows)
        text = f"{convs} convolutions, {len(self.rows)} distinct, on {self.device}"
        return text if total is None else f"{text}: {total:,.0f} us in all"

    def plot(self, ax: Any = None) -> Any:
        """Draw a roofline: what each convolution reaches against what the device allows.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; new axes by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes, with operations per byte across and operations a second up.

        Raises
        ------
        ImportError
            Without matplotlib.
        ValueError
            If nothing was timed, or the device is not in the table of limits.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError(
                "Report.plot draws with matplotlib; install it, or jqconv[examples]"
            ) from error
        limits = limits_of(self.device)
        timed = [row for row in self.rows if row.microseconds is not None]
        if limits is None or not timed:
            raise ValueError(
                "there is nothing to draw: no convolution was timed (see jqconv.tune)"
                if limits
                else f"there is nothing to draw against: the limits of {self.device} are not known"
            )
        if ax is None:
            _, ax = plt.subplots(figsize=(8, 5), layout="constrained")
        _draw_roofline(ax, limits, timed)
        ax.set_title(f"int8 convolutions on {self.device}")
        return ax


_COLUMNS = (
    "convolution",
    "times",
    "algorithm",
    "source",
    "us",
    "floor us",
    "% of limit",
    "bound",
    "note",
)
_NUMERIC = frozenset({1, 4, 5, 6})


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Say what runs every convolution in `fn`, how fast, and why not faster.

    `fn` is traced, not run, and nothing is searched for: what is not chosen yet says so.

    Parameters
    ----------
    fn : callable
        Any function that JAX can trace; with static arguments, one that ``jax.jit`` made. With
        ``jax.grad`` inside, its gradients are included.
    *args, **kwargs
        Its arguments; arrays may be ``jax.ShapeDtypeStruct``.

    Returns
    -------
    Report
        One row for each distinct convolution; printing it shows a table, and its ``plot()`` draws a
        roofline.

    Examples
    --------
    >>> x, w = jnp.ones((1, 8, 8, 4)), jnp.ones((3, 3, 4, 4))
    >>> report = explain(lambda x: conv2d(x, w, x_scale=0.1, w_scale=0.1), x)
    >>> [(row.count, row.spec.direction) for row in report.rows]
    [(1, 'fprop')]
    """
    gpu = _choice.gpu_here()
    device = gpu or jax.devices()[0]
    rows = [_row(one, gpu) for one in _collect.convolutions(fn, *args, **kwargs)]
    return Report(device.device_kind, tuple(rows))


def _row(one: Occurrence, gpu: jax.Device | None) -> Row:
    kind = gpu.device_kind if gpu is not None else ""
    floor, bound = floor_us(one.spec, limits_of(kind))
    choice = _choice.known(one.spec, gpu) if gpu and _choice.is_open(one.spec) else None
    algorithm = one.algorithm or (choice and choice.algorithm) or None
    timed = choice.microseconds if choice and choice.algorithm == algorithm else None
    return Row(
        spec=one.spec,
        count=one.count,
        algorithm="" if algorithm is None else str(algorithm),
        source="user" if one.pinned else getattr(algorithm, "source", ""),
        microseconds=timed,
        floor_us=floor,
        bound=bound,
        note=_note(one, algorithm, choice, gpu),
    )


def _note(
    one: Occurrence, algorithm: Algorithm | None, choice: Choice | None, gpu: jax.Device | None
) -> str:
    """Say why nothing better was possible, or what to do."""
    if gpu is None:
        return "no GPU here: runs as lax operations"
    if one.pinned:
        return "named by the caller"
    if one.spec.empty:
        return "nothing to compute"
    if algorithm is None:
        return "not chosen yet: run it, or jqconv.tune"
    if not _choice.is_open(one.spec):
        return f"cuDNN has no kernel for {one.spec.x_dtype} operands in {one.spec.direction}"
    if choice is None or not choice.trials:
        if algorithm.source == "tuned":
            return "no plan of cuDNN's builds and runs"
        if algorithm.form == "xla":
            return "cuDNN has no engine for it as it is; jqconv.tune tries other forms"
        return "cuDNN's first proposal; jqconv.tune times the others"
    return _about_trials(choice)


def _about_trials(choice: Choice) -> str:
    """Say what a search compared: the fastest of each form, as a program where it came to that."""
    best: dict[str, float] = {}
    for trial in sorted(choice.trials, key=lambda t: (not t.whole, t.microseconds)):
        best.setdefault(trial.algorithm.split("/")[0], trial.microseconds)
    form = choice.algorithm.form
    plans = {trial.algorithm: trial for trial in choice.trials if not trial.whole}
    text = f"fastest of {len(plans)} plans in {len(best)} form{'s' if len(best) > 1 else ''}"
    alone = plans.get(str(choice.algorithm))
    if alone and form not in BASE_FORMS.values():
        text += f"; its plan alone {alone.microseconds:.1f} us"
    others = {other: us for other, us in best.items() if other != form}
    if others:
        other = min(others, key=others.__getitem__)
        text += f"; next form {other} {others[other]:.1f} us"
    return text


def limits_of(device_kind: str) -> Limits | None:
    """Return the limits of a device by its name; None if it is not in the table."""
    found = (limits for name, limits in _LIMITS.items() if re.search(rf"\b{name}\b", device_kind))
    return next(found, None)


def floor_us(spec: ConvSpec, limits: Limits | None) -> tuple[float | None, str]:
    """Return the least microseconds that a device needs for `spec`, and what bounds it."""
    if limits is None:
        return None, "-"
    memory = spec.bytes_moved / limits.bytes_per_second
    rate = limits.int8 if spec.x_dtype == "int8" else limits.half
    compute = spec.operations / rate
    return 1e6 * max(memory, compute), "memory" if memory >= compute else "compute"


def describe(spec: ConvSpec) -> str:
    """Return the convolution in a few words, such as ``3x3/2 64x56x56x128->256 sbr``."""
    _, r, s, _ = spec.w_shape
    stride = "" if spec.strides == (1, 1) else f"/{_pair(spec.strides)}"
    dilation = "" if spec.dilation == (1, 1) else f" d{_pair(spec.dilation)}"
    groups = "" if spec.groups == 1 else f" g{spec.groups}"
    image = "x".join(map(str, spec.x_shape))
    if spec.direction == "fprop":
        tail = f"{spec.formulation} {spec.y_dtype}"
    else:
        tail = f"{spec.direction} {spec.x_dtype}"
    return f"{r}x{s}{stride}{dilation}{groups} {image}->{spec.w_shape[0]} {tail}"


def _pair(pair: tuple[int, int]) -> str:
    return str(pair[0]) if pair[0] == pair[1] else f"{pair[0]},{pair[1]}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _draw_roofline(ax: Any, limits: Limits, rows: Sequence[Row]) -> None:
    points = []
    for row in rows:
        operations = row.spec.operations
        seconds = (row.microseconds or 1) * 1e-6
        points.append((operations / row.spec.bytes_moved, operations / seconds))
    low, high = min(x for x, _ in points) / 2, max(x for x, _ in points) * 2
    line = [low * (high / low) ** (i / 200) for i in range(201)]
    for name, peak, style in (("int8", limits.int8, "-"), ("bf16", limits.half, "--")):
        roof = [min(peak, limits.bytes_per_second * x) for x in line]
        ax.plot(line, roof, style, color="black", linewidth=1, label=f"limit, {name}")
    for direction, marker in (("fprop", "o"), ("dgrad", "^"), ("wgrad", "s")):
        chosen = [p for p, row in zip(points, rows, strict=True) if row.spec.direction == direction]
        if chosen:
            ax.scatter(*zip(*chosen, strict=True), marker=marker, label=direction)
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="operations a second")
    ax.legend()
