"""``python -m megatron.schedules``: the same as the command ``megatron-schedules``."""

from __future__ import annotations

import sys

from megatron.schedules.cli.commands import main

sys.exit(main())
