import sys
from pathlib import Path

# The modules of this folder are imported by file (import mode importlib), so a shared one needs the folder.
sys.path.insert(0, str(Path(__file__).parent))
