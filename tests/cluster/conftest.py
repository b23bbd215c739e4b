"""Settings of the tests with Ray: it listens on loopback only. Without Ray they are not collected.

`make test-cluster` runs them in an environment that has Ray.
"""

import os
from importlib.util import find_spec

# Ray reads both when it is imported.
os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]
