"""Internals of torch's DataLoader."""

from __future__ import annotations

from torch.utils.data import default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher

__all__ = ["MapFetcher", "default_collate"]

MapFetcher = _MapDatasetFetcher
