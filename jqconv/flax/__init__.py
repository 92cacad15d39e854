"""int8 convolutions as Flax layers (flax.nnx), and the road to them from a float model.

In short::

    jqconv.flax.fold_batch_norm(model, example) # BatchNorm into the convolutions
    report = jqconv.flax.quantize(model)        # nnx.Conv -> QConv, still in float
    jqconv.flax.calibrate(model, batches)       # scales; now it computes quantized, trainable
    jqconv.flax.freeze(model, example)          # int8 kernels, for inference
"""

from jqconv._table import Table
from jqconv.flax._fold import Identity, fold_batch_norm
from jqconv.flax._frozen import Int8Conv
from jqconv.flax._model import (
    Sensitivity,
    calibrate,
    freeze,
    qconvs,
    quantize,
    sensitivity,
    set_mode,
)
from jqconv.flax._observers import MSE, AbsMax, MovingAverage, Observer, Percentile
from jqconv.flax._qconv import QConv
from jqconv.flax._state import Quant, StepSize

__all__ = [
    "MSE",
    "AbsMax",
    "Identity",
    "Int8Conv",
    "MovingAverage",
    "Observer",
    "Percentile",
    "QConv",
    "Quant",
    "Sensitivity",
    "StepSize",
    "Table",
    "calibrate",
    "fold_batch_norm",
    "freeze",
    "qconvs",
    "quantize",
    "sensitivity",
    "set_mode",
]
