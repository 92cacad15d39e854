"""From a trained float model to an int8 one: quantize, calibrate, look, freeze."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm.auto import tqdm

from jqconv._table import Table
from jqconv.flax._qconv import Freezing, Mode, QConv, _freezing

Path: TypeAlias = tuple[str, ...]


# --- reports --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """How much of each layer's output is lost to int8; see :func:`sensitivity`.

    Parameters
    ----------
    sqnr : dict of str to float
        For each layer by its path: the signal-to-quantization-noise ratio in decibels.
    """

    sqnr: dict[str, float]

    def __str__(self) -> str:
        rows = sorted(self.sqnr.items(), key=lambda item: item[1])
        return str(Table(("layer", "SQNR dB"), tuple((name, f"{db:.1f}") for name, db in rows)))

    def __repr__(self) -> str:
        return str(self)

    def plot(self, ax: Any = None) -> Any:
        """Draw the layers' ratios as bars, in the model's order.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            Where to draw; new axes by default.

        Returns
        -------
        matplotlib.axes.Axes
            The axes.

        Raises
        ------
        ImportError
            Without matplotlib.
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("Sensitivity.plot draws with matplotlib; install it") from error
        if ax is None:
            height = 1 + 0.2 * len(self.sqnr)
            _, ax = plt.subplots(figsize=(7, height), layout="constrained")
        ax.barh(list(self.sqnr), list(self.sqnr.values()))
        ax.invert_yaxis()
        ax.set(xlabel="SQNR, dB", title="int8 against float, layer by layer")
        return ax


# --- walking a model ------------------------------------------------------------------------------


def qconvs(model: nnx.Module) -> dict[str, QConv]:
    """Return the QConv layers of `model` by path, each once."""
    return {_name(path): layer for path, layer in modules(model) if isinstance(layer, QConv)}


def set_mode(model: nnx.Module, mode: Mode) -> None:
    """Set the mode of every QConv in `model`; see :class:`QConv`."""
    for layer in qconvs(model).values():
        layer.mode = mode


def modules(model: nnx.Module) -> list[tuple[Path, nnx.Module]]:
    """Return `model` and the modules in it with their paths, each once.

    In the order of definition, where `nnx.iter_modules` goes by name. (A model that `nnx.merge` or
    `nnx.clone` made has only names left to go by.)
    """
    found: dict[int, tuple[Path, nnx.Module]] = {}

    def walk(path: Path, value: Any) -> None:
        if isinstance(value, nnx.Module):
            if id(value) in found:
                return
            found[id(value)] = path, value
        for key, child in _children(value):
            walk((*path, str(key)), child)

    walk((), model)
    return list(found.values())


def _children(value: Any) -> list[tuple[Any, Any]]:
    """Return what is in a module or a plain container, with its names."""
    if isinstance(value, list | tuple | nnx.List):
        return list(enumerate(value))
    if isinstance(value, nnx.Module):
        return [(k, v) for k, v in vars(value).items() if not k.startswith("_pytree__")]
    return list(value.items()) if isinstance(value, dict) else []


def _name(path: Path) -> str:
    return ".".join(path)


def replace(model: nnx.Module, replacements: Mapping[int, nnx.Module]) -> None:
    """Put other modules in the places of those with these ids, everywhere in `model`."""

    def replaced(value: Any) -> Any:
        if isinstance(value, nnx.Module):
            return replacements.get(id(value), value)
        if isinstance(value, tuple):
            new = [replaced(item) for item in value]
            same = all(a is b for a, b in zip(new, value, strict=True))
            return value if same else tuple(new)
        for key, item in _children(value):
            value[key] = replaced(item)
        return value

    for _, parent in modules(model):
        for key, child in _children(parent):
            new = replaced(child)
            if new is child:
                continue
            if isinstance(parent, nnx.List):
                parent[key] = new
            else:
                setattr(parent, key, nnx.data(new))


# --- the pipeline ---------------------------------------------------------------------------------


def quantize(
    model: nnx.Module,
    *,
    skip: Collection[str] | Callable[[str, nnx.Conv], bool] = (),
    first_in_float: bool = False,
    last_in_float: bool = False,
    **options: Any,
) -> Table:
    """Replace every convolution of `model` that jqconv can run by a :class:`QConv`, in place.

    Nothing is quantized yet: the layers are in float, with the parameters that they had.
    :func:`calibrate` comes next. Activations and additions around the convolutions stay where they
    are; a model that is written with QConv has them inside, and passes int8 from layer to layer.

    Parameters
    ----------
    model : flax.nnx.Module
        A model, not itself a convolution.
    skip : collection of str, or callable
        Paths of convolutions to leave alone, as the report names them; or a function of the path
        and the layer that says so.
    first_in_float, last_in_float : bool, default False
        Whether to leave the first or the last convolution, in the order of definition, alone: they
        are often the most sensitive ones.
    **options
        Those of QConv that quantization adds: `observer`, `per_channel`, `learned_scales`, ...

    Returns
    -------
    Table
        Every convolution, what became of it, and why.

    Raises
    ------
    TypeError
        If `skip` is a str.
    ValueError
        If `model` is a convolution itself, a path in `skip` is no convolution of the model, or an
        option is wrong.
    """
    _check_contains(model)
    QConv(1, 1, (1, 1), rngs=nnx.Rngs(0), **options)  # raises what is wrong with the options
    convs: dict[str, Any] = {
        _name(path): conv
        for path, conv in modules(model)
        if isinstance(conv, nnx.Conv | nnx.ConvTranspose) and not isinstance(conv, QConv)
    }
    if isinstance(skip, str):
        raise TypeError(f"skip={skip!r} is one str; give a collection of paths: skip=[{skip!r}]")
    if not callable(skip) and (unknown := sorted(set(skip) - convs.keys())):
        raise ValueError(
            f"skip names {', '.join(unknown)}, but the convolutions are {', '.join(convs)}"
        )
    ends = {
        name: reason
        for name, reason, wanted in (
            (next(iter(convs), ""), "the first convolution", first_in_float),
            (next(reversed(convs), ""), "the last convolution", last_in_float),
        )
        if wanted
    }
    replacements, rows = {}, []
    for name, conv in convs.items():
        skipped = skip(name, conv) if callable(skip) else name in skip
        reason = "skipped as asked" if skipped else ends.get(name, "")
        if not reason:
            try:
                replacements[id(conv)] = QConv.from_conv(conv, **options)
            except ValueError as error:
                reason = str(error)
        rows.append((name, "float" if reason else "int8", reason))
    replace(model, replacements)
    return Table(("convolution", "runs in", "why"), tuple(rows))


def calibrate(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
    progress: bool = True,
) -> None:
    """Choose every scale of `model` from what passes through it, and let it compute quantized.

    The QConv layers run in float and observe; then they have scales, and are in mode ``"train"``.
    Put layers that behave differently in training, such as BatchNorm, into evaluation before.

    Parameters
    ----------
    model : flax.nnx.Module
        With QConv layers. What they observed before is forgotten.
    batches : iterable
        Inputs; a few hundred typical examples are enough.
    call : callable, optional
        How to run the model on a batch; ``model(batch)`` by default.
    progress : bool, default True
        Whether to show a progress bar on stderr.

    Raises
    ------
    ValueError
        If the model has no QConv, there are no batches, a layer was not reached or saw only zeros,
        or values that are not finite reached one.
    """
    layers = _layers_of(model)
    for layer in layers.values():
        layer.forget()
    bar = tqdm(batches, desc="calibrating", unit="batch", disable=not progress)
    if _run_in(model, "observe", bar, call) == 0:
        raise ValueError("there are no batches to calibrate with")
    largest = {name: np.asarray(layer.largest[...]) for name, layer in layers.items()}
    wild = [name for name, magnitudes in largest.items() if not np.isfinite(magnitudes).all()]
    if wild:
        raise ValueError(
            f"values that are not finite reached {', '.join(wild)} during calibration: find the "
            "NaN or infinity in the batches or the parameters"
        )
    idle = [name for name, magnitudes in largest.items() if magnitudes[0] == 0]
    if idle:
        raise ValueError(
            f"no values reached {', '.join(idle)} during calibration (or only zeros): call "
            "the model so that every QConv runs, or take those out"
        )
    for layer in layers.values():
        layer.set_scales()
    set_mode(model, "train")


def sensitivity(
    model: nnx.Module,
    batches: Iterable[Any],
    *,
    call: Callable[[Any, Any], Any] | None = None,
) -> Sensitivity:
    """Measure what int8 costs each layer of a calibrated model, given float inputs.

    Parameters
    ----------
    model : flax.nnx.Module
        After :func:`calibrate`, in evaluation. Its modes are as before afterwards.
    batches : iterable
        Inputs.
    call : callable, optional
        As for :func:`calibrate`.

    Returns
    -------
    Sensitivity
        Ratios in decibels: ``10 * log10(sum(y**2) / sum((q - y)**2))``, with y the layer's float
        output and q the quantized one. Prints as a table, the worst layer first.

    Raises
    ------
    ValueError
        If the model has no QConv, a layer has no scales yet, or there are no batches.
    """
    layers = _layers_of(model)
    fresh = [name for name, layer in layers.items() if not layer.has_scales]
    if fresh:
        raise ValueError(f"{', '.join(fresh)} has no scales yet: calibrate the model first")
    for layer in layers.values():
        layer.sqnr[...] = jnp.zeros(2)
    if _run_in(model, "compare", batches, call) == 0:
        raise ValueError("there are no batches to compare on (an iterator gives them only once)")
    return Sensitivity({name: _decibels(*layer.sqnr[...]) for name, layer in layers.items()})


def freeze(model: nnx.Module, *example: Any, **kwargs: Any) -> None:
    """Replace every QConv of a calibrated model by its int8 layer, in place.

    The model is run once on `example`, so that each layer meets the scale of what it is given:
    kernels are then packed, and multipliers and biases computed, for good. No convolution is
    computed, nor an algorithm searched for.

    Parameters
    ----------
    model : flax.nnx.Module
        After :func:`calibrate`, trained further or not.
    *example, **kwargs
        Arguments of the model; one example is enough, its values do not matter.

    Raises
    ------
    ValueError
        If the model has no QConv or is one, a layer is not calibrated or not reached by the
        example, or a layer is called twice with different scales.
    """
    _check_contains(model)
    layers = _layers_of(model)
    floating = [name for name, layer in layers.items() if layer.mode != "train"]
    if floating:
        raise ValueError(
            f"{', '.join(floating)} not in mode 'train' but {layers[floating[0]].mode!r}: "
            "calibrate the model before freezing it"
        )
    freezing = Freezing()
    token = _freezing.set(freezing)
    try:
        model(*example, **kwargs)
    finally:
        _freezing.reset(token)
    missed = [name for name, layer in layers.items() if id(layer) not in freezing.layers]
    if missed:
        raise ValueError(
            f"the example did not reach {', '.join(missed)}: give one that does. (A layer inside "
            "nnx.jit, nnx.remat or nnx.scan is not reached: take those off for freezing.)"
        )
    replace(model, freezing.layers)


def _run_in(
    model: nnx.Module,
    mode: Mode,
    batches: Iterable[Any],
    call: Callable[[Any, Any], Any] | None,
) -> int:
    """Run the model on every batch with its layers in `mode`; return how many there were.

    The layers' modes are as before afterwards.
    """
    layers = qconvs(model).values()
    before = [layer.mode for layer in layers]
    run = call or (lambda model, batch: model(batch))
    step = nnx.jit(lambda model, batch: (run(model, batch), None)[1])
    set_mode(model, mode)
    count = 0
    try:
        for batch in batches:
            step(model, batch)
            count += 1
    finally:
        for layer, mode_before in zip(layers, before, strict=True):
            layer.mode = mode_before
    return count


def _layers_of(model: nnx.Module) -> dict[str, QConv]:
    layers = qconvs(model)
    if not layers:
        raise ValueError("the model has no QConv: write it with them, or call quantize first")
    stacked = [name for name, layer in layers.items() if layer.kernel.ndim != 4]
    if stacked:
        raise ValueError(
            f"{', '.join(stacked)} holds several layers, stacked by nnx.vmap, which would have to "
            "share scales: use a list of layers"
        )
    return layers


def _check_contains(model: nnx.Module) -> None:
    """Refuse a layer itself: nothing could be put in its place."""
    if isinstance(model, nnx.Conv):
        raise ValueError(
            f"the model is itself a {type(model).__name__}, whose place nothing can take: put it "
            "into a module, such as nnx.Sequential"
        )


def _decibels(signal: jax.Array, noise: jax.Array) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(float(signal) / float(noise)) if signal > 0 else -math.inf
