"""From an exported forward graph, wherever it comes from, to the joint forward and backward graph."""

from fxdp.capture.joint.raw_joint import BatchSpecializedError, JointOptions
from fxdp.capture.joint.static import fitted_joint
from fxdp.capture.joint.symbolic_joint import symbolic_joint

__all__ = ["BatchSpecializedError", "JointOptions", "fitted_joint", "symbolic_joint"]
