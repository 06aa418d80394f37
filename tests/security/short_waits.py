"""Run a program of this repository, such as train.py, with short waits before a retry at the hub.

torchrun ... tests/security/short_waits.py train.py [key=value ...]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))

if __name__ == "__main__":
    import rl.world.bootstrap  # noqa: F401  before torch
    from rl.model import hub

    hub.FIRST_WAIT_S, hub.MAX_WAIT_S, hub.MAX_RETRIES = 0.05, 0.2, 2
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "train.py":
        import train
        from rl.run.plan import parse_or_plan

        train.main(parse_or_plan(None))
    else:
        from tools import merge_checkpoint

        merge_checkpoint.main()
