"""Published techniques, one file each. `unstale.techniques` says what a technique is."""
