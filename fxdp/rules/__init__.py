"""Op rules by family; importing this package registers them all."""

from fxdp.rules import attention as attention
from fxdp.rules import convolution as convolution
from fxdp.rules import counting as counting
from fxdp.rules import einsum as einsum
from fxdp.rules import embedding as embedding
from fxdp.rules import fourier as fourier
from fxdp.rules import gathering as gathering
from fxdp.rules import indexing as indexing
from fxdp.rules import linear_algebra as linear_algebra
from fxdp.rules import losses as losses
from fxdp.rules import normalization as normalization
from fxdp.rules import pooling as pooling
from fxdp.rules import resampling as resampling
