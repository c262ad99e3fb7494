import sys
from pathlib import Path

# Shares the hand-made documents of the config tests; see tests/config/conftest.py.
sys.path.insert(0, str(Path(__file__).parents[1] / "config"))
sys.path.insert(0, str(Path(__file__).parent))
