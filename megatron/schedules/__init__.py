"""Pipeline schedules whose activation memory is a choice, for stock Megatron-LM.

Importing this package imports neither torch nor Megatron; :func:`install` does, when it is called.
"""

from __future__ import annotations

__version__ = "0.1.0"
