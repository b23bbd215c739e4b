"""Rollout in several processes (`rollout.processes`).

The process of the run has the staleness queue, the journal and the trainer. It sends each group of
episodes to one of the rollout processes (`shards.ProcessRollout`), which run the episodes and send
their requests to the servers (`worker.Shard`). Everything that an episode would write to the
journal comes back as messages (`wire`), in order, and is written by the process of the run.
"""
