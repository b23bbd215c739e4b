"""Environments in worker processes: `task.isolate = process`.

`isolate` wraps a task set. Its environments then run in a few worker processes. A worker that
crashes, hangs or grows too large is ended and replaced. Its episodes fail, and the run continues.
"""

from unstale.isolation.tasks import IsolatedTasks as IsolatedTasks
from unstale.isolation.tasks import isolate as isolate
