"""For every test: one torch thread (tiny models, shared machines), and the shapes in the signatures of the plain
functions checked at every call."""

import os
import signal

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

# A shell's background jobs ignore it, and so would every process that a test starts and wants to interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("house", deadline=None)  # tests time nothing
settings.load_profile("house")
