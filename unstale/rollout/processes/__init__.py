"""Rollout in several processes (`rollout.processes`).

The run's process has the staleness queue, the journal and the trainer. It sends each group of
episodes to one of the rollout processes (`shards.ProcessRollout`). These run the episodes and send
their requests to the servers (`worker.Shard`). The record of an episode comes back as messages
(`wire`), in order. The run's process writes it to the journal.
"""
