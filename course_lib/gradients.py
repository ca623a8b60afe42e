"""Gradients as data: taking a copy, and saying how far two of them are apart.

Two float32 sums of the same numbers in another order differ by rounding, so `torch.equal` is the wrong question.
The right one is how far apart they are relative to their size, and whether more digits bring them closer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Gradients = Mapping[str, Tensor]


def copy_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy `.grad` of every parameter that has one, by name; later passes do not change the copy."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


@dataclass(frozen=True)
class GradientComparison:
    """How far a candidate gradient is from a reference, over all parameters together. All numbers are without unit.

    relative_error: L2 norm of the difference over L2 norm of the reference. max_abs: largest difference of one entry.
    cosine: of the angle between the two. scale: the factor on the reference that comes closest to the candidate (4.0
    when the division by 4 was left out). per_parameter: the relative error of each parameter by name.
    """

    max_abs: float
    relative_error: float
    cosine: float
    scale: float
    per_parameter: dict[str, float]

    def agree(self, rtol: float) -> bool:
        """Say whether the relative error is at most `rtol`. A gradient with nan agrees with nothing."""
        return self.relative_error <= rtol

    def __str__(self) -> str:
        return (
            f"relative error {self.relative_error:.1e}, largest difference {self.max_abs:.1e}, "
            f"cosine {self.cosine:.6f}, scale {self.scale:.4f}"
        )


def compare_gradients(reference: Gradients | nn.Module, candidate: Gradients | nn.Module) -> GradientComparison:
    """Compare two gradients, given as dicts of tensors by name or as modules that hold them in `.grad`.

    Computed in float64, where entries below 1e-154 count as zeros, their squares being too small. A parameter that has
    a gradient on one side only counts as zeros on the other.
    Raises ValueError when the reference is empty or two tensors of one name differ in shape.
    """
    sides = {"reference": reference, "candidate": candidate}
    for name, side in sides.items():
        if isinstance(side, nn.Module):
            sides[name] = copy_gradients(side)
        elif not isinstance(side, Mapping):
            raise TypeError(f"{name} must be a module or a dict of tensors; got {type(side).__name__}")
        for parameter, gradient in sides[name].items():
            if not isinstance(gradient, Tensor):
                raise TypeError(f"{name} must hold tensors; {parameter} is a {type(gradient).__name__}")
    reference, candidate = sides.values()
    if not reference:
        raise ValueError("reference holds no gradients; run a backward pass before comparing")
    names = list(reference) + [name for name in candidate if name not in reference]
    per_parameter: dict[str, float] = {}
    max_abs, difference, inner, size, other = 0.0, 0.0, 0.0, 0.0, 0.0
    for name in names:
        a, b = reference.get(name), candidate.get(name)
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        if a.shape != b.shape:
            raise ValueError(f"{name} has shape {tuple(a.shape)} in reference and {tuple(b.shape)} in candidate")
        a, b = flat(a), flat(b)
        gap, norm = float((b - a).norm()), float(a.norm())
        per_parameter[name] = ratio(gap, norm)
        # max() would drop a nan; a sum keeps it.
        largest = float((b - a).abs().max()) if len(a) else 0.0
        if math.isnan(largest) or largest > max_abs:  # once nan, always nan: nothing is larger
            max_abs = largest
        difference, size = math.hypot(difference, gap), math.hypot(size, norm)
        inner, other = inner + float(a @ b), math.hypot(other, float(b.norm()))
    return GradientComparison(
        max_abs=max_abs,
        relative_error=ratio(difference, size),
        cosine=inner / size / other if size and other else (1.0 if size == other else 0.0),
        scale=inner / size / size if size else math.nan,
        per_parameter=per_parameter,
    )


def flat(gradient: Tensor) -> Tensor:
    """Return a gradient as a vector in float64 on the CPU; a sparse one with its zeros, a complex one as pairs."""
    gradient = gradient.detach().to_dense().cpu()
    return (torch.view_as_real(gradient) if gradient.is_complex() else gradient).double().flatten()


def ratio(part: float, whole: float) -> float:
    """Divide, with 0 for nothing over nothing and infinity for something over nothing."""
    return part / whole if whole else (0.0 if part == 0 else part * math.inf)
