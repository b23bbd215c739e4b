"""What comes from a disk, a user or a model, made wrong: guided by coverage (atheris), or drawn by
hypothesis."""
