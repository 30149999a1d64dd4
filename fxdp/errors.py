"""The exception tree of fxdp.

    FxdpError
    ├── CaptureError        a model that cannot be captured as one graph
    │   └── TorchMismatchError  fxdp's own code does not fit the installed torch (a bug in fxdp)
    ├── PlacementError      an op that cannot be made exact on this mesh
    ├── ExactnessError      fxdp.verify found a value that differs from one device's
    │   └── RuleError       an op rule that claims a result that the op does not compute
    ├── MeshError           a mesh, process group or device that does not fit the request
    ├── InputError          inputs of a call that do not fit the program or one another
    ├── AgreementError      ranks that were given different models, options or inputs
    ├── RankFailedError     another rank raised or died
    ├── ScheduleError       a pipeline schedule that is not complete, or unknown
    │   └── DeadlockError   ranks that would wait for one another forever
    ├── StageError          a model that cannot be split into the requested stages
    ├── VerifierError       a graph that breaks an invariant of its level (a bug in fxdp)
    ├── UnsupportedTorchError   a torch that is absent, too old or built without a needed feature
    └── StateError          a call at the wrong time (after shutdown, a second backward, ...)

    UntestedTorchWarning    a torch release with which fxdp is not proven

Every message names the location, the actual and the expected value, and the remedy.
"""

from __future__ import annotations

import sys


class FxdpError(Exception):
    """Base class of all errors raised by fxdp."""


class CaptureError(FxdpError):
    """The model cannot be captured as one joint forward and backward graph.

    `plan` has the known parts of a plan, if a plan was requested: mesh, parameters, and this error.
    """

    plan: object = None


class PlacementError(FxdpError):
    """An op cannot be made exact on this mesh."""


class ExactnessError(FxdpError):
    """`fxdp.verify` found a value that differs from one device's: a bug in a rule, a pass or the capture."""


class RuleError(ExactnessError):
    """An op rule claims a placement that the op's result does not have."""


class MeshError(FxdpError, ValueError):
    """A mesh, process group or device does not fit the request."""


class InputError(FxdpError, ValueError):
    """The inputs of a call do not fit the program or one another."""


class AgreementError(FxdpError):
    """The ranks were given different models, options or inputs."""


class RankFailedError(FxdpError):
    """Another rank raised an error or died; the message contains the error of that rank."""


class ScheduleError(FxdpError, ValueError):
    """A pipeline schedule is not complete, does not fit the stages and ranks, or is unknown."""


class DeadlockError(ScheduleError):
    """The order of work in a pipeline would make ranks wait for one another forever."""


class StageError(FxdpError, ValueError):
    """The model cannot be split into the requested stages."""


class VerifierError(FxdpError):
    """A graph breaks an invariant of its level: a bug in a pass or in a registered rule."""


class UnsupportedTorchError(FxdpError):
    """Torch is not installed, too old, or built without a feature that fxdp needs."""


class TorchMismatchError(CaptureError):
    """Fxdp's own code, which works with torch's internals, does not fit the installed torch."""


class UntestedTorchWarning(UserWarning):
    """The installed torch is not a release with which fxdp is proven."""


class StateError(FxdpError, RuntimeError):
    """The call is not possible at this time, as after shutdown, or as a second backward."""


def a_kind(value: object) -> str:
    """Return the class of a value with an article, for a message: `an int`, `a Linear`, `an MLP`."""
    name = type(value).__name__
    spelled = len(name) > 1 and name[:2].isupper()  # letter by letter: an em, an el, a you
    return f"{'an' if name[0] in ('AEFHILMNORSX' if spelled else 'AEIOaeio') else 'a'} {name}"


def add_note(error: BaseException, note: str) -> None:
    """Add a line below an error's message.

    Python 3.10 shows no notes: there the line becomes the message's last one, except in an error that writes
    its message in another way, as `KeyError` does.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", ()), note]
        if type(error).__str__ is BaseException.__str__:
            error.args = ("\n".join([str(error), note]),)
