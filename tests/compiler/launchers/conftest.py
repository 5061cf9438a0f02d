"""Makes `training_text` importable by the tests beside it, and by the ranks that they start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
