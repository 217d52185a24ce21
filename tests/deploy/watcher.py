"""A server that does nothing, for tests of the watch: ``python watcher.py OPTIONS.json BEAT SILENCE``."""

import json
import logging
import sys
import time

from vllm_ascend_dsv41.deploy.watch import Watch

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    with Watch(json.loads(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])):
        print("watching", flush=True)
        time.sleep(60)
