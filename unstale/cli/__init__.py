"""The command line: `verbs` has its commands, the other modules do their work."""
