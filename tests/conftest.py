import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: threads that wait in turns are slow
tests = Path(__file__).resolve().parent
sys.path[:0] = [str(tests), str(tests.parent)]
