"""Quantized convolutions for JAX: int8 in and out, one fused cuDNN kernel, differentiable.

The main entry is :func:`conv2d`; :func:`qconv2d` is the kernel alone, for inference.
"""

from jqconv._algorithm import Algorithm, ConvAlgorithms, clear_algorithms, search_counts
from jqconv._conv import conv2d, qconv2d
from jqconv._qtensor import PackedKernel, QTensor, absmax_scale, prepack, quantize

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "ConvAlgorithms",
    "PackedKernel",
    "QTensor",
    "absmax_scale",
    "clear_algorithms",
    "conv2d",
    "prepack",
    "qconv2d",
    "quantize",
    "search_counts",
]
