"""Of torch's process groups."""

from __future__ import annotations

from torch._C._distributed_c10d import ProcessGroup, TCPStore, Work, _register_process_group
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

__all__ = ["TCPStore", "Work", "flatten_state_dict", "register_group"]


def register_group(name: str, group: ProcessGroup) -> None:
    """Let functional collectives find `group` by its name, until torch's own groups are destroyed."""
    _register_process_group(name, group)  # type: ignore[arg-type]
