"""Gradients that every rank computes in full from sufficient factors gathered from all samples.

%mm = aten.mm(%t, %x)     the product of two factors, gathered
%t_1 = aten.t(%mm)        the gradient in the parameter's shape
return gradient param(fc.weight)=%t_1
"""

from __future__ import annotations

SUFFICIENT_FACTORS = "factors"
"""The `reason` in the metadata of nodes that multiply factors, and of views of factors and products."""
