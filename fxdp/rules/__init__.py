"""Op rules by family; importing this package registers them all."""

from fxdp.rules import along_dim as along_dim
from fxdp.rules import attention as attention
from fxdp.rules import convolution as convolution
from fxdp.rules import counting as counting
from fxdp.rules import diagonals as diagonals
from fxdp.rules import einsum as einsum
from fxdp.rules import embedding as embedding
from fxdp.rules import factories as factories
from fxdp.rules import fourier as fourier
from fxdp.rules import gathering as gathering
from fxdp.rules import indexing as indexing
from fxdp.rules import joining as joining
from fxdp.rules import linear_algebra as linear_algebra
from fxdp.rules import losses as losses
from fxdp.rules import normalization as normalization
from fxdp.rules import pointwise as pointwise
from fxdp.rules import pooling as pooling
from fxdp.rules import quantization as quantization
from fxdp.rules import random as random
from fxdp.rules import recurrent as recurrent
from fxdp.rules import reductions as reductions
from fxdp.rules import resampling as resampling
from fxdp.rules import slices as slices
from fxdp.rules import transformer as transformer
from fxdp.rules import views as views
from fxdp.rules import whole as whole
