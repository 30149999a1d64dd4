"""The only room that imports torch internals, by what they are for; `releases` lists the proven releases.

A new torch release is this room to read. Other rooms import from here, not from its files, and ask
here, too, for classes that torch merely keeps in private modules: so it is seen what fxdp needs.
"""

# ruff: noqa: E402
from fxdp.torch_compat import releases

releases.check_torch()  # before the names below, of which an older torch lacks some

# Each file says in `__all__` what it has for other rooms; a second list here would only have to follow it.
from fxdp.torch_compat.channels import *  # noqa: F403
from fxdp.torch_compat.compiled_code import *  # noqa: F403
from fxdp.torch_compat.distributed import *  # noqa: F403
from fxdp.torch_compat.dtensor import *  # noqa: F403
from fxdp.torch_compat.dtensor_ops import *  # noqa: F403
from fxdp.torch_compat.dynamo import *  # noqa: F403
from fxdp.torch_compat.execution import *  # noqa: F403
from fxdp.torch_compat.exporting import *  # noqa: F403
from fxdp.torch_compat.fake_values import *  # noqa: F403
from fxdp.torch_compat.inductor import *  # noqa: F403
from fxdp.torch_compat.lazy_codegen import *  # noqa: F403
from fxdp.torch_compat.lstm_states import *  # noqa: F403
from fxdp.torch_compat.memoized_dtypes import *  # noqa: F403
from fxdp.torch_compat.memoized_fakes import *  # noqa: F403
from fxdp.torch_compat.memoized_indices import *  # noqa: F403
from fxdp.torch_compat.memoized_sizes import *  # noqa: F403
from fxdp.torch_compat.memoized_stacks import *  # noqa: F403
from fxdp.torch_compat.memoized_trees import *  # noqa: F403
from fxdp.torch_compat.mends import *  # noqa: F403
from fxdp.torch_compat.mismatch import *  # noqa: F403
from fxdp.torch_compat.op_traces import *  # noqa: F403
from fxdp.torch_compat.operators import *  # noqa: F403
from fxdp.torch_compat.outer_call import *  # noqa: F403
from fxdp.torch_compat.patch import *  # noqa: F403
from fxdp.torch_compat.permanent import *  # noqa: F403
from fxdp.torch_compat.program_header import *  # noqa: F403
from fxdp.torch_compat.releases import *  # noqa: F403
from fxdp.torch_compat.shortcut_table import *  # noqa: F403
from fxdp.torch_compat.shortcuts import *  # noqa: F403
from fxdp.torch_compat.symbolic import *  # noqa: F403
from fxdp.torch_compat.torch_ops import *  # noqa: F403
from fxdp.torch_compat.vector_instructions import *  # noqa: F403
from fxdp.torch_compat.wrapping import *  # noqa: F403
