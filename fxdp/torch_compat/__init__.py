"""The only room that imports torch internals, one file per purpose; `releases` lists the proven releases.

To support a new torch release, read this room. Other rooms import from the package, not from the files in
the package, and also import from here the classes that torch keeps in private modules. So this package
shows everything that fxdp needs from torch. Only the wing `dynamo` imports `dynamo` and `outer_call`, which
no other room needs.
"""

# ruff: noqa: E402
from fxdp.torch_compat import releases

releases.check_torch()  # before the imports below: an older torch lacks some of the imported names

# Each file lists in `__all__` the names that other rooms may import; a second list here would repeat them.
from fxdp.torch_compat.channels import *  # noqa: F403
from fxdp.torch_compat.distributed import *  # noqa: F403
from fxdp.torch_compat.dtensor import *  # noqa: F403
from fxdp.torch_compat.dtensor_ops import *  # noqa: F403
from fxdp.torch_compat.execution import *  # noqa: F403
from fxdp.torch_compat.exporting import *  # noqa: F403
from fxdp.torch_compat.fake_values import *  # noqa: F403
from fxdp.torch_compat.faults.lstm_states import *  # noqa: F403
from fxdp.torch_compat.faults.mends import *  # noqa: F403
from fxdp.torch_compat.inductor import *  # noqa: F403
from fxdp.torch_compat.mismatch import *  # noqa: F403
from fxdp.torch_compat.one_rank import *  # noqa: F403
from fxdp.torch_compat.operators import *  # noqa: F403
from fxdp.torch_compat.patch import *  # noqa: F403
from fxdp.torch_compat.permanent import *  # noqa: F403
from fxdp.torch_compat.releases import *  # noqa: F403
from fxdp.torch_compat.shortcut_table import *  # noqa: F403
from fxdp.torch_compat.shortcuts import *  # noqa: F403
from fxdp.torch_compat.symbolic import *  # noqa: F403
from fxdp.torch_compat.torch_ops import *  # noqa: F403
from fxdp.torch_compat.wrapper_tensors import *  # noqa: F403
from fxdp.torch_compat.wrapping import *  # noqa: F403
