"""python tests/emulated_npu/yardstick.py runs these; inside the emulated environment: python -m
emulated_npu.peer NAME.
"""

import json
import sys

if __name__ == "__main__":  # worker processes import this file
    from .scenarios import SCENARIOS

    print("RESULT " + json.dumps(SCENARIOS[sys.argv[1]]()), flush=True)
