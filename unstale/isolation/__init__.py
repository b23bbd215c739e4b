"""Environments in separate worker processes, with the option `task.isolate`.

`isolate` changes a task set so that its environments run in a few worker processes. A worker that
crashes, hangs or needs too much memory is ended and replaced. Its episodes fail, and the run
continues.
"""

from unstale.isolation.tasks import IsolatedTasks as IsolatedTasks
from unstale.isolation.tasks import isolate as isolate
