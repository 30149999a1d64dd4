"""The options of `fxdp.compile`, checked once."""

from fxdp.options.compile_options import CHEAPEST_FIRST as CHEAPEST_FIRST
from fxdp.options.compile_options import Options as Options
