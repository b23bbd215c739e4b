"""Parts of a run on other machines, connected by Ray. Only this package imports ray."""
