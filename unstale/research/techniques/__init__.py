"""Published techniques, one file each. `unstale.techniques.hooks` explains what a technique is."""
