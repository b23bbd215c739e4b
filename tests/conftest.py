"""Settings of all tests: one torch thread, and shape checks in `unstale.algorithms`."""

import os
import signal

os.environ.setdefault("UNSTALE_ALLOW_WEAK_SANDBOX", "1")  # machines of tests may be root's
os.environ.update(OMP_WAIT_POLICY="PASSIVE", OMP_NUM_THREADS="1")  # before torch loads

from hypothesis import settings
from jaxtyping import install_import_hook

install_import_hook(
    [
        "unstale.algorithms.audit",
        "unstale.algorithms.corrections",
        "unstale.algorithms.advantages",
        "unstale.algorithms.objectives",
        "unstale.algorithms.proximal",
    ],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)

# Background jobs of a shell ignore SIGINT, and so would the processes that tests start and
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("unstale", deadline=None)  # tests do not measure time
settings.load_profile("unstale")
