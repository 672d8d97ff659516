"""Linear layers of a model on a CPU whose products of 16-bit floats are slow."""

from __future__ import annotations

from types import MethodType

from torch import Tensor, nn

from leanroll.kernels.products import is_emulated, linear


def install_linear(model: nn.Module) -> int:
    """Give every plain linear layer widened products where they pay (`kernels.products`); returns how many. State dicts do not
    change, and a model that moves to another device gets that device's products."""
    layers = [m for m in model.modules() if type(m) is nn.Linear and is_emulated(m.weight)]
    for layer in layers:
        # A bound method rather than a closure: deep copies of the layer get one of their own.
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, layer.weight, layer.bias)
