import sys
from pathlib import Path

tests = Path(__file__).resolve().parent
sys.path[:0] = [str(tests), str(tests.parent)]
