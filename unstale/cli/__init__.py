"""The command line. The module `verbs` has its commands, and the others do the commands' work."""
