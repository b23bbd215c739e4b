"""The command line. The module `verbs` declares its commands, and other modules do their work."""
