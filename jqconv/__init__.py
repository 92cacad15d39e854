"""Quantized convolutions for JAX: int8 in and out, one fused cuDNN kernel, differentiable.

The main entry is :func:`conv2d`; :func:`qconv2d` is the kernel alone, for inference.
"""

from jqconv import _search as _search  # puts its search where choices are made
from jqconv import cache, nn
from jqconv._algorithm import Algorithm, ConvAlgorithms
from jqconv._choice import clear_algorithms, search_counts
from jqconv._conv import conv2d, qconv2d
from jqconv._explain import explain
from jqconv._policy import config
from jqconv._qtensor import PackedKernel, QTensor, absmax_scale, prepack, quantize
from jqconv._tune import tune

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "ConvAlgorithms",
    "PackedKernel",
    "QTensor",
    "absmax_scale",
    "cache",
    "clear_algorithms",
    "config",
    "conv2d",
    "explain",
    "nn",
    "prepack",
    "qconv2d",
    "quantize",
    "search_counts",
    "tune",
]
