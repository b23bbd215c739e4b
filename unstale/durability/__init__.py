"""What a run writes so that it can resume: journal, checkpoints, virtual clock."""
