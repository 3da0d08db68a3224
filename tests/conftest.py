import sys
from pathlib import Path

# Helpers of the tests are plain modules beside them.
for folder in (".", "coordinator", "e2e", "expert_worker", "http", "kernels", "launch"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import host  # noqa: E402

host.use_steady_sums()
