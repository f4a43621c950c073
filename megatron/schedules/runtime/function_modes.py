"""Torch's function modes, such as a default device, which take ten times as long as a read of a tensor's attribute."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

without_modes: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunction
"""Surrounds code that only reads attributes of tensors, computes with them, or names the device of a new one."""
