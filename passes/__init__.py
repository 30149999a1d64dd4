"""The passes of the compiler, one per file, in the order in which they run.

| pass | leaves the graph at |
|---|---|
| `Canonicalize` | CAPTURED |
| `ExposeCounts` | CAPTURED (programs with micro-batches) |
| `LiftNumbers` | CAPTURED (programs with micro-batches) |
| `BatchDimAnalyzer` | PLACED |
| `ExpandRecipes` | PLACED |
| `PlaceParameters` | PLACED (sharded parameters) |
| `CastReductions` | PLACED (mixed precision) |
| `InsertCollectives` | EXPLICIT |
| `LocalizeShapes` | LOCAL |
| `AssignStages` | STAGED (programs with stages or micro-batches) |
| `BucketRows` | LOCAL (sharded parameters) |
| `ScheduleRows` | LOCAL (sharded parameters) |
| `BucketGradients` | LOCAL |
| `CoalesceReductions` | LOCAL |
| `EmitProgram` | EMITTED |

Import them from `fxdp.passes`; the order is data in `fxdp/compiler/order.py`.
"""

from fxdp.passes.assign_stages import AssignStages
from fxdp.passes.batch_dim_analyzer import BatchDimAnalyzer
from fxdp.passes.bucket_gradients import BucketGradients
from fxdp.passes.bucket_rows import BucketRows
from fxdp.passes.canonicalize import Canonicalize
from fxdp.passes.cast_reductions import CastReductions
from fxdp.passes.coalesce_reductions import CoalesceReductions
from fxdp.passes.emit_program import EmitProgram
from fxdp.passes.expand_recipes import ExpandRecipes
from fxdp.passes.expose_counts import ExposeCounts
from fxdp.passes.insert_collectives import InsertCollectives
from fxdp.passes.lift_numbers import LiftNumbers
from fxdp.passes.localize_shapes import LocalizeShapes
from fxdp.passes.place_parameters import PlaceParameters
from fxdp.passes.schedule_rows import ScheduleRows

__all__ = [
    "AssignStages",
    "BatchDimAnalyzer",
    "BucketGradients",
    "BucketRows",
    "Canonicalize",
    "CastReductions",
    "CoalesceReductions",
    "EmitProgram",
    "ExpandRecipes",
    "ExposeCounts",
    "InsertCollectives",
    "LiftNumbers",
    "LocalizeShapes",
    "PlaceParameters",
    "ScheduleRows",
]
