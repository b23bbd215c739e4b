"""The command line: `verbs` has its commands, and the other modules do their work."""
