"""How each op acts on placements, one file per family; importing this package registers them all."""

from fxdp.rules.families import along_dim as along_dim
from fxdp.rules.families import attention as attention
from fxdp.rules.families import counting as counting
from fxdp.rules.families import diagonals as diagonals
from fxdp.rules.families import einsum as einsum
from fxdp.rules.families import embedding as embedding
from fxdp.rules.families import factories as factories
from fxdp.rules.families import gathering as gathering
from fxdp.rules.families import images as images
from fxdp.rules.families import indexing as indexing
from fxdp.rules.families import joining as joining
from fxdp.rules.families import layers as layers
from fxdp.rules.families import linear_algebra as linear_algebra
from fxdp.rules.families import losses as losses
from fxdp.rules.families import never_split as never_split
from fxdp.rules.families import normalization as normalization
from fxdp.rules.families import pointwise as pointwise
from fxdp.rules.families import quantization as quantization
from fxdp.rules.families import random as random
from fxdp.rules.families import reductions as reductions
from fxdp.rules.families import slices as slices
from fxdp.rules.families import views as views
