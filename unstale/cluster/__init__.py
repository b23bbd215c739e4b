"""Parts of a run on other machines, connected by Ray. No other package imports ray."""
