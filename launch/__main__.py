"""`python -m evrun.launch` is `evrun`."""

from __future__ import annotations

import sys

from evrun.launch.cli import main

sys.exit(main())
