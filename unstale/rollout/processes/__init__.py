"""Rollout in several processes (`rollout.processes`).

The main process has the staleness queue, the journal and the trainer. It sends each group of
episodes to one of the rollout processes (`shards.ProcessRollout`), which runs the episodes and
requests replies from the engines' servers (`worker.Shard`). The record of each episode comes back
in order, as messages (`wire`), and the main process writes it to the journal.
"""
