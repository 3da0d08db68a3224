import sys
from pathlib import Path

# Helpers of these tests are plain modules beside them.
sys.path.insert(0, str(Path(__file__).parent))
